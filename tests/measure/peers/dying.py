"""An engine to host in a process: it counts, or dies or fails as peers do. The worker loads it by its name."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from forerun.core.errors import InvalidInput
from forerun.measure.bench.alternate import Contender, Written

FATAL = 13  # a token that ends the process


def counting(name: str, like: str | None = None) -> Contender:
    """Counts upwards from the end of each prompt, and prints while it does."""

    def write(prompts: Sequence[Sequence[int]], max_tokens: int) -> Written:
        print("a library that talks")
        os.write(1, b"and one that does so in C\n")
        if any(FATAL in prompt for prompt in prompts):
            os.kill(os.getpid(), signal.SIGILL)
        texts = [[prompt[-1] + 1 + i for i in range(max_tokens)] for prompt in prompts]
        return Written(texts, 0.25, 3, 0.125, [{"pass": 0.1}], [((1, 1, 1),)])

    return Contender(name, write, exact=False, like=like)


def load(names: Sequence[str], how: str = "") -> list[Contender]:
    """Contenders of these names; `how` is what goes wrong."""
    if how == "SIGILL":
        os.kill(os.getpid(), signal.SIGILL)
    if how == "exit":
        os.write(2, b"first words\nlast words\n")
        os._exit(7)
    if how == "user":
        raise InvalidInput("that cannot be; do otherwise")
    if how == "bug":
        raise ZeroDivisionError("a bug of theirs")
    return [counting(name, names[0] if i else None) for i, name in enumerate(names)]


def isa() -> str:
    return "abacus"


def echo(**arguments: Any) -> dict[str, Any]:
    return {**arguments, "pid": os.getpid()}
