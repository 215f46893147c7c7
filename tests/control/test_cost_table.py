"""Times of many passes at once are those of one after the other."""

from itertools import pairwise

import pytest

from forerun.control.cost import CostModel


@pytest.mark.parametrize("rows", [1, 3, 60, 900])
def test_many_are_as_one_by_one(rows: int) -> None:
    cost = CostModel({1: 4.0, 8: 4.1, 64: 4.8, 256: 8.7, 1024: 29.5})
    for seen, seconds in ((1, 4.2), (40, 6.0), (300, 9.0)):
        cost.observe(seen, seconds, 8)
    found = cost.passes_seconds(rows, 300, 8)
    assert found == pytest.approx([cost.pass_seconds(rows + i, 8) for i in range(300)])
    assert cost.passes_seconds(5, 2, 8) != cost.passes_seconds(5, 2, 1)


def test_a_node_costs_more_in_a_pass_that_prompts_have_filled() -> None:
    cost = CostModel({1: 4.0, 64: 4.8, 256: 8.7, 1024: 29.5})
    alone = cost.pass_seconds(64, 32) - cost.pass_seconds(32, 32)
    for _ in range(40):
        cost.note_prompts(256)
    beside = cost.pass_seconds(64, 32) - cost.pass_seconds(32, 32)
    assert beside > 2 * alone
    assert cost.passes_seconds(32, 40, 32) == pytest.approx([cost.pass_seconds(32 + i, 32) for i in range(40)])
    for _ in range(40):
        cost.note_prompts(0)
    assert cost.pass_seconds(64, 32) - cost.pass_seconds(32, 32) == pytest.approx(alone)


def test_what_was_looked_up_is_forgotten_when_a_round_shows_more() -> None:
    cost = CostModel({1: 4.0, 8: 4.1})
    before = cost.pass_seconds(1), cost.pass_seconds(8)
    assert (cost.pass_seconds(1), cost.pass_seconds(8)) == before
    cost.observe(1, 8.0)
    assert cost.pass_seconds(1) > before[0]
    assert cost.pass_seconds(8) > before[1]
    assert cost.pass_seconds(1, 4) != cost.pass_seconds(1, 1)


@pytest.mark.parametrize("batch", [1, 4])
def test_nodes_are_priced_by_what_was_measured(batch: int) -> None:
    """Rounds of trees that were cut by a price take less than their rows did: that makes no node cheaper."""
    cost = CostModel({1: 2.0, 4: 3.0, 16: 5.0, 64: 6.0})
    price = cost.price_for_all(15, batch)
    plain = {1: 2.0, 4: 3.0}[batch]
    assert price[0] == 0.0
    assert price[15] == pytest.approx({1: 5.0, 4: 6.0}[batch] / plain - 1.0)
    assert price == tuple(sorted(price))
    for _ in range(40):
        cost.observe(16 * batch, 0.6 * cost.seconds[16 * batch], batch)
    assert cost.price_for_all(15, batch) == price
    assert cost.price(15, batch - 1) != price, "the negative control"


def test_nodes_beyond_the_largest_measured_pass_are_not_free() -> None:
    """At load a small KV cache may end the measurement early."""
    price = CostModel({1: 1.0, 32: 2.0, 64: 4.0}).price_for_all(15, batch=8)
    steps = [b - a for a, b in pairwise(price)]
    assert min(steps) > 0.0
    assert steps[-1] == pytest.approx(steps[6]), "the last line goes on"
