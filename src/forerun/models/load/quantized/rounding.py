"""Weights rounded to nearest: one byte with a scale for each output, or four bits with a scale for each group."""

from __future__ import annotations

import torch
from torch import Tensor

GROUPS = (128, 64, 32)  # columns that share a scale of four bits: the largest that divides the width
LARGEST = {"int8": 127.0, "fp8": 448.0}
_SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of a group's largest number: what scales of four bits are tried with


def in_bytes(weight: Tensor, kind: str, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """int8 or float8_e4m3fn [N, K], and scales [N] in fp32 that `scale_dtype` holds exactly.

    Each output's largest number becomes the largest there is.
    """
    largest = LARGEST[kind]
    scales = (weight.float().abs().amax(1).clamp(min=1e-12) / largest).to(scale_dtype).float()
    scaled = (weight.float() / scales[:, None]).clamp_(-largest, largest)
    data = scaled.round_().to(torch.int8) if kind == "int8" else scaled.to(torch.float8_e4m3fn)
    return data, scales


def in_four_bits(weight: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """Numbers 0..15 that stand for -8..7, and the scale of each group [N, K / group] with the smallest error."""
    size = group or next(size for size in GROUPS if weight.shape[1] % size == 0)
    parts = weight.float().view(len(weight), -1, size)
    most, least = parts.abs().amax(2).clamp(min=1e-12) / 7.0, torch.full((), float("inf"))
    numbers, scales = torch.zeros_like(parts), torch.zeros_like(most)
    error = least.to(weight.device).expand(most.shape)
    for shrunk in _SHRUNK:
        scale = (most * shrunk).bfloat16().float()
        rounded = (parts / scale[..., None]).round_().clamp_(-8, 7)
        off = (rounded * scale[..., None] - parts).square_().sum(2)
        better = off < error
        error, scales = torch.where(better, off, error), torch.where(better, scale, scales)
        numbers = torch.where(better[..., None], rounded, numbers)
    return (numbers + 8).to(torch.uint8).flatten(1), scales.bfloat16()
