"""Experts one by one under their ordinary names, of files that stack them: gpt-oss's, and Qwen3-VL's.

On disk a layer has `experts.gate_up_proj` [E, D, 2I] and `experts.down_proj` [E, I, D]. Qwen3-VL's gates are the first
half of the columns; gpt-oss has gates in even columns and ups in odd ones, and a bias of each. In place of a weight
there may be MXFP4: `_blocks` [E, outputs, inputs / 32, 16], two inputs to a byte, the first in the lower half, and
`_scales` [E, outputs, inputs / 32], exponents of two. Such a weight is given in GGUF's order of the same numbers, which
the kernels pack.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from forerun.core.errors import DamagedFile
from forerun.models.families import FAMILIES, WRAPPED
from forerun.models.load.quants import MXFP4, Blocks, dequantize
from forerun.models.load.weights import Weights

Named = TypeVar("Named", bound=Mapping[str, Tensor])
_STACK = re.compile(r"(.+\.experts\.)(gate_up_proj|down_proj)(_bias|_blocks|)")
_ROUTER = re.compile(r"(.+\.mlp\.)router\.(weight|bias)")
_OUTPUTS = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}
_MOST_EXPERTS, _NOT_A_NUMBER = 4096, 255


class _Place(NamedTuple):
    """Which rows of which stack a weight is."""

    stack: str
    kind: str  # "", "_bias" or "_blocks"
    expert: int
    outputs: slice


def unstack(family: str, weights: Named) -> Named | UnstackedExperts:
    """The same weights, with experts one by one where the family's files stack them gpt-oss's way."""
    described = FAMILIES.get(WRAPPED[family].family if family in WRAPPED else family)
    if described is None or described.experts not in ("gpt_oss", "qwen"):
        return weights
    first = next(filter(_STACK.fullmatch, weights), None)
    if first is None or (described.experts == "qwen" and not _is_turned(weights, first)):
        return weights
    return UnstackedExperts(weights, interleaved=described.experts == "gpt_oss")


def _shape_of(weights: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    return weights.shape(name) if isinstance(weights, Weights) else tuple(weights[name].shape)


def _is_turned(weights: Mapping[str, Tensor], name: str) -> bool:
    """Are experts stacked [E, inputs, outputs]? transformers' own stacks in memory are the other way round."""
    names = (f"{name.rpartition('.')[0]}.{part}" for part in ("gate_up_proj", "down_proj"))
    into, out = (_shape_of(weights, one) if one in weights else () for one in names)
    return len(into) == len(out) == 3 and into[2] == 2 * out[1]


class UnstackedExperts(Weights):
    """`X.experts.3.up_proj.weight` and so on; `X.router` is `X.gate`, as elsewhere."""

    def __init__(self, whole: Mapping[str, Tensor], interleaved: bool = True) -> None:
        """`interleaved`: gates and ups are columns in turn."""
        self.interleaved = interleaved
        self.whole, self.device = whole, torch.device("cpu")
        self.quantization = whole.quantization if isinstance(whole, Weights) else None
        self.names = self._places = self._find()

    def on(self, device: torch.device | str) -> UnstackedExperts:
        there = copy(self)
        there.device = torch.device(device)
        return there

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places[name]
        if isinstance(place, str):
            return self._shape(place)
        whole = self._shape(place.stack + place.kind)
        if place.kind == "_bias":
            return (len(range(whole[-1])[place.outputs]),)
        if place.kind == "_blocks":
            self._check_blocks(place.stack, whole)
            return len(range(whole[1])[place.outputs]), 32 * whole[2]
        if len(whole) != 3:
            raise self._damaged(place.stack, f"is of {whole}, not three dimensions")
        return len(range(whole[2])[place.outputs]), whole[1]

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        if isinstance(place, str):
            return self.whole[place]
        if place.kind == "_bias":
            return self.whole[place.stack + "_bias"][place.expert, place.outputs]
        if place.kind == "_blocks":
            return dequantize(self._blocks(name, place), self.device)
        return self.whole[place.stack][place.expert, :, place.outputs].t()

    def blocks(self, name: str) -> Blocks | None:
        place = self._places[name]
        return self._blocks(name, place) if isinstance(place, _Place) and place.kind == "_blocks" else None

    def packed_kinds(self) -> set[int]:
        packed = any(isinstance(place, _Place) and place.kind == "_blocks" for place in self._places.values())
        return {MXFP4} if packed else set()

    def _blocks(self, name: str, place: _Place) -> Blocks:
        shape = self.shape(name)
        codes = self._bytes(place.stack + "_blocks")[place.expert, place.outputs]  # [outputs, G, 16]
        scales = self._bytes(place.stack + "_scales")[place.expert, place.outputs]  # [outputs, G]
        if bool((scales == _NOT_A_NUMBER).any()):
            raise self._damaged(place.stack + "_scales", "has scales that are not numbers")
        data = torch.empty(*scales.shape, 17, dtype=torch.uint8)
        data[..., 0] = scales
        first, last = codes[..., :8], codes[..., 8:]  # inputs 0 to 15, two to a byte, and 16 to 31
        data[..., 1::2] = (first & 15) | (last & 15) << 4
        data[..., 2::2] = (first >> 4) | (last >> 4 << 4)
        return Blocks(MXFP4, shape, data.flatten())

    def _bytes(self, name: str) -> Tensor:
        found = self.whole[name]
        if found.dtype != torch.uint8:
            raise self._damaged(name, f"is {str(found.dtype).removeprefix('torch.')}, not uint8")
        return found

    def _check_blocks(self, stack: str, blocks: tuple[int, ...]) -> None:
        if len(blocks) != 4 or blocks[3] != 16:
            raise self._damaged(stack + "_blocks", f"is of {blocks}, not blocks of 16 bytes")
        if stack + "_scales" not in self.whole:
            raise self._damaged(stack + "_scales", "is missing")
        if (scales := self._shape(stack + "_scales")) != blocks[:3]:
            raise self._damaged(stack + "_scales", f"is of {scales} where its blocks need {blocks[:3]}")

    def _shape(self, name: str) -> tuple[int, ...]:
        return _shape_of(self.whole, name)

    def _find(self) -> dict[str, _Place | str]:
        """Every weight, and the name of the whole one, or its place in a stack."""
        found = dict[str, _Place | str]()
        for name in self.whole:
            stack, router = _STACK.fullmatch(name), _ROUTER.fullmatch(name)
            if router is not None:
                found[f"{router[1]}gate.{router[2]}"] = name
            elif stack is not None:
                found |= self._unstacked(stack)
            elif not name.endswith("_proj_scales"):
                found[name] = name
        return found

    def _unstacked(self, stack: re.Match[str]) -> dict[str, _Place | str]:
        shape, end = self._shape(stack[0]), "bias" if stack[3] == "_bias" else "weight"
        if len(shape) < 2 or shape[0] > _MOST_EXPERTS:
            raise self._damaged(stack[0], f"is of {shape}, not experts")
        places = _OUTPUTS[stack[2]]
        if stack[2] == "gate_up_proj" and not self.interleaved:
            places = {"gate_proj": slice(shape[-1] // 2), "up_proj": slice(shape[-1] // 2, None)}
        return {
            f"{stack[1]}{i}.{name}.{end}": _Place(stack[1] + stack[2], stack[3], i, outputs)
            for i in range(shape[0])
            for name, outputs in places.items()
        }

    def _damaged(self, name: str, what: str) -> DamagedFile:
        return DamagedFile(f"the checkpoint is damaged: {name[-80:]!r} {what}; fetch it again")
