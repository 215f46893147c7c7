"""The referee's runs against engines, and how often it is wrong: the lab's commands, and their result documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.referee import clean, command, document
from lab.referee.engines import ENGINES
from lab.runner import main, parse
from tools.docs_figures import documents

ENGINE_RUNS = [
    name for name in documents() if name.startswith("referee-") and name not in ("referee-clean", "referee-real")
]


@pytest.mark.parametrize("name", ENGINE_RUNS)
def test_the_tables_of_a_document_are_those_of_its_reports(name: str) -> None:
    found = documents()[name]
    assert json.loads(json.dumps(document.tables(found["raw_samples"]))) == found["tables"]


@pytest.mark.parametrize("name", ["referee-clean", "referee-real"])
def test_the_tables_of_clean_runs_are_those_of_their_samples(name: str) -> None:
    found = documents()[name]
    assert json.loads(json.dumps(clean.tables(dict(found["raw_samples"])))) == found["tables"]


def test_a_thousand_simulated_and_twenty_real_clean_runs_and_no_bug_missed_in_twenty_seeds() -> None:
    """What the issue asks for is what the committed documents say."""
    simulated, real = (documents()[name]["raw_samples"] for name in ("referee-clean", "referee-real"))
    assert len(simulated["simulated"]) >= 1000
    assert min(simulated["simulated"]) > clean.alarms()
    assert len(simulated["planted"]) >= 15
    assert all(len(runs) >= 20 and all(each["found"] for each in runs) for runs in simulated["planted"].values())
    assert len(real["real"]) >= 20
    checks = [one for each in real["real"] for one in each["report"]["checks"]]
    assert [one["name"] for one in checks if one["status"] == "fail"] == []
    assert len({each["drafter"] for each in real["real"]}) >= 5


def test_a_simulated_run_is_drawn_from_the_law_it_is_tested_against() -> None:
    found = clean.simulated(0, 4)
    assert min(found) > clean.alarms()
    assert len(set(found)) == 4


@pytest.mark.slow
def test_our_engine_and_a_planted_bug_give_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean, "BUGS", {"min_p_ignored": "..."})
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
