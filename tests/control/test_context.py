"""A pass behind a long context costs more, and a tree's more than a single row's: the controller knows both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CONTEXT, METHOD, QUICK, CostModel, context_slopes
from forerun.core.types import Needs, Prompts, Scores, Seq, TreeBatch
from forerun.models.base import ON_CPU, Abilities, HoldsUnread
from forerun.testing import FakeSeq, TableLM
from tests.control.scenarios import LONG_8B, SCENARIOS, by_length
from tests.models.tiny_checkpoints import make_decoder, make_reference, save
from tests.simulate.recorded import PASSES

FLAT = {1: 1.0, 16: 1.2, 64: 1.5}
SLOPES = 1e-5, 2e-6


def test_a_row_costs_more_behind_a_long_context() -> None:
    cost = CostModel(FLAT, SLOPES)
    short = [cost.pass_seconds(rows) for rows in (1, 16, 64)]
    assert short == [*FLAT.values()]
    cost.note_context(CONTEXT + 28_672)
    assert cost.context == 28_672
    for rows, once in zip((1, 16, 64), short, strict=True):
        assert cost.pass_seconds(rows) == pytest.approx(once + 28_672 * (1e-5 + 2e-6 * rows))
    assert cost.pass_seconds(64, batch=2) == pytest.approx(1.5 + 28_672 * (2e-5 + 2e-6 * 64))
    assert cost.price(63)[63] > 1.5 * CostModel(FLAT).price(63)[63]
    cost.note_context(300)
    assert [cost.pass_seconds(rows) for rows in (1, 16, 64)] == short


def test_what_rounds_took_behind_a_long_context_is_not_believed_of_short_ones() -> None:
    cost = CostModel(FLAT)
    for tokens, times in ((200, 1.0), (30_000, 4.0)):
        cost.note_context(tokens)
        for _ in range(40):
            cost.observe(64, times * FLAT[64])
    long = cost.pass_seconds(64)
    cost.note_context(200)
    assert long > 3.0 * FLAT[64]
    assert cost.pass_seconds(64) < 1.4 * FLAT[64]


class Timed(TableLM):
    """Passes take time by a counted clock, more of it the more is cached."""

    def __init__(self, **kinds: Any) -> None:
        super().__init__(40, **kinds)
        self.now, self.contexts = 0.0, list[int]()

    @property
    def can(self) -> Abilities:
        return replace(ON_CPU, clock=lambda: self.now)

    def occupy(self, seq: Seq) -> None:
        self.prefill([seq], Needs())

    def score(self, seqs: Any, trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        cached = self.cached_tokens(seqs[0])
        self.contexts.append(cached)
        self.now += 0.01 + 0.001 * trees.nodes + cached * (1e-5 + 3e-6 * trees.nodes)
        return super().score(seqs, trees, needs, prompts)


def test_slopes_are_measured_behind_a_longer_context(tmp_path: Path) -> None:
    target = Timed()
    assert isinstance(target, HoldsUnread)
    file = tmp_path / "costs.json"
    cost = CostModel.measure_or_load(target, file)
    assert cost.slopes == pytest.approx((1e-5, 3e-6), rel=0.02)
    assert max(target.contexts) < 3000  # long enough to show, no longer
    assert target.used_slots == 0
    passes = len(target.contexts)
    assert CostModel.measure_or_load(target, file).slopes == cost.slopes
    assert len(target.contexts) == passes  # they are kept
    kept = json.loads(file.read_text())
    file.write_text(json.dumps({**kept, "slopes": [-1.0, 1e9]}))
    assert CostModel.measure_or_load(target, file).slopes == pytest.approx(cost.slopes)
    assert json.loads(file.read_text())["method"] == METHOD


def test_there_may_be_no_room_for_a_longer_context() -> None:
    curve = dict.fromkeys(QUICK, 1.0)
    assert context_slopes(Timed(slots=400), curve, [1, 2, 3]) == (0.0, 0.0)
    assert context_slopes(TableLM(40), curve, [1, 2, 3]) == (0.0, 0.0)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", ["llama2", "lfm2-biased", "qwen3_5", "nemotron_h", "deepseek_v3", "gemma4"])
def test_a_context_that_nobody_read_holds_pages_until_it_is_released(name: str, native: bool, tmp_path: Path) -> None:
    target = make_decoder(*save(make_reference(name), tmp_path), native=native)
    probe = FakeSeq(-1, [1] * 50, max_length=60)
    target.occupy(probe)
    assert target.cached_tokens(probe) == 49
    scores = target.score([probe], TreeBatch.chains([[1, 2, 3]]), Needs())
    assert bool(scores.required_logits.isfinite().all())
    target.release(probe)
    assert target.used_slots == target.cached_slots == 0  # and nobody finds it


class Blind(AdaptiveController):
    """As the controller was: whatever the context, a pass costs what was measured behind a short one."""

    def __init__(self, cost: CostModel, *others: Any, **kinds: Any) -> None:
        super().__init__(CostModel(cost.seconds), *others, **kinds)

    def _note_context(self, seqs: Any) -> None:
        """It does not ask."""


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("name", "least", "blind"),
    [
        ("long in turn with short, hard texts", 0.98, 0.95),
        ("long in turn with short", 1.2, 1.17),
        ("long texts alone", 1.6, 1.4),
    ],
)
def test_long_texts_in_turn_with_short_ones(name: str, least: float, blind: float) -> None:
    assert SCENARIOS[name](AdaptiveController, 2)["speed"] > least
    assert SCENARIOS[name](Blind, 2)["speed"] < blind  # the negative control


FALLING = {512: 0.7, 4096: 0.55, 16_384: 0.3, 32_768: 0.15, 131_072: 0.05}  # acceptance by length


@pytest.mark.parametrize("lengths", [(512, 4096, 16_384, 32_768), (32_768, 16_384, 4096, 512), (32_768,)])
def test_the_default_is_never_below_plain_as_acceptance_falls_with_length(lengths: tuple[int, ...]) -> None:
    """An 8B whose trees cost more the longer the context is; one request behind another, of all lengths in turn."""
    found = by_length(AdaptiveController, FALLING, lengths * 3, PASSES, LONG_8B)
    assert min(found.values()) >= 1.0, found
    if len(lengths) > 1:
        assert sorted(found.values(), reverse=True) == [found[length] for length in sorted(found)]


@pytest.mark.parametrize("long", [32_768, 131_072])
def test_drafts_that_are_worthless_behind_long_prompts_cost_little_though_short_ones_gain(long: int) -> None:
    """What a text may lose is a number of rounds, so the fewer tokens it has, the larger the share."""
    found = by_length(AdaptiveController, {512: 0.7, long: 0.02}, (512, long) * 3, PASSES, LONG_8B, answer=512)
    assert found[512] > 2.0
    assert 0.97 <= found[long] < 1.0, found
