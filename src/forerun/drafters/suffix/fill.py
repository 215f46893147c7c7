"""What fills trees of the suffix drafter where matches end: successors, how far they are trusted, and tree sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from forerun.drafters.base import AT_HAND
from forerun.drafters.suffix.successors import Row, Successors
from forerun.drafters.tree_builder import least_step
from forerun.types import Budget

MEMORY, WORTH = 0.998, 8.0  # of how far the table is trusted: per try, and tokens that the prior is worth
OWN_MEMORY, OWN_WORTH = 0.97, 4.0  # the same in one text, beside what all texts have shown
OWN_LEAST, OWN_MOST = 0.4, 1.5
PRIOR = (1.0, 0.65)  # share of what the table promises that comes: where nothing matches, and behind a match
# the least survival in a tree, unless a budget is to be drafted whole: the host makes every node
LEAST = 0.015
FEW = 2  # sequences that get trees; more get chains
MANY = 8  # more than so many get matches alone: their doubtful tokens would fill the pass
TREE = Budget(16, AT_HAND, 8)  # what offers assume before a price list was seen
CHAIN = Budget(AT_HAND, AT_HAND)  # the same for many sequences
# tokens that offers promise behind a token that was not among them; weight of the last
AFTER_MISS, NEWEST = 0.3, 0.05
STALE = 16  # offers in a row that nothing was drafted of, after which the last price list is forgotten


def least_of(budget: Budget) -> float:
    """The least survival of a node that is worth looking up."""
    if budget.price is not None:
        return max(LEAST, least_step(budget.price))
    return LEAST if budget is TREE or budget is CHAIN else 0.0


@dataclass(slots=True)
class OwnTrust:
    """Tokens that came in one text by those that the table promised: texts differ in how far they follow it."""

    hits: float = OWN_WORTH
    expected: float = OWN_WORTH

    def count(self, hits: float, expected: float) -> None:
        self.hits = self.hits * OWN_MEMORY + (1.0 - OWN_MEMORY) * OWN_WORTH + hits
        self.expected = self.expected * OWN_MEMORY + (1.0 - OWN_MEMORY) * OWN_WORTH + expected

    @property
    def factor(self) -> float:
        return min(max(self.hits / self.expected, OWN_LEAST), OWN_MOST)


class TextTable(NamedTuple):
    """Implements forerun.drafters.best_first.Successors for one text."""

    factors: Sequence[float]
    after: Callable[[int], Row]


class Fill:
    """The table of successors, and how far it is trusted: that is learnt.

    What it is worth depends on the size of the trees that are asked for, so that offers are made for that size. But
    where offers are small, nothing is drafted, and no other size is asked for: so a budget that was cut short because
    its text ends says nothing of the next one, and a size for which nothing was drafted of late is forgotten.
    """

    def __init__(self, table: Successors) -> None:
        self._table, self.after = table, table.after
        self.factors = list(PRIOR)
        self.asked, self.is_used = TREE, True
        self.after_miss = AFTER_MISS
        self._undrafted = 0  # offers in a row
        self._hits, self._expected = [WORTH * prior for prior in PRIOR], [WORTH, WORTH]

    @property
    def at(self) -> tuple[int, int, int, int]:
        """Where the table lies."""
        return self._table.at

    def of(self, own: OwnTrust) -> TextTable:
        """The table, as far as it is trusted in one text."""
        return TextTable([min(1.0, own.factor * factor) for factor in self.factors], self.after)

    def note_offer(self, promised: float, missed: bool) -> None:
        """An offer of so many tokens is made; `missed`: the last one had not the token that came."""
        if missed:
            self.after_miss += NEWEST * (promised - self.after_miss)
        self._undrafted += 1
        if self._undrafted > STALE and self.asked is not CHAIN:
            self.asked = TREE

    def note_budgets(self, budgets: Sequence[Budget]) -> None:
        """These are asked for."""
        first = next((budget for budget in budgets if budget.nodes), None)
        if first is not None:
            self._undrafted = 0
        self.is_used = len(budgets) <= MANY
        if len(budgets) > FEW:
            self.asked = CHAIN
        elif first is not None and first.price is not None and first.width > 1:
            self.asked = replace(first, depth=max(first.depth, AT_HAND))
        elif self.asked is CHAIN:
            self.asked = TREE

    def count(self, token: int, matched: Sequence[int], came: int, own: OwnTrust) -> None:
        """After a root with this token, and these continuations of its match, one token came."""
        if came in matched:
            return
        i = 1 if matched else 0
        row = [pair for pair in self.after(token) if pair[1] not in matched] if i else self.after(token)
        hits, expected = came in [one for _, one in row], sum([share for share, _ in row])
        own.count(hits, expected * self.factors[i])
        self._hits[i] = self._hits[i] * MEMORY + hits
        self._expected[i] = self._expected[i] * MEMORY + expected
        self.factors[i] = min(1.0, self._hits[i] / self._expected[i])
