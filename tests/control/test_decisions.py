"""The controller decides as it did when its decisions were recorded: a change of form must not change them."""

from __future__ import annotations

import json

import pytest

from forerun.control import per_sequence
from tests.control.decisions import COSTS, FILE, MAKES, decide_all, decided, digest


def test_decisions_are_the_recorded_ones() -> None:
    recorded, found = json.loads(FILE.read_text(encoding="utf-8")), decide_all()
    assert found.keys() == recorded.keys()
    assert [name for name in found if found[name] != recorded[name]] == []


def test_the_records_tell_a_controller_that_decides_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = json.loads(FILE.read_text(encoding="utf-8"))
    monkeypatch.setattr(per_sequence, "WORTH_IT", per_sequence.WORTH_IT + 0.1)
    assert digest(decided(COSTS["cpu"], MAKES["head"], 1)) != recorded["head, cpu, batch 1"]
