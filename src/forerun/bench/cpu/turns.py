"""Seconds to the first token of a chat's first and second turn (`python -m forerun.bench.cpu.turns`).

The second turn repeats the first and its answer, so that all but the new question can be found in the prefix cache. A
third chat is read anew, as nobody may share what is cached for it: what the second turn would take without the cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from statistics import median
from time import perf_counter

from forerun.bench.machine import load_average, machine_facts
from forerun.bench.suites import load_suite
from forerun.completion import Completion
from forerun.errors import ForerunError
from forerun.llm import LLM
from forerun.params import EngineConfig, SamplingParams
from forerun.prompts import Message

QUESTION = "Say in one sentence what this is about."
ANSWER = 24  # tokens


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print one line for each repeat; the last line is one JSON document. 2 for a user's error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=900, help="of the first turn, about")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(words)
    if given.repeats < 1 or given.tokens < 1:
        parser.error("--repeats and --tokens must be 1 or more")
    try:
        with LLM.load(given.model, config=EngineConfig(device="cpu")) as llm:
            found = [measure(llm, given.tokens, repeat) for repeat in range(given.repeats)]
    except ForerunError as error:
        print(f"forerun: {error}", file=sys.stderr)
        return 2
    for one in found:
        print(
            f"{one['tokens']:.0f} tokens: first turn {one['first']:.3f} s, second {one['second']:.3f} s, ",
            end="",
        )
        print(f"which is {one['second'] / one['first']:.3f} of it; without the cache {one['uncached']:.3f} s")
    middle = {key: median(one[key] for one in found) for key in found[0]}
    conditions = {**machine_facts(), "load": load_average(), **vars(given)}
    print(json.dumps({"benchmark": "turns", "conditions": conditions, "median": middle, "repeats": found}))
    return 0


def measure(llm: LLM, tokens: int, repeat: int) -> dict[str, float]:
    """Seconds to the first token of both turns of one chat, whose text no other chat has."""
    chat: list[Message] = [{"role": "user", "content": f"{text_of(llm, tokens, repeat)}\n\n{QUESTION}"}]
    first, answer = first_token(llm, chat, "turns")
    chat += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And in five words?"}]
    (second, found), (uncached, anew) = (first_token(llm, chat, salt) for salt in ("turns", None))
    if anew.cached_tokens or found.cached_tokens < len(llm.encode(chat[:1])) // 2:
        raise ForerunError("the second turn did not find the first in the cache, or a chat of its own did")
    times = {"first": first, "second": second, "uncached": uncached}
    return {"tokens": len(llm.encode(chat[:1])), "cached": found.cached_tokens, **times}


def text_of(llm: LLM, tokens: int, repeat: int) -> str:
    """Prompts of the built-in suite one after another, from another one on for every repeat."""
    items = [item.messages[-1]["content"] for item in load_suite()]
    text = f"Notes, part {repeat + 1}."
    for item in [*items[repeat * 5 :], *items]:
        if len(llm.encode(text)) >= tokens:
            break
        text += f"\n\n{item}"
    words = text.split(" ")
    return " ".join(words[: int(len(words) * min(1.0, tokens / len(llm.encode(text))))])


def first_token(llm: LLM, chat: list[Message], salt: str | None) -> tuple[float, Completion]:
    """Seconds until something of the answer is there, and the answer."""
    started, stream = perf_counter(), llm.stream(chat, SamplingParams(max_tokens=ANSWER), cache_salt=salt)
    next(stream)
    spent = perf_counter() - started
    for _ in stream:
        pass
    return spent, stream.completion


if __name__ == "__main__":
    sys.exit(main())
