"""Adaptive drafting on a loaded CPU: prompts come all the time, and drafting must not cost more than it saves.

Passes take what they took on a CPU that multiplies blocks of 16 rows, and nothing else takes time: the figures are the
same on every machine, whatever else it does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest

from forerun.build.engine import make_engine
from forerun.control import cost
from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Needs, Prompts, Request, Scores, Seq, TreeBatch
from forerun.engine.scheduler import PrefillRows
from forerun.models.base import ON_CPU, Abilities
from forerun.testing import TableLM

# milliseconds of a pass of the default model by rows, one thread with AMX
STEPS = {1: 6.6, 2: 7.0, 4: 8.2, 8: 11.2, 12: 14.3, 16: 15.3, 20: 22.4, 24: 23.9, 32: 28.8, 40: 37.6, 48: 43.8,
         64: 60.7, 512: 486.0}  # fmt: skip


def seconds_of(rows: int) -> float:
    return float(np.interp(rows, list(STEPS), list(STEPS.values()))) / 1e3


@dataclass(slots=True)
class TimedTable(TableLM):
    """A table whose passes take what a real model's did."""

    spent: float = 0.0

    @property
    def can(self) -> Abilities:
        return replace(ON_CPU, clock=lambda: self.spent)  # whatever else runs on this machine

    def score(self, seqs: list[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        scores = TableLM.score(self, seqs, trees, needs, prompts)
        self.spent += seconds_of(trees.nodes + (0 if scores.read is None else scores.read[0].nodes))
        return scores


def seconds_under_load(drafter: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> tuple[float, int]:
    """Seconds of passes for 24 requests that are there at once, and tokens that were drafted."""
    curve = {size: seconds_of(size) for size in cost.QUICK}
    monkeypatch.setattr(CostModel, "measure", lambda *given, **more: CostModel(curve))
    target = TimedTable(vocab_size=60, order=1, seed=3, sharpness=9.0)
    engine = make_engine(target, frozenset(), SpeculativeConfig(drafter="ngram"), EngineConfig(max_batch=batch))
    assert isinstance(engine.controller, AdaptiveController)
    engine.prefill_rows = PrefillRows(ON_CPU.prefill, 512, 32)
    dice = Random(5)
    for number in range(24):
        prompt = tuple(dice.randrange(60) for _ in range(120))
        params = SamplingParams(40, temperature=1.0, seed=number)
        engine.submit(Request(prompt, params, drafter=drafter))
    while engine.busy:
        engine.step()
    assert engine.stats.tokens == 24 * 40
    return target.spent, engine.stats.drafted


@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, 16])
def test_a_loaded_server_is_not_slower_for_drafting(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, none = seconds_under_load("none", batch, monkeypatch)
    drafted, some = seconds_under_load("ngram", batch, monkeypatch)
    assert none == 0
    assert some > 0
    assert plain / drafted >= 0.97


@pytest.mark.slow
def test_negative_control_with_prompts_counted_as_saved_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was done before: rows beyond 16 were taken to cost as those before, and a pass to save its prompts too."""
    plain, _ = seconds_under_load("none", 16, monkeypatch)
    monkeypatch.setattr(cost, "QUICK", (1, 2, 4, 8, 16))
    monkeypatch.setattr(CostModel, "_prompts_seconds", lambda self, batch: 0.0)
    drafted, _ = seconds_under_load("ngram", 16, monkeypatch)
    assert plain / drafted < 0.97
