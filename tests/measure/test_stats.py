"""Ratios and intervals on numbers whose answers are known, and how often an interval holds the truth."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from forerun.core.errors import InvalidInput
from forerun.measure.bench.figures import Pair, Spread, mean_interval, ratio_interval, ratio_of, t_quantile

TRUTH = 1.2
Interval = Callable[[Sequence[Sequence[Pair]]], Spread]


def test_one_prompt_gives_no_interval_however_often_it_was_repeated() -> None:
    shaky = [[Pair(10, 1.0, 10, 2.0), Pair(10, 2.0, 10, 2.0), Pair(10, 0.5, 10, 2.0)]]
    found = ratio_interval(shaky)
    assert (found.low, found.high) == (None, None)
    assert found.value == pytest.approx((30 / 3.5) / (30 / 6.0))
    assert str(found) == "1.71"
    assert mean_interval([2.0]) == Spread(pytest.approx(2.0))


def test_a_ratio_weighs_prompts_by_their_length() -> None:
    unequal = [[Pair(10, 1.0, 10, 1.0)], [Pair(90, 3.0, 90, 9.0)]]
    assert ratio_interval(unequal).value == pytest.approx((100 / 4) / (100 / 10))
    assert mean_interval([1.0, 3.0]).value == pytest.approx(math.sqrt(3.0))


def test_no_spread_where_every_prompt_says_the_same() -> None:
    same = [[Pair(10, 1.0, 10, 2.0)] * 2, [Pair(40, 4.0, 40, 8.0)] * 2]
    found = ratio_interval(same)
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    assert str(found) == "2.00 (2.00-2.00)"


def test_an_interval_that_says_nothing_is_not_printed_to_the_hundredth() -> None:
    assert str(Spread(0.43, 0.00013, 1428.57)) == "0.43 (<0.01->100)"
    assert Spread(0.43, 0.00013, 1428.57).interval == "<0.01 to >100"
    assert (Spread(1.5, 1.25, 2.0).interval, Spread(1.5).interval) == ("1.25 to 2.00", "")


def test_two_prompts_give_students_interval_by_hand() -> None:
    # logarithms 0 and 0.2: mean 0.1, standard error 0.1, t of one degree 12.706
    found = mean_interval([1.0, math.exp(0.2)])
    assert found.value == pytest.approx(math.exp(0.1))
    assert found.low == pytest.approx(math.exp(0.1 - 1.2706))
    assert found.high == pytest.approx(math.exp(0.1 + 1.2706))


def test_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput, match="nothing to average"):
        mean_interval([])
    for nothing in ([], [[]]):
        with pytest.raises(InvalidInput, match="nothing to divide"):
            ratio_interval(nothing)


@pytest.mark.parametrize(
    ("spread", "clear"),
    [
        (Spread(1.1, 1.02, 1.2), True),
        (Spread(0.9, 0.8, 0.99), True),
        (Spread(1.1, 0.99, 1.3), False),
        (Spread(1.1, 1.0, 1.3), False),
        (Spread(3.0), False),
    ],
)
def test_a_gain_is_clear_where_the_interval_leaves_1_out(spread: Spread, clear: bool) -> None:
    assert spread.is_clear is clear


def test_quantiles_are_students() -> None:
    stats = pytest.importorskip("scipy.stats")
    for degrees in (*range(1, 16), 23, 60, 479):
        assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-3), degrees


def measured(rng: random.Random, prompts: int, repeats: int = 2) -> list[list[Pair]]:
    """Prompts whose gains differ, repeats that the machine disturbs; the ratio of all of them is TRUTH."""
    found = []
    for _ in range(prompts):
        tokens = rng.randint(30, 64)
        gain = TRUTH * math.exp(rng.gauss(0.0, 0.15) + 0.15**2 / 2)  # so that seconds are right on average
        noise = [math.exp(rng.gauss(0.0, 0.05) - 0.05**2 / 2) for _ in range(repeats)]
        found.append([Pair(tokens, tokens / gain * one, tokens, float(tokens)) for one in noise])
    return found


def coverage(interval: Interval, prompts: int, trials: int = 400) -> float:
    """How often the interval of measured prompts holds the truth."""
    rng, held = random.Random(prompts), 0
    for _ in range(trials):
        found = interval(measured(rng, prompts))
        assert found.low is not None
        assert found.high is not None
        held += found.low <= TRUTH <= found.high
    return held / trials


def spread_of_repeats(prompts: Sequence[Sequence[Pair]]) -> Spread:
    """What was printed as an interval before: the lowest and the highest of the repeats."""
    ratios = [ratio_of(pairs) for pairs in zip(*prompts, strict=True)]
    return Spread(ratio_of([pair for pairs in prompts for pair in pairs]), min(ratios), max(ratios))


def percentile_bootstrap(prompts: Sequence[Sequence[Pair]]) -> Spread:
    """The usual bootstrap over prompts, which knows nothing beyond the prompts it has."""
    rng = random.Random(0)
    drawn = sorted(
        ratio_of([pair for pairs in rng.choices(prompts, k=len(prompts)) for pair in pairs]) for _ in range(60)
    )
    return Spread(1.0, drawn[1], drawn[-2])


@pytest.mark.parametrize("prompts", [2, 3, 12, 24])
def test_a_95_percent_interval_holds_the_truth_19_times_in_20(prompts: int) -> None:
    assert 0.92 <= coverage(ratio_interval, prompts) <= 0.98


def test_what_was_printed_before_did_not() -> None:
    assert coverage(spread_of_repeats, 12) < 0.5
    assert coverage(percentile_bootstrap, 2) < 0.75


def test_more_prompts_narrow_the_interval() -> None:
    rng = random.Random(1)
    few, many = (ratio_interval(measured(rng, count)) for count in (8, 200))
    assert few.low is not None
    assert few.high is not None
    assert many.low is not None
    assert many.high is not None
    assert many.high - many.low < 0.5 * (few.high - few.low)
    # deviation 0.15 from prompt to prompt: the interval is about 2 * 1.97 * 0.15 / sqrt(200) wide
    assert math.log(many.high / many.low) == pytest.approx(2 * 1.97 * 0.15 / math.sqrt(200), rel=0.3)
