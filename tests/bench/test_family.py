"""The table of drafters without a trained head: who is in it, what is compared, and that its command runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun import registry
from forerun.bench import contenders, family
from forerun.bench.settings import DrafterSetup
from forerun.control.cost import CostModel
from forerun.errors import InvalidInput
from tests.bench.conftest import table_llm


def test_every_drafter_without_a_head_is_in_the_table() -> None:
    named = {part for name in family.contenders_of(None, ["small"]) for part in name.split("=")[0].split(">")}
    assert named == {spec.name for spec in registry.drafters.specs() if spec.needs != "head"} - {"none"}
    both = family.contenders_of("plan.json", ["small", "medium"])
    assert "ngram>draft_model>draft_model=small;medium" in both
    assert "ngram>layer_skip=plan.json" in both
    assert len(both) == len(set(both))


def test_cascades_are_compared_with_their_parts() -> None:
    speeds = {
        "ngram": 1.0, "suffix": 1.5, "draft_model=m": 2.0, "draft_model=s": 0.5, "ngram>draft_model=m": 3.0,
        "ngram>draft_model=s": 0.5, "draft_model>draft_model=s;m": 2.4, "ngram>draft_model>draft_model=s;m": 6.0,
        "layer_skip": 0.8, "ngram>layer_skip": 1.2,
    }  # fmt: skip
    found = family.comparisons(
        {"by_task": {name: {"qa": {"speedup": speed}} for name, speed in speeds.items()}}
    )
    ratios = {pair: by_task["qa"] for pair, by_task in found.items()}
    assert ratios == {
        "suffix / ngram": 1.5,
        "ngram>draft_model=m / ngram": 3.0, "ngram>draft_model=m / draft_model=m": 1.5,
        "ngram>draft_model=s / ngram": 0.5, "ngram>draft_model=s / draft_model=s": 1.0,
        "draft_model>draft_model=s;m / draft_model=m": 1.2,
        "draft_model>draft_model=s;m / draft_model=s": 4.8,
        "ngram>draft_model>draft_model=s;m / ngram>draft_model=s": 12.0,
        "ngram>draft_model>draft_model=s;m / draft_model>draft_model=s;m": 2.5,
        "ngram>draft_model>draft_model=s;m / ngram>draft_model=m": 2.0,
        "ngram>layer_skip / ngram": 1.2, "ngram>layer_skip / layer_skip": 1.5,
    }  # fmt: skip


def test_the_parts_of_a_cascade_have_its_budget() -> None:
    parts = ["draft_model:5=m", "ngram:5"]
    assert family.parts_of("ngram>draft_model:5=m") == parts
    assert family.parts_of("ngram:5") == []
    assert [DrafterSetup.parse(part).budget for part in parts] == [5, 5]


def test_the_command_prints_a_table_for_each_suite(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], suite: str, tmp_path: Path
) -> None:
    cost = CostModel({1: 1.0, 2: 1.1, 8: 1.5, 64: 4.0})
    monkeypatch.setattr("forerun.bench.run.load", lambda settings: (table_llm(), cost))
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "again again again"}) + "\n")
    words = ["--suites", f"{suite},{other}", "--drafters", "ngram,suffix,recycling", "--repeats", "1"]
    assert family.main([*words, "--max-tokens", "12", "--json", str(tmp_path / "a" / "found.json")]) == 0
    printed = capsys.readouterr().out
    document = json.loads(printed.splitlines()[-1])
    assert document == json.loads((tmp_path / "a" / "found.json").read_text())
    assert list(document["suites"]) == ["question", "other"]
    assert document["suites"]["question"]["conditions"]["tasks"] == ["multi_turn", "qa"]
    assert "| drafter | all tasks | multi_turn | qa |" in printed
    assert "\nsuffix / ngram: multi_turn " in printed
    assert family.main(["--suites", str(tmp_path / "none.jsonl")]) == 2
    assert family.main(["--draft-models", "a,b,c"]) == 2


def test_what_follows_the_equals_sign_is_what_the_drafter_runs(tiny_folder: str, monkeypatch: Any) -> None:
    from forerun.bench.settings import Settings, parse_setups

    setups = [
        "layer_skip=1",
        f"draft_model={tiny_folder}",
        f"ngram>draft_model>draft_model={tiny_folder};{tiny_folder}/.",
    ]
    monkeypatch.setattr(contenders, "fresh_costs", lambda llm: CostModel({1: 1.0}))
    llm, _ = contenders.load(
        Settings(model=tiny_folder, setups=parse_setups(setups), device="cpu", threads=1)
    )
    made = [llm.engine.drafters.get(DrafterSetup.parse(name).name) for name in setups]
    assert [type(one).__name__ for one in made] == ["LayerSkipDrafter", "ModelDrafter", "CascadeDrafter"]
    assert made[0].draft.layers.end == 1  # type: ignore[attr-defined]
    assert made[1].draft is made[2].lower.upper.draft  # type: ignore[attr-defined]  # loaded once
    with pytest.raises(InvalidInput, match="has no head"):
        contenders.build_head(llm, DrafterSetup("ngram=x", "ngram", None, "x"), {})
