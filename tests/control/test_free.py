"""Drafts that cost no pass: believed as far as they were accepted, and not asked for where asking takes too long."""

from __future__ import annotations

import json
import random
from itertools import accumulate

import pytest

from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.types import Offer, Round
from forerun.testing import FakeSeq
from lab.simulate.speeds import SimulatedMenu
from tests.control.record_traces import DEPTH, FILE
from tests.control.simulate.menu import MenuSimulation
from tests.control.test_forms import FLAT, FORMS, HOST, LEAPS, LEAST

GPU = CostModel({1: 4.4, 32: 4.8, 64: 5.0, 128: 5.4, 256: 7.0, 512: 12.0, 1024: 24.0})
CPU = CostModel({1: 1.0, 2: 1.33, 4: 1.9, 8: 3.4, 16: 6.0})


class Lookups:
    """Sequences with n-gram matches that claim one survival rate and have another."""

    def __init__(self, cost: CostModel, batch: int, claimed: float, true: float, asking: float, matches: float) -> None:
        self.cost, self.true, self.asking, self.matches = cost, true, asking, matches
        self.free, self.asked, self.rng = tuple(claimed**depth for depth in range(1, 9)), 0, random.Random(3)
        self.controller = AdaptiveController(CostModel(cost.seconds), 16, 1, self._offer, lambda seq: True)
        self.seqs = [FakeSeq(i, [1]) for i in range(batch)]
        self.tokens = self.seconds = 0.0

    def _offer(self, seq: object) -> Offer:
        self.asked += 1
        return Offer(free=self.free if self.rng.random() < self.matches else ())

    def run(self, rounds: int) -> float:
        """How many times as fast as plain decoding, asking included."""
        self.tokens = self.seconds = 0.0
        batch = len(self.seqs)
        for _ in range(rounds):
            before = self.asked
            budgets = self.controller.plan(self.seqs)
            offers = self.controller.planner._offers if self.asked > before else {}
            counts = []
            for seq, budget in zip(self.seqs, budgets, strict=True):
                free = offers[seq.id].free[: budget.depth] if seq.id in offers and budget.nodes else ()
                if budget.price is None:  # the controller says how long
                    counts.append(len(free))
                    continue
                price = budget.price
                gains = [s - price[n] + price[0] for n, s in enumerate(accumulate(free), start=1) if n < len(price)]
                counts.append(1 + gains.index(max(gains)) if gains and max(gains) > 0 else 0)
            accepted = [self._accept(count) for count in counts]
            asking = self.asking * (self.asked - before)
            passes = self.cost.pass_seconds(batch + sum(counts))
            parts = {"draft": asking, "pass": passes, "host": 0.0}
            self.controller.observe(Round(tuple(self.seqs), tuple(counts), tuple(counts), tuple(accepted), parts))
            self.tokens += sum(accepted) / batch + 1.0
            self.seconds += passes + asking
        return self.tokens * self.cost.pass_seconds(batch) / self.seconds

    def _accept(self, count: int) -> int:
        accepted = 0
        while accepted < count and self.rng.random() < self.true:
            accepted += 1
        return accepted


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("cost", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("batch", [2, 8, 64])
def test_matches_that_claim_too_much_do_not_cost_much(cost: CostModel, batch: int) -> None:
    lookups = Lookups(cost, batch, claimed=0.95, true=0.3, asking=0.0, matches=0.5)
    lookups.run(60)
    assert lookups.run(300) >= 0.975
    # nothing is worth a node there
    assert lookups.controller.planner.free.trust < 0.75 or (cost is CPU and batch == 64)


def test_distrust_does_not_last() -> None:
    lookups = Lookups(GPU, 8, claimed=0.8, true=0.1, asking=0.0, matches=0.5)
    lookups.run(300)
    lookups.true = 0.8
    lookups.run(400)
    assert lookups.run(200) > 1.5


def test_matches_that_are_right_are_believed() -> None:
    lookups = Lookups(GPU, 8, claimed=0.8, true=0.8, asking=0.0, matches=0.5)
    lookups.run(100)
    assert lookups.run(300) > 1.5
    assert lookups.controller.planner.free.trust > 0.85


def test_nobody_is_asked_where_asking_takes_longer_than_drafts_gain() -> None:
    """0.01 ms a sequence, 64 of them: 13% of a round for nothing, were they always asked."""
    lookups = Lookups(GPU, 64, claimed=0.3, true=0.1, asking=0.01, matches=0.02)
    speed = lookups.run(400)
    assert lookups.asked < 0.1 * 400 * 64
    assert speed > 0.985
    always = 1.0 / (1.0 + 0.01 * 64 / GPU.pass_seconds(64))
    assert always < 0.9


def test_all_are_asked_where_drafts_gain_more() -> None:
    lookups = Lookups(GPU, 64, claimed=0.8, true=0.8, asking=0.01, matches=0.5)
    assert lookups.run(200) > 1.2
    assert lookups.asked > 0.9 * 200 * 64


def test_whoever_joins_does_not_end_the_rest_of_the_others() -> None:
    """Texts end and others join all the time: were all asked whenever one joins, they always were."""
    idle = Lookups(GPU, 64, claimed=0.3, true=0.1, asking=0.01, matches=0.0)
    idle.run(100)
    before = idle.asked
    for i in range(200):
        idle.seqs[i % 64] = FakeSeq(1000 + i, [1])
        idle.run(1)
    assert idle.asked - before < 0.05 * 200 * 64


def recorded_rates() -> list[list[float]]:
    """Accepted tokens of real chains, round by round, as the rate that gives as many on average over nine rounds."""
    found = []
    for counts in json.loads(FILE.read_text(encoding="utf-8")).values():
        means = [sum(part) / len(part) for i in range(len(counts)) if (part := counts[max(0, i - 4) : i + 5])]
        # of an endless chain: m = r / (1 - r)
        found.append([min(0.97, mean / (1.0 + mean)) for mean in means])
    return found


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("cost", [FLAT, LEAPS], ids=["flat", "leaps"])
def test_acceptance_as_it_was_in_real_texts(cost: CostModel, batch: int) -> None:
    rates = recorded_rates()
    assert len(rates) == 8
    assert max(map(len, rates)) > 20

    def trace(i: int) -> list[float]:
        shift = rates[i % 8 :] + rates[: i % 8]
        return [rate for text in shift for rate in text]

    joined = [trace(i) for i in range(batch)]
    simulation = MenuSimulation(
        cost, SimulatedMenu(FORMS, 0.11), [lambda now, one=one: one[now % len(one)] for one in joined], host=HOST
    )
    history = simulation.run(600)
    assert history.worst_window() >= LEAST
    assert history.speed(100) > (1.2 if batch < 32 else 1.0)
    assert DEPTH == 5
