"""Allowance: how much may still be lost on drafts, so that decoding never falls far below plain decoding.

It is counted in plain rounds. Every round adds a little, drafts take what they lost, gains fill it up again, and it
never exceeds `most`. A draft runs only if its worst case, nothing accepted, leaves the allowance above -`floor`; a
trial only if the allowance covers it whole. So over any stretch of n rounds the loss is at most

    most + n * earned + floor                        for a batch's forms and n = 200: 3 rounds, 1.5%

whatever is accepted; and since the allowance is never below -`floor`, drafting returns after a bounded number of
rounds. Where gains may fill it beyond what rounds alone add (`earned_up_to`), the loss is at most

    earned_up_to + n * earned + floor                and what was gained just before, up to `most`
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

STAKE = 0.5  # what may be put at risk, of what is left: times the gain by the worst loss


@dataclass(slots=True)
class Allowance:
    """What may still be lost, in plain rounds."""

    most: float = 0.5
    earned: float = 0.006  # by a round
    floor: float = 1.3
    level: float = 0.5
    earned_up_to: float = inf  # beyond that, gains alone fill it up
    usual: float = 0.0  # what drafts cost of late, whatever was accepted: the worst case where forms vary

    def book(self, loss: float) -> None:
        """A round has lost so much against plain decoding; a negative loss is a gain."""
        earned = min(self.earned, max(0.0, self.earned_up_to - self.level))
        self.level = max(min(self.level + earned - loss, self.most), -self.floor)

    def rest(self, rounds: int) -> None:
        """So many rounds have lost nothing."""
        most = min(max(self.level, self.earned_up_to), self.most)
        self.level = min(self.level + rounds * self.earned, most)

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

    def covers_stake(self, worst: float, gain: float) -> bool:
        """May a draft be made that promises so much? The less is left, the more it must promise for what it may lose.

        Doubtful drafts, missed one after the other, would else use up what is left when a long match comes: the share
        of what is left that is put at risk is at most STAKE times what is promised for each unit of it.
        """
        left = self.level + self.floor
        return worst < left and worst * worst <= STAKE * gain * left

    def covers_trial(self, worst: float) -> bool:
        """May a draft be made that may well lose all of it?"""
        return self.level >= min(worst, self.most) and self.covers(worst)
