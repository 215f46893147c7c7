"""Grows the suffix drafter's trees, the likeliest node first, from matches and from the successors of single tokens.

What may follow a node are candidates whose probabilities exclude each other: the continuations of its match, and, of
whatever these leave, what the target tends to write after its token. Nodes are made in the order of their survivals, so
that every prefix of a tree is the best tree of that size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from forerun.drafters.base import AT_HAND
from forerun.drafters.suffix.sources import Place
from forerun.drafters.suffix.successors import Row, Successors
from forerun.drafters.tree_builder import least_step
from forerun.types import Budget

MEMORY, WORTH = 0.998, 8.0  # of how far the table is trusted: per try, and tokens that the prior is worth
PRIOR = (1.0, 0.65)  # share of what the table promises that comes: where nothing matches, and behind a match
LEAST = 0.01  # the least survival in a tree, unless a budget is to be drafted whole
FEW = 2  # sequences that get trees; more get chains
TREE, CHAIN = (
    Budget(16, AT_HAND, 8),
    Budget(AT_HAND, AT_HAND),
)  # what offers assume before a price list was seen

Match = tuple[
    float, int, int, Place
]  # probability given the node above, token, the text, where the node above matches
Matches = tuple[list[Match], float]  # the likeliest first, and the probability that they leave to others
Ways = Callable[
    [Match | tuple[float, int]], Matches | None
]  # of what follows a node; None = the text ends there


@dataclass(frozen=True, slots=True)
class Grown:
    """A tree whose nodes come in the order of their survivals; node 0 is the root."""

    tokens: list[int]
    parents: list[int]
    survivals: list[float]  # of the nodes below the root
    depths: list[int]

    def by_depth(self, count: int) -> tuple[float, ...]:
        """How likely the first `count` nodes below the root bring a path of depth 1, 2, ..."""
        sums: list[float] = []
        for survival, depth in zip(self.survivals[:count], self.depths[1:], strict=False):
            if depth > len(sums):
                sums.append(0.0)
            sums[depth - 1] += survival
        return tuple(sums)


def grow(
    root: int, first: Matches, ways: Ways, fill: Fill | None, size: tuple[int, int, int], least: float
) -> Grown:
    """A tree of at most so many nodes below its root, levels, and children of a node, down to survivals of `least`.

    Of each list of candidates only the best that is not yet in the tree waits: the others cannot come before it. The
    table's successors of a node are a list of their own, of which those that match are passed over.
    """
    nodes, deepest, width = size
    tokens, parents, survivals, depths, children = [root], [-1], list[float](), [0], [0]
    waiting: list[tuple[float, int, int, int, float, Sequence[Match] | Row, tuple[int, ...]]] = []
    node, survival, found = 0, 1.0, first if deepest and nodes else None
    while True:
        if found is not None:
            matches, left = found
            if matches:
                heappush(waiting, (-survival * matches[0][0], 2 * node, node, 0, survival, matches, ()))
            if fill is not None and (row := fill.after(tokens[node])):
                share = survival * left * fill.factors[bool(matches)]
                known = tuple([match[1] for match in matches])
                heappush(waiting, (-share * row[0][0], 2 * node + 1, node, 0, share, row, known))
        if not waiting or len(survivals) >= nodes:
            break
        key, order, parent, rank, scale, some, known = heappop(waiting)
        survival, found = -key, None
        if survival <= least:
            break
        candidate, rank = some[rank], rank + 1
        if children[parent] >= width:
            continue
        if rank < len(some):
            heappush(waiting, (-scale * some[rank][0], order, parent, rank, scale, some, known))
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


def least_of(budget: Budget) -> float:
    """The least survival of a node that is worth looking up."""
    if budget.price is not None:
        return max(LEAST, least_step(budget.price))
    return LEAST if budget is TREE or budget is CHAIN else 0.0


class Fill:
    """The table of successors, and how far it is trusted: that is learnt.

    What it is worth depends on the size of the trees that are asked for, so that offers are made for that size.
    """

    def __init__(self, table: Successors) -> None:
        self.after = table.after
        self.factors = list(PRIOR)
        self.asked = TREE
        self._hits, self._expected = [WORTH * prior for prior in PRIOR], [WORTH, WORTH]

    def note_budgets(self, budgets: Sequence[Budget]) -> None:
        """These are asked for."""
        first = next((budget for budget in budgets if budget.nodes), None)
        if len(budgets) > FEW:
            self.asked = CHAIN
        elif first is not None and first.price is not None and first.width > 1:
            self.asked = first
        elif self.asked is CHAIN:
            self.asked = TREE

    def count(self, token: int, matched: Sequence[int], came: int) -> None:
        """After a root with this token, and these continuations of its match, one token came."""
        if came in matched:
            return
        hits, expected = 0.0, 0.0
        for share, one in self.after(token):
            if one not in matched:
                expected += share
                hits += one == came
        i = 1 if matched else 0
        self._hits[i] = self._hits[i] * MEMORY + hits
        self._expected[i] = self._expected[i] * MEMORY + expected
        self.factors[i] = min(1.0, self._hits[i] / self._expected[i])
