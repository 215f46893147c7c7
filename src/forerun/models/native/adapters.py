"""Adapters as the native kernels want them: numbers of 16 bits in the order in which they are read, a struct per layer.

A matrix is multiplied by a power of two that brings its largest number close to the largest of 16 bits; what `down`
gives is divided by it again, in float32. So numbers that a checkpoint holds in float16 or bfloat16 are exact, and
those of float32 are rounded to 11 significant bits.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.types import Seq
from forerun.models.adapters import parts_of
from forerun.models.attention import Span
from forerun.models.config import DecoderConfig
from forerun.models.layers import unpair
from forerun.models.load.adapter import Adapter
from forerun.models.native.library import AdapterLayer, Change

_LANES, _RANKS, _OUTPUTS = 16, 4, 32  # as forerun.h has them
_ORDER = ("q", "k", "v", "o", "gate", "up", "down")  # as fr_adapter_layer has them


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class NativeAdapter:
    """An adapter in memory; implements forerun.core.types.LoadedAdapter."""

    name: str
    key: int
    nbytes: int
    config: DecoderConfig  # of the target that it was loaded for
    layers: ctypes.Array[AdapterLayer]
    kept: Sequence[Tensor]  # what the structs point to

    @classmethod
    def of(cls, name: str, key: int, adapter: Adapter, config: DecoderConfig) -> NativeAdapter:
        layers, kept = (AdapterLayer * config.layers)(), list[Tensor]()
        rank = -(-adapter.rank // _RANKS) * _RANKS
        for part in parts_of(adapter, config):
            turned = config.rope_pairs == "neighbours" and part.name in ("q", "k")  # as the weights' rows are
            rows = unpair(part.up, config.head_dim, config.ropes[0].dims) if turned else part.up
            (down, first), (up, second) = _halves(part.down), _halves(rows)
            down, up = _in_blocks(down), _in_panels(up, rank)
            kept += [down, up]
            change = Change(rank, down.data_ptr(), up.data_ptr(), adapter.scale * 2.0 ** -(first + second))
            layers[part.layer].changes[_ORDER.index(part.name)] = change
        return cls(name, key, sum(one.nbytes for one in kept), config, layers, kept)

    def at(self, first: int) -> int:
        """Where the changes of a layer, and of those behind it, lie."""
        return ctypes.addressof(self.layers) + first * ctypes.sizeof(AdapterLayer)


def _halves(matrix: Tensor) -> tuple[Tensor, int]:
    """The matrix times a power of two, in 16 bits, and that power."""
    largest = float(matrix.abs().max())
    power = 14 - math.frexp(largest)[1] if 0.0 < largest < math.inf else 0
    return (matrix.double() * 2.0**power).half(), power


def _in_blocks(down: Tensor) -> Tensor:
    """[R, in] -> [R / 4, in / 16, 4, 16], zeros behind the last."""
    rank, inputs = down.shape
    whole = F.pad(down, (0, -inputs % _LANES, 0, -rank % _RANKS))
    return whole.view(-1, _RANKS, whole.shape[1] // _LANES, _LANES).transpose(1, 2).contiguous()


def _in_panels(up: Tensor, rank: int) -> Tensor:
    """[out, R] -> [out / 32, R, 32], zeros behind the last."""
    whole = F.pad(up, (0, rank - up.shape[1], 0, -len(up) % _OUTPUTS))
    return whole.view(-1, _OUTPUTS, rank).transpose(1, 2).contiguous()


def adapters_of(config: DecoderConfig, spans: Sequence[Span], seqs: Sequence[Seq], first: int = 0) -> array[int] | None:
    """For every row of a pass, where the changes of its sequence's adapter lie from layer `first` on; None = nowhere.

    The array must live as long as the pass, and the sequences keep their adapters.
    """
    if not any([seq.adapter is not None for seq in seqs]):  # noqa: C419 - asked in every pass
        return None
    places = array("Q")
    for span, seq in zip(spans, seqs, strict=True):
        places.extend([address_of(config, seq, first)] * span.nodes)
    return places


def address_of(config: DecoderConfig, seq: Seq, first: int = 0) -> int:
    """Of one sequence; 0 = it has none."""
    own = seq.adapter
    if own is None:
        return 0
    if not isinstance(own, NativeAdapter) or own.config is not config:  # C would read what is not there
        raise InvalidInput(f"the adapter {own.name!r} was loaded by another target")
    return own.at(first)
