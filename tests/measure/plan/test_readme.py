"""README, its result document and `forerun plan` agree on what an 8B gains on one H200, and on where that pays."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.measure.plan.advice import PLAIN, Load, Profile, built_in, capacity, plan

ROOT = Path(__file__).parents[3]
DEFAULT = "ngram+eagle3, adaptive"
MEASURED = Load(rate=1.0, prompt=290, answer=100)  # as long as Spec-Bench's prompts and texts were


def readme_gains() -> dict[int, float]:
    """Times plain by sequences at once, as the README tells them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    told = re.search(r"With ([\d /]+) sequences at once the default decodes at ([\d. /]+) times", text)
    assert told is not None
    sizes, gains = (part.split(" / ") for part in told.groups())
    return {int(size): float(gain) for size, gain in zip(sizes, gains, strict=True)}


def document() -> dict[str, Any]:
    """The result document of the batch sweep."""
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "h200-batches-8b.json").read_text("utf-8"))
    return found


def published_rates() -> dict[int, tuple[float, float]]:
    """Tokens per second by sequences at once: plain, and the default."""
    rows = document()["tables"]["batches"]["rows"]
    return {row["batch"]: (row["plain"], row["default"]) for row in rows}


def at(batch: int) -> Profile:
    """What was measured with so many at once, and nothing else."""
    profile = built_in("h200", "8b")
    return replace(profile, points=tuple(point for point in profile.points if point.batch == batch))


GAINS = readme_gains()


def test_the_pages_are_read() -> None:
    assert list(GAINS) == list(published_rates()) == [1, 8, 32, 64, 128]


@pytest.mark.parametrize("batch", GAINS)
def test_the_plan_has_the_gains_of_the_readme_and_the_rates_of_the_measurements(batch: int) -> None:
    profile = at(batch)
    for setup, rate in zip((PLAIN, DEFAULT), published_rates()[batch], strict=True):
        assert capacity(profile, setup, MEASURED, batch) == pytest.approx(rate, rel=0.01)
    gain = capacity(profile, DEFAULT, MEASURED, batch) / capacity(profile, PLAIN, MEASURED, batch)
    assert gain == pytest.approx(GAINS[batch], abs=0.01)


@pytest.mark.parametrize("batch", GAINS)
def test_the_plan_drafts_where_the_readme_says_that_it_gains(batch: int) -> None:
    """So many at once all the time: a load that takes many replicas, which one point of the profile serves."""
    rate = 40 * published_rates()[batch][0] / MEASURED.answer
    choices = plan(at(batch), replace(MEASURED, rate=rate, first_seconds=60.0, token_seconds=1.0))
    assert (choices[0].setup == DEFAULT) == (GAINS[batch] > 1.0)


@pytest.mark.parametrize("rate", [0.1, 1.0, 20.0, 60.0, 400.0, 4000.0])
def test_an_8b_on_an_h200_is_never_told_to_decode_plainly_where_a_replica_has_room(rate: float) -> None:
    """Requests at random leave a tenth of the time free: few are at once then, and drafts gain."""
    best, *others = plan(built_in("h200", "8b"), replace(MEASURED, rate=rate))
    plain = next(choice for choice in others if choice.setup == PLAIN)
    assert best.setup == DEFAULT
    assert best.answer_seconds < 0.75 * plain.answer_seconds


def test_the_plan_names_the_measurement() -> None:
    source = built_in("h200", "8b").source
    assert document()["commit"] in source
    assert source.startswith("benchmarks/h200-batches-8b.json")


@pytest.mark.parametrize("kind", ["fp8", "int8", "w4"])
def test_quantised_weights_have_the_times_of_their_measurement(kind: str) -> None:
    """Per token that was written, without the time of prompts."""
    found = json.loads((ROOT / "benchmarks" / "h200-weights-8b.json").read_text("utf-8"))
    profile = built_in("h200", f"8b-{kind}")
    rows = [row for row in found["tables"]["weights"]["rows"] if row["weights"] == kind]
    for setup, name in ((PLAIN, "plain"), (DEFAULT, "default")):
        points = {point.batch: point for point in profile.of(setup)}
        assert list(points) == [row["batch"] for row in rows]
        for row in rows:
            parts = row[f"{name}_ms"]
            seconds = (1 - parts["prompt"] / sum(parts.values())) / row[name]
            assert points[row["batch"]].decode_seconds == pytest.approx(seconds, rel=0.001)
    assert found["commit"] in profile.source
    best, *_ = plan(profile, replace(MEASURED, rate=1.0))
    assert best.setup == DEFAULT
