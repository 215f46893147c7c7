"""The profile of rounds, with small models on the CPU, where nothing is traced: its rounds and its lines."""

from __future__ import annotations

import pytest

from forerun.bench.gpu.round_parts import (
    make_rounds,
    measure_rounds,
    measure_trees,
    product_names,
    tell,
)
from forerun.drafters.base import NoDrafter
from forerun.drafters.cuda.model_drafter import on_device
from forerun.offers import Form
from tests.gpu.heads import both_drafters
from tests.gpu.tiny import make_target


def test_trees_of_every_size_are_drafted_and_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    target = make_target("llama", "cpu")
    drafter = both_drafters(target, borrows=True)[0]
    rows = list(measure_trees(target, drafter, 2, [1, 8, 24]))
    assert [(row["nodes"], "draft_us" in row) for row in rows] == [(1, False), (8, True), (24, True)]
    assert all(row["pass_us"] > 0 for row in rows)
    for row in rows:
        tell(row)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[-1].startswith("batch 2 x 24 nodes  pass")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_of_a_head_and_of_a_draft_model(
    temperature: float, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = make_target("llama", "cpu"), make_target("llama", "cpu")
    head, model = both_drafters(target, borrows=True)[0], on_device(target, draft, NoDrafter, 2, 1000)
    assert model is not None
    engine = make_rounds(target, {"head": head, "draft": model}, 2)
    names = product_names({"pass": target.passes.steps})
    for name, form in (("none", None), ("head", Form(7, 5, 3)), ("draft", Form(2, 2, 1))):
        row = measure_rounds(engine, name, form, 2, temperature, names, timed=5)
        assert row["rounds"] == 5
        assert (row["tokens_per_round"] == 1.0) >= (form is None)
        assert (row["tokens_per_round"] > 2.0) >= (name == "draft")  # the target's own weights
        tell(row)
        assert f"T={temperature:g} batch 2: round" in capsys.readouterr().out
    assert not engine.busy
