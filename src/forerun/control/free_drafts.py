"""FreeDrafts: how far drafts that cost nothing (look-ups) are trusted, what they may lose, and their budgets."""

from __future__ import annotations

from dataclasses import replace

from forerun.control.acceptance import Factor
from forerun.control.allocate import Levels
from forerun.control.allowance import Allowance
from forerun.control.prices import PriceList
from forerun.core.offer import Offer
from forerun.core.types import Budget

UNCORRECTED_ERROR = 0.05  # smaller errors of a drafter's expectations are not corrected
FREE_MEMORY = 0.99  # of tokens accepted by those expected, per draft that cost nothing
FORGIVING = 0.997  # of the same, per round: distrust does not last
DISTRUST_PER_LOSS = 0.4  # what is expected counts for so much less per plain round lost
LEAST_TRUST = 0.4  # and for so much of itself at least
NOTHING = Budget(0, 0, source="free")


class FreeDrafts:
    """Of all sequences together."""

    def __init__(self) -> None:
        # gains of many drafts may be lost again before drafting ends: a few long ones in vain are no reason
        self.allowance = Allowance(most=5.0, earned=0.01, floor=1.5, level=0.0)
        self._kept = Factor(4.0)  # tokens accepted, by those that were expected

    @property
    def trust(self) -> float:
        """Tokens accepted, by those expected: the best drafts are chosen, and so overrated."""
        trust = self._kept.value()
        return trust if trust < 1.0 - UNCORRECTED_ERROR else 1.0

    def levels(self, offer: Offer, more: float = 0.0) -> Levels:
        """What a sequence could draft for nothing; none where too much was lost of late.

        `more`: tokens that any draft costs beside its nodes.
        """
        if not self.allowance.covers_usual:
            return Levels(())
        trust = self._cautious_trust()
        free = offer.free if trust == 1.0 else [trust * survival for survival in offer.free]
        return Levels(free, (more, 0.0))

    def budget(self, listed: PriceList, *, chain: bool = False) -> Budget:
        """All that may pay by a price list; `chain`: without branches."""
        if not self.allowance.covers_usual:
            return NOTHING
        trust, free = self._cautious_trust(), listed.chain if chain else listed.free
        if trust == 1.0 or free.price is None:
            return free
        return replace(free, price=tuple([cost / trust for cost in free.price]))

    def _cautious_trust(self) -> float:
        """Where more was lost than gained, only drafts that promise more than they cost are made."""
        level = self.allowance.level
        return self.trust if level >= 0.0 else self.trust * max(LEAST_TRUST, 1.0 + DISTRUST_PER_LOSS * level)

    def note_round(self) -> None:
        self._kept.add(0.0, 0.0, FORGIVING)

    def note_idle(self, rounds: int) -> None:
        """So many rounds in a row that drafted nothing."""
        self._kept.add(0.0, 0.0, FORGIVING**rounds)
        self.allowance.rest(rounds)

    def note_chain(self, accepted: int, expected: float) -> None:
        """Of a chain so many tokens were accepted."""
        self._kept.add(accepted, expected, FREE_MEMORY)
