"""One packed linear layer through the C library, for tests of its kernels."""

import ctypes

import torch
from torch import Tensor

from forerun.models.native.library import library, match_threads
from forerun.models.native.packing import PackedWeight, side_by_side


def apply(weight: PackedWeight, x: Tensor) -> Tensor:
    """x [M, inputs] float32 by a packed weight -> [M, outputs]."""
    rows = x.contiguous()
    y = rows.new_empty(len(rows), weight.outputs)
    match_threads(torch.get_num_threads())
    failed = library().fr_linear_rows(ctypes.byref(side_by_side([weight])), rows.data_ptr(), y.data_ptr(), len(rows))
    assert not failed, f"no memory for the blocks of {len(rows)} rows"
    return y
