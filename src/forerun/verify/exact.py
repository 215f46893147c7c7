"""Exact verification (speculative sampling): committed tokens have the target's own law, whatever was drafted.

Write p for the target's law after a node and q for the law that a sampled child was really drawn from.

    greedy     p is a point mass: follow the child that equals the argmax.
    chosen     a child that was chosen, not sampled, is a point mass too, and does not depend on p. So draw
               x ~ p, once per node, and follow the child that equals x. If none does, x is the bonus.
    sampled    take the children in the order they were drawn. Child x is accepted with probability
               min(1, p(x)/q(x)). If it is rejected, the residual normalise(max(p - q, 0)) becomes p for
               the next child. Siblings drawn without replacement come from q without those that were
               rejected before them, normalised again. If all are rejected, the bonus is drawn from the
               last residual.

Why the sampled rule is exact: x is drafted and accepted with probability q(x) min(1, p(x)/q(x)) = min(p(x),
q(x)). It is rejected with the missing mass, sum_x max(p - q, 0), and then the residual adds exactly
max(p(x) - q(x), 0). The sum is p(x). The same holds of every further child with the residual in the place of
p (Leviathan et al. 2023 and Chen et al. 2023 for one child; SpecInfer for several; Sequoia without
replacement).

One walk covers all three. The children that can be tested are tested; then x is drawn once from what is left
of p, and a child that was only chosen and equals x is followed.

Block verification (Sun et al. 2024): tests a sampled chain as a whole and accepts more of it.

The token-by-token rule stops at the first rejected token. A token that the target finds much likelier than
the drafter (p/q > 1) has probability to spare, which that rule does not use. Here the ratio is carried along
the chain, r_i = min(1, r_{i-1} p(x_i) / q(x_i)), the i-th prefix passes its own test with probability h_i,
and the *longest* prefix that passes is accepted, even where shorter ones do not pass. No exact rule for
chains accepts more tokens.

Trees with siblings, chosen nodes and greedy trees have no such ratio to carry, and take the exact walk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.core.noise import ACCEPT, BLOCK, Noise
from forerun.core.types import Laws, TreeBatch, Verdict
from forerun.verify.walk import TreeView, decide, follow_argmax

_TINY = torch.finfo(torch.float64).tiny  # an empty support stays empty


class ExactVerifier:
    """Speculative sampling over trees, with and without replacement; point masses; greedy."""

    exact = True
    shares_noise = False

    def verify(self, trees: TreeBatch, laws: Laws, noise: Noise) -> Verdict:
        return decide(trees, laws, noise, walk_exactly, coupled=False)


def walk_exactly(view: TreeView) -> tuple[list[int], int]:
    """The accepted nodes below the root, and the bonus."""
    if view.greedy:
        return follow_argmax(view)
    path: list[int] = []
    node = 0
    while True:
        child, token = step(view, node, depth=len(path))
        if child is None:
            return path, token
        path.append(child)
        node = child


def step(view: TreeView, node: int, depth: int) -> tuple[int | None, int]:
    """The target's token after a node, and the child that carries it, if one does."""
    accepted, p, untested = first_accepted(view, node, depth)
    if accepted is not None:
        return accepted, view.tokens[accepted]
    x = view.draw(p, depth)
    return next((i for i in untested if view.tokens[i] == x), None), x


def first_accepted(view: TreeView, node: int, depth: int) -> tuple[int | None, Tensor, list[int]]:
    """The first accepted sampled child; else what is left of p, and the children that were not tested.

    The order is that of the draws, never one by probability: sorting would let the draws choose their rule.
    A child that q has no mass for (its support was used up) is no draw from q, and is taken for chosen.
    """
    p = view.law(node)
    sampled = [i for i in view.children[node] if view.rows[i] >= 0]
    untested = [i for i in view.children[node] if view.rows[i] < 0]
    if view.draws is None or not sampled:
        return None, p, untested
    assert len({view.rows[i] for i in sampled}) == 1, "siblings that were sampled come from one law"
    q = view.drawn_from(sampled[0])
    for index, sibling in enumerate(sampled):
        x = view.tokens[sibling]
        if q[x] == 0:
            untested.append(sibling)
            continue
        # strict, so that an impossible token is rejected even where u is exactly 0
        if view.uniform(depth, ACCEPT, index) * q[x] < p[x]:
            return sibling, p, []
        p = residual(p, q)
        if not view.draws.replace:
            q[x] = 0.0
            q = q / q.sum().clamp(min=_TINY)
    return None, p, untested


def residual(p: Tensor, q: Tensor) -> Tensor:
    """normalise(max(p - q, 0)): the law after a token drawn from q was rejected; p if nothing is left.

    Nothing is left only where p = q up to rounding, and then tokens are rejected by rounding only.
    """
    left = (p - q).clamp_(min=0.0)
    total = left.sum()
    return left / total if total > 0 else p


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
