"""What drafters offer to the controller for the coming round (`Offer`), and what that decides (`Plan`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from forerun.core.request import Budget

Kind = Literal["plain", "trees", "lookup"]  # of a round


class Form(NamedTuple):
    """The size of one sequence's draft: nodes below the root, levels, and children per node at most."""

    nodes: int
    depth: int
    width: int


class Menu(Protocol):
    """The forms that a drafter has ready for a whole batch, such as captured graphs; all sequences get the same one.

    Sequences whose offers hold the same menu draft together.
    """

    @property
    def forms(self) -> tuple[Form, ...]: ...

    def seconds(self, form: Form, batch: int) -> float:
        """What drafting this form for so many sequences takes, measured where it was."""
        ...

    def rows(self, form: Form, batch: int) -> int:
        """Of the target's pass over trees of this form for so many sequences, padding included."""
        ...

    def expected(self, form: Form) -> float:
        """Tokens of one draft that are accepted on average, as far as the drafter's files say."""
        ...


@dataclass(frozen=True, slots=True)
class Offer:
    """What drafting for one sequence would cost in the coming round, and what it can draft at no cost.

    `seconds[d - 1]` is what drafting depth d adds to drafting depth d - 1; the last entry holds for every further
    depth. So `()` costs nothing, `(s,)` costs s per level, and a drafter that makes all levels in one pass says
    `(s, 0.0)`.
    """

    seconds: tuple[float, ...] = ()
    start: float = 0.0  # seconds before the first level: tokens that it must read first
    free: tuple[float, ...] = ()  # acceptance probability of each depth of a chain that costs nothing
    chosen: bool = True  # tokens are chosen, never sampled: the drafter cuts its tree by the price list
    stops: bool = False  # it knows its confidence level by level, and stops where the next would not pay
    # tokens of its last draft that it expected to be accepted; None = not known
    expected: float | None = None
    menu: Menu | None = None  # it drafts in these forms only, for all its sequences together
    otherwise: float = 0.0  # tokens that its next draft brings where the next token is none of `free`

    @property
    def costs(self) -> bool:
        """Must the drafter run, and take time, to draft?"""
        return self.menu is not None or any(self.seconds)

    @property
    def level(self) -> float:
        """Seconds that each further level takes."""
        return self.seconds[-1] if self.seconds else 0.0

    def until(self, depth: int) -> float:
        """Seconds of drafting so deep, without the start."""
        return total(self.seconds, depth)


FREE = Offer()
NEVER = Offer(chosen=False)  # of a drafter that never drafts: there is nothing to choose


@dataclass(frozen=True, slots=True)
class Part:
    """What one sequence drafts in a round."""

    kind: Kind = "plain"
    shape: Form | None = None  # of trees from captured graphs; others vary
    claims: tuple[float, ...] = ()  # of a look-up: how likely each depth is accepted
    start: float = 0.0  # seconds that its drafter takes to read the sequence first


PLAIN = Part()


@dataclass(frozen=True, slots=True)
class Plan:
    """What a round does: its kind, its shape, and a budget for every sequence.

    It travels with the launched round and comes back with its outcome, so that a controller need not remember rounds.
    """

    kind: Kind
    budgets: tuple[Budget, ...]
    parts: dict[int, Part] = field(default_factory=dict)  # by sequence; all others are plain
    shape: Form | None = None  # of all trees, where they have the same
    asked: int = 0  # look-ups that were made for it

    @classmethod
    def of(cls, budgets: Sequence[Budget] | Plan) -> Plan:
        """Of a controller that says no more than this."""
        if isinstance(budgets, cls):
            return budgets
        first = next((one for one in budgets if one.nodes), None)
        shape = None if first is None else Form(first.nodes, first.depth, first.width)
        return cls("plain" if first is None else "trees", tuple(budgets), shape=shape)

    @classmethod
    def plain(cls, count: int, asked: int = 0) -> Plan:
        return cls("plain", (NOTHING,) * count, asked=asked)

    def goes_on(self, last: Plan, trees: bool) -> bool:
        """Is it what the last round does, which has trees of its plan's shape or is plain?"""
        return (self.kind == "trees" and self.shape == last.shape) if trees else self.kind == "plain"

    def part(self, seq_id: int) -> Part:
        return self.parts.get(seq_id, PLAIN)

    def __iter__(self) -> Iterator[Budget]:
        return iter(self.budgets)

    def __len__(self) -> int:
        return len(self.budgets)

    def __getitem__(self, place: int) -> Budget:
        return self.budgets[place]


NOTHING = Budget(0, 0, source="free")


def at_depth(levels: Sequence[float], depth: int) -> float:
    """What depth 1, 2, ... adds: the last entry holds for all further depths."""
    return levels[min(depth, len(levels)) - 1] if levels else 0.0


def total(levels: Sequence[float], depth: int) -> float:
    """What depths 1 to `depth` add up to."""
    if not levels:
        return 0.0
    known = len(levels) - 1
    return sum(levels[: min(known, depth)]) + max(0, depth - known) * levels[-1]
