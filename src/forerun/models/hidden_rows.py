"""HiddenRows: the hidden rows of a pass on a CPU, by layer, in one block of memory whose addresses are known.

Kernels write them and a head's kernels read them, by address. A layer becomes a tensor where somebody asks for it:
between two passes, which evict the CPU caches, making a tensor or asking one for its address costs many microseconds,
and a round of a head with five layers would do it ten times.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import torch
from torch import Tensor

_ZERO = array("f", [0.0])


class HiddenRows(Mapping[int, Tensor]):
    """Layer -> [M, D] float32; zeros when it is made, and to be filled once."""

    __slots__ = ("_block", "_made", "_shape", "addresses", "row_bytes")

    def __init__(self, layers: Sequence[int], rows: int, width: int) -> None:
        self._block, self._shape = _ZERO * (len(layers) * rows * width), (rows, width)
        self._made: dict[int, Tensor] = {}
        self.row_bytes, at = 4 * width, self._block.buffer_info()[0]
        self.addresses: dict[int, int] = {}  # of each layer's first row
        for layer in layers:
            self.addresses[layer] = at
            at += rows * self.row_bytes

    def __getitem__(self, layer: int) -> Tensor:
        found = self._made.get(layer)
        if found is None:
            if layer not in self.addresses:
                raise KeyError(layer)
            (rows, width), place = self._shape, [*self.addresses].index(layer)
            # the same memory; torch refuses one that is empty
            numbers = torch.frombuffer(self._block, dtype=torch.float32) if rows else torch.empty(0)
            found = self._made[layer] = numbers.view(len(self.addresses), rows, width)[place]
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self.addresses)

    def __len__(self) -> int:
        return len(self.addresses)

    def __contains__(self, layer: object) -> bool:
        return layer in self.addresses

    def some(self, layers: Sequence[int]) -> LayerRows:
        """The rows of these layers, in this order."""
        return LayerRows(self, layers)


class LayerRows(Sequence[Tensor]):
    """Some layers of such a block, [M, D] each."""

    __slots__ = ("_layers", "hidden")

    def __init__(self, hidden: HiddenRows, layers: Sequence[int]) -> None:
        self.hidden, self._layers = hidden, layers

    @property
    def addresses(self) -> list[int]:
        known = self.hidden.addresses
        return [known[layer] for layer in self._layers]

    @overload
    def __getitem__(self, i: int) -> Tensor: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, i: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(i, slice):
            return LayerRows(self.hidden, self._layers[i])
        return self.hidden[self._layers[i]]

    def __len__(self) -> int:
        return len(self._layers)
