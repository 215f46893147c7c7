"""Draft only as much as pays, by what passes cost here and how often this text's drafts stood.

A drafter that costs nothing and knows its own confidence (n-gram) gets the whole budget and the price list,
and cuts its tree itself. For one that must run to draft (a model), the length is fixed beforehand from the
acceptance seen so far: K maximises (1 + a + ... + a^K) / (t(K+1)/t(1) + K c).

Where no length pays, trying again is the only way to learn that the text has changed, and it costs. So there is
an allowance: every token earns a fiftieth of a pass, every drafting round is charged what it cost beyond the
tokens it brought, and a trial is made only when the allowance covers its worst case. Whatever the text does, the
loss stays within that fiftieth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.control.cost import CostModel
from forerun.types import Budget, Round, Seq

EARNED = 0.02  # passes that a token adds to the allowance
MOST_SAVED = 12.0  # passes; more would only be spent at once when a text goes bad
HOPEFUL = 0.95  # the acceptance a trial hopes for


@dataclass(slots=True)
class Record:
    """How often drafts stood: a running rate over the positions that were tested."""

    hits: float = 2.1  # to begin with, an acceptance of 0.7 worth three tries
    tries: float = 3.0

    def count(self, depth: int, accepted: int) -> None:
        tried = min(accepted + 1, depth)
        memory = 0.95**tried
        self.hits = self.hits * memory + accepted
        self.tries = self.tries * memory + tried

    @property
    def acceptance(self) -> float:
        return min(self.hits / self.tries, 0.999)


class AdaptiveController:
    """Budgets from measured costs and observed acceptance."""

    weighs_costs = True

    def __init__(
        self, cost: CostModel, nodes: int, width: int, draft_seconds: Callable[[Seq], float]
    ) -> None:
        self.cost, self.nodes, self.width = cost, nodes, width
        self.draft_seconds = draft_seconds  # per drafted level, by the sequence's own drafter
        self.allowance = 6.0  # passes that may still be lost on trials
        self._records: dict[int, Record] = {}
        self._latest = Record()  # what a new text starts from

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        price = self.cost.price(self.nodes, neighbours=len(seqs) - 1)
        return [self._budget(seq, price) for seq in seqs]

    def observe(self, outcome: Round) -> None:
        if len(outcome.seqs) == 1:
            self.cost.observe(outcome.drafted[0] + 1, outcome.seconds["target"])
        price = self.cost.price(max(outcome.drafted, default=0), neighbours=len(outcome.seqs) - 1)
        rows = zip(outcome.seqs, outcome.drafted, outcome.depths, outcome.accepted, strict=True)
        for seq, drafted, depth, accepted in rows:
            level = self._level(seq)
            if not level:
                continue
            self.allowance += EARNED * (accepted + 1)
            if depth:
                self._record(seq).count(depth, accepted)
                self._latest.count(depth, accepted)
                self.allowance += accepted + 1 - price[drafted] - depth * level
            self.allowance = min(self.allowance, MOST_SAVED)

    def forget(self, seq: Seq) -> None:
        self._records.pop(seq.id, None)

    def _level(self, seq: Seq) -> float:
        """What drafting one level costs, in plain passes."""
        return self.draft_seconds(seq) / self.cost.pass_seconds(1)

    def _record(self, seq: Seq) -> Record:
        if seq.id not in self._records:
            share = 3.0 / self._latest.tries
            self._records[seq.id] = Record(self._latest.hits * share, 3.0)
        return self._records[seq.id]

    def _budget(self, seq: Seq, price: tuple[float, ...]) -> Budget:
        level = self._level(seq)
        if not level:
            return Budget(self.nodes, self.nodes, self.width, price)
        length = best_length(self._record(seq).acceptance, price, level)
        if length and self.allowance > -MOST_SAVED:
            return Budget(length, length)
        length = best_length(HOPEFUL, price, level)
        worst = price[length] + length * level - 1.0
        return Budget(length, length) if self.allowance >= worst else Budget(0, 0)


def best_length(acceptance: float, price: Sequence[float], level: float) -> int:
    """The chain length with the most tokens per second; 0 where none beats a plain pass."""
    best, best_rate, tokens, survival = 0, 1.0, 1.0, 1.0
    for length in range(1, len(price)):
        survival *= acceptance
        tokens += survival
        rate = tokens / (price[length] + length * level)
        if rate > best_rate:
            best, best_rate = length, rate
    return best
