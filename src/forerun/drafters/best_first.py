"""Grows a tree of chosen tokens, the likeliest node first, from lists of what may follow each node.

Nodes are made in the order of their survivals, so that every prefix of a tree is the best tree of that size: to cut it
to what pays is to count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

Candidate = tuple[float, int, *tuple[Any, ...]]
"""Probability given the node above, token, and what else the drafter knows it by."""
# the likeliest first, and the probability that they leave to others
Candidates = tuple[Sequence[Candidate], float]
Ways = Callable[[Any], Candidates | None]  # what may follow a candidate's node; None = the text ends there


Size = tuple[int, int, int]  # of a tree: nodes below its root, levels, children of a node at most


class Successors(Protocol):
    """A table of what may follow a token, whatever else is known of the node."""

    @property
    def factors(self) -> Sequence[float]:
        """What its probabilities are multiplied by: where nothing else may follow a node, and where something may."""
        ...

    def after(self, token: int) -> Sequence[Candidate]: ...


class BestTree(NamedTuple):
    """A tree that was cut to what pays."""

    tokens: list[int]
    parents: list[int]
    by_depth: list[float]  # how likely its nodes bring a path of depth 1, 2, ...
    nexts: list[int]  # tokens of the children of its root


@dataclass(frozen=True, slots=True)
class Grown:
    """A tree whose nodes come in the order of their survivals; node 0 is the root."""

    tokens: list[int]
    parents: list[int]
    survivals: list[float]  # of the nodes below the root
    depths: list[int]

    def cut(self, count: int) -> BestTree:
        """The first `count` nodes."""
        pairs = zip(self.tokens[1 : count + 1], self.depths[1:], strict=False)
        nexts = [token for token, depth in pairs if depth == 1]
        return BestTree(self.tokens[: count + 1], self.parents[: count + 1], self.by_depth(count), nexts)

    def by_depth(self, count: int) -> list[float]:
        """How likely the first `count` nodes below the root bring a path of depth 1, 2, ..."""
        sums: list[float] = []
        for survival, depth in zip(self.survivals[:count], self.depths[1:], strict=False):
            if depth > len(sums):
                sums.append(0.0)
            sums[depth - 1] += survival
        return sums


def grow(
    root: int,
    first: Candidates,
    ways: Ways,
    more: Successors | None,
    size: Size,
    least: float,
) -> Grown:
    """A tree of at most so many nodes below its root, levels, and children of a node, down to survivals of `least`.

    Of each list of candidates only the best that is not yet in the tree waits: the others cannot come before it. What a
    table adds below a node is a list of its own, of which those that the node has already are passed over.
    """
    nodes, deepest, width = size
    tokens, parents, survivals, depths, children = [root], [-1], list[float](), [0], [0]
    waiting: list[tuple[float, int, int, int, float, Sequence[Candidate], tuple[int, ...]]] = []
    node, survival, found = 0, 1.0, first if deepest and nodes else None
    while True:
        if found is not None:
            own, left = found
            if own and (likely := survival * own[0][0]) > least:
                heappush(waiting, (-likely, 2 * node, node, 0, survival, own, ()))
            share = 0.0 if more is None else survival * left * more.factors[bool(own)]
            row = more.after(tokens[node]) if more is not None and share > least else ()
            if row and (likely := share * row[0][0]) > least:  # what is too unlikely need not wait
                known = tuple([one[1] for one in own])
                heappush(waiting, (-likely, 2 * node + 1, node, 0, share, row, known))
        if not waiting or len(survivals) >= nodes:
            break
        key, order, parent, rank, scale, some, known = heappop(waiting)
        survival, found = -key, None
        candidate, rank = some[rank], rank + 1
        if children[parent] >= width:
            continue
        if rank < len(some) and (likely := scale * some[rank][0]) > least:
            heappush(waiting, (-likely, order, parent, rank, scale, some, known))
        if candidate[1] in known:
            continue
        node = len(tokens)
        tokens.append(candidate[1])
        parents.append(parent)
        survivals.append(survival)
        depths.append(depths[parent] + 1)
        children[parent] += 1
        children.append(0)
        if depths[node] < deepest:
            found = ways(candidate)
    return Grown(tokens, parents, survivals, depths)
