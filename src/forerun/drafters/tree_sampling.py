"""Sampled trees: nodes drawn from a head's own law, which the verifier tests with p/q.

The shape of a tree is fixed before anything is drawn, because dropping drawn tokens would change their law. It is the
best one for how often the first, second, ... sibling is accepted where the ones before it were rejected. Siblings are
drawn without replacement, in index order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush

import torch
from torch import Tensor

from forerun.drafters.tree_growth import Steps, Tree
from forerun.drafters.vocab import DraftVocabulary
from forerun.noise import DRAFT, draw, uniform
from forerun.types import Budget, Seq
from forerun.verify.warp import warp_rows

# how often the k-th sibling is accepted
RATES = (0.65, 0.1, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01, 0.008, 0.006)
TreeShape = tuple["TreeShape", ...]  # of the children, in the order they are drawn: each one's own children
_ROUND = 4096  # numbers that a round has at a position: more than a tree has nodes


def sample_trees(
    steps: Steps, seqs: Sequence[Seq], budgets: Sequence[Budget], vocabulary: DraftVocabulary
) -> tuple[list[Tree], list[list[int]], list[Tensor]]:
    """One tree per sequence drawn from the head's own law: trees, the law that each node came from, the laws."""
    logits = steps.first()[:, None]  # [B, W, Vd]
    laws: list[Tensor] = []
    growing = [_Drawn(seq, budget, laws) for seq, budget in zip(seqs, budgets, strict=True)]
    while True:
        for b, tree in enumerate(growing):
            if tree.frontier:
                rows = vocabulary.spread(logits[b, : len(tree.frontier)].float())
                paths = [tree.path(node) for node in tree.frontier]
                tree.draw(warp_rows(rows, [seqs[b]] * len(rows), paths).softmax(-1).cpu())
        ahead = [tree.advance() for tree in growing]
        if not any(ahead):
            return [tree.tree for tree in growing], [tree.rows for tree in growing], laws
        wide = max(map(len, ahead))
        padded = torch.tensor([[*row, *[(0, 0)] * (wide - len(row))] for row in ahead], device=logits.device)
        logits = steps.after(padded[..., 0], padded[..., 1])


class _Drawn:
    """One sequence's tree: nodes that are to have children are the frontier, in index order."""

    def __init__(self, seq: Seq, budget: Budget, laws: list[Tensor]) -> None:
        self.tree: Tree = ([seq.tokens[-1]], [-1])
        self.rows = [-1]
        self._seq, self._laws = seq, laws
        self._level, self._start = 0, 1  # depth of the frontier, and where the nodes below it begin
        shape = best_shape(budget.nodes, budget.depth, budget.width)
        self._wanted = {0: shape}  # node -> shapes of the children it is to have
        self.frontier = [0] if shape else []

    def path(self, node: int) -> list[int]:
        """Tokens from below the root down to a node."""
        tokens, parents = self.tree
        found: list[int] = []
        while node:
            found.append(tokens[node])
            node = parents[node]
        return found[::-1]

    def draw(self, laws: Tensor) -> None:
        """Children of the frontier from the laws [W, V] after its nodes, as many as their support allows."""
        position = len(self._seq.tokens)
        for node, law in zip(self.frontier, laws, strict=True):
            if not bool(law.isfinite().all()):
                continue  # all that the head can draft is ruled out here
            left, row = law.clone(), len(self._laws)
            self._laws.append(law)
            for below in self._wanted[node][: int((law > 0).sum())]:
                # keyed by the round too: a position drafted again must not see the same number again
                index = position * _ROUND + len(self.rows)
                token = draw(left, uniform(self._seq.seed, position + self._level, DRAFT, index))
                left[token] = 0.0
                self._add(node, token, row, below)

    def advance(self) -> list[tuple[int, int]]:
        """The next frontier: each node's token, and where its parent is in the last one."""
        place = {node: i for i, node in enumerate(self.frontier)}
        tokens, parents = self.tree
        self.frontier = [node for node in range(self._start, len(tokens)) if self._wanted[node]]
        self._start, self._level = len(tokens), self._level + 1
        return [(place[parents[node]], tokens[node]) for node in self.frontier]

    def _add(self, parent: int, token: int, row: int, below: TreeShape) -> None:
        self._wanted[len(self.rows)] = below
        self.tree[0].append(token)
        self.tree[1].append(parent)
        self.rows.append(row)


@lru_cache(maxsize=256)
def best_shape(nodes: int, depth: int, width: int) -> TreeShape:
    """The tree of so many nodes with the most expected accepted tokens; at most `width` nodes a level branch."""
    made: list[tuple[int, int]] = [(-1, 0)]  # parent, depth
    waiting = [(-RATES[0], 0, 0)] if nodes and depth else []  # survival, parent, which child
    branching = [0] * (depth + 1)
    while waiting and len(made) <= nodes:
        score, parent, rank = heappop(waiting)
        level = made[parent][1] + 1
        if rank == 0:  # the parent's first child: it goes through the head
            if branching[level - 1] == width:
                continue
            branching[level - 1] += 1
        node = len(made)
        made.append((parent, level))
        if rank + 1 < min(width, len(RATES)):
            heappush(waiting, (score * RATES[rank + 1] / RATES[rank], parent, rank + 1))
        if level < depth:
            heappush(waiting, (score * RATES[0], node, 0))
    children: dict[int, list[int]] = {}
    for node, (parent, _) in enumerate(made[1:], start=1):
        children.setdefault(parent, []).append(node)

    def shape_of(node: int) -> TreeShape:
        return tuple(shape_of(child) for child in children.get(node, ()))

    return shape_of(0)
