"""The check of the planner: how it compares, and how it knows that others slow a process down."""

from __future__ import annotations

import os
import time

import pytest

from forerun.measure.plan.advice import Ask, simulate
from forerun.measure.plan.measure import Contention
from forerun.measure.plan.profile import PLAIN, Point, Profile
from lab.serve.load import arrivals
from lab.serve.plan_check import forecast

PROFILE = Profile("m", "x", "made up", (Point(PLAIN, 1, 0.01, 1e-4, 1.0, 0.0, 100.0),))


def test_the_forecast_is_of_the_same_requests_at_the_same_times() -> None:
    lengths, tokens = [100, 50, 20], [10, 20, 30]
    asks = [Ask(*each) for each in zip(arrivals(2.0, 3, 7), lengths, tokens, strict=True)]
    known = simulate(PROFILE, PLAIN, asks, 8, slower=2.0).tokens_per_second
    row = {"rate": 2.0, "tokens": tokens, "measured": known / 1.1, "slowdown": 2.0}
    found = forecast(PROFILE, row, PLAIN, lengths, seed=7)
    assert found["forecast"] == pytest.approx(known, abs=0.01)
    assert found["off"] == pytest.approx(0.1, abs=0.001)
    other = forecast(PROFILE, {**row, "slowdown": 4.0}, PLAIN, lengths, seed=7)
    assert other["forecast"] < found["forecast"]


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="only Linux tells it")
def test_a_process_that_works_is_at_least_as_slow_as_one_with_the_cores_to_itself() -> None:
    contention = Contention()
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    assert contention.slowdown() >= 1.0


def test_where_nothing_is_told_nothing_is_assumed() -> None:
    assert Contention(pid=2**31 - 1).slowdown() == 1.0
