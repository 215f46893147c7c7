"""Drafters with a head, a plan or second models of their own, beside the engine's default one."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.control.cost import CostModel
from forerun.core.errors import InvalidInput
from forerun.measure.bench import contenders
from forerun.measure.bench.settings import DrafterSetup, Settings, parse_setups


def test_what_follows_the_equals_sign_is_what_the_drafter_runs(tiny_folder: str, monkeypatch: Any) -> None:
    setups = [
        "layer_skip=1",
        f"draft_model={tiny_folder}",
        f"ngram>draft_model>draft_model={tiny_folder};{tiny_folder}/.",
    ]
    monkeypatch.setattr(contenders, "fresh_costs", lambda llm: CostModel({1: 1.0}))
    llm, _ = contenders.load(Settings(model=tiny_folder, setups=parse_setups(setups), device="cpu", threads=1))
    made = [llm.engine.drafters.get(DrafterSetup.parse(name).name) for name in setups]
    assert [type(one).__name__ for one in made] == ["LayerSkipDrafter", "ModelDrafter", "CascadeDrafter"]
    assert made[0].draft.layers.end == 1  # type: ignore[attr-defined]
    assert made[1].draft is made[2].lower.upper.draft  # type: ignore[attr-defined]  # loaded once
    with pytest.raises(InvalidInput, match="has no head"):
        contenders.build_head(llm, DrafterSetup("ngram=x", "ngram", None, "x"), {})
