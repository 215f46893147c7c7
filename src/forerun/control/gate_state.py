"""GateState: is the gate of look-ups open for one size of batch, since when, and what have its open rounds gained?"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_WAIT, LONGEST_WAIT = (64, 512)  # rounds that it stays closed behind an opening in vain, twice as many each time
LEAST_OPEN_ROUNDS = 48  # before it may close again: the gain of fewer is chance
NEWEST_GAIN = 0.02  # weight of the last round in the average gain
PLAIN_AFTER = 8  # open rounds before some are plain, to show what plain ones take


@dataclass(slots=True)
class GateState:
    """Of one size of batch."""

    is_open: bool
    rounds: int = 0  # since it opened or closed
    gain: float = 0.0  # of open rounds, in plain rounds: a moving average
    wait: int = 0  # rounds that it stays closed
    next_wait: int = FIRST_WAIT
    plain_left: int = 0  # plain rounds that are still to be made to time them
    plain_due: int = PLAIN_AFTER  # open rounds before that

    @property
    def has_tried(self) -> bool:
        """Was it open for long enough to say what that gains?"""
        return self.rounds >= LEAST_OPEN_ROUNDS

    def open(self) -> None:
        self.is_open, self.rounds, self.gain, self.plain_due = True, 0, 0.0, 1 << 30

    def note(self, gain: float) -> None:
        """An open round gained so many plain rounds."""
        self.rounds += 1
        self.gain += max(NEWEST_GAIN, 1.0 / self.rounds) * (gain - self.gain)

    @property
    def has_gained(self) -> bool:
        return self.has_tried and self.gain > 0.0

    def note_success(self) -> None:
        """It has gained: the next opening in vain counts as the first."""
        self.next_wait = FIRST_WAIT

    def close(self) -> None:
        self.is_open, self.rounds, self.wait = False, 0, self.next_wait
        self.next_wait = min(2 * self.next_wait, LONGEST_WAIT)
