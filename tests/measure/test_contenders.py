"""Drafters with a head, a plan or second models of their own, beside the engine's default one."""

from __future__ import annotations

import os
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.errors import ForerunError, InvalidInput
from forerun.heads import BOX
from forerun.measure.bench import contenders
from forerun.measure.bench.settings import Cell, DrafterSetup, Settings, parse_setups
from tests.measure.conftest import table_llm


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


def test_it_measures_with_the_threads_that_a_user_would_have(tiny_folder: str, monkeypatch: Any) -> None:
    """OMP_NUM_THREADS, and slow cores, count here as for `LLM`; before, it took every core."""
    monkeypatch.setattr(contenders, "fresh_costs", lambda llm: CostModel({1: 1.0}))
    before = torch.get_num_threads()
    own = (os.cpu_count() or 1) + 1
    try:
        torch.set_num_threads(own)
        contenders.load(Settings(model=tiny_folder, setups=parse_setups(["ngram"]), device="cpu"))
        assert torch.get_num_threads() == own
        contenders.load(Settings(model=tiny_folder, setups=parse_setups(["ngram"]), device="cpu", threads=1))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_two_contenders_of_one_kind_decide_alike_whoever_writes_beside_them() -> None:
    """By a counted clock: a round's drafts are what its controller decided, so they are compared one by one."""
    assert drafts_beside(apart=True) == drafts_beside(apart=True, others=())
    assert drafts_beside(apart=True)["auto"] == drafts_beside(apart=True)["ngram"]


def test_negative_control_contenders_of_one_engine_change_each_others_drafts() -> None:
    shared = drafts_beside(apart=False)
    assert shared["auto"] != drafts_beside(apart=False, others=())["auto"] or shared["auto"] != shared["ngram"]


def drafts_beside(apart: bool, others: tuple[str, ...] = ("suffix", "draft_model")) -> dict[str, list[Any]]:
    """The rounds of two n-gram contenders, `auto` and `ngram`, beside others that write in turn with them."""
    llm, clock = table_llm("ngram", "adaptive"), [0.0]
    engine, score = llm.engine, llm.engine.target.score

    def counted(seqs: Any, trees: Any, *rest: Any) -> Any:
        clock[0] += 1.0 + 0.12 * trees.nodes
        return score(seqs, trees, *rest)

    engine.target.score = counted  # type: ignore[method-assign, assignment]
    engine.stats.now = lambda: clock[0]
    cost = CostModel({1: 1.12, 2: 1.24, 8: 1.96, 64: 8.7})
    assert isinstance(engine.controller, AdaptiveController)
    engine.controller.cost = deepcopy(cost)
    engines, settings = contenders.Engines(llm, cost), Settings(ignore_eos=True)
    setups = parse_setups(["auto", "ngram", *others])
    writing = [contenders.own_contender(engines.of(one) if apart else llm, settings, Cell(), one) for one in setups]
    prompts = [[5 + i, 6, 7, 5 + i, 6, 7, 9 + i] for i in range(6)]
    found: dict[str, list[Any]] = {one.name: [] for one in writing}
    for prompt in prompts:
        for one in writing:
            found[one.name].append(one.write([prompt], 48).drafts)
    return {name: found[name] for name in ("auto", "ngram")}


@pytest.mark.parametrize(
    ("drafter", "complaint"),
    [
        ("eagle3", "needs a head"),
        ("draft_model", "needs a second model"),
        ("ngram>medusa", "needs a head"),
        ("eagle3=/nonexistent", "there is no folder '/nonexistent'"),
        (f"eagle3={BOX / 'smollm2-135m-eagle3'}", "is 576 wide and"),
    ],
)
def test_a_drafter_without_its_head_is_refused_before_weights_are_loaded(
    tiny_folder: str, monkeypatch: Any, drafter: str, complaint: str
) -> None:
    def loaded(*args: Any, **options: Any) -> Any:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(contenders, "LLM", SimpleNamespace(load=loaded))
    with pytest.raises(ForerunError, match=complaint):
        contenders.load(Settings(model=tiny_folder, setups=parse_setups(["auto", drafter]), device="cpu", threads=1))
    with pytest.raises(AssertionError, match="weights were loaded"):
        contenders.load(Settings(model=tiny_folder, setups=parse_setups(["auto", "ngram"]), device="cpu", threads=1))
