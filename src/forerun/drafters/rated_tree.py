"""Trees of a fixed shape: the nodes whose ranks were most often right, by the rates measured on held-back text."""

from __future__ import annotations

from functools import lru_cache

from forerun.drafters.tree_builder import best_count
from forerun.types import Budget


@lru_cache(maxsize=64)
def best_tree(
    rates: tuple[tuple[float, ...], ...], nodes: int, depth: int, width: int
) -> tuple[tuple[int, int, float], ...]:
    """The tree of (parent, rank, survival) with the most expected tokens, root left out; best nodes first.

    Greedy is optimal: a node adds exactly the product of its path's rates, and never more than its parent.
    """
    tree: list[tuple[int, int, float]] = []
    open_nodes = [(1.0, 0, 0)]  # survival, level, index in the tree counting the root
    taken = {0: 0}  # how many children each node has: the next child has that rank
    while len(tree) < nodes:
        best: tuple[float, int, int, int] | None = None
        for survival, level, index in open_nodes:
            rank = taken[index]
            if level < min(depth, len(rates)) and rank < min(width, len(rates[level])):
                gain = survival * rates[level][rank]
                if best is None or gain > best[0]:
                    best = (gain, level, index, rank)
        if best is None:
            break
        gain, level, parent, rank = best
        taken[parent] += 1
        tree.append((parent, rank, gain))
        taken[len(tree)] = 0
        open_nodes.append((gain, level + 1, len(tree)))
    return tuple(tree)


def filled_tree(
    root: int, guesses: list[list[int]], rates: tuple[tuple[float, ...], ...], budget: Budget
) -> tuple[list[int], list[int]]:
    """The fixed tree with this sequence's tokens in it."""
    most = min(budget.width, len(guesses[0]))
    tree = best_tree(rates, budget.nodes, min(budget.depth, len(guesses)), most)
    tree = tree[: best_count([survival for *_, survival in tree], budget.price)]
    tokens, parents, levels = [root], [-1], [0]
    for parent, rank, _ in tree:
        tokens.append(guesses[levels[parent]][rank])
        parents.append(parent)
        levels.append(levels[parent] + 1)
    return tokens, parents
