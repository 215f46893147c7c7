"""Costs, and the arithmetic of what pays."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.control import cost
from forerun.control.base import FixedController
from forerun.control.cost import CostModel
from forerun.control.per_sequence import History
from forerun.control.prices import Levels, allocate, best_depth, deepest, shortest_that_pays, widest
from forerun.core.request import budget_of
from forerun.models.base import Abilities
from forerun.testing import FakeSeq, TableLM

STEEP = CostModel({1: 1.0, 2: 2.9, 4: 3.0, 8: 3.4, 16: 6.0})
FLAT = CostModel({1: 1.0, 2: 1.05, 4: 1.15, 8: 1.3, 16: 1.8})


def test_costs_between_and_beyond_the_measured_sizes() -> None:
    assert STEEP.pass_seconds(1) == 1.0
    assert STEEP.pass_seconds(6) == pytest.approx(3.2)
    # on as before, not from the origin
    assert STEEP.pass_seconds(32) == pytest.approx(6.0 + 16 * (6.0 - 3.4) / 8)
    assert STEEP.price(3)[0] == 1.0
    assert STEEP.price(3)[3] == pytest.approx(3.0)


def test_neighbours_make_every_node_dearer_and_so_does_a_text_that_goes_well() -> None:
    line = CostModel({1: 1.0, 16: 2.5})
    assert line.price(4)[4] == pytest.approx(1.4)
    assert line.price(4, neighbours=3)[4] == pytest.approx(1 + 4 * 0.4 / 1.3)
    fast = line.price(4, rate=2.0)
    assert fast[4] - fast[0] == pytest.approx(2 * 0.4)


def test_nodes_are_charged_on_top_of_those_that_others_draft() -> None:
    alone, behind = STEEP.price(2), STEEP.price(2, others=3)
    assert alone[1] - alone[0] == pytest.approx(1.9)
    assert behind[1] - behind[0] == pytest.approx(0.1)


def test_the_curve_follows_real_rounds_and_shrugs_off_a_pause() -> None:
    model = CostModel({1: 1.0, 2: 2.0})
    for _ in range(200):
        model.observe(1, 1.5)
    assert model.pass_seconds(1) == pytest.approx(1.5, rel=0.01)
    model.observe(1, 1000.0)
    assert model.pass_seconds(1) < 1.6


def test_a_machine_that_becomes_slower_does_so_for_every_size() -> None:
    model = CostModel({1: 1.0, 2: 1.3, 4: 1.9, 8: 3.4})
    for _ in range(100):
        model.observe(1, 3.0)  # nobody drafts for a while
    assert model.pass_seconds(2) > 1.12 * model.pass_seconds(1)
    for _ in range(800):  # and every size finds its own level, whatever it was taken for
        model.observe(1, 2.0)
        model.observe(4, 3.0)
    assert model.pass_seconds(1) == pytest.approx(2.0, rel=0.02)
    assert model.pass_seconds(4) == pytest.approx(3.0, rel=0.02)


def test_measures_a_real_target_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cost, "load_average", lambda: 0.0)
    target, file = TableLM(vocab_size=8), tmp_path / "costs" / "t.json"
    model = CostModel.measure_or_load(target, file)
    assert all(seconds > 0 for seconds in model.seconds.values())
    assert target.used_slots == 0
    with caplog.at_level(logging.INFO, logger="forerun.progress"):
        assert CostModel.measure_or_load(target, file).seconds == model.seconds
        assert not caplog.messages
        CostModel.measure_or_load(target, None)
    assert caplog.messages == ["measuring what passes cost on this machine"], "it may take a while"
    file.write_text("not json")
    assert CostModel.measure_or_load(target, file).seconds.keys() == model.seconds.keys()
    json.loads(file.read_text())


def test_a_curve_of_a_busy_machine_is_measured_again_once_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, file, loads, measured = TableLM(vocab_size=8), tmp_path / "t.json", [0.0], list[int]()

    def measure(target: object, sizes: Sequence[int], repeats: int) -> CostModel:
        measured.append(1)
        return CostModel(dict.fromkeys(sizes, 1.0))

    monkeypatch.setattr(CostModel, "measure", measure)
    monkeypatch.setattr(cost, "load_average", lambda: loads[0])
    for load, times in ((100.0, 1), (100.0, 1), (0.0, 2), (0.0, 2), (100.0, 2)):
        loads[0] = load
        CostModel.measure_or_load(target, file)
        assert len(measured) == times


def test_prompts_in_a_pass_do_not_make_drafts_look_cheap() -> None:
    """They must be read in any case: where rows cost the same each, a node costs what it costs without them."""
    linear = CostModel({n: 1.0 + 0.1 * n for n in (1, 8, 64)})
    price, plain = linear.price(4, neighbours=7), linear.pass_seconds(8, 8)
    for _ in range(50):
        linear.note_prompts(40)
    assert linear.price(4, neighbours=7) == pytest.approx(price)
    assert linear.pass_seconds(8, 8) == pytest.approx(plain)
    assert linear.passes_seconds(8, 3, 8) == pytest.approx([plain, plain + 0.1, plain + 0.2])


def test_nodes_cost_more_in_a_pass_that_prompts_have_filled() -> None:
    bent = CostModel({1: 1.0, 32: 1.0, 64: 3.0})  # flat while weights are what takes time
    price = bent.price(4, neighbours=7)
    assert price == pytest.approx([1.0] * 5)
    for _ in range(50):
        bent.note_prompts(40)
    assert bent.price(4, neighbours=7)[4] == pytest.approx(1.0 + 8 * 4 * 2.0 / 32)


@pytest.mark.parametrize(("device", "largest"), [("cpu", 64), ("cuda", 1024)])
def test_a_gpu_is_measured_up_to_the_trees_of_a_whole_batch(
    device: str, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's passes are nearly flat: a straight line from 16 nodes on would make trees look far too dear.

    A CPU's are steps, of 16 rows where it multiplies blocks of them: a line from there on would make drafts for a batch
    look too cheap.
    """
    asked: list[int] = []

    def measure(target: object, sizes: Sequence[int], repeats: int) -> CostModel:
        asked.extend(sizes)
        return CostModel(dict.fromkeys(sizes, 1.0))

    monkeypatch.setattr(CostModel, "measure", measure)
    target: Any = SimpleNamespace(device=torch.device(device), can=Abilities.of(torch.device(device)))
    assert CostModel.measure_or_load(target, None).pass_seconds(largest) == 1.0
    assert max(asked) == largest


def test_a_fixed_budget() -> None:
    assert FixedController(6, 2).plan([FakeSeq(0, [1])]) == [budget_of(6, 2)]
    assert budget_of(0, 1).nodes == budget_of(0, 1).depth == 0


def chain(acceptance: float, level: float = 0.0, most: int = 8) -> Levels:
    return Levels([acceptance**depth for depth in range(1, most + 1)], (level,))


def test_depth_rises_with_acceptance_and_falls_with_cost() -> None:
    flat, steep = FLAT.price(8), STEEP.price(8)
    low, middle, high = (best_depth(chain(a, 0.1), flat)[0] for a in (0.1, 0.6, 0.95))
    assert low < middle < high
    assert best_depth(chain(0.6, 0.1), steep) == (0, 0.0)
    assert best_depth(chain(0.999, 0.4), steep)[0] <= best_depth(chain(0.999), steep)[0]


def test_depth_is_the_best_there_is() -> None:
    price = FLAT.price(8, rate=1.3)
    gains = [sum(0.7**i - 0.1 for i in range(1, n + 1)) - price[n] + price[0] for n in range(9)]
    assert best_depth(chain(0.7, 0.1), price) == (gains.index(max(gains)), pytest.approx(max(gains)))


def test_levels_of_several_nodes_are_charged_for_all_of_them() -> None:
    price = FLAT.price(16, rate=2.0)
    assert best_depth(Levels([0.5, 0.4, 0.3], nodes=4.0), price)[0] == 2
    assert best_depth(Levels([0.5, 0.4, 0.3], nodes=1.0), price)[0] == 3


def test_nodes_go_to_whoever_is_likeliest_to_keep_them() -> None:
    sure, unsure, hopeless = allocate([chain(a) for a in (0.9, 0.5, 0.01)], lambda n: 0.15 * n)
    assert sure > unsure > hopeless == 0


@pytest.mark.parametrize("acceptances", [(0.8, 0.6), (0.9, 0.3), (0.5, 0.5)])
def test_the_shared_choice_is_the_best_there_is(acceptances: tuple[float, float]) -> None:
    levels, most = (0.02, 0.05), 4
    extra = [0.0, 0.5, 0.55, 0.6, 0.9, 1.0, 1.4, 1.5, 1.6]

    def gain(depths: tuple[int, ...]) -> float:
        rows = zip(acceptances, depths, levels, strict=True)
        tokens = sum(sum(a**i - level for i in range(1, n + 1)) for a, n, level in rows)
        return tokens - 1.2 * extra[sum(depths)]

    offers = [chain(a, level, most) for a, level in zip(acceptances, levels, strict=True)]
    found = allocate(offers, lambda nodes: 1.2 * extra[nodes])
    best = max(itertools.product(range(most + 1), repeat=2), key=gain)
    assert gain(tuple(found)) == pytest.approx(gain(best))


@pytest.mark.parametrize("nodes", [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0), (4.0, 1.5)])
def test_levels_of_several_nodes_share_by_what_a_node_brings(nodes: tuple[float, float]) -> None:
    """The best there is, where a pass takes few nodes and then leaps: a level of three must not be taken for one."""
    survivals, most = ((0.6, 0.3), (0.5, 0.4)), 2
    extra = [0.1 * n if n < 4 else 1.5 + 0.1 * n for n in range(20)]

    def gain(depths: tuple[int, ...]) -> float:
        tokens = sum(sum(row[:depth]) for row, depth in zip(survivals, depths, strict=True))
        return tokens - extra[round(sum(n * depth for n, depth in zip(nodes, depths, strict=True)))]

    offers = [Levels(row, nodes=n) for row, n in zip(survivals, nodes, strict=True)]
    found = allocate(offers, lambda count: extra[count])
    assert sum(n * depth for n, depth in zip(nodes, found, strict=True)) < 4
    assert sum(found) > 0
    ranked = sorted(itertools.product(range(most + 1), repeat=2), key=gain, reverse=True)
    assert gain(tuple(found)) >= gain(ranked[0]) - 0.11  # by what a node brings, one after the other


def test_whoever_brings_most_a_node_comes_first() -> None:
    few = [0.1, 0.1, 0.2, 9.0, 9.0]  # two nodes fit into the pass
    wide, narrow = Levels((0.6,), nodes=3.0), Levels((0.4,), nodes=1.0)
    assert allocate([wide, narrow], lambda nodes: few[nodes]) == [0, 1]


def test_trials_are_as_short_as_can_pay() -> None:
    assert shortest_that_pays(FLAT.price(8), (0.1,)) == 1
    assert shortest_that_pays(STEEP.price(8), (0.1,)) == 3
    assert shortest_that_pays(STEEP.price(8), (0.1,), acceptance=0.5) == 0


def test_flat_costs_allow_wide_and_deep_trees_and_steep_ones_do_not() -> None:
    gpu, cpu = CostModel({1: 1.0, 64: 1.2}), CostModel({1: 1.0, 2: 1.33, 4: 1.9, 8: 3.4, 16: 6.0})
    assert widest(gpu.price(60, rate=3.0), 10) == 10
    assert widest(cpu.price(60, rate=1.3), 10) == 1
    assert deepest(gpu.price(60, rate=3.0)) == 60
    assert 5 <= deepest(cpu.price(60, rate=1.5)) <= 20
    assert deepest(CostModel({1: 1.0, 2: 3.0, 64: 120.0}).price(60)) == 0


def test_acceptance_follows_success_and_is_not_fooled_by_one() -> None:
    record = History()
    for _ in range(60):
        record.count(1, 0)
    low = record.acceptance
    record.count(1, 1)
    assert record.acceptance < low + 0.1
    for _ in range(12):
        record.count(1, 1)
    assert record.acceptance > 0.4


def test_acceptance_is_kept_by_depth() -> None:
    record = History()
    for _ in range(60):
        record.count(4, 2)  # the first two always stand, the third never does
    first, second, third, fourth = record.survivals(4)
    assert first > 0.9
    assert second > 0.85
    assert third < 0.25
    assert fourth < third


def test_claims_that_do_not_come_true_lose_their_weight() -> None:
    honest, overconfident = History(), History()
    for _ in range(40):
        honest.count_expected(1.5, 1)
        honest.count_expected(1.5, 2)
        overconfident.count_expected(3.0, 1)
    assert honest.trust == pytest.approx(1.0, abs=0.1)
    assert overconfident.trust < 0.5
    assert History.after(overconfident).trust < 0.8


def test_a_new_text_starts_from_the_others_and_soon_outweighs_them() -> None:
    record = History()
    for _ in range(50):
        record.count(3, 3)
        record.count_gain(2.0)
    fresh = History.after(record)
    assert fresh.acceptance > 0.9
    assert fresh.mean_gain > 1.5
    for _ in range(12):
        fresh.count(3, 0)
        fresh.count_gain(-0.5)
    assert fresh.acceptance < 0.4
    assert fresh.mean_gain < 0.2
