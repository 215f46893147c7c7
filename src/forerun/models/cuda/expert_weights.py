"""The weights of a layer of experts on a GPU: experts stacked in two matrices, the router, and the shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.models.config import MoeConfig
from forerun.models.cuda.packed import Packed, Weight, WeightKind, interleaved, pack
from forerun.models.moe import Experts


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One layer's experts; rows of `gate_up` are gate and up in turn, as in dense layers."""

    router: Tensor  # [E, D], or [E + 1, D]: the last row opens the shared expert
    gate_up: Weight  # [E 2I, D] expert after expert
    down: Weight  # [E D, I]
    shared_gate_up: Weight | None  # [2S, D]
    shared_down: Weight | None  # [D, S]


def stack_experts(experts: Experts, config: MoeConfig, kind: WeightKind) -> ExpertWeights:
    """From the layout of a checkpoint, whose own tensors stay as they are."""
    gate_up, down = torch.empty_like(experts.gate_up), experts.down
    for expert in range(config.experts):
        gate_up[expert] = interleaved(experts.gate_up[expert])
    router, shared = experts.router, experts.shared
    if shared is not None and experts.shared_gate is not None:
        router = torch.cat((router, experts.shared_gate))
    return ExpertWeights(
        router=router.contiguous(),
        gate_up=pack(gate_up.flatten(0, 1), kind),
        down=pack(down.flatten(0, 1), kind),
        shared_gate_up=None if shared is None else pack(interleaved(shared.gate_up), kind),
        shared_down=None if shared is None else pack(shared.down, kind),
    )


def part_of(weight: Weight, index: int, count: int) -> Weight:
    """One of `count` equal parts of stacked weights."""
    size = weight.shape[0] // count
    own = slice(index * size, (index + 1) * size)
    return weight[own] if isinstance(weight, Tensor) else Packed(weight.data[own], weight.scales[own])
