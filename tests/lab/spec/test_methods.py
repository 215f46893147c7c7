"""Who is in the table, what a cascade is compared with, and what is said of a drafter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.core import registry
from forerun.core.errors import InvalidInput
from forerun.core.types import Budget
from forerun.heads import heads_in_the_box, open_head
from forerun.measure.bench.settings import DrafterSetup
from lab.spec.methods import LOOKUPS, Given, every_method, find_method, parameters_in, training_minutes
from lab.spec.table import comparisons, parts_of


def test_every_drafter_of_the_registry_is_in_the_table() -> None:
    own = tuple(head for head in heads_in_the_box() if "smollm2" in head.path.name)
    for given in (Given(), Given(own, ("small", "medium"), "plan.json")):
        methods = every_method(given)
        parts = [name for one in methods for name in (one.setup.drafter or "").replace("+", ">").split(">")]
        chosen = {spec.name for spec in registry.drafters.specs() if not spec.by_request}
        assert set(parts) == chosen - {"none"}
        names = [one.name for one in methods]
        assert len(names) == len(set(names))
    found = {one.name: one for one in methods}
    assert found["layer_skip"].setup.head == found["ngram>layer_skip"].setup.head == "plan.json"
    assert found["ngram>draft_model>draft_model=small;medium"].setup.head == "small;medium"
    assert found["ngram+eagle3"].setup.head == found["eagle3"].setup.head
    assert found["eagle3"].setup.head
    assert "no hydra head was given" in found["hydra"].why_not
    assert not any(one.why_not for one in every_method(Given()) if one.name in LOOKUPS)


def test_two_heads_of_one_kind_are_two_rows(every_head: list[str], tmp_path: Path) -> None:
    other = tmp_path / "hass"
    other.symlink_to(next(folder for folder in every_head if folder.endswith("/eagle")))
    heads = [open_head(Path(folder)) for folder in (*every_head, str(other))]
    names = [one.name for one in every_method(Given(tuple(head for head in heads if head is not None)))]
    assert {"eagle2=eagle", "eagle2=hass", "eagle=eagle", "eagle=hass"} < set(names)


def test_names_that_say_nothing_are_refused() -> None:
    with pytest.raises(InvalidInput, match="the table says which"):
        find_method("auto", Given())
    with pytest.raises(InvalidInput, match="names 3 models"):
        Given(draft_models=("a", "b", "c"))
    assert find_method("suffix+eagle3", Given(tuple(heads_in_the_box()))).setup.head


def test_cascades_are_compared_with_their_parts() -> None:
    speeds = {
        "ngram": 1.0, "suffix": 1.5, "draft_model=m": 2.0, "draft_model=s": 0.5, "ngram>draft_model=m": 3.0,
        "ngram>draft_model=s": 0.5, "draft_model>draft_model=s;m": 2.4, "ngram>draft_model>draft_model=s;m": 6.0,
        "layer_skip": 0.8, "ngram>layer_skip": 1.2,
    }  # fmt: skip
    rows = {name: {"by_task": {"qa": {"speedup": speed}}} for name, speed in speeds.items()}
    ratios = {pair: by_task["qa"] for pair, by_task in comparisons({"methods": rows}, LOOKUPS).items()}
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
    assert parts_of("ngram>draft_model:5=m", LOOKUPS) == parts
    assert parts_of("ngram:5", LOOKUPS) == []
    assert [DrafterSetup.parse(part).budget for part in parts] == [5, 5]


def test_parameters_and_minutes_of_the_heads_in_the_box() -> None:
    for head in heads_in_the_box():
        record = json.loads((head.path / "provenance.json").read_text())
        # what learnt, and matrices of the target's that are stored with it
        assert record["parameters"] <= parameters_in(head.path) < 2 * record["parameters"]
        assert training_minutes(head.path) is not None


def test_minutes_are_unknown_unless_all_runs_say_them(tmp_path: Path) -> None:
    assert training_minutes(tmp_path) is None
    for record, minutes in (
        ({"minutes": 2}, 2.0),
        ({"minutes": 2, "init": {"provenance": {"minutes": 3.5}}}, 5.5),
        ({"minutes": 2, "init": {"provenance": {}}}, None),
        ({"minutes": 2, "init": {}}, None),
        ({}, None),
        ([], None),
    ):
        (tmp_path / "provenance.json").write_text(json.dumps(record))
        assert training_minutes(tmp_path) == minutes


def test_a_tree_has_nodes_depth_and_width() -> None:
    assert DrafterSetup.parse("eagle3:24:5:6").fixed() == Budget(24, 5, 6)
    assert DrafterSetup.parse("eagle3:24:5:6=a/head").fixed() == Budget(24, 5, 6)
    assert DrafterSetup.parse("eagle3:8").fixed() == Budget(8, 8, 1)
    assert DrafterSetup.parse("eagle3").fixed() is None
    for text in ("eagle3:24:5", "eagle3:0:5:6", "eagle3:24:x:6", "eagle3:24:5:6:7", "eagle3:"):
        with pytest.raises(InvalidInput, match="is not usable"):
            DrafterSetup.parse(text)
