"""Coupled verification: the sampled tokens are a function of the seed alone, whatever was drafted.

The target's token after a node is argmin(E / p) = argmax(log p + G) with noise E (or Gumbel G = -log E)
hashed from (seed, absolute position): an exact draw from p. Every node at one depth has the same noise, so
the token at a position does not depend on which rounds led there. "Speculation on equals speculation off"
becomes equality of strings at every temperature. A drafter that samples with the same noise agrees often:
with probability at least (1 - TV) / (1 + TV) (Daliri et al. 2024); how its tokens were drawn does not
matter here.
"""

from __future__ import annotations

from forerun.core.noise import Noise
from forerun.core.types import Laws, TreeBatch, Verdict
from forerun.verify.greedy import follow
from forerun.verify.walk import TreeView, decide, follow_argmax
from forerun.verify.warp import coupled_token


class CoupledVerifier:
    """Follow the child that equals the target's own token under shared noise."""

    exact = True
    shares_noise = True

    def verify(self, trees: TreeBatch, laws: Laws, noise: Noise) -> Verdict:
        return decide(trees, laws, noise, walk_coupled, coupled=True)


def walk_coupled(view: TreeView) -> tuple[list[int], int]:
    """Noise is made for the depths that the walk reaches, once each."""
    if view.greedy:
        return follow_argmax(view)

    def sample(node: int, depth: int) -> int:
        log_weights = view.log_weights(node)
        return coupled_token(log_weights, view.noise.uniforms(view.b, depth, log_weights))

    return follow(view.tokens, view.children, sample)
