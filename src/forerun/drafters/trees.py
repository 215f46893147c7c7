"""Growing a tree of chosen tokens and cutting it where more nodes would not pay.

Each node carries its *survival*: the estimated probability that the whole path down to it is accepted. It
never grows with depth, so the best n nodes by survival are always connected, and 1 + the sum of their survivals
is the expected number of tokens of the round.
"""

from __future__ import annotations

from collections.abc import Sequence


class Sprout:
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
        order = sorted(range(1, len(self.tokens)), key=lambda node: (-self.survivals[node], node))
        keep = order[: best_count([self.survivals[node] for node in order[:nodes]], price)]
        kept = [0, *sorted(keep)]  # parents were made before their children
        place = {node: i for i, node in enumerate(kept)}
        parents = [-1, *(place[self.parents[node]] for node in kept[1:])]
        return [self.tokens[node] for node in kept], parents


def best_count(survivals: Sequence[float], price: Sequence[float] | None) -> int:
    """How many nodes, taken in this order, give the most tokens per unit of time.

    price[n] is what a pass over the root and n more nodes costs, in passes over one; None = nothing.
    """
    if price is None:
        return len(survivals)
    best, best_rate, tokens = 0, 1.0, 1.0
    for count, survival in enumerate(survivals[: len(price) - 1], start=1):
        tokens += survival
        if tokens / price[count] > best_rate:
            best, best_rate = count, tokens / price[count]
    return best
