"""A head's weight in the form that this machine multiplies fastest.

On a CPU a draft step is memory traffic, so large matrices are held as int8 blocks where the native kernels are
there: a quarter of the bytes. A draft may be rounded: that costs a rejected token now and then, and never
correctness, which is the verifier's. Small matrices, other devices and other formats stay plain tensors.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from forerun.models.layers import linear
from forerun.models.native import library as native
from forerun.models.native.packing import FloatMode, PackedWeight, pack_floats, side_by_side

SMALLEST = 1 << 16  # numbers in a matrix that is worth packing


def is_worth_packing(weight: Tensor) -> bool:
    return weight.numel() >= SMALLEST and weight.shape[1] % 32 == 0 and weight.dtype == torch.float32


def packed_form(weight: Tensor, bias: Tensor | None = None, mode: FloatMode = "q8") -> PackedWeight:
    """A weight as the kernels read it: in blocks, or float32 where it is small or odd."""
    weight = weight.detach().float()
    return pack_floats(weight, mode if is_worth_packing(weight) else "float32", bias)


class Matrix:
    """[outputs, inputs], to be multiplied with rows."""

    def __init__(self, weight: Tensor, *, packed: bool = True) -> None:
        self.outputs, self.inputs = weight.shape
        self._plain: Tensor | None = weight
        if packed and is_worth_packing(weight) and weight.device.type == "cpu" and native.available():
            self._kept = pack_floats(weight, "q8")  # the struct below points into it
            self._struct = side_by_side([self._kept])
            self._plain = None

    def times(self, x: Tensor) -> Tensor:
        """x [N, inputs] -> [N, outputs]"""
        if self._plain is not None:
            return linear(x, self._plain)
        rows = x.contiguous()
        out = rows.new_empty(len(rows), self.outputs)
        native.match_threads(torch.get_num_threads())
        call = native.library().fr_linear_rows
        if call(ctypes.byref(self._struct), rows.data_ptr(), out.data_ptr(), len(rows)):
            raise MemoryError(f"no memory for the blocks of {len(rows)} rows")
        return out

    def add_to(self, onto: Tensor, x: Tensor) -> Tensor:
        """onto += times(x), in place."""
        return onto.add_(self.times(x))
