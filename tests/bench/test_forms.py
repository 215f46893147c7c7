"""Drafts recorded along texts are those of the engine; rounds over them are counted; the controller finds the form."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from forerun.bench.forms.__main__ import main
from forerun.bench.forms.record import CHAINS, NEVER, WIDTHS, RecordedText, load, record, save
from forerun.bench.forms.simulation import (
    READ_FIRST,
    Simulation,
    draft_seconds,
    host_seconds,
    make_controller,
    pass_seconds,
)
from forerun.bench.suites import load_suite
from forerun.llm import LLM
from forerun.offers import Form
from forerun.params import SamplingParams
from forerun.types import Budget, Request

RATES = (
    (0.48, 0.08, 0.04, 0.03),
    (0.56, 0.08, 0.04, 0.03),
    (0.64, 0.08, 0.04, 0.02),
    (0.7, 0.07, 0.03, 0.02),
)
FORM = Form(7, 4, 4)


def text(hits: list[bool]) -> RecordedText:
    """Of which the head knows some tokens: its likeliest path is right until the next that it does not know."""
    better = np.full((len(hits), len(WIDTHS), CHAINS, CHAINS), NEVER, dtype=np.int16)
    for place in range(len(hits)):
        for level in range(min(CHAINS, len(hits) - place)):
            if not hits[place + level]:
                break
            better[place, :, level:, level] = level
    return RecordedText("own", [5] * 10, [7] * len(hits), better)


def test_recorded_drafts_are_those_of_the_engine(smollm2_path: str) -> None:
    (item,) = load_suite(limit=1)[:1]
    (kept,) = record("smollm2", [item], 14, say=lambda line: None)
    assert len(kept.better) == len(kept.answer) == 14
    with LLM.load("smollm2", drafter="eagle3") as llm:
        for form in (Form(5, 5, 1), Form(15, 6, 5), Form(31, 8, 8)):
            params, budget = SamplingParams(max_tokens=14), Budget(*form)
            (seq,) = llm.driver.write([Request(tuple(kept.prompt), params, budget=budget)])
            assert seq.tokens[len(kept.prompt) :] == kept.answer
            place, whole = 0, 0
            for one in seq.rounds:
                if place + form.depth < len(kept.answer):  # later trees are cut at the end
                    assert kept.accepted(place, form) == one.accepted, (form, place)
                    whole += 1
                place += one.accepted + 1
            assert whole > 2


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    kept = text([True, False, True, True])
    save([kept], tmp_path / "drafts.npz")
    (again,) = load(tmp_path / "drafts.npz")
    assert (again.task, again.prompt, again.answer) == (kept.task, kept.prompt, kept.answer)
    assert (again.better == kept.better).all()
    assert [again.accepted(place, FORM) for place in range(4)] == [1, 0, 2, 1]
    assert again.accepted(2, Form(1, 1, 1)) == 1


def test_rounds_of_a_form_take_what_they_take() -> None:
    known = text([True] * 11)
    outcome = Simulation([known], 1, form=FORM).run([0])
    each = draft_seconds(FORM, 1) + pass_seconds(8) + host_seconds(1, True)
    dropped = draft_seconds(FORM, 1) + pass_seconds(8)
    assert (outcome.tokens, outcome.rounds, outcome.dropped) == (11, 2, 1)
    reading = (2.5 + 10 / 38) * 1e-3
    assert outcome.seconds == pytest.approx(2 * each + READ_FIRST * 1e-3 + dropped + reading)
    plain = Simulation([known], 2).run([0, 0])
    assert (plain.tokens, plain.rounds) == (22, 20)


@pytest.mark.parametrize(("batch", "least"), [(1, 31), (8, 5)])
def test_where_all_is_accepted_the_controller_takes_large_forms(batch: int, least: int) -> None:
    outcome = Simulation([text([True] * 200)], batch, controller=make_controller(RATES)).run([0] * 3 * batch)
    large = sum(count for form, count in outcome.forms.items() if form is not None and form.nodes >= least)
    assert large > 0.7 * outcome.forms.total(), outcome.forms


def test_where_nothing_is_accepted_it_decodes_plainly() -> None:
    hard = text([False] * 200)
    plain, drafted = Simulation([hard], 1), Simulation([hard], 1, controller=make_controller(RATES))
    assert drafted.run([0] * 4).rate > 0.98 * plain.run([0] * 4).rate
    assert drafted.outcome.forms[None] > 0.8 * drafted.outcome.forms.total()


def test_loops_that_begin_and_end_are_followed() -> None:
    """Larger trees where all is right, smaller ones elsewhere."""
    mixed = [i % 3 != 2 for i in range(60)]
    loops = text([*mixed, *[True] * 90, *mixed, *[True] * 90])
    controller = make_controller(RATES)
    Simulation([loops], 1, controller=controller).run([0])
    outcome = Simulation([loops], 1, controller=controller).run([0] * 3)
    for form in (Form(63, 10, 8), Form(31, 5, 8)):
        assert outcome.rate > Simulation([loops], 1, form=form).run([0] * 3).rate


def test_the_command_says_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save([text([i % 4 != 3 for i in range(40)]), text([True] * 30)], tmp_path / "drafts.npz")
    main(["simulate", str(tmp_path / "drafts.npz"), "--batches", "1,2", "--forms", "9:3:3"])
    *lines, last = capsys.readouterr().out.splitlines()
    rows = [row for one in json.loads(last)["batches"] for row in one["rows"]]
    assert len(rows) == len(lines)
    assert {"fixed 9:3:3", "best form of each text", "controller, first time"} <= {
        row["what"] for row in rows
    }
    assert all(row["x_plain"] > 0.9 for row in rows)
