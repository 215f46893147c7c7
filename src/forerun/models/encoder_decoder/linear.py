"""Linear layers whose rows have the same bits whatever other rows are in the pass: on a CPU by the native kernels.

Without the native library, or on a GPU, torch multiplies, and a row may round differently in other company.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
from torch import Tensor

from forerun.models.native import library as native
from forerun.models.native.packing import FloatMode, pack_floats, side_by_side


class Linear(Protocol):
    """x [M, inputs] -> [M, outputs]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class TorchLinear:
    """A weight [outputs, inputs] in torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(x, self.weight.t())
        return torch.addmm(self.bias, x, self.weight.t())


class NativeLinear:
    """A weight as the native kernels read it; `match_threads` must have been called for the pass."""

    def __init__(self, weight: Tensor, bias: Tensor | None, mode: FloatMode) -> None:
        self._packed = pack_floats(weight, mode, bias)
        self._weights = side_by_side([self._packed])
        self._address = ctypes.byref(self._weights)
        self._multiply = native.library().fr_linear_rows

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = x.new_empty(len(x), self._packed.outputs)
        if self._multiply(self._address, x.data_ptr(), y.data_ptr(), len(x)):
            raise MemoryError(f"no memory for the blocks of {len(x)} rows")
        return y


def make_linear(weight: Tensor, bias: Tensor | None, mode: FloatMode | None) -> Linear:
    """By the native kernels in this mode; None = in torch, as the weight is."""
    return TorchLinear(weight, bias) if mode is None else NativeLinear(weight, bias, mode)
