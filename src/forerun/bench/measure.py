"""The alternating runner: every contender writes on the same prompt, one right after the other.

Machines drift (heat, neighbours, caches), so figures taken minutes apart do not compare. Here all contenders
of a prompt run next to each other in time, in an order that rotates, and only such neighbours are divided by
each other. Whoever claims to be exact must also have written the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Written(NamedTuple):
    """What a contender hands back."""

    tokens: Sequence[int]  # new ones only
    seconds: float  # the whole call, prompt included
    rounds: int | None = None
    decode_seconds: float | None = None  # the same without the pass over the prompt, where it can be told


Write = Callable[[Sequence[int], int], Written]


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to write a text; called with prompt ids and the most new tokens."""

    name: str
    write: Write
    exact: bool = True  # it promises the text that plain greedy decoding gives


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens."""

    id: str
    task: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One text written by one contender."""

    contender: str
    prompt: str
    task: str
    repeat: int
    tokens: tuple[int, ...]
    seconds: float
    rounds: int | None
    decode_seconds: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """A text that is not what the reference wrote."""

    contender: str
    prompt: str
    repeat: int
    position: int  # of the first new token that differs


def warm_up(contenders: Sequence[Contender], prompt: Prompt, max_tokens: int) -> None:
    """Let everybody write once for nothing: first calls allocate, compile and fault pages in."""
    for contender in contenders:
        contender.write(prompt.ids, max_tokens)


def alternate(
    contenders: Sequence[Contender], prompts: Sequence[Prompt], max_tokens: int, repeats: int
) -> Iterator[Run]:
    """Measure everybody on everything; the order turns by one with every prompt and every repeat."""
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            first = (repeat + index) % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                tokens, seconds, rounds, decode = Written(*contender.write(prompt.ids, max_tokens))
                yield Run(
                    contender.name, prompt.id, prompt.task, repeat, tuple(tokens), seconds, rounds, decode
                )


def differences(runs: Iterable[Run], contenders: Sequence[Contender]) -> list[Difference]:
    """Texts of exact contenders that are not what the first of them wrote the first time."""
    exact = {contender.name for contender in contenders if contender.exact}
    reference = next((contender.name for contender in contenders if contender.exact), None)
    runs = [run for run in runs if run.contender in exact]
    wanted = {run.prompt: run.tokens for run in reversed(runs) if run.contender == reference}
    return [
        Difference(run.contender, run.prompt, run.repeat, _first_difference(run.tokens, wanted[run.prompt]))
        for run in runs
        if run.tokens != wanted[run.prompt]
    ]


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
