"""Tokens per round of drafters in folders: every shape and temperature asked for, by task and in all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forerun.bench.acceptance import main
from forerun.drafters.medusa import HeadsConfig, write_heads
from tests.bench.conftest import CONFIG, VOCAB


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    """Two Medusa heads that say what the target says: nothing was learnt."""
    width = int(str(CONFIG["hidden_size"]))
    weights = {
        f"{i}.0.linear.{name}": torch.zeros(width, width) if name == "weight" else torch.zeros(width)
        for i in range(2)
        for name in ("weight", "bias")
    }
    write_heads(tmp_path / "heads", HeadsConfig("medusa", 2, 1, width, VOCAB, target="tiny"), weights)
    return tmp_path / "heads"


def test_every_shape_and_temperature_is_measured(
    heads: Path, tiny_checkpoint: None, suite: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--target", "tiny", "--drafters", str(heads), "--suite", suite, "--max-tokens", "12"]
    main([*given, "--device", "cpu"])
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["temperature"], row["shape"]) for row in said[:-1]] == [
        (0.0, "chain of 5"), (0.0, "tree of 60"), (1.0, "chain of 5"), (1.0, "tree of 60"),
    ]  # fmt: skip
    assert all({"qa", "all"} <= row.keys() and 1.0 <= row["all"] <= 3.0 for row in said[:-1])
    assert said[0]["all"] <= said[1]["all"], "a tree holds the chain"
    assert said[-1]["rows"] == said[:-1]
    main([*given, "--device", "cpu", "--only", "chain", "--chosen", "--temperatures", "1"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["shape"], row["chosen"]) for row in rows] == [("chain of 5", True)]


def test_typical_acceptance_stands_beside_the_exact_figures_and_says_what_it_is(
    heads: Path, tiny_checkpoint: None, suite: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--target", "tiny", "--drafters", str(heads), "--suite", suite, "--max-tokens", "24"]
    main([*given, "--device", "cpu", "--only", "chain", "--verifiers", "exact", "typical"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    found = [(row["temperature"], row["verifier"], row["exact"]) for row in rows]
    assert found == [(0.0, "exact", True), (1.0, "exact", True), (1.0, "typical", False)]
