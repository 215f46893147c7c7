"""Texts that are recorded are the model's; replays count what drafts bring and cost; costs are timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.bench.lookups import replay
from forerun.bench.lookups.__main__ import DRAFTERS, main
from forerun.bench.lookups.record import RecordedText, Recording, load, record, save
from forerun.bench.suites import load_suite
from forerun.control.cost import CostModel
from forerun.drafters.suffix.drafter import SuffixDrafter
from forerun.llm import LLM
from forerun.models.load.opening import tokens_before_an_answer
from forerun.params import SamplingParams
from forerun.types import Needs, Request

COPIED = [*range(100, 160)]
FLAT = CostModel({1: 4e-3, 64: 4.4e-3})


def recording() -> Recording:
    """A text that copies its prompt, one in which nothing came before, and one that the table knows."""
    rows = {token: [(0.9, token + 1), (0.05, token + 2)] for token in range(1000, 1100)}
    texts = [
        RecordedText("copies", COPIED, COPIED * 2),
        RecordedText("new", [*range(200, 230)], [*range(300, 400)]),
        RecordedText("known", [*range(400, 430)], [*range(1000, 1090)]),
    ]
    return Recording("made up", texts, rows)


def test_what_is_recorded_is_the_models_own(smollm2_path: str, tmp_path: Path) -> None:
    (item,) = load_suite(limit=1)[:1]
    made = record("smollm2", [item], 12, say=lambda line: None)
    (text,) = made.texts
    token = text.answer[3]
    with LLM.load("smollm2", drafter="none") as llm:
        opening = tokens_before_an_answer(llm.tokenizer)
        asked = (tuple(text.prompt), 12), ((*opening, token), 1)
        written = llm.driver.write([Request(ids, SamplingParams(max_tokens=most)) for ids, most in asked])
    assert written[0].tokens[len(text.prompt) :] == text.answer
    assert made.rows[token][0][1] == written[1].tokens[-1], "the likeliest successor is what it would write"
    assert set(text.answer) | set(text.prompt) <= made.rows.keys()
    save(made, tmp_path / "texts.json")
    again = load(tmp_path / "texts.json")
    assert again == made
    table = again.successors()
    assert table is not None
    assert [one for _, one in table.after(token)] == [one for _, one in made.rows[token]]
    assert not any(share for share, _ in table.after(next(t for t in range(9999) if t not in made.rows)))


@pytest.mark.parametrize("in_a_row", [False, True])
def test_a_gpu_gains_where_something_is_copied_or_known(in_a_row: bool) -> None:
    ngram, suffix = (replay.replay_gpu(recording(), name, FLAT, in_a_row=in_a_row) for name in DRAFTERS)
    assert ngram["copies"].times_plain > 3.0
    assert suffix["copies"].times_plain > 3.0
    assert ngram["new"] == pytest.approx((1.0, 1.0), abs=0.01)
    assert suffix["new"].times_plain > 0.97
    assert ngram["known"].tokens_per_round == pytest.approx(1.0), "nothing came before"
    assert suffix["known"].tokens_per_round > 3.0
    assert set(suffix) == {"copies", "new", "known", "all"}


def test_what_a_draft_takes_the_host_counts() -> None:
    quick, slow = (
        replay.replay_gpu(recording(), "suffix", FLAT, in_a_row=False, draft=draft)["copies"].times_plain
        for draft in (replay.DRAFT, 2e-3)
    )
    assert slow < 0.9 * quick


def test_successors_are_of_the_first_tokens_alone() -> None:
    """The text that the table knows has the tokens 1,000 to 1,089."""
    whole, half, none = (
        replay.replay_gpu(recording(), "suffix", FLAT, in_a_row=True, table=table)["known"].tokens_per_round
        for table in (1100, 1045, 0)
    )
    assert whole > half > none
    assert none == pytest.approx(1.0)


def test_a_cpu_has_no_table() -> None:
    found = replay.replay_cpu(recording(), "suffix", replay.CPUS["x86"], in_a_row=True)
    assert found["copies"].times_plain > 1.5
    assert found["known"].tokens_per_round == pytest.approx(1.0)
    assert found["known"].times_plain == pytest.approx(1.0, abs=0.02)


def test_on_a_cpu_plain_passes_run_on_under_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a drafter that does not say which matches it wants has every pass asked for by itself."""
    for name in DRAFTERS:
        new = replay.replay_cpu(recording(), name, replay.CPUS["x86"], in_a_row=False)["new"]
        assert new.times_plain == pytest.approx(1.0, abs=0.01), name
    monkeypatch.setattr(SuffixDrafter, "needs", Needs())
    alone = replay.replay_cpu(recording(), "suffix", replay.CPUS["x86"], in_a_row=False)["new"]
    assert alone.times_plain < 0.985


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(recording(), tmp_path / "texts.json")
    main(["replay", str(tmp_path / "texts.json"), "--worlds", "8B on a GPU,arm CPU"])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["world"], row["order"], row["drafter"]) for row in said["rows"][:3]] == [
        ("8B on a GPU", "first", "ngram"),
        ("8B on a GPU", "first", "suffix"),
        ("8B on a GPU", "in a row", "ngram"),
    ]
    main(["replay", str(tmp_path / "texts.json"), "--worlds", "8B on a GPU", "--head"])
    beside = json.loads(capsys.readouterr().out.splitlines()[-1])
    alone, both = (one["rows"][0]["times_plain, tokens_per_round"]["new"][0] for one in (said, beside))
    assert both > 1.5 > alone, "a head drafts where nothing came before"
    main(["replay", str(tmp_path / "texts.json"), "--passes-ms", "4.1,1", "--table", "0"])
    other = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["world"] for row in other] == ["4.1 ms on a GPU"] * 4 + ["1 ms on a GPU"] * 4
    assert other[0] == said["rows"][0] | {"world": "4.1 ms on a GPU"}, "as at 8B"
    assert other[1] != said["rows"][1] | {"world": "4.1 ms on a GPU"}, "without the table"
    main(["cost", str(tmp_path / "texts.json")])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["drafter"], row["kind"]) for row in rows] == [
        (name, kind) for name in DRAFTERS for kind in ("chain", "tree")
    ]
    assert all(row["offer"] > 0.0 for row in rows)
