"""Weights for the native kernels: GGUF blocks and float tensors become panels of four output rows.

Packing moves numbers and changes none: what a GGUF file holds as small integers and scales stays so, in another
order, at the same size or nearly. Types without a packed form become float32, which is exact too.

Packed weights lie in huge pages where the system gives them: a pass over one row reads every weight once, and with
pages of 4 KB a good part of its time goes into finding them. Many weights share a slab, which is freed with the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass
from threading import Lock
from typing import Literal

import torch
from torch import Tensor

from forerun.models.load.quants import LAYOUTS, Blocks, dequantize
from forerun.models.native.library import BF16, BLOCK, F32, Table, Weight, Weights, library

FloatMode = Literal["float32", "bfloat16", "q8", "q4"]

_Q4_1, _Q8_0 = 3, 8
_PLAIN = ("F32", "F16", "BF16")
_TABLES = {torch.float32: -1, torch.bfloat16: -2}  # as forerun.h has them
_ROWS = 4096  # rows quantised at once: intermediates stay small beside the result


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One matrix as the kernels read it. The data must outlive every struct made of it."""

    kind: int
    outputs: int
    inputs: int
    data: Tensor  # packed: uint8; plain: [outputs, inputs] float32 or bfloat16
    bias: Tensor | None = None  # [outputs] float32

    def struct(self) -> Weight:
        bias = None if self.bias is None else self.bias.data_ptr()
        return Weight(self.kind, self.outputs, self.inputs, self.data.data_ptr(), bias)


def side_by_side(parts: list[PackedWeight]) -> Weights:
    """The struct of weights that share their input."""
    found = Weights(len(parts))
    for i, part in enumerate(parts):
        found.part[i] = part.struct()
    return found


def is_packable(kind: int) -> bool:
    """Do the kernels read this GGUF type, packed or as plain floats?"""
    return LAYOUTS[kind].name in _PLAIN or library().fr_packed_kind(kind) >= 0


def pack_blocks(blocks: Blocks, bias: Tensor | None = None) -> PackedWeight:
    """A matrix of a GGUF file, exactly: in its own type where the kernels read it, else in float32."""
    outputs, inputs = blocks.shape
    packed = library().fr_packed_kind(blocks.kind)
    if packed < 0:
        name = LAYOUTS[blocks.kind].name
        return pack_floats(dequantize(blocks), "bfloat16" if name == "BF16" else "float32", bias)
    raw = blocks.data.contiguous()
    layout = LAYOUTS[blocks.kind]
    row_bytes = inputs // layout.weights * layout.bytes
    assert raw.numel() == outputs * row_bytes, (raw.numel(), blocks.shape, layout)
    data = take_memory(library().fr_packed_bytes(packed, outputs, inputs))
    library().fr_pack(blocks.kind, raw.data_ptr(), row_bytes, outputs, inputs, data.data_ptr())
    return PackedWeight(packed, outputs, inputs, data, _as_bias(bias))


def pack_floats(weight: Tensor, mode: FloatMode, bias: Tensor | None = None) -> PackedWeight:
    """A float matrix as it is, or in blocks of 32 inputs of eight or four bits (q8, q4); other widths stay float32."""
    outputs, inputs = weight.shape
    if mode in ("q8", "q4") and inputs % BLOCK == 0:
        return pack_blocks(quantize_q8(weight) if mode == "q8" else as_q4_1(weight), bias)
    narrow = mode == "bfloat16"
    data = weight.to(torch.bfloat16 if narrow else torch.float32).contiguous()
    return PackedWeight(BF16 if narrow else F32, outputs, inputs, data, _as_bias(bias))


def take_rows(blocks: Blocks, rows: Tensor) -> Blocks:
    """Some rows of a matrix of a GGUF file, as they are."""
    outputs, inputs = blocks.shape
    return Blocks(blocks.kind, (len(rows), inputs), blocks.data.view(outputs, -1)[rows].flatten())


def table_of(table: Tensor | Blocks | None) -> Table:
    """The struct of a table that the kernels look tokens up in; without rows where they cannot read it."""
    if isinstance(table, Blocks) and library().fr_packed_kind(table.kind) >= 0:
        return Table(table.kind, table.data.numel() // table.shape[0], table.data.data_ptr())
    if isinstance(table, Tensor) and table.dtype in _TABLES and table.is_contiguous():
        return Table(_TABLES[table.dtype], 0, table.data_ptr())
    return Table(-1)


def unpack_rows(blocks: Blocks, rows: Tensor | Sequence[int]) -> Tensor:
    """Some rows of a matrix of a GGUF file, in float32: [n] -> [n, inputs]; the rest of it is not read."""
    outputs, inputs = blocks.shape
    data, wanted = blocks.data, rows.tolist() if isinstance(rows, Tensor) else rows
    if library().fr_packed_kind(blocks.kind) < 0:
        return dequantize(take_rows(blocks, torch.as_tensor(rows)))
    found = torch.empty(len(wanted), inputs)
    if min(wanted, default=0) < 0 or max(wanted, default=0) >= outputs:  # C would read what is not there
        raise IndexError(f"rows {wanted} of a matrix of {outputs}")
    indices = (c_int64 * len(wanted))(*wanted)
    library().fr_unpack_rows(
        blocks.kind, data.data_ptr(), data.numel() // outputs, inputs, indices, len(wanted), found.data_ptr()
    )
    return found


def _as_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(torch.float32).contiguous()


def quantize_q8(weight: Tensor) -> Blocks:
    """A float matrix as GGUF's Q8_0: scales of amax/127 per block, in float16 before the integers are chosen."""
    outputs, inputs = weight.shape
    data = torch.empty(outputs, inputs // BLOCK, 2 + BLOCK, dtype=torch.uint8)
    for first in range(0, outputs, _ROWS):
        rows = weight[first : first + _ROWS].float().view(-1, inputs // BLOCK, BLOCK)
        scales = (rows.abs().amax(-1, keepdim=True) / 127).clamp(max=65504).half()
        inverse = torch.where(scales > 0, 1 / scales.float(), 0.0)
        values = (rows * inverse).round().clamp(-127, 127).to(torch.int8)
        data[first : first + _ROWS, :, :2] = scales.view(torch.uint8)
        data[first : first + _ROWS, :, 2:] = values.view(torch.uint8)
    return Blocks(_Q8_0, (outputs, inputs), data.flatten())


def as_q4_1(weight: Tensor) -> Blocks:
    """Fifteen steps from a block's least to its largest; both rounded to float16 before the integers are chosen."""
    outputs, inputs = weight.shape
    data = torch.empty(outputs, inputs // BLOCK, 4 + BLOCK // 2, dtype=torch.uint8)
    for first in range(0, outputs, _ROWS):
        rows = weight[first : first + _ROWS].float().view(-1, inputs // BLOCK, BLOCK)
        least, some = rows.amin(-1, keepdim=True).half(), data[first : first + _ROWS]
        steps = ((rows.amax(-1, keepdim=True) - least.float()) / 15).clamp(min=0, max=65504).half()
        inverse = torch.where(steps > 0, 1 / steps.float(), 0.0)
        values = ((rows - least.float()) * inverse).round().clamp(0, 15).to(torch.uint8)
        some[:, :, :2], some[:, :, 2:4] = steps.view(torch.uint8), least.view(torch.uint8)
        some[:, :, 4:] = values[..., : BLOCK // 2] | values[..., BLOCK // 2 :] << 4
    return Blocks(_Q4_1, (outputs, inputs), data.flatten())


_PAGE = 2 << 20  # a huge page
_SLAB = 4 * _PAGE
_LINE = 64  # weights start at a cache line

_lock = Lock()
_current: list[Tensor] = []  # what is left of the slab in use, if there is one


def take_memory(size: int) -> Tensor:
    """[size] bytes of uint8, not initialised."""
    if size >= _PAGE:
        return _allocate(size)
    with _lock:
        if not _current or _current[0].numel() < size:
            _current[:] = [_allocate(_SLAB)]
        whole, taken = _current[0], -(-size // _LINE) * _LINE
        _current[0] = whole[taken:]
    return whole[:size]


def _allocate(size: int) -> Tensor:
    """From a huge page's boundary on; the system is asked for huge pages before anything is written."""
    whole = torch.empty(size + _PAGE, dtype=torch.uint8)
    found = whole[-whole.data_ptr() % _PAGE :][:size]
    library().fr_use_huge_pages(found.data_ptr(), size)
    return found
