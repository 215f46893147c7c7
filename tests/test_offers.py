"""Offers: seconds by depth, whose last entry holds for every further depth."""

from __future__ import annotations

import pytest

from forerun.control.prices import Levels, allocate, best_depth, shortest_that_pays
from forerun.core.types import FREE, Offer, at_depth, total

PRICE = (1.0, 1.1, 1.2, 1.3, 1.4)


def test_what_costs_nothing() -> None:
    assert not FREE.costs
    assert FREE.level == FREE.until(5) == 0.0
    assert not Offer((0.0, 0.0)).costs


def test_a_level_costs_what_a_level_costs() -> None:
    offer = Offer((0.3,))
    assert offer.costs
    assert [offer.until(depth) for depth in range(4)] == pytest.approx([0.0, 0.3, 0.6, 0.9])
    assert offer.level == 0.3


def test_one_pass_costs_the_same_at_every_depth() -> None:
    offer = Offer((0.3, 0.0))
    assert offer.costs
    assert [offer.until(depth) for depth in range(4)] == [0.0, 0.3, 0.3, 0.3]
    assert offer.level == 0.0


def test_any_shape_adds_up() -> None:
    levels = (0.5, 0.2, 0.1)
    for depth in range(7):
        assert total(levels, depth) == pytest.approx(sum(at_depth(levels, d) for d in range(1, depth + 1)))
    assert total((), 9) == at_depth((), 9) == 0.0


def test_a_first_level_that_does_not_pay_may_be_worth_those_behind_it() -> None:
    one_pass = Levels((0.8, 0.7, 0.6, 0.5), costs=(1.2, 0.0))
    by_level = Levels((0.8, 0.7, 0.6, 0.5), costs=(1.2,))
    assert best_depth(one_pass, PRICE)[0] == 4
    assert best_depth(by_level, PRICE) == (0, 0.0)
    assert shortest_that_pays(PRICE, (1.2, 0.0)) == 2
    assert shortest_that_pays(PRICE, (1.2,)) == 0


def test_worth_never_grows_with_depth_and_keeps_its_sum() -> None:
    levels = Levels((0.8, 0.7, 0.6, 0.5), costs=(1.2, 0.0), nodes=2.0)
    worth = levels.worth()
    assert worth == sorted(worth, reverse=True)
    assert sum(worth) == pytest.approx((0.8 + 0.7 + 0.6 + 0.5 - 1.2) / 2)
    falling = Levels((0.8, 0.5, 0.2), costs=(0.1,))
    assert falling.worth() == [0.8 - 0.1, 0.5 - 0.1, 0.2 - 0.1]  # bit for bit: nothing is pooled


def test_a_batch_takes_all_of_one_pass_or_nothing() -> None:
    one_pass, lookup = Levels((0.8, 0.7, 0.6), costs=(1.2, 0.0)), Levels((0.6, 0.3))
    assert allocate([one_pass, lookup], lambda nodes: 0.1 * nodes) == [3, 2]
    dear = Levels((0.8, 0.7, 0.6), costs=(2.2, 0.0))
    assert allocate([dear, lookup], lambda nodes: 0.1 * nodes) == [0, 2]
