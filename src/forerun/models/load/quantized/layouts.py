"""Quantised weights of safetensors files: their layouts, and dequantised weights under their ordinary names.

A weight [N, K] is (numbers - zeros) * scales in all of them. They differ in how numbers lie in 32-bit words, the lowest
bits first: AWQ packs eight outputs into a word in an order of its own, GPTQ eight inputs, compressed-tensors eight
inputs of a row. Every tensor is checked for its shape and type, and scales for finite values. Rounding to such numbers
is here too: one byte with a scale for each output, or four bits with a scale for each group.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.errors import DamagedFile, UnsupportedModel
from forerun.models.load.quantized.scheme import Quantization, Scheme
from forerun.models.load.quants import Q4_0, Q5_0, Q8_0, Blocks
from forerun.models.load.weights import SafetensorsWeights, Weights

Shape = tuple[int, ...]
_BLOCK, _MOST = 32, 8188.0  # columns of a block of GGUF; Q4_0 is read with eight times its scale
_TYPES = ((Q4_0, -8, 7), (Q5_0, -16, 15), (Q8_0, -128, 127))  # and the whole numbers that they hold
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in its word of each of eight outputs
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_WHOLE = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class Numbers:
    """[N, K] as the files have it: (data - zeros) * scales."""

    data: Tensor  # [N, K] uint8, int8 or float8_e4m3fn
    scales: Tensor  # [N or 1, G] fp32
    zeros: Tensor | None  # the same shape, or [1, 1]
    groups: Tensor | None  # [K] which of the G scales each column has; None = all the same

    def widened(self) -> Tensor:
        """[N, K] fp32."""
        values = self.data.float()
        if self.zeros is not None:
            values -= self._by_column(self.zeros)
        return values.mul_(self._by_column(self.scales))

    def whole(self, aspect: str) -> Tensor:
        """Its `data`, `scales` or `zeros` in the shape of the weight, fp32."""
        if aspect == "data":
            return self.data.float()
        table = self.scales if aspect == "scales" else self.zeros
        return torch.zeros_like(self.data, dtype=torch.float32) + (0.0 if table is None else self._by_column(table))

    @property
    def columns_of_a_scale(self) -> int | None:
        """Neighbours that share a scale, the same number everywhere; None where columns are in another order."""
        columns = self.data.shape[1]
        if self.groups is None or self.scales.shape[1] == 1:
            return columns
        size = -(-columns // self.scales.shape[1])
        plain = torch.arange(columns, device=self.groups.device) // size
        return size if torch.equal(self.groups, plain) else None

    def blocks(self) -> Blocks | None:
        """The same numbers in a GGUF type; None where no type holds them, 32 columns to a scale of 16 bits."""
        rows, columns = self.data.shape
        if self.data.dtype == torch.float8_e4m3fn or columns % _BLOCK:
            return None
        whole, scales = self.data.to(torch.int16), self.scales
        if self.zeros is not None:
            whole -= self._by_column(self.zeros).to(torch.int16)
        if self.groups is not None and scales.shape[1] > 1:
            groups = self.groups.view(-1, _BLOCK)
            if not bool((groups == groups[:, :1]).all()):  # act-order: neighbours have scales of their own
                return None
            scales = scales[:, groups[:, 0]]
        halves = scales.clamp(-_MOST, _MOST).half()
        least, most = map(int, whole.aminmax())
        kind = next((kind for kind, low, high in _TYPES if low <= least and most <= high), None)
        if kind is None or not torch.equal(halves.float(), scales):
            return None
        parts = [halves.expand(rows, columns // _BLOCK).contiguous()[..., None].view(torch.uint8)]
        values = whole.view(rows, -1, _BLOCK)
        if kind == Q8_0:
            parts.append(values.to(torch.int8).view(torch.uint8))
        else:
            values = (values + (8 if kind == Q4_0 else 16)).to(torch.uint8)
            if kind == Q5_0:
                fifth = (values >> 4).view(rows, -1, 4, 8) << torch.arange(8, dtype=torch.uint8)
                parts.append(fifth.sum(3, dtype=torch.uint8))
            parts.append((values[..., :16] & 15) | values[..., 16:] << 4)
        return Blocks(kind, (rows, columns), torch.cat(parts, 2).flatten())

    def _by_column(self, table: Tensor) -> Tensor:
        return table.float() if self.groups is None or table.shape[1] == 1 else table.float()[:, self.groups]


@dataclass(frozen=True, slots=True)
class Module:
    """The tensors of one quantised weight."""

    files: SafetensorsWeights
    stem: str
    scheme: Scheme
    device: torch.device | str = "cpu"

    def shape(self) -> Shape:
        """[N, K] of the weight; every tensor that it needs is there and fits it, or DamagedFile says which is not."""
        scheme = self.scheme
        if scheme.layout == "elements":
            rows, columns = self._two("weight")
            self._check_scales(rows, columns, "weight_zero_point")
        elif scheme.layout == "packed":
            rows, columns = self._packed_shape()
            self._check_scales(rows, columns)
            if scheme.zeros:
                self._check("weight_zero_point", (_words(rows, scheme.bits), _parts(columns, scheme.block[1])))
        else:
            rows, columns = self._word_shape()
            groups = _parts(columns, scheme.block[1])
            self._check("scales", (groups, rows))
            self._check("qzeros", (groups, _words(rows, scheme.bits)))
        self._check_groups(columns)
        return rows, columns

    def numbers(self) -> Numbers:
        rows, columns = self.shape()
        read = {"elements": self._elements, "packed": self._packed, "awq": self._awq, "gptq": self._gptq}
        data, scales, zeros = read[self.scheme.layout](rows, columns)
        if not bool(scales.isfinite().all()):
            raise self._damaged(self._scale_name(), "has values that are not finite")
        if not bool(scales.any()) and bool(data.float().diff().any()):
            raise self._damaged(self._scale_name(), "is 0 throughout, and its weight is not")
        if self.scheme.block[0] > 1:
            scales = scales.repeat_interleave(min(self.scheme.block[0], rows), 0)[:rows]
        return Numbers(data, scales, zeros, self._groups(columns, scales.shape[1]))

    def _elements(self, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor | None]:
        kind = torch.float8_e4m3fn if self.scheme.floats else torch.int8
        scales = self._read(self._scale_name(), _FLOATS).float()
        if not self.scheme.block[1]:
            scales = scales.reshape(-1, 1)  # [N] and [N, 1], or one number
        zeros = self._read("weight_zero_point", (torch.int8,)).view(scales.shape) if self.scheme.zeros else None
        return self._read("weight", (kind,)), scales, zeros

    def _packed(self, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor | None]:
        bits = self.scheme.bits
        data = fields(self._read("weight_packed", _WHOLE), bits)[:, :columns]
        scales = self._read("weight_scale", _FLOATS).float()
        if not self.scheme.block[1]:
            scales = scales.reshape(-1, 1)
        zeros = torch.full((1, 1), 1 << (bits - 1), device=self.device)  # fields are offset by it
        if self.scheme.zeros:
            zeros = fields(self._read("weight_zero_point", _WHOLE).t(), bits)[:, :rows].t()
        return data, scales, zeros

    def _awq(self, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        data, zeros = (fields(self._read(name, _WHOLE), self.scheme.bits) for name in ("qweight", "qzeros"))
        order = list(_AWQ_ORDER)
        data, zeros = (some.view(len(some), -1, 8)[..., order].flatten(1).t() for some in (data, zeros))
        return data, self._read("scales", _FLOATS).float().t(), zeros

    def _gptq(self, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        bits = self.scheme.bits
        data = fields(self._read("qweight", _WHOLE).t(), bits)
        words = self._read("qzeros", _WHOLE)
        ones = sum(1 << at for at in range(0, 32, bits))
        zeros = fields(words + ones if self.scheme.less_one == "words" else words, bits)
        if self.scheme.less_one == "fields":
            if bool((zeros == (1 << bits) - 1).any()):  # of 0 less one, which libraries write and read differently
                raise UnsupportedModel(
                    f"{self._name('qzeros')!r} has a zero point of 0 in GPTQ's first format, which is ambiguous: use a "
                    "gptq_v2 checkpoint"
                )
            zeros = zeros + 1
        return data, self._read("scales", _FLOATS).float().t(), zeros.t()

    def _groups(self, columns: int, count: int) -> Tensor | None:
        """Which scale each column has."""
        name, group = self._group_name(), self.scheme.block[1]
        if self._name(name) in self.files:
            groups = self._read(name, _WHOLE).long()
            if not (self.scheme.layout == "packed" and bool((groups == -1).all())):  # -1: not reordered
                if bool(((groups < 0) | (groups >= count)).any()):
                    raise self._damaged(name, f"names groups beyond the {count} that there are")
                return groups
        return torch.arange(columns, device=self.device) // group if 0 < group < columns else None

    def _check_groups(self, columns: int) -> None:
        name = self._group_name()
        if self.scheme.act_order or self._name(name) in self.files:
            self._check(name, (columns,))

    def _group_name(self) -> str:
        return "g_idx" if self.scheme.layout == "gptq" else "weight_g_idx"

    def _scale_name(self) -> str:
        if self.scheme.layout in ("awq", "gptq"):
            return "scales"
        return "weight_scale_inv" if self._name("weight_scale_inv") in self.files else "weight_scale"

    def _check_scales(self, rows: int, columns: int, zeros: str | None = None) -> None:
        row_block, column_block = self.scheme.block
        shape = _parts(rows, row_block), _parts(columns, column_block)
        also = [] if column_block else [(shape[0],), *([()] if shape[0] == 1 else [])]
        self._check(self._scale_name(), shape, *also)
        if zeros is not None and self.scheme.zeros:
            self._check(zeros, shape, *also)

    def _packed_shape(self) -> tuple[int, int]:
        words, said = self._two("weight_packed"), self._shape("weight_shape")
        if said != (2,):
            raise self._damaged("weight_shape", f"is of {said}, not two numbers")
        rows, columns = map(int, self._read("weight_shape", _WHOLE).tolist())
        if words != (rows, _words(columns, self.scheme.bits)):
            raise self._damaged("weight_packed", f"is {words}, which does not hold a weight of {(rows, columns)}")
        return rows, columns

    def _word_shape(self) -> tuple[int, int]:
        high, wide = self._two("qweight")
        per_word = 32 // self.scheme.bits
        return (wide * per_word, high) if self.scheme.layout == "awq" else (wide, high * per_word)

    def _two(self, part: str) -> tuple[int, int]:
        shape = self._shape(part)
        if len(shape) != 2:
            raise self._damaged(part, f"is of {shape}, not two dimensions")
        return shape[0], shape[1]

    def _check(self, part: str, *shapes: Shape) -> None:
        given = self._shape(part)
        if given not in shapes:
            raise self._damaged(part, f"is of {given} where its weight needs {shapes[0]}")

    def _shape(self, part: str) -> Shape:
        if self._name(part) not in self.files:
            raise self._damaged(part, "is missing")
        return self.files.shape(self._name(part))

    def _read(self, part: str, kinds: tuple[torch.dtype, ...]) -> Tensor:
        tensor = self.files[self._name(part)]
        if tensor.dtype not in kinds:
            expected = " or ".join(str(kind).removeprefix("torch.") for kind in kinds)
            raise self._damaged(part, f"is {str(tensor.dtype).removeprefix('torch.')}, not {expected}")
        return tensor.to(self.device)

    def _name(self, part: str) -> str:
        return f"{self.stem}.{part}"

    def _damaged(self, part: str, what: str) -> DamagedFile:
        return DamagedFile(f"{self.files.folder} is damaged: {self._name(part)!r} {what}; fetch it again")


def fields(words: Tensor, bits: int) -> Tensor:
    """The numbers of 4 or 8 bits in rows of 32-bit words, the lowest first: [R, W] -> [R, 32 W / bits] uint8."""
    found = words.to(torch.int32).contiguous().view(torch.uint8)
    return found if bits == 8 else torch.stack((found & 15, found >> 4), -1).flatten(1)


def _parts(size: int, block: int) -> int:
    """How many blocks there are along a dimension; 0 = one."""
    return -(-size // block) if block else 1


def _words(numbers: int, bits: int) -> int:
    return -(-numbers * bits // 32)


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


def in_four_bits(weight: Tensor, group: int | None = None, column_sizes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Numbers 0..15 that stand for -8..7, and the scale of each group [N, K / group] with the smallest error.

    `column_sizes` [K]: what the squared errors of a column are multiplied by.
    """
    size = group or next(size for size in GROUPS if weight.shape[1] % size == 0)
    counts = None if column_sizes is None else column_sizes.view(-1, size)
    parts = weight.float().view(len(weight), -1, size)
    most, least = parts.abs().amax(2).clamp(min=1e-12) / 7.0, torch.full((), float("inf"))
    numbers, scales = torch.zeros_like(parts), torch.zeros_like(most)
    error = least.to(weight.device).expand(most.shape)
    for shrunk in _SHRUNK:
        scale = (most * shrunk).bfloat16().float()
        rounded = (parts / scale[..., None]).round_().clamp_(-8, 7)
        squares = (rounded * scale[..., None] - parts).square_()
        off = (squares if counts is None else squares.mul_(counts)).sum(2)
        better = off < error
        error, scales = torch.where(better, off, error), torch.where(better, scale, scales)
        numbers = torch.where(better[..., None], rounded, numbers)
    return (numbers + 8).to(torch.uint8).flatten(1), scales.bfloat16()


log = logging.getLogger(__name__)

_WORDS = ("qweight", "weight_packed")
_SCALES = ("weight_scale", "weight_scale_inv")
_OTHERS = {  # parts of quantised weights, and scales of rows and of the KV cache, which are not used
    "scales", "qzeros", "g_idx", *_SCALES, "weight_zero_point", "weight_shape", "weight_g_idx",
    "input_scale", "input_zero_point", "output_scale", "output_zero_point", "q_scale", "k_scale", "v_scale",
}  # fmt: skip
_TABLES = ("embed_tokens.weight", "lm_head.weight")
_QUANTISED_TYPES = ("I8", "U8", "F8_E4M3", "F8_E5M2")
_FUSED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # biases that are read together


class QuantizedWeights(Weights):
    """`X.weight` for every module X that the files hold quantised, in float32; other weights as they are."""

    def __init__(self, files: SafetensorsWeights, quantization: Quantization) -> None:
        self.files, self.quantization = files, quantization
        self.device: torch.device | str = "cpu"
        self._told = False  # that some weights cannot be packed?
        self.names = self._schemes = self._find()
        if quantization.unused:
            log.warning("%s: %s are ignored: activations stay in 16 or 32 bits", files.folder, quantization.unused)

    def on(self, device: torch.device | str) -> QuantizedWeights:
        there = copy(self)
        there.device = device
        return there

    def shape(self, name: str) -> tuple[int, ...]:
        scheme = self._schemes[name]
        return self.files.shape(name) if scheme is None else self._module(name, scheme).shape()

    def __getitem__(self, name: str) -> Tensor:
        scheme = self._schemes[name]
        return self.files[name] if scheme is None else self._module(name, scheme).numbers().widened()

    def scheme(self, name: str) -> Scheme | None:
        """How a weight is stored; None = as it is."""
        return self._schemes[name]

    def blocks(self, name: str) -> Blocks | None:
        """In the GGUF type that holds its very numbers; None where the checkpoint's format is of no such type."""
        if not self._may_be_packed(name):
            return None
        found = self.numbers(name).blocks()
        if found is None and not self._told:
            self._told = True
            log.warning("%s: weights such as %s have numbers that no kernel holds: float32", self.files.folder, name)
        return found

    def packed_kinds(self) -> set[int]:
        return {
            Q4_0 if scheme is not None and scheme.bits == 4 else Q8_0
            for name, scheme in self._schemes.items()
            if self._may_be_packed(name)
        }

    def _may_be_packed(self, name: str) -> bool:
        """As far as headers say. What tokens are looked up in, and the head, have no blocks here."""
        scheme, stem = self._schemes[name], name.removesuffix(".weight")
        if scheme is None or scheme.floats or scheme.act_order or name.endswith(_TABLES):
            return False
        if (scheme.bits == 8 and scheme.zeros) or scheme.block[1] % _BLOCK or self.shape(name)[1] % _BLOCK:
            return False
        scales = f"{stem}.scales" if scheme.layout in ("awq", "gptq") else f"{stem}.weight_scale"
        return self.files.kind(scales) in ("F16", "BF16")

    def numbers(self, name: str) -> Numbers:
        """A quantised weight as the files have it."""
        scheme = self._schemes[name]
        assert scheme is not None
        return self._module(name, scheme).numbers()

    def _module(self, name: str, scheme: Scheme) -> Module:
        return Module(self.files, name.removesuffix(".weight"), scheme, self.device)

    def _find(self) -> dict[str, Scheme | None]:
        """Every weight, and how it is stored; None = as it is."""
        found = dict[str, Scheme | None]()
        for name in self.files:
            stem, _, part = name.rpartition(".")
            if part in _WORDS:
                found[f"{stem}.weight"] = self._scheme(stem, part)
            elif part == "weight":
                found[name] = self._scheme(stem, part) if self._is_quantised(stem) else None
            elif part not in _OTHERS:
                found[name] = None
        for name in self._zero_biases(found):
            del found[name]
        return found

    def _scheme(self, stem: str, part: str) -> Scheme:
        assert self.quantization is not None
        scheme = self.quantization.of(stem)
        expected = {"packed": "weight_packed", "elements": "weight"}.get(scheme.layout, "qweight")
        if part != expected:
            raise DamagedFile(
                f"{self.files.folder} is damaged: it has {f'{stem}.{part}'[:80]!r} where its config says "
                f"{expected!r} ({self.quantization}); fetch it again"
            )
        return scheme

    def _is_quantised(self, stem: str) -> bool:
        kind = self.files.kind(f"{stem}.weight")
        if kind in _QUANTISED_TYPES:
            return True
        if any(f"{stem}.{scale}" in self.files for scale in _SCALES):
            raise DamagedFile(
                f"{self.files.folder} is damaged: {stem[:80]!r} has scales, but its weight is {kind}; fetch it again"
            )
        return False

    def _zero_biases(self, found: dict[str, Scheme | None]) -> list[str]:
        """Biases that GPTQ's libraries add to layers without: left out, since not all kernels have these biases."""
        alike = defaultdict[str, list[str]](list)
        for name, scheme in found.items():
            bias = name.removesuffix("weight") + "bias"
            if scheme is not None and scheme.layout == "gptq" and bias in found:
                kind = name.rsplit(".", 2)[-2]
                alike[_FUSED.get(kind, kind)].append(bias)
        return [name for names in alike.values() if not any(self.files[name].any() for name in names) for name in names]
