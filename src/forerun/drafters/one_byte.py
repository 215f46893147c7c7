"""Heads in files of one byte per weight: int8 blocks of 32 numbers along a row, with a scale each.

A matrix `name` is stored as int8 [N, K] under its own name and `name.scales` [N, K / 32] in fp16. A block's largest
number becomes 127, so rounding moves a number by at most 0.4% of it: a head drafts as before.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BLOCK = 32
SMALLEST_IN_BYTES = 1 << 14  # numbers in a matrix that is worth it
SCALES = ".scales"


def in_bytes(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Large matrices as bytes and scales; all else as it is."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        found[name] = weight
        large = weight.dim() == 2 and weight.numel() >= SMALLEST_IN_BYTES and weight.shape[1] % BLOCK == 0
        if large and weight.is_floating_point():
            found[name], found[name + SCALES] = _bytes_of(weight)
    return found


def widened(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `in_bytes` wrote, in bfloat16."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        scales = weights.get(name + SCALES)
        if name.endswith(SCALES):
            continue
        if scales is not None and weight.dtype == torch.int8:
            blocks = weight.view(len(weight), -1, BLOCK).float() * scales.float()[..., None]
            weight = blocks.view(weight.shape).bfloat16()
        found[name] = weight
    return found


def _bytes_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    blocks = weight.float().view(len(weight), -1, BLOCK)
    scales = (blocks.abs().amax(-1) / 127).half().float()
    data = (blocks / scales.clamp(min=1e-7)[..., None]).round().clamp(-127, 127)
    return data.to(torch.int8).view(weight.shape), scales.half()
