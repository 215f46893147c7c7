"""Weights in the order in which the kernels read them: strips of 16 outputs, in blocks of 128 columns.

The piece of a strip in a block is a chunk; all strips of a block lie together, block after block, so that the chunks of
any strips side by side are one piece of memory. Weights that tensor cores read
as they lie (e4m3, where rows are e4m3 too) are lines of 128 bytes with their pieces of 16 bytes exchanged; the others
lie as threads hold them in registers (source/decode.cuh). Scales lie apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BLOCK, STRIP, TILE = 128, 16, 8  # columns; outputs; strips of 128 outputs
Format = Literal["bf16", "e4m3", "int8", "e4m3_weights", "int4", "int4_zeros"]


@dataclass(frozen=True, slots=True)
class Strips:
    """A weight [N, K] of some format."""

    format: Format
    data: Tensor  # uint8 [blocks, strips and some more, bytes of a chunk]
    outputs: int
    depth: int
    channel: Tensor | None = None  # [N] fp32: a factor of each output
    of_blocks: Tensor | None = None  # [strips, blocks] fp32: a factor of each chunk, of e4m3
    sides: Tensor | None = None  # uint8 [blocks, strips, bytes]: scales and zero points of groups, of four bits
    group: int = BLOCK  # columns that share a scale, of four bits
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
        """Some of its rows, widened: of weights for rows in bf16 without groups, as LM heads are."""
        if self.format == "bf16":
            words = self.data.view(torch.bfloat16).view(self.blocks, -1, TILE, 8, 8, 4, 2, 2, 2)
            # block, tile, strip, step, g, t, upper, half, odd
            lines = words.permute(1, 2, 7, 4, 0, 3, 6, 5, 8).reshape(-1, self.blocks * BLOCK)
            return lines[rows, : self.depth]
        assert self.format in ("int8", "e4m3_weights")
        assert self.channel is not None
        parts = self.data.view(self.blocks, -1, TILE, 4, 8, 4, 2, 2, 2, 2)
        # block, tile, strip, two steps, g, t, step, upper, odd, half
        wide = parts.permute(1, 2, 9, 4, 0, 3, 6, 7, 5, 8).reshape(-1, self.blocks * BLOCK)
        kind = torch.int8 if self.format == "int8" else torch.float8_e4m3fn
        found: Tensor = wide[rows, : self.depth].view(kind).float() * self.channel[rows, None]
        return found


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


def pack_int4(weight: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Strips:
    """Numbers 0..15 [N, K], scales [N, K / group] and zero points of the same shape (else 8)."""
    group = weight.shape[1] // scales.shape[1]
    assert group in (32, 64, 128)
    assert scales.dtype in (torch.bfloat16, torch.float16)
    data = _nibble_fragments(_padded(weight.to(torch.uint8), BLOCK, BLOCK, 8))
    sides = [_of_outputs(scales, group)]
    if zeros is not None:
        sides.append(_of_outputs(-(128 + zeros.float()).to(torch.bfloat16), group))
    half = scales.dtype == torch.float16
    kind: Format = "int4" if zeros is None else "int4_zeros"
    return Strips(
        kind, _by_block(data), weight.shape[0], weight.shape[1], None, None, _by_block(torch.cat(sides, 3)), group, half
    )
