"""The host's part of rounds on a GPU's path is measured over the real engine: passes do nothing, rounds follow."""

from __future__ import annotations

import pytest

from forerun.bench.gpu.host_rounds import Told, make, measure, write


@pytest.mark.parametrize("mode", ["plain", "chain"])
def test_every_token_is_counted(mode: str) -> None:
    row = measure(mode, 3, 5, tokens=9)
    assert row["tokens"] == 5 * 9
    assert 9 <= row["rounds"] <= 27 if mode == "plain" else row["rounds"] < 20
    assert row["calls_per_token"] > 1


def test_a_head_that_drafts_nothing_lets_rounds_follow() -> None:
    engine = make("idle", 3)
    write(engine, 3, 30)
    told = engine.controller
    assert isinstance(told, Told)
    assert told.followed > told.read_first
    assert engine.target.used_slots == 0
