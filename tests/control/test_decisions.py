"""The controller decides as it did when its decisions were recorded: a change of form must not change them."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from forerun.control import adaptive, forms, lookups, overlap, per_sequence, prices
from tests.control.decisions import CASES, FILE, digest

DECISIONS = json.loads(FILE.read_text(encoding="utf-8"))


def test_every_case_is_recorded_and_no_other() -> None:
    assert CASES.keys() == DECISIONS.keys()


@pytest.mark.parametrize("case", CASES)
def test_decisions_are_the_recorded_ones(case: str) -> None:
    assert digest(CASES[case]()) == DECISIONS[case]


@pytest.mark.parametrize(
    ("module", "name", "value", "case"),
    [
        (per_sequence, "WORTH_IT", 0.15, "head, cpu, batch 1"),
        (prices, "PACE_MEMORY", 0.9, "n-gram and head, cpu, batch 3"),
        (prices, "STAKE", 0.1, "look-ups alone, recorded"),
        (prices, "MOST_SAVED", 0.0, "drafters in turn"),
        (overlap, "BETTER_THAN_HEAD", 1.0, "drafters in one batch"),
        (forms, "ROUNDS_BETWEEN_TRIALS", 32, "menu, steep, batch 8, gap 0.2"),
        (forms, "WAITING_TOKEN_WORTH", 0.0, "waiting, 8 clients"),
        (forms, "BURST", 1000, "waiting, 24 clients"),
        (overlap, "LEAST_GAIN_ON_HEAD", 0.0, "menu and look-ups, recorded"),
        (overlap, "LEAST_PROMISED", 2.0, "look-ups alone, recorded"),
        (lookups, "SAMPLED_SEQUENCES", 1, "look-ups, batch 32"),
        (adaptive, "REPEATS", 16, "drafters in turn"),
    ],
)
def test_the_records_tell_a_controller_that_decides_otherwise(
    module: ModuleType, name: str, value: float, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(module, name) != value
    monkeypatch.setattr(module, name, value)
    assert digest(CASES[case]()) != DECISIONS[case]
