"""README, docs/benchmarks.md and `forerun plan` agree on what an 8B gains on one H200, and on where that pays."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.measure.plan.advice import Load, capacity, plan
from forerun.measure.plan.profile import PLAIN, Profile, built_in

ROOT = Path(__file__).parents[3]
DEFAULT = "ngram+eagle3, adaptive"
MEASURED = Load(rate=1.0, prompt=290, answer=100)  # as long as Spec-Bench's prompts and texts were


def readme_gains() -> tuple[dict[int, float], str]:
    """Times plain by sequences at once, and the commit."""
    row = next(
        line for line in read("README.md") if line.startswith("| a 135M inflated to the cost of an 8B")
    )
    gains, commit = row.split("|")[3], row.split("|")[6].strip()
    first = re.match(r" \*\*([\d.]+)x\*\*;", gains)
    assert first is not None
    more = re.findall(r"([\d.]+)x with (\d+)(?: at once|,|;)", gains)
    return {1: float(first[1]), **{int(batch): float(gain) for gain, batch in more}}, commit


def published_rates() -> dict[int, tuple[float, float]]:
    """Tokens per second by sequences at once: plain, and the default."""
    lines = read("docs/benchmarks.md")
    start = lines.index("### Batches")
    rows = [re.match(r"\| (\d+) \| \d+ \| (\d+) \| \**(\d+), ", line) for line in lines[start : start + 20]]
    return {int(row[1]): (float(row[2]), float(row[3])) for row in rows if row is not None}


def read(path: str) -> list[str]:
    return (ROOT / path).read_text(encoding="utf-8").splitlines()


def at(batch: int) -> Profile:
    """What was measured with so many at once, and nothing else."""
    profile = built_in("h200", "8b")
    return replace(profile, points=tuple(point for point in profile.points if point.batch == batch))


GAINS, COMMIT = readme_gains()


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
    assert COMMIT in source
    assert source.startswith("docs/benchmarks.md, section Batches")
