"""Ratios with a 95% interval: how far other prompts of the same kind, and other repeats, would move a speed-up.

What drafting gains varies from prompt to prompt, and the machine from repeat to repeat. Both show in how the ratio
changes when one prompt, with all its repeats, is left out: the jackknife over prompts, on the logarithm of the ratio.
With few prompts that estimate is itself uncertain, so Student's t with one degree less than there are prompts sets the
width; a percentile bootstrap over two prompts would hold the truth half of the time. One prompt gives no interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from forerun.core.errors import InvalidInput

# by degrees of freedom, two-sided 95%
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_Z = 1.959964
_One = TypeVar("_One")


@dataclass(frozen=True, slots=True)
class Spread:
    """A ratio and its 95% interval; None where there was one prompt only."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} ({_end(self.low)}-{_end(self.high)})"

    @property
    def interval(self) -> str:
        return "" if self.low is None or self.high is None else f"{_end(self.low)} to {_end(self.high)}"

    @property
    def is_clear(self) -> bool:
        """Is 1 outside the interval? Without an interval nothing is clear."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high


def _end(value: float) -> str:
    """An end of an interval; two prompts that disagree give one too large to print in full."""
    if value < 0.01:
        return "<0.01"
    return f"{value:.2f}" if value < 100 else ">100"


class Pair(NamedTuple):
    """One of ours and one of the base's, made next to each other."""

    tokens: float
    seconds: float
    base_tokens: float
    base_seconds: float


def mean_interval(values: Sequence[float]) -> Spread:
    """The geometric mean of the ratios of several prompts, every prompt counting alike."""
    if not values:
        raise InvalidInput("there is nothing to average; measure at least one prompt")
    return _jackknife(values, statistics.geometric_mean)


def ratio_interval(prompts: Sequence[Sequence[Pair]]) -> Spread:
    """All our tokens per second by all the base's; each prompt comes with the pairs of its repeats."""
    if not prompts or not all(prompts):
        raise InvalidInput("there is nothing to divide; measure at least one prompt")
    return _jackknife(prompts, lambda some: ratio_of([pair for pairs in some for pair in pairs]))


def ratio_of(pairs: Sequence[Pair]) -> float:
    """Tokens per second of ours by those of the base, each over all pairs together."""
    tokens, seconds, base_tokens, base_seconds = map(sum, zip(*pairs, strict=True))
    return (tokens / seconds) / (base_tokens / base_seconds)


def t_quantile(degrees: int) -> float:
    """Student's t that 95% of draws stay within, on both sides; beyond ten degrees by its expansion."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    first = (_Z**3 + _Z) / 4
    second = (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    return _Z + first / degrees + second / degrees**2


def _jackknife(items: Sequence[_One], ratio: Callable[[Sequence[_One]], float]) -> Spread:
    count = len(items)
    left_out = [ratio([*items[:i], *items[i + 1 :]]) for i in range(count)] if count > 1 else []
    return jackknife(ratio(items), left_out)


def jackknife(value: float, left_out: Sequence[float]) -> Spread:
    """A ratio with its interval, from the ratios that leave one item out each; none of fewer than two items."""
    count = len(left_out)
    if count < 2:
        return Spread(value)
    logs = [math.log(one) for one in left_out]
    middle = statistics.fmean(logs)
    error = math.sqrt((count - 1) / count * sum((one - middle) ** 2 for one in logs))
    width = math.exp(t_quantile(count - 1) * error)
    return Spread(value, value / width, value * width)
