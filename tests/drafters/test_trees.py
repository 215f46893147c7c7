"""Growing and cutting trees."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forerun.core.request import best_count
from forerun.drafters.heads.growth import TreeBuilder, worth_deepening

BRANCHES = st.lists(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), min_size=1, max_size=6), min_size=1, max_size=6
)
PRICES = st.none() | st.lists(st.floats(1, 20), min_size=1, max_size=12).map(lambda rest: (1.0, *sorted(rest)))


def grow(branches: list[list[tuple[int, float]]]) -> TreeBuilder:
    builder = TreeBuilder(9)
    for branch in branches:
        node = 0
        for token, confidence in branch:
            node = builder.add(node, token, confidence)
    return builder


@given(BRANCHES, st.integers(0, 12), PRICES)
def test_a_cut_tree_is_a_tree(
    branches: list[list[tuple[int, float]]], nodes: int, price: tuple[float, ...] | None
) -> None:
    tokens, parents = grow(branches).cut(nodes, price)
    assert tokens[0] == 9
    assert parents[0] == -1
    assert len(tokens) == len(parents) <= nodes + 1
    assert all(0 <= parent < i for i, parent in enumerate(parents) if i)
    children = [(parents[i], tokens[i]) for i in range(1, len(tokens))]
    assert len(set(children)) == len(children)


@given(BRANCHES, st.integers(0, 12))
def test_the_likeliest_nodes_stay(branches: list[list[tuple[int, float]]], nodes: int) -> None:
    builder = grow(branches)
    kept = len(builder.cut(nodes, None)[0]) - 1
    assert kept == min(nodes, len(builder.tokens) - 1)


@given(st.lists(st.floats(0, 1), max_size=8), st.lists(st.floats(0.5, 9), min_size=1, max_size=10))
def test_what_is_drafted_never_costs_more_than_it_is_expected_to_bring(
    survivals: list[float], rest: list[float]
) -> None:
    price = (1.0, *rest)
    count = best_count(survivals, price)
    gains = [sum(survivals[:n]) - price[n] + 1.0 for n in range(min(len(survivals), len(rest)) + 1)]
    assert gains[count] >= -1e-9
    assert gains[count] >= max(gains) - 1e-9


def test_a_steep_price_means_no_draft_and_a_flat_one_all_of_it() -> None:
    assert best_count([0.6, 0.5, 0.4], (1.0, 3.0, 3.1, 3.2)) == 0
    assert best_count([0.9, 0.8, 0.7], (1.0, 1.0, 1.0, 1.0)) == 3
    assert best_count([0.95, 0.9, 0.9, 0.85, 0.8], (1.0, 3.0, 3.0, 3.1, 3.1, 3.1)) == 5  # only the whole pays


def test_a_level_must_pay_for_its_drafting_and_its_places() -> None:
    price = tuple(1.0 + 0.3 * n for n in range(9))
    assert worth_deepening([0.9], 1, price, 0.3)
    assert not worth_deepening([0.9], 1, price, 0.6)
    assert not worth_deepening([0.3], 1, price, 0.0)
    assert worth_deepening([0.5, 0.45], 1, price, 0.2)  # together, not each
    assert not worth_deepening([0.5], 1, price, 0.2)
    leap = (1.0, 2.9, 3.0, 3.1, 3.2, 3.3)
    assert worth_deepening([0.9], 0, leap, 0.1)  # dear at first, cheap behind
