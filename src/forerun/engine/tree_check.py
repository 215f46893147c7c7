"""Checks every proposed tree before it reaches the target: sizes, tokens, parents, depth and laws.

Kernels would read past the end of a malformed tree, and a wrong root would change the output silently. The check
reads host integers only. Trees that a device has grown (`TreeBatch.form`) come from our own code: only their sizes
are checked, since reading them would make the host wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from forerun.core.errors import InvalidInput
from forerun.core.tree import ONE_NODE
from forerun.core.types import Budget, Draws, Seq, TreeBatch


def check_trees(trees: TreeBatch, seqs: Sequence[Seq], budgets: Sequence[Budget], vocab_size: int) -> None:
    """Raise InvalidInput unless there is one tree per sequence, within its budget, and each is well formed."""
    starts = trees.starts
    if len(starts) != len(seqs) + 1 or starts[0] != 0:
        raise InvalidInput(f"{len(starts) - 1} trees were proposed for {len(seqs)} sequences")
    if trees.form is None:
        tokens, parents = trees.to_host()
        if _are_lone_roots(trees, tokens, parents, seqs):
            return
        if not len(tokens) == len(parents) == starts[-1]:
            raise InvalidInput(f"{len(tokens)} tokens and {len(parents)} parents for {starts[-1]} nodes")
        if {*map(type, tokens), *map(type, parents)} != {int}:
            raise InvalidInput("tokens and parents of a tree are integers")
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise InvalidInput(f"a tree holds a token outside the vocabulary of {vocab_size}")
    # trees of one form are as large as any may be
    shared = max((budget.nodes for budget in budgets), default=0)
    for b, seq in enumerate(seqs):
        first, end = starts[b], starts[b + 1]
        most = budgets[b].nodes if trees.form is None else shared
        if not 0 < end - first <= most + 1:
            raise InvalidInput(f"a tree of {end - first} nodes, but 1 to {most + 1} were asked for")
        if trees.form is not None:
            continue
        if tokens[first] != seq.tokens[-1] or parents[first] != -1:
            raise InvalidInput("the root of a tree is the last token of its sequence, and its parent is -1")
        if end - first > 1:
            depth = _depth_of(tuple(parents[first:end]))
            if depth is None:
                raise InvalidInput(f"{parents[first:end]} are no parents: they come before their children")
            if depth > budgets[b].depth:
                raise InvalidInput(f"a tree is {depth} deep, but at most {budgets[b].depth} was asked for")
    if trees.drawn_from is not None:
        _check_draws(trees, trees.drawn_from, vocab_size)


def _are_lone_roots(trees: TreeBatch, tokens: list[int], parents: list[int], seqs: Sequence[Seq]) -> bool:
    """A plain round, as most are in a large batch: then there is nothing else to check."""
    if trees.starts == ONE_NODE and len(tokens) == len(parents) == 1 and trees.drawn_from is None:
        return type(tokens[0]) is int and parents[0] == -1 and tokens[0] == seqs[0].tokens[-1]
    if not trees.is_plain() or trees.drawn_from is not None or len(parents) != len(tokens):
        return False
    return {*map(type, tokens)} == {int} and {*parents} == {-1} and tokens == [seq.tokens[-1] for seq in seqs]


@lru_cache(maxsize=1024)
def _depth_of(parents: tuple[int, ...]) -> int | None:
    """How deep a tree of this shape is; None where a child comes before its parent. Cached, because shapes recur."""
    depths = [0]
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            return None
        depths.append(depths[parent] + 1)
    return max(depths)


def _check_draws(trees: TreeBatch, draws: Draws, vocab_size: int) -> None:
    """Every drawn node names its law, and siblings were drawn from one."""
    if draws.rows.shape != (trees.nodes,) or draws.laws.ndim != 2 or draws.laws.shape[1] > vocab_size:
        shapes = f"{tuple(draws.laws.shape)} laws and {tuple(draws.rows.shape)} rows"
        raise InvalidInput(f"{shapes} for {trees.nodes} nodes and a vocabulary of {vocab_size}")
    if trees.form is not None:
        return
    rows, parents = draws.rows.tolist(), trees.to_host()[1]
    if max(rows, default=-1) >= len(draws.laws):
        raise InvalidInput(f"a node names law {max(rows)} of {len(draws.laws)}")
    for first, end in zip(trees.starts, trees.starts[1:], strict=False):
        law_of: dict[int, int] = {}
        for parent, row in zip(parents[first:end], rows[first:end], strict=True):
            if row >= 0 and law_of.setdefault(parent, row) != row:
                raise InvalidInput("siblings that were sampled come from one law")
