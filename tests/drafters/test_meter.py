"""What a level costs: a warm-up and a pause of the machine must not stick."""

from __future__ import annotations

import pytest

from forerun.drafters.heads.base import Meter


def test_a_slow_start_and_a_pause_count_little() -> None:
    now = [0.0]
    meter = Meter(lambda: now[0])

    def draft(seconds: float, levels: int = 1) -> float:
        meter.start()
        now[0] += seconds
        meter.stop(levels)
        return meter.seconds

    assert draft(5.0) == pytest.approx(0.5)  # the first warms up
    assert draft(2.0, levels=2) == pytest.approx(1.0)  # the second is what it takes
    assert draft(100.0) == pytest.approx(1.1)
    assert draft(0.1) == pytest.approx(0.8)  # falls are followed sooner than rises
    assert draft(9.0, levels=0) == pytest.approx(0.8)  # nothing was drafted


def test_a_pause_in_the_second_draft_does_not_stick() -> None:
    """It replaces the first; a drafter that seems ten times too slow is not used again, and so not measured again."""
    now = [0.0]
    meter = Meter(lambda: now[0])
    for seconds in (2.0, 50.0):
        meter.start()
        now[0] += seconds
        meter.stop(1)
    assert meter.seconds == pytest.approx(2.0)
