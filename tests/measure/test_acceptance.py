"""Tokens per round of drafters in folders: every shape and temperature asked for, by task and in all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.api.llm import LLM
from forerun.build.engine import make_engine
from forerun.core.errors import ForerunError
from forerun.core.params import EngineConfig, SpeculativeConfig
from forerun.core.types import Budget
from forerun.drafters.base import Drafter
from forerun.drafters.heads.medusa import HeadsConfig, write_heads
from forerun.measure import acceptance
from forerun.measure.acceptance import Plan, batch_for, main, measure
from forerun.measure.bench.suites import Item
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.cuda.target import CudaDecoder
from tests.gpu.heads import both_drafters
from tests.gpu.test_following import Watched, willing_target
from tests.gpu.tiny import make_target
from tests.measure.conftest import CONFIG, VOCAB, Letters, table_llm


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    """Two Medusa heads that say what the target says: nothing was learnt."""
    width = int(str(CONFIG["hidden_size"]))
    weights = {
        f"{i}.0.linear.{name}": torch.zeros(width, width) if name == "weight" else torch.zeros(width)
        for i in range(2)
        for name in ("weight", "bias")
    }
    write_heads(tmp_path / "heads", HeadsConfig("medusa", 2, 1, width, VOCAB, target="tiny"), weights)
    return tmp_path / "heads"


def test_every_shape_and_temperature_is_measured(
    heads: Path, tiny_checkpoint: None, suite: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--target", "tiny", "--drafters", str(heads), "--suite", suite, "--max-tokens", "12"]
    main([*given, "--device", "cpu"])
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["temperature"], row["shape"]) for row in said[:-1]] == [
        (0.0, "chain of 5"), (0.0, "tree of 60"), (1.0, "chain of 5"), (1.0, "tree of 60"),
    ]  # fmt: skip
    assert all({"qa", "all"} <= row.keys() and 1.0 <= row["all"] <= 3.0 for row in said[:-1])
    assert said[0]["all"] <= said[1]["all"], "a tree holds the chain"
    assert said[-1]["rows"] == said[:-1]
    main([*given, "--device", "cpu", "--only", "chain", "--chosen", "--temperatures", "1"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["shape"], row["chosen"]) for row in rows] == [("chain of 5", True)]


def test_typical_acceptance_stands_beside_the_exact_figures_and_says_what_it_is(
    heads: Path, tiny_checkpoint: None, suite: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--target", "tiny", "--drafters", str(heads), "--suite", suite, "--max-tokens", "24"]
    main([*given, "--device", "cpu", "--only", "chain", "--verifiers", "exact", "typical"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    found = [(row["temperature"], row["verifier"], row["exact"]) for row in rows]
    assert found == [(0.0, "exact", True), (1.0, "exact", True), (1.0, "typical", False)]


def twin(drafter: Drafter, target: CudaDecoder) -> LLM:
    """An engine as on a GPU, on its twin: rounds may start before the last one was read."""
    speculative = SpeculativeConfig("none", controller="fixed")
    engine = make_engine(target, frozenset(), speculative, EngineConfig(max_batch=1), Letters())
    engine.drafters.add("head", drafter)
    engine.default_drafter, engine.timeline.depth = "head", 2
    return LLM(engine, Letters(), "tiny")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("heat", "verifier"), [(0.0, "exact"), (1.0, "coupled"), (1.0, "exact")])
def test_a_gpu_drafts_and_decides_on_the_device_and_rounds_do_not_wait_for_the_host(
    heat: float, verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = willing_target()
    device, plain = both_drafters(target, borrows=True)
    watched, asked = Watched(monkeypatch), list[int]()
    monkeypatch.setattr(plain, "propose", lambda seqs, budgets: asked.append(len(seqs)))
    items = [Item(str(i), "ab"[i % 2], ({"role": "user", "content": "so it is" + "so" * i},)) for i in range(4)]
    plan = Plan([heat], [verifier], tokens=14, length=3, nodes=8, chosen=True, batch=2)
    rows = measure(twin(device, target), "head", items, plan)
    assert [row["shape"] for row in rows] == ["chain of 3", "tree of 8"]
    assert [row["nodes"] for row in rows] == [3.0, 8.0], "no tree is cut"
    assert all(row["prompts"] == 4 and row.keys() > {"a", "b"} for row in rows)
    assert not asked, "nothing is drafted by the host"
    assert watched.followed > 8


def test_what_must_be_read_first_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: the host applies a bias, so it reads every round."""
    target = willing_target()
    llm, watched = twin(both_drafters(target, borrows=True)[0], target), Watched(monkeypatch)
    llm.engine.controller = acceptance.always(Budget(3, 3, 1, repeats=9))
    llm.generate([[3, 4, 5]], max_tokens=24, ignore_eos=True, logit_bias={7: 0.5})
    assert watched.asked > 5
    assert not watched.followed


def test_batches_are_such_that_trees_fit_a_pass() -> None:
    draft = both_drafters(make_target("llama", "cpu", kernels="torch"), borrows=True)[0].draft
    for nodes in (60, 100, 5):
        wanted = draft.menu.fitting(1, nodes, 7, 10)
        fit = batch_for(32, nodes, MAX_ROWS)
        assert draft.menu.fitting(fit, nodes, 7, 10) == wanted
        cut = draft.menu.fitting(32, nodes, 7, 10)
        assert (cut != wanted) is (nodes > 30), "a tree of 60 would have 31 nodes in a batch of 32"


def test_a_row_ends_in_time_with_prompts_of_all_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1_000_000))
    monkeypatch.setattr(acceptance, "perf_counter", lambda: float(next(ticks)))
    items = [
        Item(f"{task}{i}", task, ({"role": "user", "content": f"{task} {i}"},)) for task in "abc" for i in range(9)
    ]
    plan = Plan([0.0], tokens=1 << 8, trees=False, batch=3, seconds=20.0)
    (row,) = measure(table_llm(), "ngram", items, plan)
    assert 3 <= row["prompts"] < 27
    assert row.keys() > {"a", "b", "c"}
    (whole,) = measure(table_llm(), "ngram", items, replace(plan, seconds=None))
    assert whole["prompts"] == 27


def test_a_drafter_that_fails_is_not_taken_for_one_that_drafts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = table_llm()

    def fail(seqs: object, budgets: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(llm.engine.drafters.get("ngram"), "propose", fail)
    with pytest.raises(ForerunError, match="switched off"):
        measure(llm, "ngram", [Item("1", "qa", ({"role": "user", "content": "why"},))], Plan([0.0], tokens=8))
