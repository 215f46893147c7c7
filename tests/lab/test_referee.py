"""The referee's runs against engines, and how often it is wrong: the lab's commands, and their result documents."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest

from forerun.referee.planted import BUGS
from lab.referee import clean, command
from lab.referee.engines import ENGINES
from lab.runner import main, parse
from tools.docs_figures import documents

WRONG = ("referee-clean", "referee-planted", "referee-real")
ENGINE_RUNS = [name for name in documents() if name.startswith("referee-") and name not in WRONG]


@pytest.mark.parametrize("name", [*ENGINE_RUNS, *WRONG])
def test_the_tables_of_a_document_are_those_of_its_reports(name: str) -> None:
    found = documents()[name]
    made = (clean if name in WRONG else command).tables(found["raw_samples"])
    assert json.loads(json.dumps(made)) == found["tables"]


def test_negative_control_another_verdict_changes_the_tables() -> None:
    raw = deepcopy(documents()["referee-forerun-cpu"]["raw_samples"])
    raw[0]["report"]["checks"][0]["status"] = "fail"
    assert command.tables(raw) != documents()["referee-forerun-cpu"]["tables"]


def test_a_thousand_simulated_and_twenty_real_clean_runs_and_no_bug_missed_in_twenty_seeds() -> None:
    simulated, planted, real = (
        documents()[f"referee-{name}"]["raw_samples"][part]
        for name, part in (("clean", "simulated"), ("planted", "planted"), ("real", "real"))
    )
    assert len(simulated) >= 1000
    assert min(simulated) > clean.alarms()
    assert planted.keys() == BUGS.keys()
    assert all(len(runs) >= 20 and all(each["found"] for each in runs) for runs in planted.values())
    assert len(real) >= 20
    assert len({each["drafter"] for each in real}) >= 5
    assert [c["name"] for each in real for c in each["report"]["checks"] if c["status"] == "fail"] == []


def test_a_simulated_run_is_drawn_from_the_law_it_is_tested_against() -> None:
    found = clean.simulated(0, 4)
    assert min(found) > clean.alarms()
    assert len(set(found)) == 4


@pytest.mark.slow
def test_our_engine_and_a_planted_bug_give_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean, "BUGS", {"min_p_ignored": clean.BUGS["min_p_ignored"]})
    words = ["--simulated", "1", "--real", "1", "--seeds", "1", "--seconds", "8", "--json", str(tmp_path / "d.json")]
    assert clean.work(parse("referee-clean", words)) == 0
    found = json.loads((tmp_path / "d.json").read_text())
    assert [row["failed"] for row in found["tables"]["clean"]["rows"]] == [0, 0]
    assert found["tables"]["planted"]["rows"][0]["missed"] == 0


@pytest.mark.slow
def test_a_server_is_started_checked_and_ended(tmp_path: Path) -> None:
    file = tmp_path / "d.json"
    words = ["referee", "serve-draft", "--only", "greedy.on_off", "--only", "usage", "--json", str(file)]
    assert main(words) == 0
    found = json.loads(file.read_text())
    assert [row["passed"] for row in found["tables"]["runs"]["rows"]] == [2]
    assert "started" in found["raw_samples"][0]
    assert str(tmp_path) not in file.read_text()


def test_a_server_that_does_not_start_is_told_and_its_log_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = ENGINES["vllm-ngram"].__class__("a broken one", "numpy", "python -c 'raise SystemExit(str(6 * 7))' {port}")
    monkeypatch.setitem(command.ENGINES, "broken", broken)
    assert main(["referee", "broken", "--json", str(tmp_path / "d.json")]) == 1
    assert "did not start" in capsys.readouterr().err
    assert [file.read_text() for file in tmp_path.glob("d.*.log")] == ["42\n"]


def test_an_unknown_engine_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["referee", "nosuch", "--json", str(tmp_path / "d.json")]) == 2
    assert "no engine 'nosuch'" in capsys.readouterr().err
