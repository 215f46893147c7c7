"""The rows of one pass as the native kernels read them: what each node sees, where it is, where its keys go.

A node sees a context, which is read through its sequence's pages, and then a few slots by depth, its own last. A chain
lies behind its context already, so its nodes have longer contexts and a tail of one; the nodes of a tree share the
context and have their own paths as tails.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from forerun.models.attention import Span
from forerun.models.native.library import Reach


class Rows:
    """Columns of integers in one piece of memory, which lives as long as this object, and their addresses."""

    def __init__(
        self,
        first: list[int],
        context: list[int],
        tails: Sequence[Sequence[int]],
        write: list[int],
        pages: list[int],
    ) -> None:
        """`pages` of all sequences end to end; `first` says where each node's start."""
        self._stride = stride = max(map(len, tails), default=1)
        tail = [len(slots) for slots in tails]
        self.positions = [before + own - 1 for before, own in zip(context, tail, strict=True)]
        self._most = max(self.positions, default=-1) + 1
        numbers = [*first, *context, *tail, *self.positions, *write]
        for slots in tails:
            numbers += slots
            numbers += [0] * (stride - len(slots))
        behind = len(numbers)
        numbers += pages
        self._numbers = (ctypes.c_int32 * len(numbers))(*numbers)
        at, size = ctypes.addressof(self._numbers), 4 * len(first)
        self._first, self._context, self._tail = at, at + size, at + 2 * size
        self.position, self.write, self._tails = at + 3 * size, at + 4 * size, at + 5 * size
        self._pages = at + 4 * behind

    def reach(self) -> Reach:
        return Reach(
            self._first, self._context, self._tail, self._tails, self._stride, self._most, self._pages
        )

    def place(self, places: Sequence[int]) -> None:
        """Change which row of the rotations each node reads."""
        nodes = len(self.positions)
        self._numbers[3 * nodes : 4 * nodes] = list(places)


def rows_of(spans: Sequence[Span]) -> Rows:
    """Lay out the nodes of all spans."""
    first, context, write = list[int](), list[int](), list[int]()
    tails: list[list[int]] = []
    pages: list[int] = []
    for span in spans:
        own, shape, nodes = span.slots, span.shape, span.nodes
        write += own
        first += [len(pages)] * nodes
        pages += span.pages
        if shape.is_chain:
            context += range(span.length, span.length + nodes)
            tails += [[slot] for slot in own]
            continue
        context += [span.length] * nodes
        tails += [[own[node] for node in path] for path in shape.paths]
    return Rows(first, context, tails, write, pages)
