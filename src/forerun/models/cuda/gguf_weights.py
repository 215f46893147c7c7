"""Weights of a GGUF file, packed for the products compiled ahead: no number is rounded again.

Q4_0, Q4_1 and Q4_K stay in four bits (4.5, 5 and 4.75 with their scales). Q8_0 has a byte for each weight (8.5 bits),
and so have Q5_0, Q5_K and Q6_K, whose 5 and 6 bits no kernel reads: 9.25 bits with their scales instead of 5.5 and 6.6.
What is joined (queries, keys and values are Q4_K and Q6_K in Q4_K_M) takes a format that holds all of its types; where
there is none, it is dequantised to bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from forerun.core.errors import DamagedFile
from forerun.models.blocks import Checkpoint
from forerun.models.config import DecoderConfig
from forerun.models.cuda.cubin.packing import BLOCK, Strips, pack_int4, pack_int8_groups, pack_k, pair_gates
from forerun.models.cuda.file_weights import MODULES, READ, AspectOf, as_it_is, weight_of
from forerun.models.cuda.weights import Role, interleaved
from forerun.models.load.quants import GROUP, LAYOUTS, Grouped, read_groups
from forerun.models.load.weights import GgufWeights

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
        names = ["lm_head.weight"]
        if self.config.tied:
            names = [self._parts["data"].prefix + "embed_tokens.weight"]
        types = self._types(names)
        name = self.config.file_name(names[0])
        return GgufNumbers(frozenset(types), self._groups(name)) if is_held(types) else None

    def _types(self, names: list[str]) -> set[str]:
        found = (self.config.file_name(name) for name in names)
        return {type_of(self.weights, name) for name in found if name in self.weights}

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
