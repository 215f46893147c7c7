"""The rows of one pass as the native kernels read them: what each node sees, where it is, where its keys go.

A node sees a context, which is read through its sequence's pages, and then a few slots by depth, its own last. A chain
lies behind its context already, so its nodes have longer contexts and a tail of one; the nodes of a tree share the
context and have their own paths as tails. `RotationTables` has cosines and sines by position.

`HiddenRows` has the hidden rows of a pass by layer, in one block of memory whose addresses are known: kernels write
them and a head's kernels read them. A layer becomes a tensor where somebody asks for it: between two passes, which
evict the CPU caches, making a tensor or asking one for its address costs many microseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.attention import Span
from forerun.models.layers import Rotations
from forerun.models.native.library import Reach


class Rows:
    """Columns of integers in one piece of memory, which lives as long as this object, and their addresses."""

    __slots__ = ("_at", "_numbers", "_pages", "_stride", "longest", "position", "positions", "write")

    def __init__(
        self,
        first: list[int],
        context: list[int],
        tails: Sequence[Sequence[int]] | None,
        write: list[int],
        pages: list[int],
        skipped: list[int] | None = None,
    ) -> None:
        """`pages` of all sequences end to end; `first` says where each node's start.

        `tails` None = of one slot each: the one that is written. `skipped`: positions that the pages of each node leave
        out; None = none.
        """
        if tails is None:
            self._stride, self.positions = 1, context
            numbers = [*first, *context, *[1] * len(first), *context, *write, *write]
        else:
            self._stride = stride = max(map(len, tails), default=1)
            tail = [len(slots) for slots in tails]
            self.positions = [before + own - 1 for before, own in zip(context, tail, strict=True)]
            numbers = [*first, *context, *tail, *self.positions, *write]
            for slots in tails:
                numbers += slots
                numbers += [0] * (stride - len(slots))
        if skipped is not None:
            self.positions = [at + more for at, more in zip(self.positions, skipped, strict=True)]
            numbers[3 * len(first) : 4 * len(first)] = self.positions
        self.longest = max(self.positions, default=0)
        behind = 4 * len(numbers)
        self._numbers = array("i", numbers + pages)
        self._at, size = self._numbers.buffer_info()[0], 4 * len(first)
        self.position, self.write, self._pages = self._at + 3 * size, self._at + 4 * size, self._at + behind

    def set_reach(self, reach: Reach) -> None:
        """Write where these columns lie."""
        at, size = self._at, 4 * len(self.positions)
        reach.first, reach.context, reach.tail = at, at + size, at + 2 * size
        reach.tails, reach.tail_stride, reach.most = at + 5 * size, self._stride, self.longest + 1
        reach.pages = self._pages

    def place(self, places: Sequence[int]) -> None:
        """Change which row of the rotations each node reads."""
        nodes = len(self.positions)
        self._numbers[3 * nodes : 4 * nodes] = array("i", places)


def rows_of(spans: Sequence[Span]) -> Rows:
    columns: list[list[int]] = [[], [], [], []]
    (first, context, write, pages), only_chains = columns, True
    for span in spans:
        own, nodes = span.slots, span.nodes
        write += own
        first += [len(pages)] * nodes
        pages += span.pages
        if span.shape.is_chain:
            context += range(span.length, span.length + nodes)
        else:
            context += [span.length] * nodes
            only_chains = False
    skipped = [span.skipped for span in spans for _ in range(span.nodes)]
    tails = None if only_chains else _tails(spans)
    return Rows(first, context, tails, write, pages, skipped if any(skipped) else None)


def _tails(spans: Sequence[Span]) -> list[list[int]]:
    """The slots of every node's path, its own last; of a chain's nodes only that one, as the others are context."""
    tails: list[list[int]] = []
    for span in spans:
        own, shape = span.slots, span.shape
        if shape.is_chain:
            tails += [[slot] for slot in own]
        else:
            tails += [[own[node] for node in path] for path in shape.paths]
    return tails


_PIECE = 512  # positions whose rotations are worked out at once


class Table(NamedTuple):
    """Rotations by position, and where they lie in memory."""

    values: Tensor  # [2, ropes, N, R] cosines and sines; ropes of fewer pairs than R use the first
    positions: int  # N
    cosines: int
    sines: int
    stride: int  # from a rope's numbers to those of the next

    @classmethod
    def of(cls, values: Tensor) -> Table:
        at = values.data_ptr()
        return cls(values, values.shape[2], at, at + values.nbytes // 2, values.stride(1))


Regimes = tuple[int, ...]  # of every rope


class RotationTables:
    """The tables of a model's ropes, by regime."""

    def __init__(self, rotations: Sequence[Rotations]) -> None:
        self._rotations = rotations
        self._tables: dict[Regimes, Table] = {}

    def at(self, regimes: Regimes, longest: int) -> Table:
        """For positions up to `longest` at least; made a piece at a time, so that none ever changes."""
        pairs = max(one.rope.dims for one in self._rotations) // 2
        table = self._tables.get(regimes) or Table.of(torch.empty(2, len(self._rotations), 0, pairs))
        while table.positions <= longest:
            fresh = torch.arange(table.positions, table.positions + _PIECE)
            made = zip(self._rotations, regimes, strict=True)
            parts = [one.at(fresh, regime).squeeze(1) for one, regime in made]
            turns = torch.stack([F.pad(part, (0, pairs - part.shape[1])) for part in parts])  # [ropes, _PIECE, R]
            piece = torch.stack((turns.real, turns.imag))
            table = self._tables[regimes] = Table.of(torch.cat((table.values, piece), dim=2))
        return table

    def of_rows(self, rows: Rows, spans: Sequence[Span], regimes: Sequence[Regimes]) -> Table:
        """The rotations of a pass whose spans have these regimes; the rows' places in them are set."""
        if regimes.count(regimes[0]) == len(regimes):
            return self.at(regimes[0], rows.longest)
        pieces = []  # neighbours of different regimes: a table of just these rows
        for span, regime in zip(spans, regimes, strict=True):
            pieces.append(self.at(regime, rows.longest).values[:, :, rows.positions[span.first : span.end]])
        rows.place(range(len(rows.positions)))
        return Table.of(torch.cat(pieces, dim=2))


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
