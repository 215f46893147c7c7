"""Ratios and intervals on numbers whose answers are known."""

from __future__ import annotations

import random

import pytest

from forerun.bench.stats import Pair, Spread, bootstrap_mean, bootstrap_ratio, paired_ratio
from forerun.errors import InvalidInput


def test_runs_are_divided_in_pairs_and_not_in_sum() -> None:
    # the machine slows down tenfold: the pairs agree on 2, sums or medians of the two lists would not
    assert paired_ratio([2.0, 20.0, 200.0], [1.0, 10.0, 100.0]) == Spread(2.0, 2.0, 2.0)
    assert paired_ratio([1.0, 3.0, 8.0], [1.0, 1.0, 2.0]) == Spread(3.0, 1.0, 4.0)


def test_unpaired_runs_are_refused() -> None:
    with pytest.raises(InvalidInput, match="1 runs against 2"):
        paired_ratio([1.0], [1.0, 2.0])
    with pytest.raises(InvalidInput, match="cannot be paired"):
        paired_ratio([], [])


def test_bootstrap_interval_holds_the_mean_and_narrows_with_more_prompts() -> None:
    rng = random.Random(1)
    few = [rng.gauss(1.5, 0.3) for _ in range(8)]
    many = [rng.gauss(1.5, 0.3) for _ in range(200)]
    narrow, wide = bootstrap_mean(many), bootstrap_mean(few)
    assert wide.low < wide.value < wide.high
    assert narrow.high - narrow.low < 0.5 * (wide.high - wide.low)
    assert narrow.value == pytest.approx(sum(many) / len(many))
    # 200 draws of deviation 0.3: the interval is about 2 * 1.96 * 0.3 / sqrt(200) wide
    assert narrow.high - narrow.low == pytest.approx(0.083, rel=0.25)


def test_bootstrap_is_repeatable_and_knows_no_spread_where_there_is_none() -> None:
    assert bootstrap_mean([1.0, 2.0, 4.0]) == bootstrap_mean([1.0, 2.0, 4.0])
    assert bootstrap_mean([2.0]) == Spread(2.0, 2.0, 2.0)
    with pytest.raises(InvalidInput, match="nothing to average"):
        bootstrap_mean([])


def test_a_ratio_weighs_prompts_by_their_length_and_its_interval_knows_both_spreads() -> None:
    same = [[Pair(10, 1.0, 10, 2.0)] * 2, [Pair(40, 4.0, 40, 8.0)] * 2]
    assert bootstrap_ratio(same) == Spread(2.0, 2.0, 2.0)
    unequal = [[Pair(10, 1.0, 10, 1.0)], [Pair(90, 3.0, 90, 9.0)]]
    found = bootstrap_ratio(unequal)
    assert found.value == pytest.approx((100 / 4) / (100 / 10))
    assert (found.low, found.high) == (1.0, 3.0)  # either prompt twice
    shaky = [[Pair(10, 1.0, 10, 2.0), Pair(10, 2.0, 10, 2.0)]]
    assert bootstrap_ratio(shaky).low == 1.0  # the slow repeat twice
    with pytest.raises(InvalidInput, match="nothing to divide"):
        bootstrap_ratio([])
