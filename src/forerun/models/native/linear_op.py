"""torch.ops.forerun.linear: one packed linear layer, for families whose other parts run in torch."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from forerun.models.native.library import library, match_threads
from forerun.models.native.packing import PackedWeight, side_by_side


@torch.library.custom_op("forerun::linear", mutates_args=())
def linear(x: Tensor, data: Tensor, kind: int, outputs: int, bias: Tensor | None = None) -> Tensor:
    """x [M, inputs] float32 by a packed weight's `data` -> [M, outputs]; every row's bits are its own."""
    rows = x.contiguous()
    y = rows.new_empty(len(rows), outputs)
    weights = side_by_side([PackedWeight(kind, outputs, rows.shape[1], data, bias)])
    match_threads(torch.get_num_threads())
    if library().fr_linear_rows(ctypes.byref(weights), rows.data_ptr(), y.data_ptr(), len(rows)):
        raise MemoryError(f"no memory for the blocks of {len(rows)} rows")
    return y


@linear.register_fake
def _(x: Tensor, data: Tensor, kind: int, outputs: int, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], outputs)


def apply(weight: PackedWeight, x: Tensor) -> Tensor:
    """x [M, inputs] by a packed weight -> [M, outputs]."""
    found: Tensor = linear(x, weight.data, weight.kind, weight.outputs, weight.bias)
    return found
