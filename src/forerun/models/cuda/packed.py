"""Weights of one byte: int8 or fp8 with one scale per output, widened where they are multiplied.

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
