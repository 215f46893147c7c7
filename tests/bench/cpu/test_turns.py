"""Seconds to the first token of two turns: the second finds the first one's tokens in the cache, and must."""

import json

import pytest

from forerun.bench.cpu import turns
from forerun.errors import ForerunError
from forerun.llm import LLM


@pytest.mark.model
def test_both_turns_are_measured_with_and_without_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert turns.main(["--tokens", "120", "--repeats", "1"]) == 0
    *lines, document = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    found = json.loads(document)
    assert 100 < found["median"]["tokens"] < 200
    assert all(one["cached"] >= one["tokens"] // 2 for one in found["repeats"])
    assert all(one[key] > 0 for one in found["repeats"] for key in ("first", "second", "uncached"))


@pytest.mark.model
def test_negative_control_a_cache_that_finds_nothing_is_no_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = turns.first_token
    monkeypatch.setattr(turns, "first_token", lambda llm, chat, salt: ask(llm, chat, None))
    with LLM.load() as llm, pytest.raises(ForerunError, match="did not find the first"):
        turns.measure(llm, 60, 0)
