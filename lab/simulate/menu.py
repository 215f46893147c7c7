"""Simulate a controller over a menu of forms: sequences come and go, acceptance follows traces, time is counted.

    MenuSimulation(GPU_COSTS, menu, [lambda round: 0.6] * 8).run(1000).worst_window()

Every round has a true time, of the pass, of the draft and of the host, of which the controller learns what a real one
would; and what plain decoding would have taken for the same tokens is known.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.offer import Form, Offer, Plan
from forerun.core.types import Budget, PlainSeq, Round

Trace = Callable[[int], float]  # round -> how likely the likeliest token is accepted

SIBLING = 0.4  # times the rate, of what its better siblings leave: how likely the next sibling is accepted


def accepted_of(form: Form, rate: float) -> float:
    """Expected accepted tokens of a tree of this form, whose nodes are its likeliest."""
    level, found = [1.0], list[float]()
    for _ in range(form.depth):
        ranks = [rate]
        while len(ranks) < form.width:
            ranks.append((1.0 - sum(ranks)) * SIBLING * rate)
        level = sorted((above * rank for above in level for rank in ranks), reverse=True)[: form.width]
        found += level
    return sum(sorted(found, reverse=True)[: form.nodes])


@dataclass(frozen=True, slots=True)
class SimulatedMenu:
    """Forms, what drafting them takes, and what they are said to gain at one acceptance rate."""

    forms: tuple[Form, ...]
    level: float  # seconds of a level at batch 1
    slope: float = 0.02  # of that, more for each further sequence
    claimed_rate: float = 0.6  # acceptance in the drafter's files

    def seconds(self, form: Form, batch: int) -> float:
        return self.level * form.depth * (1.0 + self.slope * (batch - 1))

    def rows(self, form: Form, batch: int) -> int:
        return batch * (form.nodes + 1)

    def expected(self, form: Form) -> float:
        return accepted_of(form, self.claimed_rate)


@dataclass(frozen=True, slots=True)
class SimulatedRound:
    """One round: sequences, the form, tokens, its seconds, and those of a plain round of the same batch."""

    batch: int
    nodes: int
    tokens: int
    seconds: float
    plain: float

    @property
    def plain_equivalent(self) -> float:
        """Seconds that plain decoding takes for the same tokens."""
        return self.tokens * self.plain / self.batch


@dataclass(slots=True)
class History:
    """The rounds of a run."""

    rounds: list[SimulatedRound] = field(default_factory=list)

    def speed(self, first: int = 0, last: int | None = None) -> float:
        """How many times as fast as plain decoding."""
        some = self.rounds[first:last]
        return sum(one.plain_equivalent for one in some) / sum(one.seconds for one in some)

    def worst_window(self, length: int = 200) -> float:
        """The lowest speed over any so many rounds in a row."""
        starts = range(max(1, len(self.rounds) - length + 1))
        return min(self.speed(start, start + length) for start in starts)


class MenuSimulation:
    """One controller, sequences that join and leave, and a drafter with a menu."""

    def __init__(
        self,
        cost: CostModel,
        menu: SimulatedMenu,
        traces: Sequence[Trace],
        *,
        believed: CostModel | None = None,
        lifetime: int = 0,
        host: float = 0.0,
        noise: float = 0.0,
        gap: float = 0.0,
        seed: int = 1,
    ) -> None:
        """`believed` is the curve that was measured; `lifetime` rounds later another sequence takes a place.

        A round takes `gap` seconds more unless it was launched before the last one, of the same form, was read.
        """
        self.cost, self.menu, self.traces, self.lifetime = cost, menu, traces, lifetime
        self.host, self.noise, self.gap, self.rng = host, noise, gap, random.Random(seed)
        offer, known = Offer(menu=menu), CostModel((believed or cost).seconds)
        self.controller = AdaptiveController(known, 60, 10, lambda seq: offer)
        self.seqs = [PlainSeq(i, [1]) for i in range(len(traces))]
        self.history, self._next_id = History(), len(traces)
        self._next: Plan | None = None  # of the round that follows
        self._ids: list[int] = []  # of the sequences of the last round

    def run(self, rounds: int, batch: Callable[[int], int] | None = None) -> History:
        """`batch` says how many of the sequences are there in a round; None = all of them."""
        for _ in range(rounds):
            now = len(self.history.rounds)
            self._replace_some(now)
            self._step(now, self.seqs[: batch(now) if batch else None])
        return self.history

    def _step(self, now: int, seqs: Sequence[PlainSeq]) -> None:
        if [seq.id for seq in seqs] != self._ids:
            self._next = None  # some have come or gone
        self._ids = [seq.id for seq in seqs]
        followed, gap = self._next is not None, self.gap if self._next is None else 0.0
        plan = self.controller.plan(seqs) if self._next is None else self._next
        budgets = plan.budgets
        accepted = [self._accept(self.traces[i](now), budget) for i, budget in enumerate(budgets)]
        nodes, depths = [budget.nodes for budget in budgets], [budget.depth for budget in budgets]
        count, drafted = len(seqs), sum(nodes)
        form = next((Form(one.nodes, one.depth, one.width) for one in budgets if one.nodes), None)
        drafting = 0.0 if form is None else self.menu.seconds(form, count)
        target = self.cost.pass_seconds(count + drafted)
        seconds = {"draft": drafting, "pass": target, "host": self.host * count + gap}
        seconds = {part: spent * self._jitter() for part, spent in seconds.items()}
        trees = tuple(nodes), tuple(depths), tuple(accepted)
        self._next = self.controller.follow(seqs, plan) if self.gap else None
        for seq, count_of in zip(seqs, accepted, strict=True):
            seq.tokens += [1] * (1 + count_of)
        self.controller.observe(Round(tuple(seqs), *trees, seconds, followed=followed, plan=plan))
        plain = self.cost.pass_seconds(count) + self.host * count
        truly = drafting + target + self.host * count + gap
        self.history.rounds.append(SimulatedRound(count, drafted, sum(accepted) + count, truly, plain))

    def _replace_some(self, now: int) -> None:
        for i, seq in enumerate(self.seqs):
            if self.lifetime and now and (now + i * 7) % self.lifetime == 0:
                self.controller.forget(seq)
                self.seqs[i] = PlainSeq(self._next_id, [1])
                self._next_id += 1

    def _jitter(self) -> float:
        """Times are never quite the same, and now and then the machine pauses."""
        if not self.noise:
            return 1.0
        pause = 20.0 if self.rng.random() < 0.003 else 1.0
        return pause * max(0.5, self.rng.gauss(1.0, self.noise))

    def _accept(self, rate: float, budget: Budget) -> int:
        """A draw whose mean is what a tree of this form gains at this rate, level by level."""
        if not budget.nodes:
            return 0
        each, accepted = level_rate(Form(budget.nodes, budget.depth, budget.width), round(rate, 3)), 0
        while accepted < budget.depth and self.rng.random() < each:
            accepted += 1
        return accepted


@lru_cache(maxsize=4096)
def level_rate(form: Form, rate: float) -> float:
    """The acceptance rate of every level of a chain as deep as this form that gains as much."""
    mean = accepted_of(form, rate)
    if mean == 0.0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        below = sum(middle**depth for depth in range(1, form.depth + 1)) < mean
        low, high = (middle, high) if below else (low, middle)
    return high
