"""Simulate a controller over a menu of forms: sequences come and go, acceptance follows traces, time is counted.

    MenuSimulation(GPU_COSTS, menu, [lambda round: 0.6] * 8).run(1000).worst_window()

Every round has a true time, of the pass, of the draft and of the host, of which the controller learns what a real one
would; and what plain decoding would have taken for the same tokens is known.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.types import Budget, Form, Offer, PlainSeq, Round, RoundPlan
from lab.simulate.speeds import SimulatedMenu, draw_accepted
from tests.control.simulate.history import History, SimulatedRound

Trace = Callable[[int], float]  # round -> how likely the likeliest token is accepted


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
        self._following, self._budget = False, Budget(0, 0)

    def run(self, rounds: int, batch: Callable[[int], int] | None = None) -> History:
        """`batch` says how many of the sequences are there in a round; None = all of them."""
        for _ in range(rounds):
            now = len(self.history.rounds)
            self._replace_some(now)
            self._step(now, self.seqs[: batch(now) if batch else None])
        return self.history

    def _step(self, now: int, seqs: Sequence[PlainSeq]) -> None:
        followed, gap = self._following, 0.0 if self._following else self.gap
        budgets = [self._budget] * len(seqs) if followed else self.controller.plan(seqs)
        accepted = [
            draw_accepted(
                Form(one.nodes, one.depth, one.width), self.traces[i](now), one.depth, lambda _: self.rng.random()
            )
            if one.nodes
            else 0
            for i, one in enumerate(budgets)
        ]
        nodes, depths = [budget.nodes for budget in budgets], [budget.depth for budget in budgets]
        count, drafted = len(seqs), sum(nodes)
        form = next((Form(one.nodes, one.depth, one.width) for one in budgets if one.nodes), None)
        drafting = 0.0 if form is None else self.menu.seconds(form, count)
        target = self.cost.pass_seconds(count + drafted)
        seconds = {"draft": drafting, "pass": target, "host": self.host * count + gap}
        seconds = {part: spent * self._jitter() for part, spent in seconds.items()}
        trees = tuple(nodes), tuple(depths), tuple(accepted)
        self._budget, last = budgets[0], RoundPlan("trees" if drafted else "plain", 1)
        self._following = bool(self.gap and self.controller.follow(seqs, last, bool))
        for seq, count_of in zip(seqs, accepted, strict=True):
            seq.tokens += [1] * (1 + count_of)
        self.controller.observe(Round(tuple(seqs), *trees, seconds, followed=followed))
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
