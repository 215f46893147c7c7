"""`forerun bench` on a table: every combination, what is kept of it, going on after a stop, and the report."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.cli import app
from forerun.control.cost import CostModel
from forerun.core.errors import InvalidInput, PromptTooLong, UnknownName
from forerun.measure.bench import contenders, run
from forerun.measure.bench.alternate import Contender, Run, Written
from forerun.measure.bench.compare import SCHEMA, read_result
from forerun.measure.bench.figures import pieces
from forerun.measure.bench.run import RunLog
from forerun.measure.bench.settings import Cell, DrafterSetup, Settings, parse_setups
from forerun.measure.bench.suites import load_suite
from forerun.measure.report.html import render
from tests.measure.conftest import Letters, table_llm


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The benchmark loads the table; the number of threads is put back."""

    def load(settings: Settings) -> Any:
        torch.set_num_threads(1)
        return table_llm(), CostModel({1: 1.0, 2: 1.1, 8: 1.5, 64: 4.0})

    monkeypatch.setattr(run, "load", load)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["forerun", *words])
    with pytest.raises(SystemExit) as ended:
        app.main()
    return int(ended.value.code or 0)


@pytest.mark.slow
def test_the_command_prints_tables_then_the_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], suite: str, tmp_path: Path
) -> None:
    files = {name: tmp_path / name for name in ("result.json", "report.html", "raw")}
    words = ["bench", "--prompts", suite, "--drafters", "auto,ngram:2,draft_model:2", "--max-tokens", "10"]
    words += ["--temperatures", "0,0.8", "--batches", "1,2", "--verifiers", "auto,exact", "--repeats", "1"]
    words += ["--json", str(files["result.json"]), "--html", str(files["report.html"])]
    words += ["--trace", str(tmp_path / "trace.json")]
    code = command(monkeypatch, *words, "--out", str(files["raw"]))
    assert any(one["name"] == "pass" for one in json.loads((tmp_path / "trace.json").read_text()))
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert code == 0, result["differing"]
    assert read_result(files["result.json"]) == result
    assert result["schema"] == SCHEMA
    assert len(result["cells"]) == 8
    assert list(result["by_task"]) == ["auto", "ngram:2", "draft_model:2"]
    assert set(result["by_task"]["auto"]) == {"multi_turn", "qa"}
    assert [cell["equal"] for cell in result["cells"]] == [True] * 6 + [None] * 2  # exact, temperature 0.8
    assert result["contenders"]["plain"]["tokens_per_round"] == 1.0
    assert set(result["contenders"]["auto"]["seconds"]) == {"prompt", "draft", "pass", "verdict", "host"}
    assert result["samples"][0]["pieces"]
    assert "By conditions" in printed
    assert "<svg" in files["report.html"].read_text()
    lines = (files["raw"] / "rounds.jsonl").read_text().splitlines()
    assert len(lines) == 4 * (2 + 1) * 4  # (verifier, temperature) x (two groups, one of two) x contenders
    row = json.loads(lines[0])
    assert len(row["drafts"][0]) == row["rounds"] == len(row["passes"])


@pytest.mark.slow
def test_no_full_collection_of_what_was_loaded_falls_into_a_timed_call(
    monkeypatch: pytest.MonkeyPatch, suite: str
) -> None:
    frozen, alternate = list[int](), run.alternate

    def watched(*args: Any) -> Iterator[Run]:
        frozen.append(gc.get_freeze_count())
        return alternate(*args)

    monkeypatch.setattr(run, "alternate", watched)
    run.run(Settings(suite=suite, max_tokens=4, repeats=1, batches=(1, 2)))
    assert len(frozen) == 2
    assert min(frozen) > 10_000, "objects that collections leave out"
    assert gc.get_freeze_count() == 0, "afterwards models may be dropped"


def test_a_cell_writes_as_many_texts_at_once_as_its_batch_has_places(suite: str) -> None:
    llm = table_llm()
    settings, most = Settings(suite=suite, max_tokens=6), llm.engine.max_batch
    running, step = list[int](), llm.engine.step

    def watched() -> Any:
        events = step()
        running.append(len(llm.engine.running) + len(llm.engine.reading))
        return events

    llm.engine.step = watched  # type: ignore[method-assign]
    contender = contenders.own_contender(llm, settings, Cell(batch=2), DrafterSetup("plain", "none"))
    assert len(contender.write([(1, 2)] * 8, 6).texts) == 8
    assert max(running) == 2 < most == llm.engine.max_batch


@pytest.mark.slow
def test_the_report_needs_nothing_from_outside_and_escapes_what_models_write(suite: str) -> None:
    settings = Settings(suite=suite, max_tokens=8, repeats=1, setups=parse_setups(["auto"]), batches=(1, 2))
    result = run.run(settings)
    result["samples"][0]["pieces"] = [["<script>alert(1)</script>", True]]
    page = render(result)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert not [word for word in ("http://", "https://", "src=", "@import", "url(") if word in page]
    assert "Speed-up against batch size" in page
    assert "Acceptance by position" in page


@pytest.mark.slow
def test_an_interrupted_run_goes_on_and_other_settings_are_refused(
    suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(suite=suite, max_tokens=6, repeats=2, setups=parse_setups(["auto"]))
    first = run.run(settings, tmp_path)
    file = tmp_path / "rounds.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 8
    file.write_text("".join(lines[:5]) + lines[5][:20])  # stopped while writing the sixth
    written: list[str] = []
    honest = contenders.own_contender

    def counted(llm: Any, settings: Settings, cell: Cell, setup: DrafterSetup) -> Contender:
        contender = honest(llm, settings, cell, setup)

        def write(prompts: Any, max_tokens: int) -> Written:
            written.append(setup.name)
            return contender.write(prompts, max_tokens)

        return Contender(setup.name, write, contender.exact)

    monkeypatch.setattr(contenders, "own_contender", counted)
    second = run.run(settings, tmp_path)
    assert len(written) == 2 + 3  # warming up, and what was missing
    assert [json.loads(line)["seconds"] for line in file.read_text().splitlines()][:5] == [
        json.loads(line)["seconds"] for line in lines[:5]
    ]
    assert second["compared"] == first["compared"]
    with pytest.raises(InvalidInput, match="max_tokens=6 and now 7"):
        run.run(Settings(suite=suite, max_tokens=7, setups=settings.setups), tmp_path)


def test_a_journal_gives_back_what_it_was_given(tmp_path: Path) -> None:
    settings, cell = Settings(), Cell("exact", 0.5, 2)
    done = Run("x", "a+b", "mixed", 1, ((1, 2), (3,)), 0.5, 2, 0.25, ({"pass": 0.125},), (((1, 1, 1),), ()))
    RunLog(tmp_path, settings).add(cell, done)
    assert RunLog(tmp_path, settings).known(cell) == {done.key: done}
    assert RunLog(tmp_path, settings).known(Cell()) == {}


def test_rounds_are_recorded_and_the_engine_is_left_as_it_was() -> None:
    """Nothing stands between the engine and its controller: the benchmark measures the product."""
    llm = table_llm()
    controller, setup = llm.engine.controller, DrafterSetup("ngram:3", "ngram", 3)
    written = contenders.own_contender(llm, Settings(), Cell(), setup).write([[5, 6, 7], [8, 9]], 12)
    assert llm.engine.controller is controller
    assert llm.engine.stats.by_round is None
    assert sum(one["pass"] for one in written.passes) == pytest.approx(llm.engine.stats.seconds["pass"])
    assert written.rounds == len(written.passes) == llm.engine.stats.rounds
    assert [len(text) for text in written.texts] == [sum(r[2] + 1 for r in text) for text in written.drafts]
    assert all(r[0] <= 3 for text in written.drafts for r in text)
    assert any(r[0] for text in written.drafts for r in text)


def test_pieces_tell_drafted_tokens_from_the_targets_own() -> None:
    tokens = Letters().encode("abcdef")
    shown = pieces(tokens, ((3, 3, 2), (0, 0, 0), (2, 2, 2)), Letters())
    assert "".join(text for text, _ in shown) == Letters().decode(tokens)
    assert [drafted for _, drafted in shown] == [True, True, False, False, True, True]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"batches": (0,)}, "batches=0"),
        ({"temperatures": (-1.0,)}, "temperature=-1.0"),
        ({"verifiers": ("exactt",)}, "did you mean 'exact'"),
        ({"peers": ("vllm",)}, "unknown peer 'vllm'"),
        ({"peers": ("transformers_assisted",)}, "needs a second model"),
        ({"setups": (DrafterSetup("a", None), DrafterSetup("a", None))}, "listed twice"),
    ],
)
def test_settings_that_cannot_be_run_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        Settings(**settings)


def test_ways_are_named_by_drafter_and_budget() -> None:
    assert parse_setups(["auto", "ngram:4"]) == (DrafterSetup("auto", None), DrafterSetup("ngram:4", "ngram", 4))
    with pytest.raises(InvalidInput, match="write ngram:8"):
        DrafterSetup.parse("ngram:many")
    with pytest.raises(UnknownName, match="did you mean 'ngram'"):
        DrafterSetup.parse("ngran")
    with pytest.raises(InvalidInput, match="always measured"):
        DrafterSetup.parse("plain")


def test_mistakes_on_the_command_line_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, complaint in (
        (["--temperatures", "hot"], "--temperatures 'hot' is not a list of numbers"),
        (["--batches", ","], "--batches ',' are not numbers by comma"),
        (["--batches", "nan"], "--batches 'nan' are not numbers by comma"),
        (["--batches", "1.5"], "--batches '1.5' are not numbers by comma"),
        (["--temperatures", ","], "--temperatures is empty"),
        (["--threads", "0"], "--threads 0 is out of range"),
        (["--temperatures", "nan"], "--temperatures nan is out of range"),
        (["--verifiers", ","], "no verifier is named; use auto, "),
        (["--drafters", "ngran"], "did you mean 'ngram'"),
        (["--batches", "40", "--max-tokens", "2"], "--batches 40 needs as many prompts"),
    ):
        assert command(monkeypatch, "bench", *words) == 2
        assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_a_prompt_beyond_the_context_is_named_before_anything_is_measured(suite: str) -> None:
    settings, llm = Settings("table", suite=suite, max_tokens=4), table_llm()
    items = load_suite(suite)
    lengths = {len(prompt.ids): prompt.id for prompt in run.tokenise(llm, items, settings)}
    llm.engine.max_length = max(lengths) + 1
    assert run.tokenise(llm, items, settings)
    llm.engine.max_length = max(lengths)
    with pytest.raises(PromptTooLong, match=rf"prompt {lengths[max(lengths)]} of the task \w+ has .* choose shorter"):
        run.tokenise(llm, items, settings)
