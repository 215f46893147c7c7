"""The sentences that the terminal and the page share say no more than their intervals."""

from __future__ import annotations

import pytest

from forerun.measure.bench.figures import Spread
from forerun.measure.report import summary
from tests.measure.report.documents import clear_gain, no_clear_gain, one_prompt, result_of


def test_a_clear_gain_and_a_clear_loss_are_called_so() -> None:
    assert summary.verdict("auto", Spread(1.5, 1.4, 1.6)) == (
        "auto is faster than plain decoding: 1.50 times its speed (95% interval 1.40 to 1.60)."
    )
    assert summary.verdict("x", Spread(0.7, 0.6, 0.8)).startswith("x is slower than plain decoding: 0.70")


def test_an_interval_that_holds_1_is_no_gain() -> None:
    said = summary.headline(no_clear_gain())
    assert said is not None
    assert "no clear gain or loss" in said
    assert "which holds 1" in said
    assert "faster" not in said


def test_one_prompt_says_that_it_is_one() -> None:
    said = summary.headline(one_prompt())
    assert said is not None
    assert "3.00 times" in said
    assert "on one prompt" in said
    assert "interval " not in said.replace("no interval and", "")


def test_nothing_drafted_has_no_headline() -> None:
    assert summary.headline(result_of({"plain": [1.0, 2.0]})) is None


def test_the_warning_is_there_where_the_machine_was_busy() -> None:
    assert summary.busy_warning(clear_gain()["conditions"]) is None
    busy = clear_gain(busy=True, load_before=1.7)
    assert "load average 1.7 on 2 cores" in (summary.busy_warning(busy["conditions"]) or "")
    assert summary.notes(busy)[0] == summary.busy_warning(busy["conditions"])


def test_notes_say_what_the_figures_rest_on() -> None:
    notes = summary.notes(
        clear_gain(isa={"forerun": "avx2", "llama_cpp": None}, left_out={"llama_cpp": "it ended by SIGILL"})
    )
    assert notes == [
        "llama_cpp left out: it ended by SIGILL",
        "tiny, 6 prompts of 2 tasks, 2 repeats, at most 40 new tokens each, 1 thread.",
        "Instruction sets: forerun avx2.",
    ]
    assert summary.instruction_sets({}) is None


def test_ratios_are_found_in_either_direction() -> None:
    result = result_of({"transformers": [8.0, 8.4, 7.6], "plain": [2.0, 2.0, 2.0], "auto": [1.0, 1.0, 1.0]})
    forward, back = (
        summary.ratio_over(result, *pair) for pair in (("plain", "transformers"), ("transformers", "plain"))
    )
    assert forward is not None
    assert back is not None
    assert forward.value == pytest.approx(4.0)
    assert back.value == pytest.approx(0.25)
    assert back.low is not None
    assert back.high is not None
    assert back.low < 0.25 < back.high < 1.0
    assert back.low == pytest.approx(1 / (forward.high or 0.0))
    assert summary.ratio_over(result, "plain", "plain") == Spread(1.0, 1.0, 1.0)
    assert summary.ratio_over(result, "plain", "llama_cpp") is None


def test_acceptance_comes_with_its_counts() -> None:
    # per prompt and repeat: trees 4, 2, 2 and 0 deep of which 3, 0 and 2 were accepted; twelve such texts
    assert summary.accepted_cells(clear_gain(), "auto") == [
        "0.67 (24 of 36)", "0.67 (24 of 36)", "1.00 (12 of 12)", "0.00 (0 of 12)",
    ]  # fmt: skip
    assert summary.accepted_cells(clear_gain(), "plain") == []
    assert summary.drafters_of(clear_gain()) == ["auto", "ngram:8"]


def test_equality_counts_every_cell() -> None:
    result = clear_gain()
    assert summary.equality(result) == "36 of 36 texts equal what plain wrote."
    result["cells"][0]["differing"] = [{}, {}]
    assert summary.equality(result).startswith("34 of 36")
