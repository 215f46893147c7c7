"""Rest: where asking drafters takes the host longer than their drafts gain, they are not asked for a while.

A lookup costs no pass, but the host looks up every sequence of a batch, and a GPU waits meanwhile: with many sequences
and few matches that is several percent of a round. Both are counted in plain rounds, as moving averages.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

NOTICED = 0.02  # plain rounds that asking must take before it matters
ROUNDS, TRIES = 24, 6  # rounds of a rest, and rounds between two of them in which drafters are asked
SMOOTH = 0.15


@dataclass(slots=True)
class Rest:
    """What drafts that cost no pass gain and what asking for them takes; and for how long nobody is asked."""

    gain: float = 0.0
    cost: float = 0.0
    _asked: int = 0
    _left: int = 0
    _known: frozenset[int] = frozenset()

    def goes_on(self, ids: Collection[int]) -> bool:
        """Is nobody asked in this round? A sequence that has joined is always asked."""
        if self._left <= 0 or not self._known.issuperset(ids):
            self._left = 0
            return False
        self._left -= 1
        return True

    def observe(self, ids: Collection[int], gain: float, cost: float) -> None:
        """A round in which all were asked, and nobody has a drafter that costs."""
        self._asked += 1
        weight = max(SMOOTH, 1.0 / self._asked)
        self.gain += weight * (gain - self.gain)
        self.cost += weight * (min(cost, 4.0 * self.cost if self.cost else cost) - self.cost)
        if self._asked >= TRIES and self.cost > NOTICED and self.gain < self.cost:
            self._left, self._known, self._asked = ROUNDS, frozenset(ids), 0
