"""The target's own tokens of many nodes at once, above temperature 0: under shared noise, and drawn from the law.

A walk on the host asks for one node after the other, which on a GPU means several reads for each. Where tokens were
chosen, not drawn, the token after a node depends on nothing but its law and its position: so all of them are found
together, read once, and the walk goes along them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.core.noise import DRAW, Noise, device_uniform, device_uniforms, mixed_seed
from forerun.core.types import Laws, TreeBatch, Verdict
from forerun.verify.greedy import greedy_walks

AT_ONCE = 1 << 24  # entries of rows that are worked on together: temporary memory is a few times that


def is_worth_it(trees: TreeBatch, laws: Laws) -> bool:
    """Are these trees of chosen tokens, on a device that is slow to answer?"""
    return trees.drawn_from is None and laws.log_weights.device.type != "cpu" and not all(laws.greedy)


def decide_at_once(trees: TreeBatch, laws: Laws, noise: Noise, coupled: bool) -> Verdict:
    """The verdict of coupled or of exact verification on trees of chosen tokens, with one read."""
    rows = laws.log_weights
    owners = [b for b, size in enumerate(trees.sizes()) for _ in range(size)]
    seeds = [mixed_seed(seed) for seed in noise.seeds]
    at = [noise.positions[b] + depth for b, depth in zip(owners, trees.host_depths(), strict=True)]
    sent = torch.tensor([[seeds[b] for b in owners], at, [laws.greedy[b] for b in owners]]).to(rows.device)
    step = max(1, AT_ONCE // rows.shape[1])
    parts = [_tokens(rows[i : i + step], sent[:, i : i + step], coupled) for i in range(0, trees.nodes, step)]
    return greedy_walks(trees, torch.cat(parts).tolist())


def _tokens(rows: Tensor, sent: Tensor, coupled: bool) -> Tensor:
    """[n] after nodes, of which were sent: mixed seeds, positions of their tokens, whether they are greedy."""
    seeds, positions, greedy = sent
    if coupled:
        tokens = torch.arange(rows.shape[1], dtype=torch.int32, device=rows.device)
        found = coupled_tokens(rows, noise_of(seeds, positions, tokens))
    else:
        found = drawn_tokens(rows.softmax(-1), device_uniform(seeds, positions, DRAW))
    return torch.where(greedy > 0, rows.argmax(-1), found)


def noise_of(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """[..., V] standard exponentials E = -log(1 - u) of mixed seeds and positions [...]."""
    return device_uniforms(seeds, positions, tokens).neg_().log1p_().neg_()


def coupled_tokens(log_weights: Tensor, noise: Tensor) -> Tensor:
    """argmin(E / p) of laws [..., V]: what `forerun.verify.warp.coupled_token` gives for each."""
    weights = (log_weights - log_weights.amax(-1, keepdim=True)).exp_()
    return (noise / weights).argmin(-1)


def drawn_tokens(laws: Tensor, u: Tensor) -> Tensor:
    """The tokens at quantiles u [...] of laws [..., V]: what `forerun.core.noise.draw` gives for each."""
    cdf = laws.double().cumsum(-1)
    found = torch.searchsorted(cdf, (u * cdf[..., -1])[..., None], right=True)[..., 0]
    last = laws.shape[-1] - 1 - (laws > 0).flip(-1).to(torch.int8).argmax(-1)  # of those that are possible
    return torch.minimum(found, last)
