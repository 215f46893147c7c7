"""Typical acceptance (Medusa): accepts drafted tokens that the target finds plausible enough. Not exact.

A token passes if p(x) > min(epsilon, delta exp(-H(p))): where the entropy H is high the threshold is low. The
longest path of passing nodes is accepted, the likelier of two as long, and the bonus is drawn from the law
after it. The output has *not* the target's law: `exact` is False, and results say so.
Greedy trees follow the argmax and are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.noise import Noise
from forerun.core.types import CUT, Laws, TreeBatch, Verdict
from forerun.verify.walk import TreeView, decide, follow_argmax


@dataclass(frozen=True, slots=True)
class TypicalVerifier:
    """Medusa's rule with Medusa's constants."""

    epsilon: float = 0.09  # a token of at least this probability always passes
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not (0.0 < self.epsilon < 1.0 and self.delta > 0.0):
            given = f"epsilon={self.epsilon!r}, delta={self.delta!r}"
            raise InvalidInput(f"{given} are out of range: epsilon between 0 and 1, delta above 0")

    @property
    def exact(self) -> bool:
        return False

    @property
    def shares_noise(self) -> bool:
        return False

    def verify(self, trees: TreeBatch, laws: Laws, noise: Noise) -> Verdict:
        return decide(trees, laws, noise, self.walk)

    def walk(self, view: TreeView) -> tuple[list[int], int]:
        if view.greedy:
            return follow_argmax(view)
        best, paths = (0, 0.0, 0), {0: list[int]()}  # (length, log-probability, -node): the best path so far
        likelihoods = {0: 0.0}
        for node in range(len(view.tokens)):  # parents precede children
            if node not in paths or not view.children[node]:
                continue
            p = view.law(node)
            least = min(self.epsilon, self.delta * math.exp(-entropy(view.log_weights(node), p)))
            for child in view.children[node]:
                likely = float(p[view.tokens[child]]) if view.tokens[child] != CUT else 0.0
                if likely > least:
                    paths[child] = [*paths[node], child]
                    likelihoods[child] = likelihoods[node] + math.log(likely)
                    best = max(best, (len(paths[child]), likelihoods[child], -child))
        path = paths[-best[2]]
        return path, view.draw(view.law(-best[2]), len(path))


def entropy(log_weights: Tensor, p: Tensor) -> float:
    """-sum(p log p) of a law [V] = softmax(log_weights)."""
    possible = torch.where(p > 0, log_weights, 0.0)
    return float(log_weights.logsumexp(-1) - torch.dot(p, possible.to(p.dtype)))
