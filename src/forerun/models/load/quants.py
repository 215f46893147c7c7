"""Dequantises GGUF blocks with torch, for the types that llama.cpp's files use.

A tensor is a run of blocks; each holds a few weights as small integers beside their scales. The unpackers
below take the bytes of n blocks and give their weights, in the arithmetic of the `gguf` package's own
`dequantize` (every product here is exact in float32, so the results are bit-equal; a test compares
them). Types without an unpacker go through that package when it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.core.errors import UnsupportedModel

_CHUNK = 1 << 20  # weights unpacked at once: intermediates stay small beside the result
_ON_DEVICE = 1 << 24  # the same elsewhere than on a CPU: 1,846 chunks of a 1.5B were 36,000 launches


@dataclass(frozen=True, slots=True)
class Layout:
    name: str
    weights: int  # per block
    bytes: int  # per block


LAYOUTS: dict[int, Layout] = {
    0: Layout("F32", 1, 4),
    1: Layout("F16", 1, 2),
    2: Layout("Q4_0", 32, 18),
    3: Layout("Q4_1", 32, 20),
    6: Layout("Q5_0", 32, 22),
    7: Layout("Q5_1", 32, 24),
    8: Layout("Q8_0", 32, 34),
    9: Layout("Q8_1", 32, 40),
    10: Layout("Q2_K", 256, 84),
    11: Layout("Q3_K", 256, 110),
    12: Layout("Q4_K", 256, 144),
    13: Layout("Q5_K", 256, 176),
    14: Layout("Q6_K", 256, 210),
    15: Layout("Q8_K", 256, 292),
    16: Layout("IQ2_XXS", 256, 66),
    17: Layout("IQ2_XS", 256, 74),
    18: Layout("IQ3_XXS", 256, 98),
    19: Layout("IQ1_S", 256, 50),
    20: Layout("IQ4_NL", 32, 18),
    21: Layout("IQ3_S", 256, 110),
    22: Layout("IQ2_S", 256, 82),
    23: Layout("IQ4_XS", 256, 136),
    24: Layout("I8", 1, 1),
    25: Layout("I16", 1, 2),
    26: Layout("I32", 1, 4),
    27: Layout("I64", 1, 8),
    28: Layout("F64", 1, 8),
    29: Layout("IQ1_M", 256, 56),
    30: Layout("BF16", 1, 2),
    34: Layout("TQ1_0", 256, 54),
    35: Layout("TQ2_0", 256, 66),
    39: Layout("MXFP4", 32, 17),
}
F32, Q4_0, Q5_0, Q8_0, MXFP4 = 0, 2, 6, 8, 39


@dataclass(frozen=True, slots=True)
class Blocks:
    kind: int  # a key of LAYOUTS
    shape: tuple[int, ...]
    data: Tensor  # [bytes] uint8, contiguous


def dequantize(blocks: Blocks, device: torch.device | str = "cpu") -> Tensor:
    """The weights of a tensor, in float32 and in memory of their own on a device.

    They are unpacked there: a matrix that takes a CPU ten seconds takes a GPU as long as the copy of its packed bytes.
    """
    layout = LAYOUTS[blocks.kind]
    if layout.name in _PLAIN:
        return blocks.data.clone().view(_PLAIN[layout.name]).to(device, torch.float32).view(blocks.shape)
    data, unpack = blocks.data.to(device), _UNPACKERS.get(layout.name)
    if unpack is None:  # the gguf package unpacks on the CPU
        data, unpack = blocks.data, _gguf_unpacker(blocks.kind, layout)
    packed = data.view(-1, layout.bytes)  # [n, bytes]
    weights = torch.empty(len(packed), layout.weights, device=packed.device)
    step = (_CHUNK if packed.device.type == "cpu" else _ON_DEVICE) // layout.weights
    for start in range(0, len(packed), step):
        unpack(packed[start : start + step], weights[start : start + step])
    return weights.view(blocks.shape).to(device)


def _gguf_unpacker(kind: int, layout: Layout) -> Callable[[Tensor, Tensor], None]:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as unpack_rows
    except ImportError:
        raise UnsupportedModel(
            f"weights of type {layout.name} cannot be read; install gguf, or use a Q4_K, Q8_0 or F16 file"
        ) from None

    def unpack(packed: Tensor, out: Tensor) -> None:
        try:
            rows: Any = unpack_rows(packed.numpy(), GGMLQuantizationType(kind))
        except NotImplementedError:  # gguf knows the type and cannot read it
            raise UnsupportedModel(
                f"weights of type {layout.name} cannot be read; use a Q4_K, Q8_0 or F16 file of the model"
            ) from None
        out.copy_(torch.from_numpy(rows))

    return unpack


def _half(packed: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as [n, 1] float32."""
    return packed[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Low nibbles to the first half of out's last dimension, high ones to the second."""
    half = packed.shape[-1]
    torch.bitwise_and(packed, 15, out=out[..., :half])
    torch.bitwise_right_shift(packed, 4, out=out[..., half:])


def _four_bits(packed: Tensor) -> Tensor:
    codes = torch.empty(len(packed), 32, dtype=torch.uint8, device=packed.device)
    _nibbles(packed, codes)
    return codes


def _fifth_bit(packed: Tensor) -> Tensor:
    """Bit i of four bytes as 16 or 0, for weight i of 32: [n, 4] -> [n, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).view(-1, 32) << 4


def _q8_0(packed: Tensor, out: Tensor) -> None:
    torch.mul(packed[:, 2:].view(torch.int8), _half(packed, 0), out=out)


def _q4_0(packed: Tensor, out: Tensor) -> None:
    torch.mul(_four_bits(packed[:, 2:]).view(torch.int8) - 8, _half(packed, 0), out=out)


def _q4_1(packed: Tensor, out: Tensor) -> None:
    torch.mul(_four_bits(packed[:, 4:]), _half(packed, 0), out=out)
    out += _half(packed, 2)


# The sixteen values of IQ4_NL.
_UNEVEN_STEPS = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32
)


def _iq4_nl(packed: Tensor, out: Tensor) -> None:
    torch.mul(_UNEVEN_STEPS.to(packed.device)[_four_bits(packed[:, 2:]).long()], _half(packed, 0), out=out)


# The sixteen values of MXFP4, twice as large as they are: scales are halved.
_FLOAT_STEPS = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32)


def _mxfp4(packed: Tensor, out: Tensor) -> None:
    exponents = packed[:, :1].int()
    bits = torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23)  # 2^(e - 128)
    torch.mul(_FLOAT_STEPS.to(packed.device)[_four_bits(packed[:, 1:]).long()], bits.view(torch.float32), out=out)


def _q5_0_codes(packed: Tensor) -> Tensor:
    return _four_bits(packed[:, 6:]) | _fifth_bit(packed[:, 2:6])


def _q5_0(packed: Tensor, out: Tensor) -> None:
    torch.mul(_q5_0_codes(packed).view(torch.int8) - 16, _half(packed, 0), out=out)


def _q5_1(packed: Tensor, out: Tensor) -> None:
    codes = _four_bits(packed[:, 8:]) | _fifth_bit(packed[:, 4:8])
    torch.mul(codes, _half(packed, 0), out=out)
    out += _half(packed, 2)


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 scales and 8 minima of 6 bits in the 12 bytes of a K block: [n, 12] -> two of [n, 8]."""
    low, minima, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([low & 63, (rest & 15) | ((low >> 2) & 48)], 1)
    return scales, torch.cat([minima & 63, (rest >> 4) | ((minima >> 2) & 48)], 1)


def _k_codes(packed: Tensor) -> Tensor:
    """128 bytes of nibbles in runs of 32: low nibbles are one group of weights, high ones the next."""
    codes = torch.empty(len(packed), 4, 64, dtype=torch.uint8, device=packed.device)
    _nibbles(packed.reshape(-1, 4, 32), codes)
    return codes.view(-1, 8, 32)


def _scale_groups(packed: Tensor, codes: Tensor, out: Tensor) -> None:
    scales, minima = _six_bit_scales(packed[:, 4:16])
    grouped = out.view(-1, 8, 32)
    torch.mul(codes, (_half(packed, 0) * scales).unsqueeze(-1), out=grouped)
    grouped -= (_half(packed, 2) * minima).unsqueeze(-1)


def _q4_k(packed: Tensor, out: Tensor) -> None:
    _scale_groups(packed, _k_codes(packed[:, 16:]), out)


def _q5_k_codes(packed: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device).view(1, 8, 1)
    high = ((packed[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4  # [n, 8, 32]
    return _k_codes(packed[:, 48:]) | high


def _q5_k(packed: Tensor, out: Tensor) -> None:
    _scale_groups(packed, _q5_k_codes(packed), out)


def _q6_k_codes(packed: Tensor) -> Tensor:
    low = torch.empty(len(packed), 2, 128, dtype=torch.uint8, device=packed.device)
    _nibbles(packed[:, :128].reshape(-1, 2, 64), low)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device).view(1, 1, 4, 1)
    high = ((packed[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4  # [n, 2, 4, 32]
    return (low.view(-1, 2, 4, 32) | high).view(-1, 16, 16)


def _q6_k(packed: Tensor, out: Tensor) -> None:
    codes = _q6_k_codes(packed).view(torch.int8) - 32
    scales = _half(packed, 208) * packed[:, 192:208].view(torch.int8)
    torch.mul(codes, scales.unsqueeze(-1), out=out.view(-1, 16, 16))


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_UNPACKERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
}


GROUP = 16  # columns of the smallest group that a type has


@dataclass(frozen=True, slots=True)
class Grouped:
    """A weight [N, K] as the file has it: data * steps * scales - lows * minima, the last four for each 16 columns."""

    data: Tensor  # [N, K] int16
    steps: Tensor  # [N, K / 16] int16
    lows: Tensor
    scales: Tensor  # [N, K / 16] float16
    minima: Tensor

    def whole(self, aspect: str) -> Tensor:
        """One of its parts in the shape of the weight."""
        found: Tensor = getattr(self, aspect)
        return found if aspect == "data" else found.repeat_interleave(GROUP, 1)

    def widened(self) -> Tensor:
        """[N, K] fp32: what `dequantize` gives."""
        steps, lows, scales, minima = (self.whole(name).float() for name in ("steps", "lows", "scales", "minima"))
        return self.data.float() * (steps * scales) - lows * minima


def read_groups(blocks: Blocks, device: torch.device | str = "cpu") -> Grouped:
    """The numbers of a matrix of a type in `GROUPED`, none of them rounded."""
    layout = LAYOUTS[blocks.kind]
    packed = blocks.data.to(device).view(-1, layout.bytes)
    codes, *parts = GROUPED[layout.name](packed)
    rows = blocks.shape[0]
    each = layout.weights // GROUP  # groups of a block
    wide = (part.expand(len(packed), -1) for part in parts)
    steps, lows, scales, minima = (part.repeat_interleave(each // part.shape[1], 1).view(rows, -1) for part in wide)
    return Grouped(codes.to(torch.int16).view(blocks.shape), steps.short(), lows.short(), scales.half(), minima.half())


Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # numbers, steps, lows, scales, minima of n blocks


def _one_scale(codes: Tensor, scales: Tensor, zero: int) -> Parts:
    one = torch.ones(1, 1, device=codes.device)
    return codes, one, one * zero, scales, scales


def _two_scales(codes: Tensor, scales: Tensor, minima: Tensor) -> Parts:
    one = torch.ones(1, 1, device=codes.device)
    return codes, one, -one, scales, minima


def _six_bits(packed: Tensor, codes: Tensor) -> Parts:
    return codes, *_six_bit_scales(packed[:, 4:16]), _half(packed, 0), _half(packed, 2)


def _signed_steps(packed: Tensor) -> Parts:
    steps, scales = packed[:, 192:208].view(torch.int8), _half(packed, 208)
    return _q6_k_codes(packed), steps, steps, scales, scales * 32


GROUPED: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": lambda packed: _one_scale(_four_bits(packed[:, 2:]), _half(packed, 0), 8),
    "Q4_1": lambda packed: _two_scales(_four_bits(packed[:, 4:]), _half(packed, 0), _half(packed, 2)),
    "Q5_0": lambda packed: _one_scale(_q5_0_codes(packed), _half(packed, 0), 16),
    "Q8_0": lambda packed: _one_scale(packed[:, 2:].view(torch.int8), _half(packed, 0), 0),
    "Q4_K": lambda packed: _six_bits(packed, _k_codes(packed[:, 16:])),
    "Q5_K": lambda packed: _six_bits(packed, _q5_k_codes(packed)),
    "Q6_K": _signed_steps,
}
