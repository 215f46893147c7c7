"""TreeBuilder: grows a tree of chosen tokens and cuts it where more nodes would not pay.

Each node carries its *survival*: the estimated probability that the whole path down to it is accepted. It
never grows with depth, so the best n nodes by survival are always connected, and 1 + the sum of their survivals
is the expected number of tokens of the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

DEEPER = 0.9  # of what reaches a frontier, the share assumed to be accepted one level below
ROW = 0.2  # of a level of one row: what a further row adds to it, on a CPU
_AHEAD = (1, 2, 4, 8, 16)  # numbers of nodes that a further level may add


class TreeBuilder:
    """A tree under construction; node 0 is the root and certain."""

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.survivals = [1.0]
        self._children: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int, confidence: float) -> int:
        """The child of `parent` with this token, made if it is new; `confidence` is given the parent."""
        node = self._children.get((parent, token))
        if node is None:
            node = len(self.tokens)
            self._children[parent, token] = node
            self.tokens.append(token)
            self.parents.append(parent)
            self.survivals.append(self.survivals[parent] * min(max(confidence, 0.0), 1.0))
        return node

    def cut(self, nodes: int, price: Sequence[float] | None) -> tuple[list[int], list[int]]:
        """(tokens, parents) of the root and the best nodes below it: at most `nodes`, and only while it pays."""
        survivals = self.survivals  # as sorted keeps the order of equals, those made first come first
        order = sorted(range(1, len(self.tokens)), key=survivals.__getitem__, reverse=True)
        keep = order[: best_count([self.survivals[node] for node in order[:nodes]], price)]
        kept = [0, *sorted(keep)]  # parents were made before their children
        place = {node: i for i, node in enumerate(kept)}
        parents = [-1, *(place[self.parents[node]] for node in kept[1:])]
        return [self.tokens[node] for node in kept], parents


def best_count(survivals: Sequence[float], price: Sequence[float] | None) -> int:
    """How many nodes, taken in this order, gain most beyond their price.

    price[n] is what a pass over the root and n more nodes costs, in tokens; None = they all cost the same.
    """
    if price is None:
        return len(survivals)
    best, best_gain, gain = 0, 0.0, price[0]
    for count, survival in enumerate(survivals[: len(price) - 1], start=1):
        gain += survival
        if gain - price[count] > best_gain:
            best, best_gain = count, gain - price[count]
    return best


@lru_cache(maxsize=16)  # a list holds for many rounds
def least_step(price: tuple[float, ...]) -> float:
    """What one more node costs at least, however many there are: one that survives less often never pays."""
    return max(0.0, min([after - before for before, after in pairwise(price)], default=0.0))


def worth_deepening(
    survivals: Sequence[float], drafted: int, price: Sequence[float], level: float
) -> list[int]:
    """Which nodes of a frontier of these survivals to draft one more level below; none where that does not pay.

    So many nodes are there already. Of what reaches the frontier, some share is accepted one level deeper; each such
    node must pay for its place in the pass and its row in the level, and all of them together for the drafting of the
    level. Deeper levels may still pay where this one just does not: that is why the share is high.
    """
    last = min(drafted, len(price) - 1)
    ahead = [min(last + step, len(price) - 1) for step in _AHEAD]
    # the price may jump at first and be flat after: what counts is the best that several more nodes could do
    place = min([(price[n] - price[last]) / (n - last) for n in ahead if n > last], default=1.0)
    if sum([max(0.0, DEEPER * survival - place) for survival in survivals]) <= level:
        return []
    # no child survives more often than its parent
    least = min(place + ROW * level, max(survivals, default=0.0))
    return [i for i, survival in enumerate(survivals) if survival >= least]


def pays_to_deepen(survivals: Sequence[float], drafted: int, price: Sequence[float], level: float) -> bool:
    """Is one more level worth drafting below any of these?"""
    return bool(worth_deepening(survivals, drafted, price, level))
