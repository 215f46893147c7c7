"""Ratios with their spread. A single number from a shared machine is an anecdote.

Two things vary: the machine from repeat to repeat, and what drafting gains from prompt to prompt. The first
is shown by the ratios of paired repeats, the second by a bootstrap over prompts; they are never mixed.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure and the range it was seen in."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


def paired_ratio(ours: Sequence[float], base: Sequence[float]) -> Spread:
    """Median, lowest and highest of the ratios of runs that were made next to each other."""
    if len(ours) != len(base) or not ours:
        raise InvalidInput(f"{len(ours)} runs against {len(base)} cannot be paired; make as many of each")
    ratios = [mine / other for mine, other in zip(ours, base, strict=True)]
    return Spread(statistics.median(ratios), min(ratios), max(ratios))


def bootstrap_mean(
    values: Sequence[float], *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> Spread:
    """The mean over prompts and its percentile interval: how far another choice of prompts might move it."""
    if not values:
        raise InvalidInput("there is nothing to average; measure at least one prompt")
    rng = random.Random(seed)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(draws))
    tail = (1.0 - level) / 2.0
    low, high = (means[min(draws - 1, int(share * draws))] for share in (tail, 1.0 - tail))
    return Spread(statistics.fmean(values), low, high)
