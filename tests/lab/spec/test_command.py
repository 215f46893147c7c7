"""The Spec-Bench table on a tiny model: all methods on one inflated target, failures apart, limits, resuming."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from forerun.core import registry
from forerun.core.types import Budget, Seq, TreeBatch
from forerun.drafters.base import BaseDrafter
from lab.runner import main
from lab.spec import load
from lab.spec import measure as measuring

Spec = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def spec(
    tiny_folder: str,
    suite: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tiny_shape: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Spec:
    monkeypatch.setattr(measuring, "WARM_UP_TOKENS", 2)

    def run(*words: str) -> tuple[int, dict[str, Any], str]:
        file = tmp_path / "found" / "spec.json"
        common = ["--model", tiny_folder, "--suite", suite, "--device", "cpu", "--threads", "1", "--context", "256"]
        code = main(["spec", *common, "--max-tokens", "8", "--json", str(file), *words])
        return code, json.loads(file.read_text()), capsys.readouterr().out

    return run


@pytest.mark.slow
def test_every_method_writes_the_plain_text_at_the_larger_shape(
    spec: Spec, every_head: list[str], tmp_path: Path
) -> None:
    plot = tmp_path / "plots" / "spec.png"
    code, document, printed = spec("--shape", "tiny", "--heads", ",".join(every_head), "--plot", str(plot))
    assert code == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    failed = {name for name, facts in document["methods"].items() if facts["error"]}
    assert failed == {"draft_model", "draft_text", "peagle", "specdec"}  # what no head or model was given for
    heads = {"eagle3", "eagle2", "eagle", "mtp", "medusa", "hydra", "dflash", "dspark", "ngram+eagle3"}
    wanted = {
        "ngram",
        "suffix",
        "recycling",
        "lookahead",
        "layer_skip",
        "sparse_kv",
        "ngram>layer_skip",
        "ngram+medusa",
    } | heads
    assert [(cell["temperature"], cell["verifier"]) for cell in document["cells"]] == [
        (0.0, "auto"), (1.0, "exact"), (1.0, "coupled"),
    ]  # fmt: skip
    for cell, equal in zip(document["cells"], (2, "law", 2), strict=True):
        more = {"eagle3 chosen", "ngram+eagle3 chosen", "mtp chosen"} if equal == "law" else set()
        assert set(cell["methods"]) == {"plain", *wanted, *more}
        assert {row["equal"] for row in cell["methods"].values()} == {equal}
        assert cell["tasks"] == ["multi_turn", "qa"]
        assert cell["methods"]["plain"]["speedup"] == 1.0
        assert cell["methods"]["plain"]["tokens_per_round"] == 1.0
    assert all(document["methods"][name]["parameters"] > 5000 for name in heads)
    assert document["methods"]["suffix"]["parameters"] == 0
    assert "T=0" in printed
    assert printed.count("| `ngram` (auto) |") == 3
    assert "- `draft_model`: no second model was given" in printed


@pytest.mark.slow
def test_a_text_that_differs_is_counted_and_the_exit_code_is_1(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    true = measuring.measure_once

    def wrong(contender: Any, one: Any, *more: Any) -> Any:
        run = true(contender, one, *more)
        if contender.name == "suffix" and one.task == "qa":
            object.__setattr__(run, "texts", ((7,) * 8,))
        return run

    monkeypatch.setattr(measuring, "measure_once", wrong)
    code, document, printed = spec("--shape", "tiny", "--methods", "ngram,suffix", "--temperatures", "0")
    assert code == 1
    assert document["cells"][0]["methods"]["suffix"]["equal"] == 1
    assert document["cells"][0]["methods"]["ngram"]["equal"] == 2
    assert "1 of 2" in printed


class Breaking(BaseDrafter):
    """Drafts until it breaks."""

    calls = 0
    at = 1

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        type(self).calls += 1
        if self.calls >= self.at:
            raise RuntimeError("broken drafter")
        return TreeBatch.chains([seq.tokens[-1:] for seq in seqs])


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 12])
def test_a_method_that_raises_is_a_row_and_the_others_go_on(
    spec: Spec, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(Breaking, "at", at)
    monkeypatch.setattr(Breaking, "calls", 0)
    registry.drafters.register("breaking", f"{__name__}:Breaking")
    try:
        words = ("--methods", "ngram,breaking,suffix", "--temperatures", "0", "--shape", "tiny")
        code, document, printed = spec(*words)
    finally:
        registry.drafters.unregister("breaking")
    assert code == 0
    assert "broken drafter" in document["methods"]["breaking"]["error"]
    assert Breaking.calls == at  # it is not called again
    assert document["cells"][0]["methods"]["suffix"]["equal"] == 2
    assert ("breaking" in document["cells"][0]["methods"]) == (at > 1)  # what it wrote before counts
    assert ("| `breaking` * | - | - | could not run |" in printed) == (at == 1)


@pytest.mark.slow
def test_a_method_that_cannot_be_built_is_a_row(spec: Spec, tmp_path: Path, every_head: list[str]) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_text('{"medusa_num_heads": 4, "hidden_size": 32, "vocab_size": 64}')
    words = ("--methods", f"medusa={damaged},ngram", "--temperatures", "0", "--shape", "tiny")
    code, document, _ = spec(*words)
    assert code == 0
    assert "holds no safetensors file" in document["methods"]["medusa=damaged"]["error"]
    assert list(document["cells"][0]["methods"]) == ["plain", "ngram"]


@pytest.mark.slow
def test_time_limits_end_the_run_and_keep_what_was_measured(spec: Spec) -> None:
    words = ("--shape", "tiny", "--methods", "ngram,suffix", "--temperatures", "0")
    code, document, printed = spec(*words, "--time-limit", "0")
    assert code == 0
    assert document["conditions"]["cut"] == "the time limit of 0 s"
    assert list(document["cells"][0]["methods"]) == ["plain"]  # the first text
    assert "CUT SHORT" in printed
    code, document, printed = spec(*words, "--method-seconds", "0")
    assert document["cells"][0]["methods"]["ngram"]["texts"] == 1
    assert document["cells"][0]["methods"]["plain"]["texts"] == 2
    assert "- note on `ngram`: stopped after 0 s" in printed


@pytest.mark.slow
def test_a_run_resumes_and_can_be_shown_again(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--shape", "tiny", "--methods", "ngram", "--temperatures", "0", "--out", str(tmp_path / "raw"))
    first = spec(*words)[1]
    monkeypatch.setattr(measuring.Session, "_warm_up", lambda self, contenders: None)

    def forbidden(*given: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(measuring, "measure_once", forbidden)
    assert spec(*words)[1]["cells"] == first["cells"]
    monkeypatch.setattr(load, "load_llm", forbidden)
    assert main(["spec", "--show", str(tmp_path / "found" / "spec.json"), "--plot", str(tmp_path / "again.png")]) == 0
    assert "| `ngram` (auto) |" in capsys.readouterr().out
    assert (tmp_path / "again.png").is_file()


@pytest.mark.slow
def test_own_shape_second_models_and_comparisons(spec: Spec, tiny_folder: str) -> None:
    words = ("--methods", "ngram,suffix,draft_model,ngram>draft_model", "--draft-models", tiny_folder)
    code, document, printed = spec(*words, "--temperatures", "0")
    assert code == 0
    assert document["conditions"]["shape"] == "its own shape"
    name = Path(tiny_folder).name
    assert document["methods"]["draft_model"]["parameters"] > 10_000
    assert document["cells"][0]["methods"]["draft_model"]["equal"] == 2, name
    assert "\nsuffix / ngram: multi_turn " in printed
    assert "\nngram>draft_model / draft_model: multi_turn " in printed


@pytest.mark.slow
def test_mistakes_are_one_line(tmp_path: Path, tiny_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--suite", str(tmp_path / "none.jsonl")],
        ["--model", tiny_folder, "--heads", str(tmp_path)],
        ["--model", tiny_folder, "--methods", "auto"],
        ["--model", tiny_folder, "--methods", "nonsense"],
        ["--model", tiny_folder, "--temperatures", "warm"],
        ["--model", tiny_folder, "--verifiers", "nonsense"],
    ):
        assert main(["spec", *words, "--device", "cpu"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
