"""The rows of one pass as the native kernels read them: what each node sees, where it is, where its keys go.

A node sees a context, which is read through its sequence's pages, and then a few slots by depth, its own last. A chain
lies behind its context already, so its nodes have longer contexts and a tail of one; the nodes of a tree share the
context and have their own paths as tails. `RotationTables` has cosines and sines by position.

`HiddenRows` has the hidden rows of a pass by layer, in one block of memory whose addresses are known: kernels write
them and a head's kernels read them. A layer becomes a tensor where somebody asks for it.

`TreePass` is the struct of a pass over one sequence's tree, filled once and then changed in place: from one pass over a
chain to the next a few integers change. Behind it `PlainRun` runs plain passes of one greedy text in the same native
call, where nobody would draft (`Needs.match_length`): Python between two passes mostly waits for what the pass has
evicted from the caches. The engine learns nothing of it: its next rounds ask for the same passes, one by one, and get
what is known. Whoever asks for anything else has them dropped.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.tree import Topology
from forerun.core.types import Greedy, Needs, Scores, Seq, TreeBatch
from forerun.models.attention import Span
from forerun.models.layers import Rotations, not_numbers
from forerun.models.native import library as native
from forerun.models.native.library import Model, Pass, Reach
from forerun.models.pages import PAGE, Extent


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


_AT_ONCE = 8  # logits of one node that are made together


class TreePass:
    """One struct, and the integers that it points to: columns as `Rows` has them, then the pages."""

    def __init__(self, model: Model) -> None:
        self.one = Pass()
        self._reach = self.one.reach  # the same memory; asking for it makes an object each time
        self.at = ctypes.byref(model), ctypes.byref(self.one)
        self._numbers, self._ids, self._tops = array("i"), array("q"), array("i")
        self._pages: Sequence[int] = ()
        self._table: Table | None = None
        self._adapters = array("Q")
        self._vocab, self._shows = model.vocab, False  # does the pass show hidden rows?
        self._spare: list[tuple[Tensor, int]] = []  # and where each lies

    def logits(self, nodes: int) -> Tensor:
        """[nodes, V] that the pass fills. Of one node several are made at once: a tensor takes long to make."""
        if nodes > 1:
            logits = torch.empty(nodes, self._vocab)
            self.one.logits = logits.data_ptr()
            return logits
        if not self._spare:
            self._make_spare()
        logits, self.one.logits = self._spare.pop()
        return logits

    def spare_rows(self, rows: int) -> int:
        """Where `rows` rows of logits [1, V] lie one behind the other; `take_rows` takes those that were filled."""
        if len(self._spare) < rows:
            self._make_spare()
        return self._spare[-1][1]

    def take_rows(self, rows: int) -> list[Tensor]:
        return [self._spare.pop()[0] for _ in range(rows)]

    def _make_spare(self) -> None:
        with torch.inference_mode(False):
            block = torch.empty(_AT_ONCE, 1, self._vocab)
        self._spare = [(row, row.data_ptr()) for row in reversed(block.unbind())]  # the first is taken first

    def set_x(self, hidden: Mapping[int, Tensor], last: int, shows: bool) -> None:
        """What leaves the last layer is computed in place where it is shown; not `shows`: no rows are."""
        if shows:
            self.one.x, self._shows = hidden[last].data_ptr() if last in hidden else None, True
        elif self._shows:
            self.one.hidden_count, self.one.kept, self.one.x, self._shows = 0, None, None, False

    def set_adapter(self, address: int, nodes: int) -> None:
        """All rows have the changes that lie there; 0 = none have any."""
        if address or self.one.adapters:
            self._adapters = array("Q", [address] * nodes) if address else array("Q")
            self.one.adapters = self._adapters.buffer_info()[0] if address else None

    def fill(self, tokens: Sequence[int], shape: Topology, length: int, pages: Sequence[int], table: Table) -> None:
        """A tree of these tokens follows `length` committed ones of a sequence with these pages."""
        if table is not self._table:
            self._table, self.one.cosines, self.one.sines = table, table.cosines, table.sines
            self.one.rope_stride = table.stride
        if shape.is_chain:
            self._fill_chain(tokens, length, pages)
        else:
            self._fill_tree(tokens, shape, length, pages)

    def _fill_chain(self, tokens: Sequence[int], length: int, pages: Sequence[int]) -> None:
        nodes = len(tokens)
        if nodes != len(self._ids) or pages is not self._pages:
            self._lay_out(nodes, pages)
        numbers, ids = self._numbers, self._ids
        for i, token in enumerate(tokens):
            position, ids[i] = length + i, token
            numbers[nodes + i] = numbers[3 * nodes + i] = position
            slot = pages[position // PAGE] * PAGE + position % PAGE
            numbers[4 * nodes + i] = numbers[5 * nodes + i] = slot
        self._reach.most = length + nodes

    def _fill_tree(self, tokens: Sequence[int], shape: Topology, length: int, pages: Sequence[int]) -> None:
        """Its nodes share the context, and have their own paths behind it."""
        nodes, depths, stride = len(tokens), shape.depths, shape.deepest + 1
        slots = [pages[at // PAGE] * PAGE + at % PAGE for at in range(length, length + nodes)]
        numbers = [*[0] * nodes, *[length] * nodes, *[depth + 1 for depth in depths]]
        numbers += [length + depth for depth in depths]
        numbers += slots
        for path, depth in zip(shape.paths, depths, strict=True):
            numbers += [slots[node] for node in path]
            numbers += [0] * (stride - depth - 1)
        self._numbers = array("i", [*numbers, *pages])
        self._ids, self._tops, self._pages = array("q", tokens), array("i", [0] * nodes), ()
        self._point(nodes, stride)
        self._reach.most = length + stride

    def _lay_out(self, nodes: int, pages: Sequence[int]) -> None:
        """Room for `nodes` nodes, behind these pages."""
        none = [0] * nodes
        self._numbers = array("i", [*none, *none, *[1] * nodes, *none, *none, *none, *pages])
        self._ids, self._tops, self._pages = array("q", none), array("i", none), pages
        self._point(nodes, 1)

    def _point(self, nodes: int, stride: int) -> None:
        """To the columns of `nodes` nodes, with `stride` slots in each tail."""
        one, reach, at, size = self.one, self._reach, self._numbers.buffer_info()[0], 4 * nodes
        one.nodes = one.scored = nodes
        one.tokens, one.tops = self._ids.buffer_info()[0], self._tops.buffer_info()[0]
        one.position, one.write = at + 3 * size, at + 4 * size
        reach.first, reach.context, reach.tail = at, at + size, at + 2 * size
        reach.tails, reach.tail_stride, reach.pages = at + 5 * size, stride, at + (5 + stride) * size

    def top(self, node: int) -> int:
        """Where the logits of one node are largest, after the pass."""
        return self._tops[node]

    def tops(self) -> list[int]:
        """Where each row of logits is largest, after the pass."""
        return self._tops.tolist()


def checked(tops: list[int]) -> list[int]:
    """The same, if all rows of logits held numbers."""
    if -1 in tops:
        raise not_numbers()
    return tops


MOST = 7  # passes behind the first of a call: up to eight tokens come at once, within the seconds that it may hold
SECONDS = 0.03  # of a call: where passes take long, Python between them is a small share, and tokens come one by one
_MORE = 256  # tokens that the text grows by


@lru_cache(maxsize=64)
def without_rows(needs: Needs) -> Needs:
    """What a head that reads one row needs of a pass behind which it rests; the last round of the rest has that row."""
    return replace(needs, hidden_layers=(), rests=(needs.rests or 1) - 1)


class PlainRun:
    """The passes behind the last one: whose they are, and what each found."""

    def __init__(self, alone: TreePass, layers: int, width: int) -> None:
        self._last, self._width = layers, width
        self._alone, self._one, self._tops = alone, native.Run(), (ctypes.c_int32 * MOST)()
        self._decode = native.library().fr_decode_run
        self._one.seconds, self._one.tops = SECONDS, ctypes.addressof(self._tops)
        self._at = *alone.at, ctypes.byref(self._one)
        self._extent: Extent | None = None  # None = there are none
        self._start = 0  # committed positions before the first of them
        self._found: list[
            tuple[int, Tensor, int, Mapping[int, Tensor]]
        ] = []  # the token of each, its logits, where these are largest, and rows that entered layers
        self._layers: tuple[int, ...] = ()  # these layers
        # of the sequence that `_reader` is, and how much of it is known
        self._text, self._read = array("i"), 0
        self._reader: Extent | None = None
        self._stop_ids, self._stops = frozenset[int](), array("q")

    def known(self, extent: Extent, tokens: list[int], needs: Needs) -> Scores | None:
        """Of a pass over these tokens, if it was run; else all that were are dropped."""
        if extent is self._extent and len(tokens) == 1 and needs.hidden_layers == self._layers:
            place = extent.length - self._start
            if 0 <= place < len(self._found) and self._found[place][0] == tokens[0]:
                _, logits, top, hidden = self._found[place]
                return Scores(logits, hidden, Greedy(checked([top])), ahead=-1)
        self.drop()
        return None

    def has_next(self, extent: Extent) -> bool:
        """Was the next pass of this sequence run, without hidden rows?"""
        known = extent is self._extent and not self._layers
        return known and 0 <= extent.length - self._start < len(self._found)

    def drop(self) -> None:
        """What was run and not asked for no longer counts."""
        self._extent = None

    def passes(self, seq: Seq, extent: Extent, trees: TreeBatch, needs: Needs) -> int:
        """How many may be run behind the pass over this tree. The first token of a text does not wait for others."""
        if needs.match_length is None or needs.may_run or len(seq.tokens) <= seq.prompt_length:
            return 0
        if not trees.topology()[0].is_chain:
            return 0
        if self._last in needs.hidden_layers:  # computed in place, for the caller of the first pass
            return 0
        room = min(seq.max_length - len(seq.tokens), extent.writable - extent.length) - trees.nodes
        return max(0, min(MOST if needs.rests is None else min(MOST, needs.rests), room))

    def run(
        self, seq: Seq, extent: Extent, tokens: list[int], most: int, needs: Needs, layers: Sequence[int] = ()
    ) -> tuple[int, float]:
        """The pass that the TreePass has, over a chain of these tokens, and up to `most` behind it.

        `layers`: of these, the rows that enter them are kept for each. How many were run, and the first one's share of
        the time.
        """
        one, alone = self._one, self._alone
        shown = [HiddenRows(layers, 1, self._width) for _ in range(most)] if layers else []
        places = array("Q", [at for rows in shown for at in rows.addresses.values()])
        one.hidden = places.buffer_info()[0]
        one.most, one.match, one.logits = most, needs.match_length or 0, alone.spare_rows(most)
        if needs.match_length:
            self._write_text(seq.tokens, extent, len(tokens))
        if seq.stop_ids is not self._stop_ids:
            self._stop_ids, self._stops = seq.stop_ids, array("q", seq.stop_ids)
            one.stops, one.stop_count = self._stops.buffer_info()
        if self._decode(*self._at):
            raise MemoryError(f"no memory for a pass over {len(tokens)} nodes")
        count = one.count
        if count:
            tops = self._tops[:count]
            roots, hidden = (alone.top(one.kept), *tops), shown or ({},) * count
            self._found = list(zip(roots, alone.take_rows(count), tops, hidden, strict=False))
            self._layers = needs.hidden_layers
            self._extent, self._start = extent, extent.length + one.kept + 1
        return count, one.own

    def _write_text(self, tokens: list[int], extent: Extent, nodes: int) -> None:
        """The text of this sequence, with room behind it for tokens found behind `nodes` nodes."""
        length = len(tokens)
        if extent is not self._reader or length < self._read:
            self._reader, self._read = extent, 0
        if length + nodes + MOST > len(self._text):
            self._text.extend([0] * (length + nodes + _MORE - len(self._text)))
        self._text[self._read : length] = array("i", tokens[self._read :])
        self._read = length
        self._one.text, self._one.length = self._text.buffer_info()[0], length
