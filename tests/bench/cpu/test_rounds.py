"""Where rounds' seconds went: what is added up of a log, whole or cut short, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.bench.cpu import passes, rounds
from forerun.models.native import library as native
from tests.models.tiny_gguf import write_tiny


def run(
    contender: str, prompt: str, seconds: float, drafts: list[list[int]], task: str = "qa"
) -> dict[str, Any]:
    """A text whose rounds took a millisecond for each node of the pass, and 0.2 beside it."""
    spent = [
        {"prompt": 0.0, "draft": 1e-4, "pass": 1e-3 * (1 + nodes), "verdict": 0.0, "host": 1e-4}
        for nodes, _, _ in drafts
    ]
    decoding = sum(sum(one.values()) for one in spent)
    return {
        "batch": 1, "contender": contender, "prompt": prompt, "task": task, "repeat": 0, "seconds": seconds,
        "decode_seconds": decoding, "texts": [[1] * (len(drafts) + sum(one[2] for one in drafts))],
        "passes": spent, "drafts": [drafts],
    }  # fmt: skip


PLAIN = [[0, 0, 0]] * 4
RUNS = [
    run("plain", "a", 0.01, PLAIN),
    run("ngram", "a", 0.02, [[0, 0, 0], [2, 2, 1], [0, 0, 0]]),
    run("plain", "b", 0.01, PLAIN, "math"),
    run("ngram", "b", 0.005, PLAIN, "math"),
    run("ngram", "c", 0.005, PLAIN, "math"),  # cut short before plain wrote it
]


def test_texts_are_compared_with_plain_on_the_same_prompt() -> None:
    found = {
        task: {name: one.as_document() for name, one in each.items()}
        for task, each in rounds.add_up(RUNS).items()
    }
    assert found["qa"]["ngram"]["x_plain"] == 0.5
    assert found["math"]["ngram"]["x_plain"] == 2.0
    assert found["all"]["ngram"]["x_plain"] == 1.0, "the mean of both, by factors"
    assert found["all"]["ngram"]["x_plain_lowest"] == 0.5
    assert (found["qa"]["ngram"]["drafted"], found["qa"]["ngram"]["accepted"]) == (2, 1)


def test_passes_are_told_apart_by_their_nodes_and_by_what_came_before() -> None:
    (one,) = (each["ngram"].as_document() for task, each in rounds.add_up(RUNS).items() if task == "qa")
    behind_plain, behind_draft = (one["pass_ms"][kind] for kind in (rounds.BEHIND_PLAIN, rounds.BEHIND_DRAFT))
    assert (behind_plain["n"], behind_draft["n"], one["pass_ms"]["3"]["p50"]) == (1, 1, 3.0)
    assert one["ms_a_text"]["pass"] == 5.0
    assert one["ms_a_text"]["prompt"] == pytest.approx(20.0 - 5.6)


def test_a_log_that_was_cut_off_is_read_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(one) for one in RUNS]
    (tmp_path / "rounds.jsonl").write_text("\n".join([*lines, lines[0][:40]]))
    assert rounds.main([str(tmp_path), "--task", "math"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["all", "ngram", "1.0"]
    document = json.loads(shown[-1])
    assert document["tasks"]["math"]["ngram"]["texts"] == 2


def test_a_folder_without_a_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rounds.main([str(tmp_path)])
    assert "--out" in capsys.readouterr().err


@pytest.mark.skipif(not native.available(), reason="it says which kernels were timed")
def test_passes_are_timed_behind_each_pause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiny.gguf"
    write_tiny(file)
    words = ["--model", str(file), "--rows", "1,4", "--pauses", "0,0.1", "--repeats", "1", "--threads", "1"]
    assert passes.main(words) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {pause: set(curve) for pause, curve in document["seconds"].items()} == {
        "0.0": {"1", "4"},
        "0.1": {"1", "4"},
    }
    assert all(spent > 0.0 for curve in document["seconds"].values() for spent in curve.values())
