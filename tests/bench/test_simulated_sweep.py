"""The simulated sweep writes what was recorded, counts its rounds, and tells drafts that pay from those that do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forerun.bench.forms.record import CHAINS, NEVER, WIDTHS, RecordedText, save
from forerun.bench.simulated_sweep import BOTH, HEAD, OTHER, STOP, ended, main, run


def texts(count: int, right: bool, length: int = 40) -> list[RecordedText]:
    """Tokens that no look-up finds; the head knows all of them, or none."""
    better = np.full((length, len(WIDTHS), CHAINS, CHAINS), NEVER, dtype=np.int16)
    for level in range(CHAINS if right else 0):
        better[: length - level, :, level:, level] = level
    ids = [[100 + i * 500 + j for j in range(length + 60)] for i in range(count)]
    return [RecordedText("own", one[:60], one[60:], better) for one in ids]


@pytest.mark.parametrize("batch", [1, 4])
def test_drafts_pay_where_they_are_right_and_only_there(batch: int) -> None:
    for right in (True, False):
        plain, head, both = run(texts(6, right), [batch], [HEAD, BOTH], seed=1)
        assert set(plain["kinds"]) == {"plain"}
        assert plain["x_plain"] == 1.0
        for row in (head, both):
            assert sum(row["kinds"].values()) > 0
            assert row["x_plain"] > 1.5 if right else 0.95 < row["x_plain"] < 1.01
            assert row["tokens_per_round"] > 2.0 if right else row["tokens_per_round"] == 1.0


def test_a_form_that_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(texts(6, True), tmp_path / "kept.npz")
    main([str(tmp_path / "kept.npz"), "--batches", "4", "--setups", "3:3:1", "--seeds", "2", "--same-texts"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("batch   4  3:3:1:")
    assert "read first; 3:3 " in lines[1]
    rows = json.loads(lines[-1])["rows"]
    assert [row["seed"] for row in rows] == [0, 0, 1, 1]
    assert rows[0]["tokens_per_s"] != rows[2]["tokens_per_s"]  # noise
    assert rows[1]["kinds"] == rows[3]["kinds"]  # and the same texts


def test_other_texts_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.bench.simulated_sweep.RecordedGPU._word", lambda self, seq, depth: 9)
    with pytest.raises(RuntimeError, match="other texts"):
        run(texts(6, False), [1], [HEAD], seed=1)


def test_texts_that_ended_early_say_so() -> None:
    long, short = texts(2, True)
    short = replace(short, answer=[STOP, *short.answer[1:12]])
    first, second = ended([long, short])
    assert first.answer == long.answer
    assert second.answer == [OTHER, *short.answer[1:11], STOP]
