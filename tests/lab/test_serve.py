"""The load test against a real server, and that it notices what it is there to notice."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import httpx
import pytest
import torch

from forerun import LLM
from lab.runner import main
from lab.serve.command import running
from lab.serve.load import Target, arrivals, figures, over_off
from lab.serve.stream_client import Answer
from tests.server.conftest import Running


@pytest.mark.slow
def test_a_small_load(served: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--url {served.url}/v1 --requests 4 --loads 4 --max-tokens 6 --plot {tmp_path}/serve.png"
    assert main(["serve", *words.split()]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["mode"] for row in document["rows"]] == ["off", "fixed", "adaptive"]
    assert (document["lost"], document["unequal"]) == (0, 0)
    assert all(row["tokens_per_second"] > 0 and row["ttft"]["p99"] > 0 for row in document["rows"])
    assert (tmp_path / "serve.png").stat().st_size > 1000


@pytest.mark.slow
def test_clients_that_ask_again(served: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    suite = tmp_path / "short.jsonl"  # 80 prompts are read
    asked = ("Say yes.", "Count to three.", "Name a tree.")
    suite.write_text("".join(json.dumps({"id": one, "task": "short", "turns": [one]}) + "\n" for one in asked))
    words = f"--url {served.url} --requests 3 --loads= --clients 1,4 --modes off,adaptive --repeats 2 --max-tokens 2"
    more = f"--per-client 3 --suite {suite} --plot {tmp_path}/serve.png"
    assert main(["serve", *words.split(), *more.split()]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = [(row["repeat"], row["clients"], row["mode"], row["requests"]) for row in document["rows"]]
    assert rows == [
        (0, 1, "off", 8), (0, 1, "adaptive", 8), (0, 4, "off", 12), (0, 4, "adaptive", 12),
        (1, 1, "adaptive", 8), (1, 1, "off", 8), (1, 4, "adaptive", 12), (1, 4, "off", 12),
    ]  # fmt: skip
    assert [(row["clients"], row["mode"]) for row in document["over_off"]] == [(1, "adaptive"), (4, "adaptive")]
    assert (document["lost"], document["unequal"]) == (0, 0)


def test_ratios_are_of_medians() -> None:
    rows = [
        {"load": 1.0, "clients": None, "mode": mode, "tokens_per_second": speed}
        for mode, speed in (("off", 10.0), ("off", 20.0), ("off", 12.0), ("adaptive", 6.0), ("adaptive", 6.0))
    ]
    assert over_off(rows) == [{"load": 1.0, "clients": None, "mode": "adaptive", "ratio": 0.5}]
    assert over_off(rows[3:]) == []


@pytest.mark.slow
def test_an_unknown_mode_is_said(served: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--url", served.url, "--modes", "of"]) == 2
    assert "unknown mode 'of'" in capsys.readouterr().err


LITTLE = """
import sys
from forerun.control import cost
from lab.inflate.model import PRESETS, Shape
from lab.runner import main
cost.QUICK = 1, 4  # it is not the time of passes that counts here
PRESETS["little"] = Shape(640, 31, 9, 3, 64, 1600)
# the shape is known in this process
words = "serve-inflated --shape little --device cpu --max-num-seqs 2 --port 0 --front thread"
sys.exit(main(words.split()))
"""


@pytest.mark.slow
def test_a_server_at_the_cost_of_a_larger_shape(llm: LLM) -> None:
    """Its texts are the small model's, drafted by the small model's head at the larger shape."""
    body = {"messages": [{"role": "user", "content": "Count to five."}], "max_tokens": 8, "temperature": 0}
    texts = []
    with running(["-c", LITTLE]) as url:
        for speculative in ("off", {"drafter": "eagle3", "budget": 4}):
            asked = {**body, "speculative": speculative}
            answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=100).json()
            texts.append(answer["choices"][0]["message"]["content"])
            accepted = answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
            assert (accepted > 0) == (speculative != "off")
    assert texts[0] == texts[1] == llm.chat("Count to five.", max_tokens=8, drafter="none").text


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_larger_shape_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve-inflated", "--port", "0"]) == 2
    assert "needs a GPU" in capsys.readouterr().err


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
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03), "as exponential gaps are"


def test_a_server_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--url", "http://127.0.0.1:9"]) == 2
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.slow
def test_it_starts_a_server_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = "serve --requests 1 --loads= --clients 1 --per-client 1 --modes off --max-tokens 2"
    assert main([*words.split(), "--serve-args", "--max-num-seqs 2"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["model"], len(document["rows"])) == ("smollm2", 1)
    assert document["command"].startswith("python -m lab serve --requests 1")
