"""Predictions against arithmetic: replayed rounds are the engine's, and times follow from them."""

from __future__ import annotations

import pytest

from forerun.control.cost import CostModel
from forerun.core.types import Budget
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.drafters.model.draft_model import ModelDrafter
from forerun.measure.advise.evidence import (
    Costs,
    Drafting,
    Text,
    at_acceptance,
    calibrate,
    can_replay,
    estimate,
    replay,
    worst_prompt,
)
from forerun.measure.bench.alternate import Run
from forerun.measure.bench.contenders import own_contender
from forerun.measure.bench.settings import Cell, DrafterSetup, Settings
from forerun.testing import ScriptedDrafter, TableLM
from tests.measure.conftest import table_llm

LINE = CostModel({1: 1.0, 2: 1.1, 11: 2.0, 101: 11.0})  # t(n) = 0.9 + n / 10
COSTS = Costs(LINE, host=0.0)


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_replay_makes_the_rounds_that_the_engine_made(nodes: int) -> None:
    llm, settings, cell = table_llm(), Settings(), Cell()
    prompts = [tuple(range(2, 9)), (40, 41, 40, 41, 40)]
    plain, drafted = (
        own_contender(llm, settings, cell, setup).write
        for setup in (DrafterSetup("plain", "none"), DrafterSetup("n", "ngram", nodes))
    )
    stops = llm.engine.stop_ids
    texts = [Text(ids, tuple(plain([ids], 30).texts[0]), 0.0, 30, stops) for ids in prompts]
    made = [drafted([ids], 30).drafts[0] for ids in prompts]
    done = replay(NgramDrafter(), texts, Budget(nodes, nodes))
    assert list(done.rounds) == made
    assert any(kept for text in made for _, _, kept in text)


def test_who_can_be_replayed() -> None:
    assert can_replay(NgramDrafter())
    assert not can_replay(ModelDrafter(TableLM(8), 8))
    assert not can_replay(ScriptedDrafter.random(8))


def test_one_text_at_a_time_is_a_sum_over_its_rounds() -> None:
    text = Text((1,), (1,) * 6)
    drafting = Drafting((((3, 3, 3), (0, 0, 0), (1, 1, 0)),), level=0.1)
    # 6 tokens of one pass each, against passes over 4, 1 and 2 nodes and four drafted levels
    found = estimate(drafting, [text], COSTS, 1)
    assert found == pytest.approx(6.0 / (1.3 + 1.0 + 1.1 + 0.4))
    idle = Drafting((*drafting.rounds, ((0, 0, 0),) * 6), level=0.1)
    assert worst_prompt(idle, [text, text], COSTS, 1) == pytest.approx(1.0)
    assert found > estimate(idle, [text, text], COSTS, 1) > 1.0
    slow = [Text((1,), (1,) * 6, prompt_seconds=4.0)]
    assert estimate(drafting, slow, COSTS, 1) == pytest.approx(10.0 / 7.8)
    hosted = Costs(LINE, host=0.5)
    assert estimate(drafting, [text], hosted, 1) == pytest.approx(9.0 / (3.8 + 1.5))


def test_more_texts_at_once_make_every_node_dearer() -> None:
    texts = [Text((1,), (1,) * 8)]
    drafting = Drafting((((3, 3, 1),) * 4,))
    one, four = (estimate(drafting, texts, COSTS, batch) for batch in (1, 4))
    assert one == pytest.approx(2 * 1.0 / 1.3)
    assert four == pytest.approx(2 * 1.3 / 2.5)
    assert estimate(drafting, texts, COSTS, 32) < 1.0 < four


def test_shorter_chains_keep_what_came_first() -> None:
    drafting = Drafting((((4, 4, 3), (4, 4, 0), (0, 0, 0)),))
    assert drafting.cut(2).rounds == (((2, 2, 2), (2, 2, 0), (0, 0, 0)),)
    assert drafting.tokens_per_round() == 2.0
    assert drafting.accepted() == [(1, 2), (1, 2), (1, 2), (0, 2)]


def test_drafters_that_do_not_exist_yet() -> None:
    speed, length = at_acceptance(0.8, 0.05, COSTS, 1, 8)
    by_hand = [sum(0.8**i for i in range(k + 1)) / (1.0 + 0.1 * k + 0.05 * k) for k in range(9)]
    assert speed == pytest.approx(max(by_hand))
    assert length == by_hand.index(max(by_hand))
    assert at_acceptance(0.05, 0.05, COSTS, 1, 8) == (1.0, 0)


def test_the_curve_is_brought_to_the_level_of_real_rounds() -> None:
    plain = Run("p", "a", "qa", 0, ((1, 2),), 5.0, 2, 4.2, ({"pass": 2.0, "host": 0.1},) * 2)
    drafted = Run("d", "a", "qa", 0, ((1, 2),), 5.0, 2, 4.0, ({"pass": 3.3}, {"pass": 9.0}), (((1, 1, 0), (0, 0, 0)),))
    costs = calibrate(LINE, [plain], [drafted])
    assert costs.host == pytest.approx(0.1)
    assert costs.target.pass_seconds(1) == pytest.approx(2.0)
    assert costs.target.pass_seconds(11) == pytest.approx(6.0)  # passes over two took three times t(2)


def test_the_curve_is_taken_as_it_was_measured_and_not_as_a_controller_has_corrected_it() -> None:
    """The advisor's curve is the controller's, and the rounds that calibrate it have corrected it already."""
    plain = Run("p", "a", "qa", 0, ((1, 2),), 5.0, 2, 4.2, ({"pass": 2.0},) * 2)
    drafted = Run("d", "a", "qa", 0, ((1, 2),), 5.0, 1, 4.0, ({"pass": 3.3},), (((1, 1, 0),),))
    learnt = CostModel(LINE.seconds)
    for _ in range(40):
        learnt.observe(1, 2.0)
        learnt.observe(2, 3.3)
    assert learnt.pass_seconds(1) > 1.8, "it has learnt"
    costs = calibrate(learnt, [plain], [drafted])
    assert costs.target.pass_seconds(1) == pytest.approx(2.0)
    assert costs.target.pass_seconds(2) == pytest.approx(3.3)


def test_passes_that_take_longer_than_t_of_n_count_as_they_took() -> None:
    text = Text((1,), (1,) * 6)
    rounds = (((3, 3, 3), (0, 0, 0), (1, 1, 0)),)
    slower = Drafting(rounds, level=0.1, passes=1.5)
    assert estimate(slower, [text], COSTS, 1) == pytest.approx(6.0 / (1.5 * (1.3 + 1.0 + 1.1) + 0.4))
    assert estimate(slower.cut(3), [text], COSTS, 1) == estimate(slower, [text], COSTS, 1)
    even = Drafting(rounds, passes=1.5)
    assert estimate(even, [text], COSTS, 4) == pytest.approx(estimate(Drafting(rounds), [text], COSTS, 4) / 1.5)
