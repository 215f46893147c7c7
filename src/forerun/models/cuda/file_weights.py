"""Weights that a file holds quantised, packed for the products compiled ahead: no number is rounded again.

Joining queries, keys and values, or gates and ups, moves whole rows. So a block is read as its numbers, as their scales
and as their zero points, each in the shape of the weight, and what was joined alike is packed together.
A weight whose scales the kernels do not have (act-order, 8 bits in groups) is dequantised to bf16.

Of GGUF files Q4_0, Q4_1 and Q4_K stay in four bits (4.5, 5 and 4.75 with their scales). Q8_0 has a byte for each weight
(8.5 bits), and so have Q5_0, Q5_K and Q6_K, whose 5 and 6 bits no kernel reads: 9.25 bits with their scales. What is
joined (queries, keys and values are Q4_K and Q6_K in Q4_K_M) takes a format that holds all of its types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from forerun.core.errors import DamagedFile
from forerun.models.blocks import Block, Checkpoint
from forerun.models.config import DecoderConfig
from forerun.models.cuda.cubin.packing import (
    BLOCK,
    Strips,
    pack_bf16,
    pack_bytes,
    pack_e4m3,
    pack_int4,
    pack_int8_groups,
    pack_k,
    pair_gates,
)
from forerun.models.cuda.weights import Role, interleaved
from forerun.models.layers import Experts
from forerun.models.load.quantized.layouts import Numbers, QuantizedWeights
from forerun.models.load.quants import GROUP, LAYOUTS, Grouped, read_groups
from forerun.models.load.weights import GgufWeights, Weights

Aspect = Literal["data", "scales", "zeros"]
MODULES = {  # that are joined into one weight
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
    "down": ("mlp.down_proj",),
}


class Parts(Protocol):
    """Numbers of a weight, with scales and whatever else belongs to groups of its columns."""

    def whole(self, aspect: str) -> Tensor: ...


READ = 16  # weights of a layer that are kept between its readings


class StoredWeights:
    """The quantised weights of a checkpoint, block by block."""

    def __init__(self, weights: Mapping[str, Tensor], config: DecoderConfig, device: torch.device) -> None:
        assert isinstance(weights, QuantizedWeights)
        self.weights = weights.on(device)
        self._read = lru_cache(READ)(self.weights.numbers)
        aspects: tuple[Aspect, ...] = ("data", "scales", "zeros")
        self._parts = {
            aspect: Checkpoint(AspectOf(self.weights, self._quantised, aspect), config, torch.float32, device)
            for aspect in aspects
        }

    def _quantised(self, name: str) -> Numbers | None:
        return None if self.weights.scheme(name) is None else self._read(name)

    def block(self, index: int) -> dict[str, Numbers | None]:
        """The weights of a layer; None = not quantised, or not all of what is joined alike."""
        blocks = {aspect: part.block(index) for aspect, part in self._parts.items()}
        found = {name: self._joined(name, index, blocks) for name in MODULES}
        self._read.cache_clear()  # or what was read last would stay: this object is part of a cycle
        return found

    def _joined(self, name: str, index: int, blocks: dict[Aspect, Block]) -> Numbers | None:
        at = f"{self._parts['data'].prefix}layers.{index}."
        names = [f"{at}{module}.weight" for module in MODULES[name] if f"{at}{module}.weight" in self.weights]
        schemes = {self.weights.scheme(name) for name in names}
        scheme = schemes.pop()
        if schemes or scheme is None:
            return None
        steps = {self._read(name).columns_of_a_scale for name in names}
        step = steps.pop()
        if steps or step is None:
            return None
        data, scales, zeros = (weight_of(blocks[aspect], name) for aspect in blocks)
        if scheme.floats:
            return Numbers(data.to(torch.float8_e4m3fn), scales[:, ::step], None, None)
        return Numbers(data.to(torch.int16), scales[:, ::step], zeros[:, ::step], None)


def pack_numbers(numbers: Numbers, role: Role) -> Strips:
    """In the format that holds these numbers exactly; gates come before their ups, as in a checkpoint."""
    order: Callable[[Tensor], Tensor] = (lambda given: pair_gates(interleaved(given))) if role == "gate" else as_it_is
    data, scales, zeros = numbers.data, numbers.scales, numbers.zeros
    if role == "gate" and scales.shape[1] > 1 and zeros is None:
        order = as_it_is  # blocks of 128 x 128: gates and ups have scales of their own, and meet behind the product
    strips = _pack(order(data), order(scales), None if zeros is None else order(zeros))
    if strips is None:
        strips = pack_bf16(order(numbers.widened()).bfloat16())
    return replace(strips, gated=role == "gate" and order is not as_it_is)


def _pack(data: Tensor, scales: Tensor, zeros: Tensor | None) -> Strips | None:
    """None where no format holds them."""
    channels = scales.shape[1] == 1
    if zeros is None:
        if channels:
            return pack_e4m3(data, scales[:, 0].contiguous())
        of_blocks = scales[::BLOCK]
        same = torch.equal(of_blocks.repeat_interleave(BLOCK, 0)[: len(scales)], scales)
        fits = same and scales.shape[1] == -(-data.shape[1] // BLOCK)
        return pack_e4m3(data, None, of_blocks) if fits else None
    centre = int(zeros.flatten()[0])
    if int(data.max()) > 15 or int(data.min()) < 0:  # of 8 bits
        if channels and bool((zeros == centre).all()) and centre in (0, 128):
            return pack_bytes((data - centre).to(torch.int8), scales[:, 0].contiguous())
        return None
    found = _scales_of_groups(data, scales, zeros)
    if found is None:
        return None
    scales, zeros = found
    return pack_int4(data.to(torch.uint8), scales, None if bool((zeros == 8).all()) else zeros)


def _scales_of_groups(data: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor] | None:
    """Of groups that the kernels have, in 16 bits; None where they cannot be."""
    columns = data.shape[1]
    group = columns // scales.shape[1]
    wanted = BLOCK if group % BLOCK == 0 else 32
    kind = next(
        (kind for kind in (torch.bfloat16, torch.float16) if torch.equal(scales.to(kind).float(), scales)), None
    )
    if kind is None or group % wanted or columns % group:
        return None
    repeat = group // wanted
    return scales.to(kind).repeat_interleave(repeat, 1), zeros.repeat_interleave(repeat, 1)


class AspectOf(Weights):
    """A part of the numbers that `read` gives, in place of the weight and in its shape; other weights as they are."""

    def __init__(self, weights: Weights, read: Callable[[str], Parts | None], aspect: str) -> None:
        self.weights, self._read, self._aspect = weights, read, aspect
        self.names = weights.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights.shape(name)

    def __getitem__(self, name: str) -> Tensor:
        numbers = self._read(name)
        return self.weights[name] if numbers is None else numbers.whole(self._aspect)


def weight_of(block: Block, name: str) -> Tensor:
    """One of `MODULES`, joined."""
    if name in ("qkv", "o"):
        found: Tensor = getattr(block, name)
        return found
    assert not isinstance(block.mlp, Experts)
    return block.mlp.gate_up if name == "gate_up" else block.mlp.down


def as_it_is(given: Tensor) -> Tensor:
    return given


_ONE_SCALE, _K = {"Q4_0", "Q5_0", "Q8_0"}, {"Q4_K", "Q5_K", "Q6_K"}
_NUMBERS = {  # aspects, and what holds them exactly
    "data": torch.int16,
    "steps": torch.int16,
    "lows": torch.int16,
    "scales": torch.float16,
    "minima": torch.float16,
}


@dataclass(frozen=True, slots=True)
class GgufNumbers:
    """Numbers of what is joined, and the types that they are of."""

    types: frozenset[str]
    numbers: Grouped


BITS = {  # of a weight of a type alone, with its scales
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q5_0": 8.5,
    "Q8_0": 8.5,
    "Q4_K": 4.75,
    "Q5_K": 9.25,
    "Q6_K": 9.25,
}


def is_held(types: set[str]) -> bool:
    """Is there a format that holds weights of these types, side by side?"""
    return bool(types) and (types <= _K or types <= _ONE_SCALE or types == {"Q4_1"})


class StoredBlocks:
    """The weights of a GGUF file that kernels can read as they are, layer by layer."""

    def __init__(self, weights: GgufWeights, config: DecoderConfig, device: torch.device) -> None:
        self.weights, self.config, self._device = weights.on(device), config, device
        self._read = lru_cache(READ)(self._groups)
        self._parts = {
            aspect: Checkpoint(AspectOf(self.weights, self._held, aspect), config, dtype, device)
            for aspect, dtype in _NUMBERS.items()
        }

    def block(self, index: int) -> dict[str, GgufNumbers | None]:
        """The weights of a layer; None = no format holds all of what is joined."""
        at = f"{self._parts['data'].prefix}layers.{index}."
        types = {name: self._types([f"{at}{module}.weight" for module in MODULES[name]]) for name in MODULES}
        held = [name for name in MODULES if is_held(types[name])]
        found: dict[str, dict[str, Tensor]] = {name: {} for name in held}
        for aspect, part in self._parts.items():
            block = part.block(index)
            for name in held:
                weight = weight_of(block, name)
                found[name][aspect] = weight if aspect == "data" else weight[:, ::GROUP].contiguous()
        self._read.cache_clear()  # or what was read last would stay: this object is part of a cycle
        return {
            name: GgufNumbers(frozenset(types[name]), Grouped(**found[name])) if name in held else None
            for name in MODULES
        }

    def head(self) -> GgufNumbers | None:
        types = self._types([self._head])
        name = self.config.file_name(self._head)
        return GgufNumbers(frozenset(types), self._groups(name)) if is_held(types) else None

    def nbytes(self) -> int:
        """Of the whole model in memory: what no format holds is widened to 16 bits, as embeddings and norms are."""
        bits, prefix = dict.fromkeys(self.weights, 16.0), self._parts["data"].prefix
        for index in range(self.config.layers):
            for modules in MODULES.values():
                names = self._in_file([f"{prefix}layers.{index}.{module}.weight" for module in modules])
                bits.update(dict.fromkeys(names, self._bits(names)))
        (head,) = self._in_file([self._head])
        sizes = {name: math.prod(self.weights.shape(name)) for name in bits}
        apart = self._bits([head]) * sizes[head] if self.config.tied else 0.0  # a head beside the embedding
        if not self.config.tied:
            bits[head] = self._bits([head])
        return int(sum(bits[name] * size for name, size in sizes.items()) + apart) // 8

    def _bits(self, names: list[str]) -> float:
        types = {type_of(self.weights, name) for name in names}
        return max(BITS[name] for name in types) if is_held(types) else 16.0

    @property
    def _head(self) -> str:
        return self._parts["data"].prefix + "embed_tokens.weight" if self.config.tied else "lm_head.weight"

    def _in_file(self, names: list[str]) -> list[str]:
        found = (self.config.file_name(name) for name in names)
        return [name for name in found if name in self.weights]

    def _types(self, names: list[str]) -> set[str]:
        return {type_of(self.weights, name) for name in self._in_file(names)}

    def _held(self, name: str) -> Grouped | None:
        matrix = len(self.weights.shape(name)) == 2
        return self._read(name) if matrix and is_held({type_of(self.weights, name)}) else None

    def _groups(self, name: str) -> Grouped:
        numbers = read_groups(self.weights.blocks(name), self._device)
        if not bool(numbers.scales.isfinite().all() & numbers.minima.isfinite().all()):
            path, tensor = self.weights.file.path, self.weights.tensor(name)
            raise DamagedFile(f"{path} is damaged: {tensor!r} has scales that are not finite; pull it again")
        return numbers


def is_packed(weights: GgufWeights) -> bool:
    """Are there matrices in a type that the kernels can read?"""
    return any(len(weights.shape(name)) == 2 and type_of(weights, name) in BITS for name in weights)


def type_of(weights: GgufWeights, name: str) -> str:
    """The GGUF type of a weight."""
    return LAYOUTS[weights.kind(name)].name


def pack_gguf(stored: GgufNumbers, role: Role) -> Strips:
    """In the format that holds these numbers exactly; gates come before their ups, as in a checkpoint."""
    order: Callable[[Tensor], Tensor] = (lambda given: pair_gates(interleaved(given))) if role == "gate" else as_it_is
    given = stored.numbers
    data, types = order(given.data), stored.types
    by_32 = slice(None, None, 32 // GROUP)
    scales = order(given.scales)
    if types <= _K:
        groups = by_32 if types == {"Q4_K"} else slice(None)
        steps, lows = (order(values)[:, groups] for values in (given.steps, given.lows))
        of_blocks = slice(None, None, BLOCK // GROUP)
        packed = pack_k(data, steps, lows, scales[:, of_blocks], order(given.minima)[:, of_blocks])
    elif types == {"Q4_1"}:
        packed = pack_int4(data, scales[:, by_32], minima=-order(given.minima)[:, by_32])
    elif types == {"Q4_0"}:
        packed = pack_int4(data, scales[:, by_32])
    else:
        centred = data - order(given.lows).repeat_interleave(GROUP, 1)
        packed = pack_int8_groups(centred.to(torch.int8), scales[:, by_32])
    return replace(packed, gated=role == "gate")
