"""t(rows) of a CPU is measured as passes follow each other in a text: behind passes of their own size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.control import cost
from forerun.control.cost import METHOD, CostModel
from forerun.core.types import Needs, Prompts, Scores, Seq, TreeBatch
from forerun.models.base import ON_CPU, Abilities
from forerun.testing import TableLM


class SlowBehindWide(TableLM):
    """A pass takes a second and a tenth of one for every row, and half a second more behind one of another size."""

    now, last = 0.0, 0

    @property
    def can(self) -> Abilities:
        return replace(ON_CPU, clock=lambda: self.now)

    def score(self, seqs: Any, trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        self.now += 1.0 + 0.1 * trees.nodes + 0.5 * (trees.nodes != self.last)
        self.last = trees.nodes
        return super().score(seqs, trees, needs, prompts)


def test_a_pass_is_timed_behind_one_of_its_own_size() -> None:
    target = SlowBehindWide(vocab_size=8)
    measured = CostModel.measure(target, (1, 4, 16), repeats=2).seconds
    assert measured == pytest.approx({1: 1.1, 4: 1.4, 16: 3.1})  # so many rows come alone
    target.last = 0
    assert cost.time_pass(target, [_probe(target)], 4, [1]) == pytest.approx(1.9)  # what that avoids


class Settles(TableLM):
    """A pass takes two milliseconds, and another one up to the tenth of a run."""

    now, last, run = 0.0, 0, 0

    @property
    def can(self) -> Abilities:
        return replace(ON_CPU, clock=lambda: self.now)

    def score(self, seqs: Any, trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        self.run = self.run + 1 if trees.nodes == self.last else 1
        self.last = trees.nodes
        self.now += 0.003 if self.run < 10 else 0.002
        return super().score(seqs, trees, needs, prompts)


def test_passes_of_a_small_model_settle_before_they_count() -> None:
    assert CostModel.measure(Settles(vocab_size=8), (1, 4), repeats=2).seconds == pytest.approx({1: 0.002, 4: 0.002})


def test_runs_of_a_large_model_stay_short() -> None:
    assert cost.goes_on([0.2] * 2)
    assert not cost.goes_on([0.2] * 3)
    assert cost.goes_on([0.004] * 11)
    assert not cost.goes_on([0.004] * 12)


def _probe(target: TableLM) -> Seq:
    (probe,) = cost.scratch_sequences(target, 4, [1, 2, 3])
    target.prefill([probe], Needs())
    return probe


def test_a_curve_that_was_measured_otherwise_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "load_average", lambda: 0.0)
    target, file = TableLM(vocab_size=8), tmp_path / "t.json"
    sizes = {str(size): 5.0 for size in cost.QUICK}
    file.write_text(json.dumps({"seconds": sizes, "busy": False}))
    assert CostModel.measure_or_load(target, file).seconds[1] != 5.0
    file.write_text(json.dumps({"seconds": sizes, "busy": False, "method": METHOD}))
    assert CostModel.measure_or_load(target, file).seconds[1] == 5.0
