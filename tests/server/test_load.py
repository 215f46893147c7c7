"""The load test against a real server, and that it notices what it is there to notice."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from forerun.bench.serve.command import main
from forerun.bench.serve.load import Target, arrivals, figures
from forerun.bench.serve.start import main as start_main
from forerun.bench.serve.start import start
from forerun.bench.serve.stream_client import Answer
from forerun.errors import InvalidInput
from tests.server.conftest import Running


def test_a_small_load(served: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--url {served.url}/v1 --requests 4 --loads 4 --max-tokens 6 --plot {tmp_path}/serve.png"
    assert main(words.split()) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["mode"] for row in document["rows"]] == ["off", "fixed", "adaptive"]
    assert (document["lost"], document["unequal"]) == (0, 0)
    assert all(row["tokens_per_second"] > 0 and row["ttft"]["p99"] > 0 for row in document["rows"])
    assert (tmp_path / "serve.png").stat().st_size > 1000


def test_what_is_lost_or_changed_is_counted() -> None:
    good = Answer(0.0, 0.5, 1.5, "text", 11, 200)
    answers = [good, Answer(0.0, problem="the stream was cut off"), Answer(0.0, 0.5, 1.5, "texd", 11, 200)]
    found = figures(answers, ["text"] * 3, 2.0, Target(1.0, 0.2))
    assert (found["lost"], found["unequal"], found["tokens_per_second"]) == (1, 1, 11.0)
    assert found["tpot"]["p50"] == 0.1
    assert figures([good], ["text"], 2.0, Target(0.1, 0.2))["good_per_second"] == 0.0


def test_arrivals_are_poisson_and_repeatable() -> None:
    times = arrivals(5.0, 4000, seed=1)
    assert times == arrivals(5.0, 4000, seed=1) != arrivals(5.0, 4000, seed=2)
    assert times == sorted(times)
    assert times[-1] / 4000 == pytest.approx(0.2, rel=0.08)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03), (
        "as exponential gaps are"
    )


def test_a_server_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9"]) == 2
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.slow
def test_a_start_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert start_main(["--starts", "1"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["starts"] == 1
    assert document["seconds"] > document["cpu_seconds"] / 4 > 0


def test_a_server_that_does_not_start_is_said() -> None:
    with pytest.raises(InvalidInput, match="did not get ready"):
        start("no-such-model")
