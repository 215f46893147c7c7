"""Trials: when a drafter that does not pay is tried again.

A drafter that stops where it is not confident says at once what it would gain, so one round tells. Its trials come
after 2, 4, ... 32 rounds without a draft, until one pays again; a new text has one at once, and then starts
from half the wait of the text before. All trials together lose no more than the allowance has (allowance.py). Others
need several rounds to show what they gain, which only the allowance limits.

Until the next trial a sequence that is alone rests: nothing is planned for it, and its rounds follow each other.
"""

from __future__ import annotations

from forerun.control.allocate import shortest_that_pays
from forerun.control.allowance import Allowance
from forerun.control.history import LONGEST_WAIT, History
from forerun.control.prices import REFRESH_ROUNDS
from forerun.core.offer import Offer, total
from forerun.core.types import Budget

_RESTING = tuple(Budget(0, 0, source="free", repeats=rounds) for rounds in range(LONGEST_WAIT + 1))


class Trials:
    """Whether a trial is due, and until when it is known that none is."""

    def __init__(self, others: Allowance) -> None:
        self.others = others
        # a loss is noticed within a few rounds, and texts are often short: 40 tokens may lose little
        self.stopping = Allowance(most=2.0, earned=0.015, floor=1.0, level=1.0)
        # a sequence alone in its batch, the round up to which nothing pays for it, and whether its drafter stops
        self._off = (-1, 0, True)

    def of(self, stops: bool) -> Allowance:
        """That of drafters that stop where they are not confident, or of all others."""
        return self.stopping if stops else self.others

    def levels(self) -> dict[bool, float]:
        """What each has left, by whether drafters stop."""
        return {True: self.stopping.level, False: self.others.level}

    def is_due(self, record: History, worst: float, spare: float, stops: bool) -> bool:
        """May a trial be made that loses so much at worst, with so much allowance left? Then the next is put off."""
        if spare < self._least(worst, stops) or (stops and record.idle < record.wait):
            return False
        record.note_trial()
        return True

    def rest(self, seq_id: int, now: int, record: History, worst: float | None, stops: bool) -> None:
        """No trial now: nothing is learnt until one is due. `worst` None = none can pay."""
        rounds = REFRESH_ROUNDS
        if worst is not None:
            rounds = self.of(stops).rounds_until(self._least(worst, stops), REFRESH_ROUNDS)
        if worst is not None and stops:
            rounds = min(REFRESH_ROUNDS, max(record.wait - record.idle, rounds))
        self._off = seq_id, now + rounds, stops

    def note_rested(self, rounds: int) -> None:
        """So many rounds of the sequence that rests have lost nothing."""
        self.of(self._off[2]).rest(rounds)

    def are_off(self, seq_id: int, now: int) -> bool:
        return seq_id == self._off[0] and now < self._off[1]

    def resting(self, seq_id: int, now: int) -> Budget:
        """Nothing, for this round and those behind it in which nothing pays for sure."""
        return _RESTING[max(0, self._off[1] - now - 1) if seq_id == self._off[0] else 0]

    def _least(self, worst: float, stops: bool) -> float:
        """The allowance that covers it."""
        return worst - 0.9 * self.stopping.floor if stops else worst


def shortest_trial(offer: Offer, price: tuple[float, ...], plain: float, batch: int, costly: int) -> tuple[int, float]:
    """The shortest draft that could pay, and what it costs in plain rounds if all of it is rejected.

    `plain` seconds take a plain pass; of the batch, `costly` sequences share what drafting takes.
    """
    costs = tuple([seconds * batch / costly / plain for seconds in offer.seconds])
    length = shortest_that_pays(price, costs)
    worst = price[length] - 1.0 + total(costs, length) + offer.start * batch / plain
    return length, worst / batch
