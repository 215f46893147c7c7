"""Draft only as much as pays, by what passes cost here and how often this text's drafts stood.

A drafter that costs nothing and knows its own confidence (n-gram) gets the whole budget and the price list, and
cuts its tree itself. For one that must run to draft (a model), the length is fixed beforehand from the acceptance
seen so far: K maximises (1 + a + ... + a^K) / (t(K+1)/t(1) + K c). Where even certain acceptance would lose, it is
never run; where it lost lately, it is tried again after ever longer pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.control.cost import CostModel
from forerun.types import Budget, Round, Seq

FIRST_PAUSE, LONGEST_PAUSE = 16, 256  # rounds


@dataclass(slots=True)
class _Record:
    """What one sequence's drafts came to."""

    hits: float = 2.1  # prior: an acceptance of 0.7, worth three tries
    tries: float = 3.0
    pause: int = 0  # rounds to sit out
    next_pause: int = FIRST_PAUSE

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
        self._records: dict[int, _Record] = {}

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        price = self.cost.price(self.nodes, neighbours=len(seqs) - 1)
        return [self._budget(seq, price) for seq in seqs]

    def observe(self, outcome: Round) -> None:
        if len(outcome.seqs) == 1:
            self.cost.observe(outcome.drafted[0] + 1, outcome.seconds["target"])
        for seq, depth, accepted in zip(outcome.seqs, outcome.depths, outcome.accepted, strict=True):
            if depth and self.draft_seconds(seq) > 0:
                self._records.setdefault(seq.id, _Record()).count(depth, accepted)

    def forget(self, seq: Seq) -> None:
        self._records.pop(seq.id, None)

    def _budget(self, seq: Seq, price: tuple[float, ...]) -> Budget:
        level = self.draft_seconds(seq) / self.cost.pass_seconds(1)
        if level == 0.0:
            return Budget(self.nodes, self.nodes, self.width, price)
        record = self._records.setdefault(seq.id, _Record())
        if record.pause:
            record.pause -= 1
            return Budget(0, 0)
        length = best_length(record.acceptance, price, level)
        if length == 0 and best_length(0.999, price, level):
            record.pause, record.next_pause = record.next_pause, min(2 * record.next_pause, LONGEST_PAUSE)
            record.hits, record.tries = 2.1, 3.0  # after the pause, look again with open eyes
        elif length:
            record.next_pause = (
                max(FIRST_PAUSE, record.next_pause // 2) if record.acceptance > 0.7 else record.next_pause
            )
        return Budget(length, length, 1)


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
