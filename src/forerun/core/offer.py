"""What a round drafts: its kind and form, what a drafter offers for it (`Offer`), and what is planned (`RoundPlan`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

# plain: nothing is drafted | trees: one form for all, grown on the device | lookup: trees of any size, from the host |
# searched: look-ups were made for all sequences and none was worth drafting
Kind = Literal["plain", "trees", "lookup", "searched"]


class Form(NamedTuple):
    """The drafts of a round: nodes below the root, levels, and children per node at most of every tree; their kind."""

    nodes: int
    depth: int
    width: int
    kind: Kind = "trees"  # other kinds have no size of their own

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self[:3]


PLAIN, LOOKUP, SEARCHED = Form(0, 0, 1, "plain"), Form(0, 0, 1, "lookup"), Form(0, 0, 1, "searched")


class RoundPlan(NamedTuple):
    """What a round is, planned before anything is drafted for it."""

    kind: Kind
    repeats: int = 0  # further rounds under this plan that may be launched before this one is read
    # of its trees; None = trees of any size, or, where it follows an unread round, the form of that round
    form: Form | None = None

    def again(self) -> RoundPlan:
        """The next round under the same plan."""
        return self._replace(repeats=self.repeats - 1, form=None)


class Menu(Protocol):
    """The forms that a drafter has ready for a whole batch, such as captured graphs; all sequences get the same one.

    Sequences whose offers hold the same menu draft together.
    """

    @property
    def forms(self) -> tuple[Form, ...]: ...

    def seconds(self, form: Form, batch: int) -> float:
        """What drafting this form for so many sequences takes, measured where it was."""

    def rows(self, form: Form, batch: int) -> int:
        """Of the target's pass over trees of this form for so many sequences, padding included."""

    def expected(self, form: Form) -> float:
        """Tokens of one draft that are accepted on average, as far as the drafter's files say."""


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
    key: int = 0  # the same for all sequences of one drafter: what their texts came to is kept by it
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


def at_depth(levels: Sequence[float], depth: int) -> float:
    """What depth 1, 2, ... adds: the last entry holds for all further depths."""
    return levels[min(depth, len(levels)) - 1] if levels else 0.0


def total(levels: Sequence[float], depth: int) -> float:
    """What depths 1 to `depth` add up to."""
    if not levels:
        return 0.0
    known = len(levels) - 1
    return sum(levels[: min(known, depth)]) + max(0, depth - known) * levels[-1]
