"""The nouns: trees laid end to end, taken apart and put together again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from forerun.core.errors import InvalidInput
from forerun.core.types import Draws, Laws, Needs, TreeBatch, Verdict, offsets
from forerun.testing import path_to, random_tree, tree_of

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
quick = hypothesis.settings(max_examples=60, deadline=None)


@st.composite
def batches(draw: object) -> TreeBatch:
    """Random trees, some of whose nodes are said to be drawn."""
    rng = random.Random(draw(st.integers(0, 2**32)))  # type: ignore[operator]
    trees = [random_tree(rng, rng.randrange(9), 9, rng.randint(0, 7)) for _ in range(rng.randint(0, 5))]
    nodes = sum(len(tokens) for tokens, _ in trees)
    if rng.random() < 0.5:
        return TreeBatch.trees(trees)
    rows = torch.tensor([rng.randint(-1, 2) for _ in range(nodes)], dtype=torch.long)
    return TreeBatch.trees(trees, Draws(torch.full((3, 9), 1 / 9), rows, False))


def parts(trees: TreeBatch) -> list[tuple[object, ...]]:
    """Each tree by itself, with the laws of its nodes."""
    drawn = trees.drawn_from
    found = []
    for b in range(len(trees)):
        span = slice(trees.starts[b], trees.starts[b + 1])
        rows = [-1] * trees.sizes()[b] if drawn is None else drawn.rows[span].tolist()
        laws = [None if row < 0 or drawn is None else tuple(drawn.laws[row].tolist()) for row in rows]
        found.append((*tree_of(trees, b), laws))
    return found


def same(left: Sequence[tuple[object, ...]], right: Sequence[tuple[object, ...]]) -> bool:
    return [repr(part) for part in left] == [repr(part) for part in right]


@quick
@hypothesis.given(batches())
def test_depths_are_lengths_of_paths(trees: TreeBatch) -> None:
    wanted = []
    for b in range(len(trees)):
        parents = tree_of(trees, b)[1]
        wanted += [len(path_to(parents, i)) for i in range(len(parents))]
    assert trees.depths().tolist() == wanted
    assert trees.is_plain() == (max(wanted, default=0) == 0)


@quick
@hypothesis.given(batches(), st.randoms(use_true_random=False))
def test_select_gives_the_trees_named_in_the_order_asked_for(trees: TreeBatch, rng: random.Random) -> None:
    which = rng.sample(range(len(trees)), rng.randint(0, len(trees)))
    chosen = trees.select(which)
    assert same(parts(chosen), [parts(trees)[b] for b in which])
    assert chosen.starts == offsets(chosen.sizes())
    assert torch.equal(trees.tokens[trees.nodes_of(which)], chosen.tokens)


@quick
@hypothesis.given(batches(), batches(), st.randoms(use_true_random=False))
def test_join_puts_each_tree_in_its_place(one: TreeBatch, two: TreeBatch, rng: random.Random) -> None:
    total = len(one) + len(two)
    order = rng.sample(range(total), total)
    whole = parts(TreeBatch.join([one, two], order))
    wanted = [*parts(one), *parts(two)]
    assert same([whole[order[i]] for i in range(total)], wanted)


def test_one_batch_joined_is_put_in_order_too() -> None:
    trees = TreeBatch.chains([[1], [2, 3]])
    assert parts(TreeBatch.join([trees], [1, 0])) == parts(trees.select([1, 0]))


def test_join_refuses_draws_with_and_without_replacement() -> None:
    def batch(replace: bool) -> TreeBatch:
        return TreeBatch.trees([([0], [-1])], Draws(torch.ones(1, 1), torch.tensor([-1]), replace))

    with pytest.raises(InvalidInput, match="replacement"):
        TreeBatch.join([batch(True), batch(False)], [0, 1])


@quick
@hypothesis.given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=5))
def test_chains_are_trees_in_which_each_node_follows_the_last(rows: list[list[int]]) -> None:
    trees = TreeBatch.chains(rows)
    assert [tree_of(trees, b)[0] for b in range(len(rows))] == rows
    assert trees.depths().tolist() == [i for row in rows for i in range(len(row))]
    assert trees.tokens.dtype == trees.parents.dtype == torch.long
    verdict = Verdict.whole_chain(trees, [0] * len(rows))
    assert [verdict.path(b) for b in range(len(rows))] == [list(range(1, len(row))) for row in rows]


@quick
@hypothesis.given(batches())
def test_trees_of_lists_and_of_tensors_are_the_same(trees: TreeBatch) -> None:
    again = TreeBatch(trees.tokens, trees.parents, trees.starts, trees.drawn_from)
    assert again.to_host() == trees.to_host() == (trees.tokens.tolist(), trees.parents.tolist())
    assert again.host_depths() == trees.host_depths()
    assert trees.is_plain() == all(size == 1 for size in trees.sizes())
    assert trees.nodes == len(trees.tokens) == len(trees.parents)


@quick
@hypothesis.given(st.lists(st.lists(st.integers(1, 9), max_size=5), max_size=5))
def test_verdicts_of_lists_and_of_tensors_are_the_same(paths: list[list[int]]) -> None:
    verdict = Verdict.of(paths, list(range(len(paths))), "cpu")
    again = Verdict(verdict.paths, verdict.accepted, verdict.bonus)
    assert again.to_host() == verdict.to_host() == (paths, list(range(len(paths))))
    assert verdict.paths.shape == (len(paths), max(map(len, paths), default=0))


@quick
@hypothesis.given(st.lists(st.lists(st.integers(1, 9), max_size=5), max_size=5))
def test_verdicts_keep_paths_of_different_lengths(paths: list[list[int]]) -> None:
    verdict = Verdict.of(paths, [3] * len(paths), "cpu")
    assert [verdict.path(b) for b in range(len(paths))] == paths
    assert verdict.accepted.tolist() == [len(path) for path in paths]


@quick
@hypothesis.given(batches(), st.randoms(use_true_random=False))
def test_laws_are_selected_with_their_trees(trees: TreeBatch, rng: random.Random) -> None:
    laws = Laws(trees.tokens[:, None].float().repeat(1, 2), tuple(b % 2 == 0 for b in range(len(trees))))
    which = rng.sample(range(len(trees)), rng.randint(0, len(trees)))
    chosen = laws.select(trees.nodes_of(which), which)
    assert chosen.log_weights[:, 0].tolist() == trees.select(which).tokens.tolist()
    assert chosen.greedy == tuple(b % 2 == 0 for b in which)


def test_needs_add_up() -> None:
    assert Needs((-1, 2)) | Needs((2, 1)) == Needs((-1, 1, 2))
    assert Needs() | Needs() == Needs()
    lengths = {(one, two): (Needs(match_length=one) | Needs(match_length=two)).match_length
               for one in (None, 0, 1, 3) for two in (None, 0, 1, 3)}  # fmt: skip
    assert {found for pair, found in lengths.items() if None in pair} == {None}
    assert (lengths[0, 0], lengths[0, 3], lengths[3, 0], lengths[1, 3], lengths[3, 1]) == (0, 3, 3, 1, 1)


def test_laws_are_softmaxes() -> None:
    laws = Laws(torch.tensor([[0.0, 0.0, -torch.inf]]), (False,))
    assert laws.probs(0).tolist() == [0.5, 0.5, 0.0]


def test_draws_of_several_drafters_share_one_table() -> None:
    """Whatever device its trees are on, and however many words it knows."""
    chosen = TreeBatch(
        torch.zeros(2, dtype=torch.long, device="meta"), torch.zeros(2, dtype=torch.long, device="meta"), (0, 2)
    )
    narrow = TreeBatch.trees([([1, 2], [-1, 0])], Draws(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([-1, 0]), False))
    wide = TreeBatch.trees(
        [([1, 3], [-1, 0])], Draws(torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.tensor([-1, 0]), False)
    )
    joined = TreeBatch.join([narrow, wide], [1, 0])
    draws = joined.drawn_from
    assert draws is not None
    assert draws.laws.shape == (2, 4)
    assert [int(draws.laws[row].argmax()) for row in draws.rows[[1, 3]]] == joined.tokens[[1, 3]].tolist() == [3, 2]
    draws = TreeBatch.join([chosen, narrow], [0, 1]).drawn_from
    assert draws is not None
    assert draws.rows.tolist() == [-1, -1, -1, 0]
