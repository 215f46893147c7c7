"""Weights in the order in which the kernels read them: strips of 16 outputs, in blocks of 128 columns.

The piece of a strip in a block is a chunk; all strips of a block lie together, block after block, so that the chunks of
any strips side by side are one piece of memory. Weights that tensor cores read
as they lie (e4m3, where rows are e4m3 too) are lines of 128 bytes with their pieces of 16 bytes exchanged; the others
lie as threads hold them in registers (source/decode.cuh). Scales lie apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

BLOCK, STRIP, TILE = 128, 16, 8  # columns; outputs; strips of 128 outputs
Format = Literal[
    "bf16", "e4m3", "int8", "e4m3_weights", "int4", "int4_zeros", "int4_mins", "int4_k", "bytes_k", "int8_groups"
]  # fmt: skip
_WIDENED = 1024  # rows at once: their strips are widened whole
SIGN = 128  # what bytes of scales are larger by than what they stand for


@dataclass(frozen=True, slots=True)
class Strips:
    """A weight [N, K] of some format."""

    format: Format
    data: Tensor  # uint8 [blocks, strips and some more, bytes of a chunk]
    outputs: int
    depth: int
    channel: Tensor | None = None  # [N] fp32: a factor of each output
    of_blocks: Tensor | None = None  # [strips, blocks] fp32: a factor of each chunk, of e4m3
    sides: Tensor | None = None  # uint8 [blocks, strips, bytes]: scales, zero points and minima of groups
    group: int = BLOCK  # columns that share a scale
    half_scales: bool = False  # scales of groups are float16, not bfloat16
    gated: bool = False

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.outputs, self.depth))

    @property
    def strips(self) -> int:
        """How many hold outputs; memory has a multiple of eight of them."""
        return -(-self.outputs // STRIP)

    @property
    def blocks(self) -> int:
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        apart = (0 if tensor is None else tensor.nbytes for tensor in (self.channel, self.of_blocks, self.sides))
        return self.data.nbytes + sum(apart)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Some of its rows, widened: of weights for rows in bf16, as LM heads are."""
        found = torch.cat([self._rows(rows[i : i + _WIDENED]) for i in range(0, len(rows), _WIDENED)])
        return found if self.channel is None else found * self.channel[rows, None]

    def _rows(self, rows: Tensor) -> Tensor:
        strips, place = rows // STRIP, torch.arange(len(rows), device=rows.device)
        part = replace(self, data=self.data[:, strips], sides=None if self.sides is None else self.sides[:, strips])
        return _widen(part).view(len(rows), STRIP, -1)[place, rows % STRIP, : self.depth]


def _widen(weight: Strips) -> Tensor:
    """[16 outputs of each strip, columns of all blocks] without the outputs' own factors; fp32, or bf16 as it is."""
    data, blocks = weight.data, weight.blocks
    if weight.format == "bf16":
        words = data.view(torch.bfloat16).view(blocks, -1, 8, 8, 4, 2, 2, 2)
        # block, strip, step, g, t, upper, half, odd
        return words.permute(1, 6, 3, 0, 2, 5, 4, 7).reshape(-1, blocks * BLOCK)
    assert weight.format != "e4m3"
    if weight.format.startswith("int4"):
        if weight.format in ("int4_mins", "int4_k"):
            data = _turned(data, 29)
        halves = torch.stack((data & 15, data >> 4), -1).view(blocks, -1, 2, 8, 4, 4, 2, 2, 2)
        # block, strip, four steps, g, t, step, odd, upper, half
        wide = halves.permute(1, 8, 3, 0, 2, 5, 7, 4, 6)
    else:
        parts = data.view(blocks, -1, 4, 8, 4, 2, 2, 2, 2)
        # block, strip, two steps, g, t, step, upper, odd, half
        wide = parts.permute(1, 8, 3, 0, 2, 5, 6, 4, 7)
    wide = wide.reshape(-1, blocks * BLOCK)
    if weight.format == "e4m3_weights":
        return wide.view(torch.float8_e4m3fn).float()
    if weight.format == "bytes_k":
        wide = wide >> 1
    numbers = wide.view(torch.int8).float() if weight.format in ("int8", "int8_groups") else wide.float()
    return numbers if weight.sides is None else _scaled(numbers, weight, weight.sides)


def _scaled(numbers: Tensor, weight: Strips, sides: Tensor) -> Tensor:
    """Numbers times the scales of their groups, less zero points or minima."""
    count, blocks = BLOCK // weight.group, weight.blocks
    kind = torch.float16 if weight.half_scales else torch.bfloat16

    def by_column(values: Tensor) -> Tensor:
        """[block, strip, groups, g, half] -> [outputs, columns]."""
        table = values.permute(1, 4, 3, 0, 2).reshape(-1, blocks * values.shape[2])
        return table.float().repeat_interleave(BLOCK // values.shape[2], 1)

    words = sides.view(blocks, -1, sides.shape[2] // 32, 32)
    if weight.format in ("int4_k", "bytes_k"):
        of_groups = words[:, :, :count].reshape(blocks, -1, count, 8, 2, 2).float() - SIGN
        of_blocks = words[:, :, count:].contiguous().view(torch.float16).view(blocks, -1, 2, 8, 2)
        scales, minima = (by_column(of_groups[..., i, :]) * by_column(of_blocks[:, :, i : i + 1]) for i in range(2))
        return numbers * scales - minima
    tables = words.contiguous().view(kind).view(blocks, -1, words.shape[2] // count, count, 8, 2)
    scales = by_column(tables[:, :, 0])
    if weight.format == "int4_mins":
        return numbers * scales - by_column(tables[:, :, 1])
    if weight.format == "int4_zeros":
        less = words.contiguous().view(torch.bfloat16).view(tables.shape)[:, :, 1]
        return (numbers + by_column(less) + SIGN) * scales
    return (numbers - (8 if weight.format == "int4" else 0)) * scales


def _turned(data: Tensor, by: int) -> Tensor:
    """Words of 32 bits turned left."""
    words = data.contiguous().view(torch.int32)
    return ((words << by) | ((words >> (32 - by)) & ((1 << by) - 1))).view(torch.uint8)


def pair_gates(gate_up: Tensor) -> Tensor:
    """[2I, ...], gate and up interleaved, in the order that lets one thread hold both: eight gates, their eight ups."""
    units, rest = gate_up.shape[0] // 2, gate_up.shape[1:]
    return gate_up.view(units // 8, 8, 2, *rest).transpose(1, 2).reshape(2 * units, *rest)


def _padded(weight: Tensor, rows: int, columns: int, value: float = 0) -> Tensor:
    more = -weight.shape[0] % rows, -weight.shape[1] % columns
    if more == (0, 0):
        return weight
    shape = weight.shape[0] + more[0], weight.shape[1] + more[1]
    wide = torch.full(shape, value, device=weight.device, dtype=torch.float32).to(weight.dtype)
    wide[: weight.shape[0], : weight.shape[1]] = weight
    return wide


def _lines(weight: Tensor) -> Tensor:
    """[N, K] of bytes -> [tiles, blocks, 8, bytes] for tensor cores that read weights from shared memory."""
    weight = _padded(weight, BLOCK, BLOCK)
    tiles, blocks = weight.shape[0] // BLOCK, weight.shape[1] // BLOCK
    pieces = weight.reshape(tiles, BLOCK, blocks, 8, 16).transpose(1, 2)  # tile, block, output, piece of 16 bytes
    row = torch.arange(BLOCK, device=weight.device)[:, None]
    place = torch.arange(8, device=weight.device)[None, :] ^ (row % 8)
    exchanged = pieces.gather(3, place[:, :, None].expand(*pieces.shape))
    return exchanged.reshape(tiles, blocks, TILE, -1)


def _fragments(weight: Tensor) -> Tensor:
    """[N, K] -> [tile, block, strip, half, g, step of 16 columns, upper columns, t, odd column]."""
    weight = _padded(weight, BLOCK, BLOCK)
    tiles, blocks = weight.shape[0] // BLOCK, weight.shape[1] // BLOCK
    return weight.reshape(tiles, TILE, 2, 8, blocks, 8, 2, 4, 2).permute(0, 4, 1, 2, 3, 5, 6, 7, 8)


def _word_fragments(weight: Tensor) -> Tensor:
    """Numbers of 16 bits: a thread's 16 bytes are one step of 16 columns."""
    parts = _fragments(weight).permute(0, 1, 2, 5, 4, 7, 6, 3, 8)  # ..., step, g, t, upper, half, odd
    return parts.reshape(*parts.shape[:3], -1).view(torch.uint8)


def _split_steps(parts: Tensor, count: int) -> Tensor:
    """The eight steps of a block, dimension 5, as `count` times so many."""
    return parts.reshape(*parts.shape[:5], count, 8 // count, *parts.shape[6:])


def _byte_fragments(weight: Tensor) -> Tensor:
    """A thread's 16 bytes are two steps of 16 columns."""
    parts = _split_steps(_fragments(weight), 4)
    parts = parts.permute(0, 1, 2, 5, 4, 8, 6, 7, 9, 3)  # ..., two steps, g, t, step, upper, odd, half
    return parts.reshape(*parts.shape[:3], -1)


def _nibble_fragments(weight: Tensor) -> Tensor:
    """A thread's 16 bytes are four steps of 16 columns."""
    parts = _split_steps(_fragments(weight), 2)
    parts = parts.permute(0, 1, 2, 5, 4, 8, 6, 9, 7, 3)  # ..., four steps, g, t, step, odd, upper, half
    joined = parts[..., 0] | (parts[..., 1] << 4)
    return joined.reshape(*parts.shape[:3], -1)


def _of_outputs(values: Tensor, group: int) -> Tensor:
    """[N, K / group] of 16 bits -> [tile, block, strip, bytes]: outputs g and g + 8 of a strip side by side."""
    groups = BLOCK // group
    values = _padded(values, BLOCK, groups)
    tiles, blocks = values.shape[0] // BLOCK, values.shape[1] // groups
    parts = values.reshape(tiles, TILE, 2, 8, blocks, groups).permute(0, 4, 1, 5, 3, 2)
    return parts.reshape(tiles, blocks, TILE, -1).view(torch.uint8)


def _by_block(chunks: Tensor) -> Tensor:
    """[tile, block, strip, bytes] -> [block, strip, bytes]."""
    return chunks.transpose(0, 1).flatten(1, 2).contiguous()


def pack_bf16(weight: Tensor) -> Strips:
    """bf16 weights [N, K]."""
    return Strips("bf16", _by_block(_word_fragments(weight)), weight.shape[0], weight.shape[1])


def pack_e4m3(weight: Tensor, channel: Tensor | None = None, of_blocks: Tensor | None = None) -> Strips:
    """For rows in e4m3 as well. Scales of outputs [N], or of 128 x 128 blocks [N / 128, K / 128], or both."""
    if of_blocks is not None:
        of_blocks = of_blocks.float().repeat_interleave(TILE, 0).contiguous()
    return Strips(
        "e4m3", _by_block(_lines(weight.view(torch.uint8))), weight.shape[0], weight.shape[1], channel, of_blocks
    )


def pack_bytes(weight: Tensor, channel: Tensor) -> Strips:
    """int8 or e4m3 weights [N, K] with a scale for each output, for rows in bf16."""
    kind: Format = "int8" if weight.dtype == torch.int8 else "e4m3_weights"
    return Strips(kind, _by_block(_byte_fragments(weight.view(torch.uint8))), weight.shape[0], weight.shape[1], channel)


def pack_int4(weight: Tensor, scales: Tensor, zeros: Tensor | None = None, minima: Tensor | None = None) -> Strips:
    """Numbers 0..15 [N, K], scales [N, K / group], and zero points (else 8) or minima of the same shape."""
    group = weight.shape[1] // scales.shape[1]
    assert group in (32, 64, 128)
    assert scales.dtype in (torch.bfloat16, torch.float16)
    data = _nibble_fragments(_padded(weight.to(torch.uint8), BLOCK, BLOCK, 8))
    sides = [_of_outputs(scales, group)]
    kind: Format = "int4"
    if zeros is not None:
        kind = "int4_zeros"
        sides.append(_of_outputs(-(SIGN + zeros.float()).to(torch.bfloat16), group))
    elif minima is not None:
        assert group == 32
        assert minima.dtype == scales.dtype
        kind, data = "int4_mins", _turned(data, 3)
        sides.append(_of_outputs(minima, group))
    half, (outputs, depth) = scales.dtype == torch.float16, weight.shape
    return Strips(
        kind, _by_block(data), outputs, depth, sides=_by_block(torch.cat(sides, 3)), group=group, half_scales=half
    )


def pack_int8_groups(weight: Tensor, scales: Tensor) -> Strips:
    """int8 [N, K] and scales [N, K / 32]."""
    data, half = _byte_fragments(weight.view(torch.uint8)), scales.dtype == torch.float16
    sides, (outputs, depth) = _by_block(_of_outputs(scales, 32)), weight.shape
    return Strips("int8_groups", _by_block(data), outputs, depth, sides=sides, group=32, half_scales=half)


def pack_k(weight: Tensor, steps: Tensor, lows: Tensor, scales: Tensor, minima: Tensor) -> Strips:
    """Numbers [N, K] that stand for number * step * scale - low * minimum.

    Steps and lows are of one byte, for each 32 columns where numbers are of four bits, for each 16 where they are of
    six; scales and minima are float16, for each 128 columns.
    """
    group = weight.shape[1] // steps.shape[1]
    assert group in (16, 32)
    assert scales.dtype == minima.dtype == torch.float16
    numbers = weight.to(torch.uint8)
    data = _turned(_nibble_fragments(numbers), 3) if group == 32 else _byte_fragments(numbers << 1)
    of_groups = [
        torch.unflatten(_of_outputs((values + SIGN).to(torch.uint8), group), 3, (-1, 8, 2)) for values in (steps, lows)
    ]
    sides = [torch.stack(of_groups, -2).flatten(3), _of_outputs(scales, BLOCK), _of_outputs(minima, BLOCK)]
    outputs, depth = weight.shape
    return Strips(
        "int4_k" if group == 32 else "bytes_k", _by_block(data), outputs, depth,
        sides=_by_block(torch.cat(sides, 3)), group=group, half_scales=True,
    )  # fmt: skip
