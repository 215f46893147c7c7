"""Texts that change, and sequences that share a pass: in the simulator, where time is counted and not measured."""

from __future__ import annotations

import itertools
import random

import pytest

from forerun.control.adaptive import (
    AdaptiveController,
    Record,
    best_length,
    best_lengths,
    shortest_that_pays,
)
from forerun.control.cost import CostModel
from forerun.testing import FakeSeq
from forerun.types import Round
from tests.control.test_control import FLAT, STEEP, Simulation


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("level", [0.05, 0.1])
def test_follows_a_text_that_becomes_easy_within_20_rounds(seed: int, level: float) -> None:
    simulation = Simulation(FLAT, level)
    simulation.rng = random.Random(seed)
    simulation.run(0.05, 400)
    simulation.run(0.95, 20)
    assert simulation.controller.plan([simulation.seq])[0].depth >= 4


@pytest.mark.parametrize("seed", range(5))
def test_follows_a_text_that_becomes_hard_within_20_rounds(seed: int) -> None:
    simulation = Simulation(FLAT, 0.2)
    simulation.rng = random.Random(seed)
    simulation.run(0.95, 200)
    simulation.run(0.05, 20)
    assert simulation.controller.plan([simulation.seq])[0].depth <= 1


@pytest.mark.parametrize("cost", [STEEP, FLAT])
@pytest.mark.parametrize("level", [0.05, 0.4])
@pytest.mark.parametrize("length", [10, 40, 200])
def test_texts_that_keep_changing_cost_no_more_than_the_allowance(
    cost: CostModel, level: float, length: int
) -> None:
    simulation = Simulation(cost, level)
    seconds = 0.0
    texts = list(itertools.islice(itertools.cycle((0.05, 0.9, 0.3)), 2400 // length))
    tokens = 0
    for acceptance in texts:
        written, spent = simulation.write(acceptance, length)
        tokens, seconds = tokens + written, seconds + spent
    assert tokens / seconds >= 0.97


def test_a_short_memory_notices_success_and_is_not_fooled_by_one() -> None:
    record = Record()
    for _ in range(60):
        record.count(1, 0)
    low = record.acceptance
    record.count(1, 1)
    assert record.acceptance < low + 0.1
    for _ in range(4):
        record.count(1, 1)
    assert record.acceptance > 0.4


def test_nodes_go_to_whoever_is_likeliest_to_keep_them() -> None:
    extra = [1.0 + 0.05 * n for n in range(17)]
    sure, unsure, hopeless = best_lengths([0.9, 0.5, 0.01], [0.0] * 3, 3, extra, 8)
    assert sure > unsure > hopeless == 0


def test_the_shared_choice_is_the_best_there_is() -> None:
    acceptances, levels, most = (0.8, 0.6), (0.02, 0.05), 4
    extra = [1.0, 1.5, 1.55, 1.6, 1.9, 2.0, 2.4, 2.5, 2.6]

    def rate(lengths: tuple[int, ...]) -> float:
        tokens = sum(sum(a**i for i in range(n + 1)) for a, n in zip(acceptances, lengths, strict=True))
        drafting = max(n * level for n, level in zip(lengths, levels, strict=True))
        return tokens / (extra[sum(lengths)] + drafting)

    found = best_lengths(acceptances, levels, 2, extra, most)
    best = max(itertools.product(range(most + 1), repeat=2), key=rate)
    assert rate(tuple(found)) >= 0.99 * rate(best)


def test_one_sequence_is_the_case_of_many() -> None:
    price = FLAT.price(8)
    by_hand = max(range(9), key=lambda n: sum(0.7**i for i in range(n + 1)) / (price[n] + 0.1 * n))
    assert best_length(0.7, price, 0.1) == by_hand


def test_trials_are_as_short_as_can_pay() -> None:
    assert shortest_that_pays(0.95, FLAT.price(8), 0.1) == 1
    assert shortest_that_pays(0.95, STEEP.price(8), 0.1) == 3
    assert shortest_that_pays(0.5, STEEP.price(8), 0.1) == 0


def test_a_batch_spends_its_allowance_once() -> None:
    cost = CostModel({1: 1.0, 8: 1.7, 64: 8.0})
    controller = AdaptiveController(cost, 4, 1, lambda seq: 0.3)
    seqs = [FakeSeq(i, [1]) for i in range(8)]
    for _ in range(200):
        depths = [budget.depth for budget in controller.plan(seqs)]
        nodes = cost.pass_seconds(len(seqs) + sum(depths))
        outcome = Round(tuple(seqs), tuple(depths), tuple(depths), (0,) * 8, {"target": nodes, "draft": 0.3})
        controller.observe(outcome)
    price = cost.price(4, neighbours=7)
    trial = shortest_that_pays(0.95, price, 0.3)
    controller.allowance = 1.5 * (price[trial] + 0.3 * trial - 1.0)
    assert sum(budget.depth > 0 for budget in controller.plan(seqs)) == (1 if trial else 0)
