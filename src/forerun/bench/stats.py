"""Ratios with their spread. A single number from a shared machine is an anecdote.

Two things vary: the machine from repeat to repeat, and what drafting gains from prompt to prompt. Ratios of
paired repeats show the first alone; a bootstrap over prompts shows the second alone; where one interval must
say how sure a speed-up is, both are drawn again: prompts, and within each prompt its repeats.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forerun.errors import InvalidInput

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure and the range it was seen in."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


class Pair(NamedTuple):
    """One of ours and one of the base's, made next to each other."""

    tokens: float
    seconds: float
    base_tokens: float
    base_seconds: float


def paired_ratio(ours: Sequence[float], base: Sequence[float]) -> Spread:
    """Median, lowest and highest of the ratios of runs that were made next to each other."""
    if len(ours) != len(base) or not ours:
        raise InvalidInput(f"{len(ours)} runs against {len(base)} cannot be paired; make as many of each")
    ratios = [mine / other for mine, other in zip(ours, base, strict=True)]
    return Spread(statistics.median(ratios), min(ratios), max(ratios))


def bootstrap_mean(values: Sequence[float], *, draws: int = 2000, seed: int = 0) -> Spread:
    """The mean over prompts and its percentile interval: how far another choice of prompts might move it."""
    if not values:
        raise InvalidInput("there is nothing to average; measure at least one prompt")
    rng = random.Random(seed)
    means = [statistics.fmean(rng.choices(values, k=len(values))) for _ in range(draws)]
    return _interval(statistics.fmean(values), means)


def bootstrap_ratio(prompts: Sequence[Sequence[Pair]], *, draws: int = 1000, seed: int = 0) -> Spread:
    """All our tokens per second by all the base's, and how far other prompts and repeats might move it."""
    if not prompts or not all(prompts):
        raise InvalidInput("there is nothing to divide; measure at least one prompt")
    rng = random.Random(seed)
    ratios = []
    for _ in range(draws):
        drawn = rng.choices(prompts, k=len(prompts))
        ratios.append(ratio_of([pair for pairs in drawn for pair in rng.choices(pairs, k=len(pairs))]))
    return _interval(ratio_of([pair for pairs in prompts for pair in pairs]), ratios)


def ratio_of(pairs: Sequence[Pair]) -> float:
    """Tokens per second of ours by those of the base, each over all pairs together."""
    tokens, seconds, base_tokens, base_seconds = map(sum, zip(*pairs, strict=True))
    return (tokens / seconds) / (base_tokens / base_seconds)


def _interval(value: float, drawn: Sequence[float]) -> Spread:
    ordered, tail = sorted(drawn), (1.0 - LEVEL) / 2.0
    low, high = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (tail, 1.0 - tail))
    return Spread(value, low, high)
