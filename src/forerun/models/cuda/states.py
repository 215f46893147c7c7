"""States of recurrent layers on a GPU: a pool of places at fixed addresses, and what a pass is told of them.

A place is written once, by a pass or after a verdict, and read until nobody refers to it: sequences share states as
they share pages, and a pass that is never committed changes none. Place 0 is the state before the first token.

Per row a pass is told its parent (a row of the pass, or a place), where the state behind it goes, and how many rows are
a chain from there (0 = it walks its own path, -1 = another row's walk has it). What recurrent layers read of its rows
stays in buffers, so that the state behind any node of a tree can be computed later, along the node's own path.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.models.config import DecoderConfig
from forerun.models.cuda.plan import MAX_ROWS, SentInts
from forerun.models.hybrid.stateful import KEPT_BYTES, LayerState
from forerun.models.pages import Ints
from forerun.models.slots import free_memory

MOST_PLACES, FEWEST_PLACES = 2048, 16
SHARE = 8  # of free memory
PARENTS, KEEPS, WALKS, ENDS = range(4)  # of Links.ints


class Place:
    """Where a state lies; free again once nothing refers to it."""

    __slots__ = ("_free", "nbytes", "number")

    def __init__(self, number: int, nbytes: int, free: list[int]) -> None:
        self.number, self.nbytes, self._free = number, nbytes, free

    def __del__(self) -> None:
        self._free.append(self.number)


class Trace:
    """What recurrent layers read of a pass: enough for the state behind any of its rows."""

    def __init__(self, links: Tensor, joined: Tensor, prepared: Tensor) -> None:
        self.links = links  # [4, MAX_ROWS]: rows of it are as aligned in a copy
        self.joined = joined  # [R, rows, C] what convolutions read
        self.prepared = prepared  # [R, rows, ..] what memories read

    def save(self) -> None:
        """Another pass follows, in the same buffers."""
        self.links, self.joined, self.prepared = self.links.clone(), self.joined.clone(), self.prepared.clone()


def _no_trace() -> Trace | None:
    return None


class Nodes(dict[int, LayerState]):
    """States of a tree's nodes, as far as they were asked for."""

    def __init__(self, trace: Trace, first: int, end: tuple[int, Place] | None = None) -> None:
        """`first`: row of the root. `end`: its number among trees whose verdict the device has, and where it puts the
        state behind the accepted path."""
        super().__init__()
        self.trace, self.first, self.end = trace, first, end


class StatePool:
    """The states of one model's recurrent layers [places, R, ..]."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        recurrent = config.recurrent
        assert recurrent is not None
        layers, taps = recurrent.layers.count(True), recurrent.kernel - 1
        heads, keys, values = (
            recurrent.value_heads,
            recurrent.key_dim,
            recurrent.value_dim,
        )  # none of short convolutions
        self.channels = 2 * recurrent.key_heads * keys + heads * values or config.width
        # of a state
        self.nbytes = layers * (taps * self.channels * dtype.itemsize + 4 * heads * keys * values)
        free = free_memory(device) if device.type == "cuda" else None
        self.size = max(FEWEST_PLACES, min(MOST_PLACES, max(KEPT_BYTES, (free or 0) // SHARE) // self.nbytes))
        with torch.inference_mode(False):
            self.inputs = torch.zeros(self.size, layers, taps, self.channels, dtype=dtype, device=device)
            self.memories = torch.zeros(self.size, layers, heads, keys, values, device=device)
            self.joined = torch.zeros(layers, MAX_ROWS, self.channels, dtype=dtype, device=device)
            wide = -(-heads * (2 * keys + values + 2) // 4) * 4  # rows start at multiples of 16 bytes
            self.prepared = torch.zeros(layers, MAX_ROWS, wide, device=device)
        self._sent = SentInts(device, (ENDS + 1) * MAX_ROWS, torch.int32)
        self.links = self._sent.all.view(-1, MAX_ROWS)
        self._none = np.full(self.links.shape, -1, dtype=np.int32)
        self._last: Callable[[], Trace | None] = _no_trace
        self._coming: Callable[[], Trace | None] = (
            _no_trace  # the traces of passes, while somebody may ask for more states of theirs
        )
        self._free = [*range(self.size - 1, -1, -1)]
        self.empty = self.take()
        self.spill: Callable[[], bool] = lambda: False  # forgets a state that is kept for others, if there is one

    def take(self) -> Place:
        """A place to write."""
        while not self._free and self.spill():
            pass
        if not self._free:
            raise InvalidInput(f"all {self.size} places for states of recurrent layers are taken; lower max_batch")
        return Place(self._free.pop(), self.nbytes, self._free)

    @property
    def free(self) -> int:
        return len(self._free)

    def send(self, links: Ints | None) -> None:
        """None = of padding alone: nothing is kept. What was not committed of the last pass is saved first."""
        if (last := self._last()) is not None:
            last.save()
        self._last, self._coming = self._coming, _no_trace
        self._sent.send(self._none if links is None else links)

    def trace(self, rows: int) -> Trace:
        """Of the pass that comes next."""
        made = Trace(self.links, self.joined[:, :rows], self.prepared[:, :rows])
        self._coming = weakref.ref(made)
        return made

    def join_trees(self, parents: Tensor, trees: int) -> None:
        """Of trees that were grown on the device [rows]: below a root, parents are rows of the pass, not its place."""
        rows = self.links[PARENTS, : len(parents)]
        first = torch.arange(0, len(parents), len(parents) // trees, device=parents.device)
        own = (parents.view(trees, -1) + first[:, None]).flatten().int()
        rows.copy_(torch.where(parents < 0, rows, own))


class Links:
    """What a pass is told of its rows, while it is laid out."""

    def __init__(self) -> None:
        self.ints = np.full((ENDS + 1, MAX_ROWS), -1, dtype=np.int32)

    def add_chain(self, first: int, nodes: int, before: Place) -> None:
        self.ints[PARENTS, first : first + nodes] = np.arange(first - 1, first + nodes - 1)
        self.ints[PARENTS, first] = -1 - before.number
        self.ints[WALKS, first] = nodes

    def add_tree(self, first: int, parents: Iterable[int], before: Place) -> None:
        rows = [-1 - before.number if parent < 0 else first + parent for parent in parents]
        self.ints[PARENTS, first : first + len(rows)] = rows
        self.ints[WALKS, first : first + len(rows)] = 0

    def keep(self, row: int, place: Place) -> None:
        self.ints[KEEPS, row] = place.number


def windows_of(joined: Tensor, parents: Tensor, before: Tensor) -> Tensor:
    """[rows, K, C] what every row's convolution reads: inputs [rows, C] along its path, and those before the first.

    `before` [places, K - 1, C].
    """
    row, beyond = torch.arange(len(joined), device=joined.device), torch.zeros_like(parents)
    read = [joined]
    for _ in range(before.shape[1]):
        row = torch.where(row < 0, row, parents[row.clamp(min=0)].long())
        beyond = beyond + (row < 0)
        place, back = (-1 - row).clamp(min=0), (before.shape[1] - beyond).clamp(0, before.shape[1] - 1)
        read.append(torch.where((row < 0)[:, None], before[place, back.long()], joined[row.clamp(min=0)]))
    return torch.stack(read[::-1], 1)
