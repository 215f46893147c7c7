"""Whole runs come to at least what they came to with the controller that scenarios.json was recorded with.

All scenarios: python -m tests.control.scenarios prints them; here are those that take a moment.
"""

from __future__ import annotations

import json

import pytest

from tests.control.scenarios import FILE, SCENARIOS, over_seeds

QUICK = [
    "CPU head",
    "CPU draft model",
    "CPU hybrid",
    "CPU n-gram, x86",
    "n-gram, 8 sequences",
    "head alone, hard texts",
]
LEAST = 0.98  # of the recorded speed, and of that of the slowest requests: test_promise.py takes them from the record


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", QUICK)
def test_a_scenario_is_as_fast_as_it_was(name: str) -> None:
    recorded, found = json.loads(FILE.read_text(encoding="utf-8"))[name], over_seeds(name)
    assert {"speed", "worst"} <= recorded.keys() == found.keys()
    for key in recorded.keys() & {"speed", "worst", "worst_20"}:
        assert found[key] >= LEAST * recorded[key], key


def test_every_scenario_is_recorded() -> None:
    assert json.loads(FILE.read_text(encoding="utf-8")).keys() == SCENARIOS.keys()
