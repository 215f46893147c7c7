"""Costs and budgets: in a simulator, because a clock in a test proves nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from forerun.control.adaptive import AdaptiveController, best_length
from forerun.control.cost import CostModel
from forerun.control.fixed import FixedController, budget_of
from forerun.testing import FakeSeq, TableLM
from forerun.types import Round

STEEP = CostModel({1: 1.0, 2: 2.9, 4: 3.0, 8: 3.4, 16: 6.0})
FLAT = CostModel({1: 1.0, 2: 1.05, 4: 1.15, 8: 1.3, 16: 1.8})


def test_costs_between_and_beyond_the_measured_sizes() -> None:
    assert STEEP.pass_seconds(1) == 1.0
    assert STEEP.pass_seconds(6) == pytest.approx(3.2)
    assert STEEP.pass_seconds(32) == pytest.approx(12.0)
    assert STEEP.price(3)[0] == 1.0
    assert STEEP.price(3)[3] == pytest.approx(3.0)


def test_neighbours_make_every_node_dearer() -> None:
    line = CostModel({1: 1.0, 16: 2.5})
    assert line.price(4)[4] == pytest.approx(1.4)
    assert line.price(4, neighbours=3)[4] == pytest.approx(1 + 4 * 0.4 / 1.3)


def test_the_curve_follows_real_rounds_and_shrugs_off_a_pause() -> None:
    model = CostModel({1: 1.0, 2: 2.0})
    for _ in range(200):
        model.observe(1, 1.5)
    assert model.pass_seconds(1) == pytest.approx(1.5, rel=0.01)
    model.observe(1, 1000.0)
    assert model.pass_seconds(1) < 1.6


def test_measures_a_real_target_and_leaves_nothing_behind(tmp_path: Path) -> None:
    target, file = TableLM(vocab_size=8), tmp_path / "costs" / "t.json"
    model = CostModel.measure_or_load(target, file)
    assert all(seconds > 0 for seconds in model.seconds.values())
    assert target.used_slots == 0
    assert CostModel.measure_or_load(target, file).seconds == model.seconds
    file.write_text("not json")
    assert CostModel.measure_or_load(target, file).seconds.keys() == model.seconds.keys()
    json.loads(file.read_text())


def test_a_fixed_budget() -> None:
    assert FixedController(6, 2).plan([FakeSeq(0, [1])]) == [budget_of(6, 2)]
    assert budget_of(0, 1).nodes == budget_of(0, 1).depth == 0


def test_length_rises_with_acceptance_and_falls_with_cost() -> None:
    flat, steep = FLAT.price(8), STEEP.price(8)
    assert best_length(0.1, flat, 0.1) < best_length(0.6, flat, 0.1) < best_length(0.95, flat, 0.1)
    assert best_length(0.6, steep, 0.1) == 0
    assert best_length(0.999, steep, 0.4) <= best_length(0.999, steep, 0.0)


class Simulation:
    """Rounds of one sequence whose drafts stand with a known probability; time is counted, not measured."""

    def __init__(self, cost: CostModel, level: float) -> None:
        self.cost, self.level = cost, level
        self.controller = AdaptiveController(CostModel(cost.seconds), 8, 1, lambda seq: level)
        self.seq, self.rng = FakeSeq(0, [1]), random.Random(1)

    def run(self, acceptance: float, rounds: int) -> float:
        """Speed over plain decoding."""
        tokens, seconds = self.write(acceptance, rounds)
        return tokens / seconds

    def write(self, acceptance: float, rounds: int) -> tuple[int, float]:
        """Tokens, and the plain passes that they took the time of."""
        tokens, seconds = 0, 0.0
        for _ in range(rounds):
            depth = self.controller.plan([self.seq])[0].depth
            accepted = 0
            while accepted < depth and self.rng.random() < acceptance:
                accepted += 1
            spent = self.cost.pass_seconds(depth + 1)
            tokens += accepted + 1
            seconds += spent + depth * self.level
            times = {"target": spent, "draft": depth * self.level}
            self.controller.observe(Round((self.seq,), (depth,), (depth,), (accepted,), times))
        return tokens, seconds


@pytest.mark.parametrize("acceptance", [0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("cost", [STEEP, FLAT])
@pytest.mark.parametrize("level", [0.05, 0.2, 0.4])
def test_never_settles_far_below_plain_and_finds_most_of_the_gain(
    acceptance: float, cost: CostModel, level: float
) -> None:
    simulation = Simulation(cost, level)
    simulation.run(acceptance, 100)
    speed = simulation.run(acceptance, 2000)
    price = cost.price(8)
    tokens = [sum(acceptance**i for i in range(n + 1)) for n in range(9)]
    best = max(tokens[n] / (price[n] + n * level) for n in range(9))
    assert speed >= 0.97
    assert speed >= 0.85 * best


def test_follows_a_change_of_text() -> None:
    simulation = Simulation(FLAT, 0.1)
    simulation.run(0.95, 200)
    assert simulation.controller.plan([simulation.seq])[0].depth >= 6
    simulation.run(0.1, 20)
    assert simulation.controller.plan([simulation.seq])[0].depth <= 1


def test_forgets_and_never_runs_what_cannot_pay() -> None:
    simulation = Simulation(STEEP, 2.0)  # drafting costs more than the target
    assert simulation.run(1.0, 50) == 1.0
    simulation.controller.forget(simulation.seq)
    assert not simulation.controller._records
