"""Allowance: how much may still be lost on drafts, so that decoding never falls far below plain decoding.

It is counted in plain rounds. Every round adds a little, drafts take what they lost, gains fill it up again, and it
never exceeds `most`. A draft runs only if its worst case, nothing accepted, leaves the allowance above -`floor`; a
trial only if the allowance covers it whole. So over any stretch of n rounds the loss is at most

    most + n * earned + floor

whatever is accepted; and since the allowance is never below -`floor`, drafting returns after a
bounded number of rounds.

For a batch's forms the last 200 rounds are counted exactly (WindowAllowance): over no stretch of them more than three
plain rounds are lost, 1.5%. All of it may be lost at once: large trees of which nothing is accepted a few times in a
row are no reason to stop them where they gain in the long run. What was lost is forgotten with the round.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class Allowance:
    """What may still be lost, in plain rounds."""

    most: float = 0.5
    earned: float = 0.006  # by a round
    floor: float = 1.3
    level: float = 0.5
    usual: float = 0.0  # what drafts cost of late, whatever was accepted: the worst case where forms vary

    def book(self, loss: float) -> None:
        """A round has lost so much against plain decoding; a negative loss is a gain."""
        self.level = max(min(self.level + self.earned - loss, self.most), -self.floor)

    def rest(self, rounds: int) -> None:
        """So many rounds have lost nothing."""
        self.level = min(self.level + rounds * self.earned, self.most)

    def book_draft(self, cost: float, accepted: float) -> None:
        """A round of drafts that vary in size: what it cost, and what it gained."""
        if cost > 0.0:
            self.usual = max(cost, 0.9 * self.usual)
        self.book(cost - accepted)

    def rounds_until(self, worst: float, most: int) -> int:
        """Rounds without a draft, `most` of them at most, in which a trial is not covered for sure."""
        return max(0, min(most, int((worst - self.level) / max(self.earned, 1e-9)) - 1))

    @property
    def covers_usual(self) -> bool:
        """May drafts be made that cost as much as those of late?"""
        return self.covers(min(self.usual, 0.5 * self.floor))

    def covers(self, worst: float) -> bool:
        """May a draft be made that has been paying?"""
        return self.level - worst > -self.floor

    def covers_trial(self, worst: float) -> bool:
        """May a draft be made that may well lose all of it?"""
        return self.level >= min(worst, self.most) and self.covers(worst)


class Bound(Protocol):
    """What a chooser of forms asks."""

    def book(self, loss: float) -> None: ...
    def covers(self, worst: float) -> bool: ...
    def covers_trial(self, worst: float) -> bool: ...


class WindowAllowance:
    """Implements Bound: what was lost since whichever of the last rounds makes that most."""

    def __init__(self, most: float = 3.0, trials: float = 1.5, window: int = 200) -> None:
        """`trials` is what may be lost where the next round is a trial."""
        self.most, self.trials, self.window = most, trials, window
        self._round, self._total = 0, 0.0
        self._least = deque(
            [(0, 0.0)]
        )  # rounds of the window and totals behind them, from the least total upwards

    def book(self, loss: float) -> None:
        """A round has lost so much against plain decoding; a negative loss is a gain."""
        self._round, self._total = self._round + 1, self._total + loss
        least = self._least
        while least and least[-1][1] >= self._total:
            least.pop()
        least.append((self._round, self._total))
        while least[0][0] <= self._round - self.window:
            least.popleft()

    @property
    def lost(self) -> float:
        """At most, over any stretch of the window that ends now."""
        return self._total - self._least[0][1]

    def covers(self, worst: float) -> bool:
        """May a draft be made that has been paying?"""
        return self.lost + worst < self.most

    def covers_trial(self, worst: float) -> bool:
        """May a draft be made that may well lose all of it?"""
        return self.lost + worst < self.trials
