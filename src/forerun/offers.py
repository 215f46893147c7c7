"""Offer: what drafting would cost in the coming round, as a drafter states it to the controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    expected: float | None = (
        None  # tokens of its last draft that it expected to be accepted; None = not known
    )

    @property
    def costs(self) -> bool:
        """Must the drafter run, and take time, to draft?"""
        return any(self.seconds)

    @property
    def level(self) -> float:
        """Seconds that each further level takes."""
        return self.seconds[-1] if self.seconds else 0.0

    def until(self, depth: int) -> float:
        """Seconds of drafting so deep, without the start."""
        return total(self.seconds, depth)


FREE = Offer()


def at_depth(levels: Sequence[float], depth: int) -> float:
    """What depth 1, 2, ... adds: the last entry holds for all further depths."""
    return levels[min(depth, len(levels)) - 1] if levels else 0.0


def total(levels: Sequence[float], depth: int) -> float:
    """What depths 1 to `depth` add up to."""
    if not levels:
        return 0.0
    known = len(levels) - 1
    return sum(levels[: min(known, depth)]) + max(0, depth - known) * levels[-1]
