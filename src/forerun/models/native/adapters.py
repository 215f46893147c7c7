"""Adapters as the native kernels want them: both matrices of a change transposed, one struct per layer."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.types import Seq
from forerun.models.adapters import parts_of
from forerun.models.attention import Span
from forerun.models.config import DecoderConfig
from forerun.models.load.adapter import Adapter
from forerun.models.native.library import AdapterLayer, Change

_ORDER = ("q", "k", "v", "o", "gate", "up", "down")  # as fr_adapter_layer has them


@dataclass(frozen=True, slots=True, eq=False)
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
        for part in parts_of(adapter, config):
            down, up = part.down.t().contiguous(), part.up.t().contiguous()
            kept += [down, up]
            layers[part.layer].changes[_ORDER.index(part.name)] = Change(adapter.rank, down.data_ptr(), up.data_ptr())
        return cls(name, key, sum(one.nbytes for one in kept), config, layers, kept)

    def at(self, first: int) -> int:
        """Where the changes of a layer, and of those behind it, lie."""
        return ctypes.addressof(self.layers) + first * ctypes.sizeof(AdapterLayer)


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
