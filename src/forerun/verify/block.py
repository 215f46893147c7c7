"""Block verification (Sun et al. 2024): tests a sampled chain as a whole and accepts more of it.

The token-by-token rule stops at the first rejected token. A token that the target finds much likelier than
the drafter (p/q > 1) has probability to spare, which that rule does not use. Here the ratio is carried along
the chain, r_i = min(1, r_{i-1} p(x_i) / q(x_i)), the i-th prefix passes its own test with probability h_i,
and the *longest* prefix that passes is accepted, even where shorter ones do not pass. No exact rule for
chains accepts more tokens.

Trees with siblings, chosen nodes and greedy trees have no such ratio to carry, and take the exact walk.
"""

from __future__ import annotations

from forerun.core.noise import BLOCK, Noise
from forerun.core.types import Laws, TreeBatch, Verdict
from forerun.verify.exact import walk_exactly
from forerun.verify.walk import TreeView, decide


class BlockVerifier:
    """Block verification for sampled chains; the exact walk for every other tree."""

    exact = True
    shares_noise = False

    def verify(self, trees: TreeBatch, laws: Laws, noise: Noise) -> Verdict:
        return decide(trees, laws, noise, walk_block, coupled=False)


def walk_block(view: TreeView) -> tuple[list[int], int]:
    """The longest prefix of the chain that passes, and a token drawn from the residual."""
    if view.greedy or not is_sampled_chain(view):
        return walk_exactly(view)
    length = len(view.tokens) - 1
    ratio, accepted, rest = 1.0, 0, view.law(0)
    for i in range(length + 1):
        p = view.law(i)
        if i == length:
            left, passes = p, ratio
        else:
            q, x = view.drawn_from(i + 1), view.tokens[i + 1]
            left = (ratio * p - q).clamp_(min=0.0)  # [V] sums to S_i
            spare = float(left.sum())
            passes = passing(spare, ratio)
            left = left if spare > 0 else p
            ratio = carry(ratio, float(p[x]), float(q[x]))
        # All of these numbers belong to the root's position, which no other round has: tests of positions beyond
        # the prefix use up numbers, which must not be used again when the sequence gets there.
        if i == 0 or view.uniform(0, BLOCK, i) < passes:
            accepted, rest = i, left
    return list(range(1, accepted + 1)), view.draw(rest, accepted)


def passing(spare: float, ratio: float) -> float:
    """h_i = S_i / (S_i + 1 - r_i); where both vanish (p = q so far) every longer prefix passes too."""
    return spare / (spare + 1.0 - ratio) if spare + 1.0 > ratio else 1.0


def carry(ratio: float, p: float, q: float) -> float:
    """r_i = min(1, r_{i-1} p(x_i) / q(x_i)); 0 for a token that q cannot draw."""
    return min(1.0, ratio * p / q) if q > 0 else 0.0


def is_sampled_chain(view: TreeView) -> bool:
    return len(view.tokens) > 1 and all(
        row >= 0 and view.children[node] == [node + 1] for node, row in enumerate(view.rows[1:])
    )
