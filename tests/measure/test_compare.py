"""Before and after: a change counts where the intervals do not touch, and conditions that differ are shown."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from forerun.cli import app
from forerun.core.errors import InvalidInput
from forerun.measure.bench.compare import compare, read_result


def figure(value: float, spread: float = 0.05) -> dict[str, float]:
    return {"speedup": value, "low": value - spread, "high": value + spread}


RESULT: dict[str, Any] = {
    "schema": 2,
    "t": {"1": 0.01},
    "contenders": {"plain": {"tokens_per_second": 10.0}, "auto": {"tokens_per_second": 15.0}},
    "by_task": {"auto": {"qa": figure(1.0), "rag": figure(2.0)}, "old": {"qa": figure(1.0)}},
    "speedup": {"auto": figure(1.5), "old": figure(1.0)},
    "ratios": {"auto_vs_plain": 1.5},
    "intervals": {"auto_vs_plain": [1.45, 1.55]},
    "equal": True,
    "cells": [],
    "samples": [],
    "conditions": {"model": "m", "commit": "a1"},
}


def changed() -> dict[str, Any]:
    after = copy.deepcopy(RESULT)
    after["by_task"]["auto"] = {"qa": figure(1.04), "rag": figure(2.5), "new": figure(1.0)}
    after["speedup"]["auto"] = figure(1.2)
    after["conditions"]["commit"] = "b2"
    del after["by_task"]["old"]
    return after


def test_only_clear_changes_count() -> None:
    found = compare(RESULT, changed())
    rows = found["by_task"]["auto"]
    assert {task: row["verdict"] for task, row in rows.items()} == {
        "all tasks": "worse",
        "qa": "within noise",
        "rag": "better",
    }
    assert rows["rag"]["change"] == 1.25
    assert found["only_before"] == ["old"]
    assert found["conditions"] == {"commit": ["a1", "b2"]}


def test_one_prompt_has_no_interval_and_says_nothing() -> None:
    before, after = copy.deepcopy(RESULT), changed()
    after["by_task"]["auto"]["rag"] = {"speedup": 9.0, "low": None, "high": None}
    assert compare(before, after)["by_task"]["auto"]["rag"]["verdict"] == "one prompt: no interval"


def test_the_command_shows_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, result in (("a.json", RESULT), ("b.json", changed())):
        (tmp_path / name).write_text(json.dumps(result))
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for flags in ([], ["--json", "-"]):
        monkeypatch.setattr("sys.argv", ["forerun", "compare", *files, *flags])
        with pytest.raises(SystemExit) as ended:
            app.main()
        assert not ended.value.code
        printed = capsys.readouterr().out
        if flags:
            assert json.loads(printed)["by_task"]["auto"]["rag"]["verdict"] == "better"
        else:
            assert "within noise" in printed
            assert "only before: old" in printed


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("tables\nand no JSON", "does not end with JSON"),
        ('{"schema": 2}', "'t' is missing"),
        (json.dumps({**RESULT, "schema": 99}), "has schema 99"),
        (json.dumps({**RESULT, "schema": 1}), "has schema 1 "),
    ],
)
def test_a_file_that_is_no_result_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=complaint):
        read_result(file)
    with pytest.raises(InvalidInput, match=r"cannot read '.*': No such file or directory; give"):
        read_result(tmp_path / "absent.json")


def test_a_whole_output_that_ends_with_the_document_will_do(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    file.write_text("All tasks\n ...\n" + json.dumps(RESULT))
    assert read_result(file) == RESULT
