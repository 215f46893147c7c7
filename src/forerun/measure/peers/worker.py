"""The process that a peer runs in: reads questions as lines of JSON and answers them (see peers/process.py).

    {"call": "module:function", "arguments": {...}}      its result
    {"load": "module:function", "arguments": {...}}      names and guarantees of the contenders that it returns
    {"write": name, "prompts": [...], "max_tokens": n}   what that contender wrote, timed in here

A mistake of the user's is answered as "refused", any other exception as "failed". It ends when its stdin closes.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from forerun.core.errors import ForerunError

if TYPE_CHECKING:
    from forerun.measure.bench.alternate import Contender


def main() -> int:
    """Answer until the questions end."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not come between the answers
    hosted: dict[str, Contender] = {}
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line), hosted)) + "\n")
        answers.flush()
    return 0


def answer(question: dict[str, Any], hosted: dict[str, Contender]) -> dict[str, Any]:
    """One question's answer; contenders that are loaded are added to `hosted`."""
    try:
        if "write" in question:
            contender = hosted[question["write"]]
            return {"result": contender.write(question["prompts"], question["max_tokens"])}
        module, _, name = (question.get("load") or question["call"]).partition(":")
        found = getattr(import_module(module), name)(**question["arguments"])
        if "call" in question:
            return {"result": found}
        hosted |= {contender.name: contender for contender in found}
        return {"result": [(contender.name, contender.exact, contender.like) for contender in found]}
    except ForerunError as error:
        return {"refused": str(error)}
    except Exception as error:  # whatever a peer raises is the benchmark's to report
        return {"failed": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the benchmark was interrupted, and says so itself
        sys.exit(130)
