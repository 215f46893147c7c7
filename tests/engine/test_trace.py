"""The trace file: valid JSON of the trace event format; parts lie within their round, one by one, and fill it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.build.engine import make_engine
from forerun.core.errors import InvalidInput
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.engine.stats import PARTS, TRACKS, traced
from forerun.testing import TableLM


@pytest.fixture
def events(tmp_path: Path) -> list[dict[str, Any]]:
    engine = make_engine(TableLM(16), frozenset(), SpeculativeConfig("ngram"), EngineConfig(max_batch=2))
    file = tmp_path / "trace.json"
    with traced(engine.stats, file):
        for length in (4, 9, 14):
            engine.submit(Request((1, 2, 3) * length, SamplingParams(max_tokens=10, ignore_eos=True)))
        while engine.busy:
            engine.step()
    assert engine.stats.trace is None
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


def test_it_has_the_fields_that_viewers_read(events: list[dict[str, Any]]) -> None:
    named = {one["args"]["name"]: one["tid"] for one in events if one["ph"] == "M"}
    assert named == TRACKS
    spans = [one for one in events if one["ph"] == "X"]
    assert len(spans) + len(named) == len(events)
    for one in spans:
        assert set(one) == {"name", "ph", "pid", "tid", "ts", "dur", "args"}
        assert one["ts"] >= 0.0
        assert one["dur"] >= 0.0
        assert one["tid"] in TRACKS.values()


def test_parts_lie_in_their_round_and_fill_it(events: list[dict[str, Any]]) -> None:
    rounds = [one for one in events if one["tid"] == TRACKS["rounds"] and one["ph"] == "X"]
    assert len(rounds) > 5
    for number, whole in enumerate(rounds, start=1):
        parts = [one for one in events if one["ph"] == "X" and one["args"].get("round") == number]
        assert {"draft", "pass", "verdict", "host"} <= {one["name"] for one in parts} <= set(PARTS)
        assert sum(one["dur"] for one in parts) == pytest.approx(whole["dur"], abs=0.01)
        at = whole["ts"]
        for one in parts:
            assert one["ts"] == pytest.approx(at, abs=0.01), "one behind the other"
            at = one["ts"] + one["dur"]
        assert at == pytest.approx(whole["ts"] + whole["dur"], abs=0.01)
    ends = [one["ts"] + one["dur"] for one in rounds]
    assert all(end <= after["ts"] + 0.01 for end, after in zip(ends, rounds[1:], strict=False))


def test_rounds_say_what_they_did(events: list[dict[str, Any]]) -> None:
    rounds = [one["args"] for one in events if one["tid"] == TRACKS["rounds"] and one["ph"] == "X"]
    assert {one["batch"] for one in rounds} == {1, 2}
    assert sum(one["tokens"] for one in rounds) == 30
    assert sum(one["accepted"] for one in rounds) > 0
    assert all(one["nodes"] >= one["most_nodes"] >= one["depth"] for one in rounds)
    prompts = [one for one in events if one["name"] == "prompts"]
    read = sum(one["args"]["prompt_rows"] for one in prompts) + sum(one["prompt_rows"] for one in rounds)
    assert read == 3 * (4 + 9 + 14) - 3


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    engine = make_engine(TableLM(16), frozenset(), SpeculativeConfig("none"), EngineConfig())
    with pytest.raises(InvalidInput, match="choose another file"), traced(engine.stats, tmp_path):
        pass
