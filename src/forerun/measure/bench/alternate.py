"""The alternating runner: every contender writes on the same prompts, one right after the other.

Machines drift (heat, neighbours, caches), so figures taken minutes apart do not compare. Here all contenders
of a prompt run next to each other in time, in an order that rotates, and only such neighbours are divided by
each other. A contender that claims to be exact must also have written the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

from forerun.core.errors import InvalidInput

TEXTS_PER_PLACE = 4  # of a batch, in a group
T = TypeVar("T")
MIXED = "mixed"  # the task of a group whose prompts are of several

Drafts = tuple[tuple[int, int, int], ...]  # per round of a sequence: nodes drafted, depth, accepted


class Written(NamedTuple):
    texts: Sequence[Sequence[int]]  # new tokens only, one text per prompt
    seconds: float  # the whole call, prompts included
    rounds: int | None = None  # target passes
    decode_seconds: float | None = None  # the same without the pass over the prompts, where that is known
    passes: Sequence[Mapping[str, float]] = ()  # seconds of each round by part
    drafts: Sequence[Drafts] = ()  # one per sequence


Write = Callable[[Sequence[Sequence[int]], int], Written]


class ContenderLost(Exception):
    """A contender cannot go on, and the message says why; the others can."""


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that generates; called with the ids of one or more prompts and the most new tokens for each."""

    name: str
    write: Write
    exact: bool = True  # it guarantees the text that the plain loop gives
    like: str | None = None  # another contender whose text it must equal: a peer's own plain one


@dataclass(frozen=True, slots=True)
class Prompt:
    id: str
    task: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts that are answered together."""

    id: str
    task: str
    prompts: tuple[Prompt, ...]

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> Group:
        tasks = {prompt.task for prompt in prompts}
        name = "+".join(dict.fromkeys(prompt.id for prompt in prompts))
        return cls(name, tasks.pop() if len(tasks) == 1 else MIXED, tuple(prompts))


@dataclass(frozen=True, slots=True)
class Run:
    contender: str
    prompt: str  # the group's id: that of its prompt where it has one only
    task: str
    repeat: int
    texts: tuple[tuple[int, ...], ...]
    seconds: float
    rounds: int | None = None
    decode_seconds: float | None = None
    passes: tuple[Mapping[str, float], ...] = ()
    drafts: tuple[Drafts, ...] = ()
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", sum(map(len, self.texts)))

    @property
    def key(self) -> tuple[str, str, int]:
        return self.contender, self.prompt, self.repeat


@dataclass(frozen=True, slots=True)
class Difference:
    contender: str
    prompt: str
    repeat: int
    position: int  # of the first new token that differs


def group(prompts: Sequence[Prompt], batch: int) -> list[Group]:
    """Prompts in groups, each of which is answered `batch` at a time: one alone, or several times as many as places.

    In a group with a text for each place, little would be measured but how the batch fills and drains: whoever drafts
    ends with the text that gains least, alone, and a plain loop does not. A group is of one task where that has enough;
    the other prompts, one of each task in turn, are mixed. Prompts are used twice only where all of them are too few
    for a group, since repeating one flatters every lookup drafter.
    """
    if len(prompts) < batch:
        raise InvalidInput(f"batches={batch} needs as many prompts and there are {len(prompts)}; raise --limit")
    size = 1 if batch == 1 else TEXTS_PER_PLACE * batch
    groups, over = list[Group](), list[tuple[int, Prompt]]()
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        mine = [prompt for prompt in prompts if prompt.task == task]
        full = len(mine) // size * size
        groups += [Group.of(mine[i : i + size]) for i in range(0, full, size)]
        over += enumerate(mine[full:])
    mixed = [prompt for _, prompt in sorted(over, key=lambda pair: pair[0])]
    if not groups and len(mixed) < size:
        return [Group.of([mixed[i % len(mixed)] for i in range(size)])]
    count = len(mixed) // size
    cuts = [i * len(mixed) // count for i in range(count + 1)] if count else []
    return groups + [Group.of(mixed[first:end]) for first, end in pairwise(cuts)]


def warm_up(contenders: Sequence[Contender], first: Group, max_tokens: int, lost: dict[str, str] | None = None) -> None:
    """Let every contender write once, untimed: first calls allocate, compile and fault pages in."""
    for contender in contenders:
        with noting(contender, lost):
            contender.write([prompt.ids for prompt in first.prompts], max_tokens)


def in_turn(some: Sequence[T], turn: int) -> list[T]:
    """The same in an order that rotates from turn to turn: nobody is always first."""
    first = turn % len(some)
    return [*some[first:], *some[:first]]


def alternate(
    contenders: Sequence[Contender],
    groups: Sequence[Group],
    max_tokens: int,
    repeats: int,
    known: Mapping[tuple[str, str, int], Run] | None = None,
    lost: dict[str, str] | None = None,
) -> Iterator[Run]:
    """Measure every contender on every group, except runs already known; the order rotates by group and repeat.

    A contender that fails is noted in `lost` with the reason and not called again.
    """
    known = known or {}
    for repeat in range(repeats):
        for index, one in enumerate(groups):
            for contender in in_turn(contenders, repeat + index):
                if lost is not None and contender.name in lost:
                    continue
                with noting(contender, lost):
                    done = known.get((contender.name, one.id, repeat))
                    yield done or measure_once(contender, one, repeat, max_tokens)


@contextmanager
def noting(contender: Contender, lost: dict[str, str] | None) -> Iterator[None]:
    """Note that a contender failed, where the caller keeps a list of them."""
    try:
        yield
    except ContenderLost as error:
        if lost is None:
            raise
        lost[contender.name] = str(error)


def without_lost(
    contenders: Sequence[Contender], runs: Sequence[Run], lost: Mapping[str, str]
) -> tuple[list[Contender], list[Run]]:
    """The contenders that finished, and their runs: an unfinished contender's runs compare with nothing."""
    left = [
        replace(contender, like=None if contender.like in lost else contender.like)
        for contender in contenders
        if contender.name not in lost
    ]
    return left, [run for run in runs if run.contender not in lost]


def measure_once(contender: Contender, one: Group, repeat: int, max_tokens: int) -> Run:
    written = contender.write([prompt.ids for prompt in one.prompts], max_tokens)
    return Run(
        contender.name,
        one.id,
        one.task,
        repeat,
        tuple(tuple(text) for text in written.texts),
        written.seconds,
        written.rounds,
        written.decode_seconds,
        tuple(written.passes),
        tuple(written.drafts),
    )


def differences(runs: Iterable[Run], contenders: Sequence[Contender]) -> list[Difference]:
    """Texts of exact contenders that are not what the first of them wrote the first time."""
    exact = {contender.name for contender in contenders if contender.exact}
    reference = next((contender.name for contender in contenders if contender.exact), None)
    runs = [run for run in runs if run.contender in exact]
    wanted = {run.prompt: run.texts for run in reversed(runs) if run.contender == reference}
    return [
        Difference(run.contender, run.prompt, run.repeat, first_difference(mine, theirs))
        for run in runs
        for mine, theirs in zip(run.texts, wanted[run.prompt], strict=True)
        if mine != theirs
    ]


def agreement(runs: Iterable[Run], contenders: Sequence[Contender]) -> dict[str, tuple[str, int, int]]:
    """Of contenders that must equal another's text: whose, how many texts were equal to it, and of how many."""
    by_key = {run.key: run for run in runs}
    found = {}
    for contender in contenders:
        if contender.like is not None:
            mine = [run for run in by_key.values() if run.contender == contender.name]
            equal = sum(run.texts == by_key[contender.like, run.prompt, run.repeat].texts for run in mine)
            found[contender.name] = contender.like, equal, len(mine)
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """The first position where two texts differ; the length of the shorter where one begins with the other."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
