"""Weights on a GPU: one byte each (int8 or fp8 with one scale per output) or 16 bits, and stacked experts.

Reading weights is what a pass over few nodes costs, so half the bytes are nearly half the time. Rows stay in 16 bits
and sums in fp32; the scale is applied to the finished sum, so a row's bits still depend on that row alone.

Widening costs as much time as the saved bytes are worth. So a drafting head of int8 weights has rows of whole numbers,
two bytes each, and tensor cores multiply bytes as they lie in memory: once with the high ones and once with the low
ones, which is free where reading weights is what takes time. Their sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from forerun.models.config import MoeConfig
from forerun.models.layers import Experts

WeightKind = Literal["plain", "int8", "fp8"]
_LARGEST = {"int8": 127.0, "fp8": 448.0}
LARGEST_ROW = 32639  # of a row of whole numbers: 127 * 256 + 127


@dataclass(frozen=True, slots=True)
class Packed:
    """[N, K] in one byte each."""

    data: Tensor  # int8 or float8_e4m3fn
    scales: Tensor  # [N] fp32

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def scaled(self, by: float | Tensor) -> Packed:
        """The same numbers times something, for all outputs or [N] for each."""
        return Packed(self.data, self.scales * by)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Some of its rows, widened."""
        return self.data[rows].float() * self.scales[rows, None]


Weight = Tensor | Packed


def pack(weight: Tensor, kind: WeightKind) -> Weight:
    """A weight [N, K] in the form asked for; each output's largest number becomes the largest there is."""
    if kind == "plain":
        return weight
    scales = weight.float().abs().amax(1).clamp(min=1e-12) / _LARGEST[kind]
    scaled = weight.float() / scales[:, None]
    data = scaled.round().to(torch.int8) if kind == "int8" else scaled.to(torch.float8_e4m3fn)
    return Packed(data.contiguous(), scales)


def interleaved(gate_up: Tensor) -> Tensor:
    """[2I, D], all gates and then all ups, as gate and up interleaved."""
    return gate_up.view(2, -1, gate_up.shape[1]).transpose(0, 1).reshape(gate_up.shape)


def times(rows: Tensor, weight: Weight) -> Tensor:
    """rows [M, K] by a weight [N, K], in plain torch."""
    if isinstance(weight, Tensor):
        return rows @ weight.t()
    return ((rows @ weight.data.to(rows.dtype).t()) * weight.scales).to(rows.dtype)


def whole(rows: Tensor) -> Tensor:
    """Rows rounded to whole numbers of two bytes, of the same type."""
    return rows.float().round().clamp(-LARGEST_ROW, LARGEST_ROW).to(rows.dtype)


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
