"""Mixture of experts: feed-forward layers whose router picks a few experts per row; only those are computed."""

from __future__ import annotations

from collections.abc import Iterator
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
    """[M, D] -> [M, D]: the picked experts' outputs, weighted by the router, added up in the order of their numbers.

    Rows are sorted by expert, so that each expert that some row picked is read for all of its rows at once.
    """
    weights, picked = route(x, experts.router, config)  # [M, K]
    found = x.new_empty(len(x), config.per_token, x.shape[1])
    for expert, rows, ranks in by_expert(picked, config.experts):
        inner = gate(linear(x[rows], experts.gate_up[expert]), activation)
        found[rows, ranks] = linear(inner, experts.down[expert])
    out = found[:, 0] * weights[:, :1]
    for rank in range(1, config.per_token):
        out += found[:, rank] * weights[:, rank : rank + 1]
    if experts.shared is not None and experts.shared_gate is not None:
        inner = gate(linear(x, experts.shared.gate_up), activation)
        out += linear(inner, experts.shared.down) * linear(x, experts.shared_gate).sigmoid()
    return out


def route(x: Tensor, router: Tensor, config: MoeConfig) -> tuple[Tensor, Tensor]:
    """[M, K] the weights of the experts that each row picks, and their numbers, which ascend."""
    laws = linear(x, router).softmax(-1, dtype=torch.float32)  # [M, E]
    weights, picked = laws.topk(config.per_token, dim=-1)
    if config.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    picked, order = picked.sort(-1)
    return weights.gather(-1, order).to(x.dtype), picked


def by_expert(picked: Tensor, experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Every expert that some row picked, in order, with the rows that did and the rank it has for each."""
    order = picked.flatten().argsort(stable=True)
    counts: list[int] = torch.bincount(picked.flatten(), minlength=experts).tolist()
    for expert, pairs in enumerate(torch.split(order, counts)):
        if len(pairs):
            yield expert, pairs // picked.shape[1], pairs % picked.shape[1]
