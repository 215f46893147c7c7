"""Draft only as much as pays, by what passes cost here and how often this text's drafts stood.

A drafter that costs nothing and knows its own confidence (n-gram) gets the whole budget and the price list,
and cuts its tree itself. For one that must run to draft (a model), the length is fixed beforehand from the
acceptance seen so far: K maximises (1 + a + ... + a^K) / (t(K+1)/t(1) + K c). Several sequences in one pass
share its nodes: the likeliest to survive come first, whoever's they are, for as long as tokens per second rise.

Where no length pays, trying again is the only way to learn that the text has changed, and it costs. So there is
an allowance: every token earns a fiftieth of a pass, every drafting round is charged what it cost beyond the
tokens it brought, and a trial is made only when the allowance covers its worst case. Trials are as short as can
pay, so that they come often. Whatever the text does, the loss stays within that fiftieth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.control.cost import CostModel
from forerun.types import Budget, Round, Seq

EARNED = 0.02  # passes that a token adds to the allowance
MOST_SAVED = 12.0  # passes; more would only be spent at once when a text goes bad
HOPEFUL = 0.95  # the acceptance a trial hopes for
RECENT, MARGIN = 0.25, 0.2  # weight of the newest position in the short memory, and what it must be ahead by


@dataclass(slots=True)
class Record:
    """How often drafts stood: a running rate over the positions that were tested.

    A second one with a short memory notices a text that has become easy; being noisy, it must beat the first by
    a margin. The other way round nothing is needed: failures of long chains are many and costly enough.
    """

    hits: float = 2.1  # to begin with, an acceptance of 0.7 worth three tries
    tries: float = 3.0
    recent: float = 0.7

    def count(self, depth: int, accepted: int) -> None:
        tried = min(accepted + 1, depth)
        memory = 0.95**tried
        self.hits = self.hits * memory + accepted
        self.tries = self.tries * memory + tried
        for stood in [*[1.0] * accepted, *[0.0] * (tried - accepted)]:
            self.recent += RECENT * (stood - self.recent)

    @property
    def acceptance(self) -> float:
        return min(max(self.hits / self.tries, self.recent - MARGIN), 0.999)


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
        self._levels: dict[int, float] = {}  # what a drafted level costs, by sequence, in this round

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        price = self.cost.price(self.nodes, neighbours=len(seqs) - 1)
        self._levels = {seq.id: self._level(seq) for seq in seqs}
        costly = [seq for seq in seqs if self._levels[seq.id]]
        lengths = dict(zip([seq.id for seq in costly], self._lengths(costly, len(seqs)), strict=True))
        spare = self.allowance
        budgets = []
        for seq in seqs:
            if seq.id not in lengths:
                budgets.append(Budget(self.nodes, self.nodes, self.width, price))
                continue
            length = lengths[seq.id] if self.allowance > -MOST_SAVED else 0
            if not length and (trial := shortest_that_pays(HOPEFUL, price, self._levels[seq.id])):
                worst = price[trial] + trial * self._levels[seq.id] - 1.0
                if spare >= worst:
                    length, spare = trial, spare - worst
            budgets.append(Budget(length, length))
        return budgets

    def observe(self, outcome: Round) -> None:
        if len(outcome.seqs) == 1:
            # with the verdict, because a device that works on its own is waited for only there
            spent = outcome.seconds["target"] + outcome.seconds.get("verify", 0.0)
            self.cost.observe(outcome.drafted[0] + 1, spent)
        price = self.cost.price(max(outcome.drafted, default=0), neighbours=len(outcome.seqs) - 1)
        rows = zip(outcome.seqs, outcome.drafted, outcome.depths, outcome.accepted, strict=True)
        for seq, drafted, depth, accepted in rows:
            level = self._levels.get(seq.id, 0.0)  # as planned: a drafter may go another way next time
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
            self._records[seq.id] = Record(
                self._latest.hits * share, 3.0, self._latest.hits / self._latest.tries
            )
        return self._records[seq.id]

    def _lengths(self, costly: Sequence[Seq], batch: int) -> list[int]:
        """Chain lengths of the sequences whose drafter costs, chosen together."""
        plain = self.cost.pass_seconds(batch)
        extra = [self.cost.pass_seconds(batch + n) / plain for n in range(len(costly) * self.nodes + 1)]
        share = self.cost.pass_seconds(1) / plain  # levels are counted in passes over one node
        levels = [self._levels[seq.id] * share for seq in costly]
        acceptances = [self._record(seq).acceptance for seq in costly]
        return best_lengths(acceptances, levels, batch, extra, self.nodes)


def best_lengths(
    acceptances: Sequence[float], levels: Sequence[float], batch: int, extra: Sequence[float], most: int
) -> list[int]:
    """Chain lengths that give `batch` sequences the most tokens per second together.

    Nodes are added in the order of their survival. extra[n] is what a pass with n drafted nodes costs, in passes
    without any; a level is drafted for everybody at once, so the slowest chain says what drafting costs.
    """
    lengths, best = [0] * len(acceptances), [0] * len(acceptances)
    survivals = list(acceptances)
    tokens = best_rate = float(batch)
    for nodes in range(1, len(extra)):
        open_ = [i for i, length in enumerate(lengths) if length < most]
        if not open_:
            break
        chosen = max(open_, key=lambda i: survivals[i])
        tokens += survivals[chosen]
        lengths[chosen] += 1
        survivals[chosen] *= acceptances[chosen]
        drafting = max(length * level for length, level in zip(lengths, levels, strict=True))
        rate = tokens / (extra[nodes] + drafting)
        if rate > best_rate:
            best, best_rate = [*lengths], rate
    return best


def best_length(acceptance: float, price: Sequence[float], level: float) -> int:
    """The chain length with the most tokens per second for one sequence; 0 where none beats a plain pass."""
    return best_lengths([acceptance], [level], 1, price, len(price) - 1)[0]


def shortest_that_pays(acceptance: float, price: Sequence[float], level: float) -> int:
    """The shortest chain that beats a plain pass at this acceptance; 0 where none does."""
    tokens, survival = 1.0, 1.0
    for length in range(1, len(price)):
        survival *= acceptance
        tokens += survival
        if tokens > price[length] + length * level:
            return length
    return 0
