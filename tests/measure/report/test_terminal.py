"""What the terminal prints is what the document says: ratios, intervals, warnings and counts."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from forerun.measure.report import summary, terminal
from forerun.measure.report.html import render
from lab.cpu import show_modes
from tests.measure.report.documents import clear_gain, no_clear_gain, one_prompt, result_of


def printed(capsys: pytest.CaptureFixture[str], result: dict[str, Any]) -> str:
    terminal.show(result)
    return capsys.readouterr().out


def row(text: str, title: str, name: str) -> str:
    """A row of the table under a title."""
    lines = text[text.index(title) :].splitlines()
    return next(line for line in lines if line.strip().startswith(name))


def test_the_terminal_and_the_page_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    for result in (clear_gain(busy=True, load_before=1.9), no_clear_gain(), one_prompt()):
        text, page = printed(capsys, result), render(result).replace("&#39;", "'")
        said = [summary.headline(result), summary.INTERVALS, summary.equality(result), *summary.notes(result)]
        for sentence in said:
            assert sentence is not None
            assert sentence in text
            assert sentence in page


def test_brackets_are_the_intervals_of_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    result = clear_gain()
    text = printed(capsys, result)
    low, high = result["intervals"]["auto_vs_plain"]
    assert f"1.50 ({low:.2f}-{high:.2f})" in row(text, "All tasks", "auto")
    qa = result["by_task"]["auto"]["qa"]
    assert f"({qa['low']:.2f}-{qa['high']:.2f})" in row(text, "By task", "qa")
    assert low < 1.5 < high


def test_two_repeats_of_one_prompt_make_no_bracket(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, one_prompt())
    assert row(text, "All tasks", "auto").split()[1] == "3.00"
    assert "(" not in row(text, "All tasks", "auto")
    assert "3.00 (" not in text


def test_contexts_have_a_table_where_they_differ(capsys: pytest.CaptureFixture[str]) -> None:
    result = clear_gain()
    assert "context length" not in printed(capsys, result)
    result["contenders"]["auto"]["by_context"] = {
        "<2k": {"tokens_per_round": 2.5, "accepted_counts": [3, 4]},
        "8-32k": {"tokens_per_round": 1.0, "accepted_counts": [0, 0]},
    }
    text = printed(capsys, result)
    heads = text[text.index("By context length") :].splitlines()[2].split()
    assert heads == ["<2k", "8-32k"]
    cells = row(text, "By context length", "auto")
    assert "2.50  0.75 (3 of 4)" in cells
    assert "1.00  nothing drafted" in cells


def test_the_warning_is_printed_before_and_after_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, clear_gain(busy=True, load_before=1.9))
    before, after = text.split("All tasks")
    for part in (before, after):
        assert "The machine was busy before the run (load average 1.9 on 2 cores)" in part
    assert "busy" not in printed(capsys, clear_gain())


def test_the_ratio_over_plain_is_the_first_column(capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of({"transformers": [8.0, 8.0], "plain": [2.0, 2.0], "auto": [1.0, 1.0]})
    text = printed(capsys, result)
    header = next(line for line in text.splitlines() if "tokens/s" in line)
    assert header.split()[:4] == ["x", "plain", "x", "transformers"]
    assert row(text, "All tasks", "transformers").split()[1] == "0.25"
    assert row(text, "All tasks", "auto").split()[1:4] == ["2.00", "(2.00-2.00)", "8.00"]


def test_acceptance_shows_its_counts(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, clear_gain())
    assert "0.67 (24 of 36)" in row(text, "Acceptance by depth", "auto")
    nothing = result_of({"plain": [1.0, 2.0]})
    assert "Acceptance by depth" not in printed(capsys, nothing)


def test_texts_that_differ_and_cells_that_promise_the_law_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    result = clear_gain()
    second = copy.deepcopy(result["cells"][0]) | {"temperature": 0.7, "equal": None, "compared": 0}
    result["cells"][0]["differing"] = [{"contender": "auto"}]
    result["cells"][0]["equal"] = False
    result["cells"].append(second)
    result["equal_to_own_plain"] = {"lookup": {"plain": "peer", "equal": 3, "texts": 4}}
    text = printed(capsys, result)
    assert "Texts: 35 of 36 texts equal what plain wrote." in text
    assert "lookup: 3 of 4 texts equal those of peer." in text
    assert "guarantee the law, not the text" in text
    assert row(text, "By conditions", "auto, temperature 0,").split()[-1] == "no"
    assert row(text, "By conditions", "auto, temperature 0.7").split()[-2:] == ["in", "law"]


def test_plain_alone_has_nothing_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of({"plain": [3.0, 3.0]})
    assert result["cells"][0]["equal"] is None
    assert "guarantee the law" not in printed(capsys, result)


def test_a_run_on_a_cpu_shows_formats_memory_and_named_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of({"llama_cpp": [4.0, 4.4], "plain": [2.0, 2.0], "auto": [1.0, 1.0]})
    result["modes"] = {
        "gguf": {"t": {"1": 0.005, "2": 0.0065}, "bandwidth_share": 0.61},
        "q8": {"t": None, "why_not": "no native kernels"},
    }
    result["bandwidth"] = {"gb_per_s": {"copy": 20.0, "best": 21.5}}
    result["memory"] = {"dtype": "auto", "above_torch_mb": 242.0, "model_mb": 180.4}
    show_modes(result)
    text = capsys.readouterr().out
    assert row(text, "t(n) in ms by number format", "gguf").split() == ["gguf", "5.0", "6.5", "0.61"]
    assert "q8 left out: no native kernels" in text
    assert "copy 20, best 21.5" in text
    assert "242 MB above the interpreter and torch" in text
    low, high = result["intervals"]["plain_vs_llama_cpp"]
    assert f"plain_vs_llama_cpp: 2.10 ({low:.2f}-{high:.2f})" in text
    assert "plain_vs_transformers: -" in text
    assert "By task: x llama_cpp (95% interval)" in " ".join(text.split())
