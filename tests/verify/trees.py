"""Random trees of a given depth, for tests of verdicts."""

import random


def make_tree(rng: random.Random, nodes: int, depth: int, vocab: int) -> tuple[list[int], list[int]]:
    """Siblings are distinct, as drafters promise."""
    tokens, parents, depths = [rng.randrange(vocab)], [-1], [0]
    while len(tokens) < nodes:
        parent, token = rng.randrange(len(tokens)), rng.randrange(vocab)
        taken = {tokens[i] for i in range(len(tokens)) if parents[i] == parent}
        if depths[parent] < depth and token not in taken:
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return tokens, parents
