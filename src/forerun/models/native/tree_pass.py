"""TreePass: the struct of a pass over one sequence's tree, filled once and then changed in place.

Plain decoding of one text, and an n-gram draft for it, are chains: from one pass to the next a few integers change, the
token, its position, its slot. Filling everything anew took half of the Python of a round. Of other trees the columns
of integers are written anew, and the rest stays.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from forerun.core.tree import Topology
from forerun.models.layers import not_numbers
from forerun.models.native.library import Model, Pass
from forerun.models.native.pass_rows import Table
from forerun.models.pages import PAGE

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
