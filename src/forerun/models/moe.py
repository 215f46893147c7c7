"""Mixture of experts: feed-forward layers whose router picks a few experts per row; only those are computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.models.config import Activation, MoeConfig
from forerun.models.layers import gate, linear


@dataclass(frozen=True, slots=True)
class Mlp:
    """A gated feed-forward layer: gate and up in one weight."""

    gate_up: Tensor  # [2I, D]
    down: Tensor  # [D, I]
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of one layer's experts and their router."""

    router: Tensor  # [E, D]
    gate_up: Tensor  # [E, 2I, D]
    down: Tensor  # [E, D, I]
    shared: Mlp | None = None
    shared_gate: Tensor | None = None  # [1, D]


def mix(x: Tensor, experts: Experts, config: MoeConfig, activation: Activation) -> Tensor:
    """[M, D] -> [M, D]: the picked experts' outputs, weighted by the router."""
    laws = linear(x, experts.router).softmax(-1, dtype=torch.float32)  # [M, E]
    weights, picked = laws.topk(config.per_token, dim=-1)  # [M, K]
    if config.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights.to(x.dtype)
    out = torch.zeros_like(x)
    for expert, places in _by_expert(picked).items():
        rows, ranks = torch.tensor(places, device=x.device).unbind(1)
        inner = gate(linear(x[rows], experts.gate_up[expert]), activation)
        out.index_add_(0, rows, linear(inner, experts.down[expert]) * weights[rows, ranks].unsqueeze(1))
    if experts.shared is not None and experts.shared_gate is not None:
        inner = gate(linear(x, experts.shared.gate_up), activation)
        out += linear(inner, experts.shared.down) * linear(x, experts.shared_gate).sigmoid()
    return out


def _by_expert(picked: Tensor) -> dict[int, list[tuple[int, int]]]:
    """Expert -> the (row, rank) pairs that picked it, experts in order."""
    places: dict[int, list[tuple[int, int]]] = {}
    for row, chosen in enumerate(picked.tolist()):
        for rank, expert in enumerate(chosen):
            places.setdefault(expert, []).append((row, rank))
    return dict(sorted(places.items()))
