"""Whole runs come to at least what they came to with the controller that scenarios.json was recorded with.

All scenarios: python -m tests.control.scenarios prints them; here are those that take a moment.
"""

from __future__ import annotations

import json

import pytest

from tests.control.scenarios import FILE, SCENARIOS, over_seeds

QUICK = ["CPU head", "CPU draft model", "CPU hybrid", "CPU n-gram, x86", "n-gram, 8 sequences"]
LEAST = 0.98  # of the recorded speed


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", QUICK)
def test_a_scenario_is_as_fast_as_it_was(name: str) -> None:
    recorded = json.loads(FILE.read_text(encoding="utf-8"))
    assert over_seeds(name)["speed"] >= LEAST * recorded[name]["speed"]


def test_every_scenario_is_recorded() -> None:
    assert json.loads(FILE.read_text(encoding="utf-8")).keys() == SCENARIOS.keys()
