"""The rows of one pass as the native kernels read them: what each node sees, where it is, where its keys go.

A node sees a run of slots and then a few more by depth, its own last. A chain lies in a row already, so its nodes
have longer runs and a tail of one; the nodes of a tree share the run and have their own paths as tails.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from forerun.models.attention import Span
from forerun.models.native.library import Reach


class Rows:
    """Columns of integers in one piece of memory, which lives as long as this object, and their addresses."""

    def __init__(
        self, first: list[int], context: list[int], tails: Sequence[Sequence[int]], write: list[int]
    ) -> None:
        self._stride = stride = max(map(len, tails), default=1)
        tail = [len(slots) for slots in tails]
        self.positions = [before + own - 1 for before, own in zip(context, tail, strict=True)]
        self._most = max(self.positions, default=-1) + 1
        numbers = [*first, *context, *tail, *self.positions, *write]
        for slots in tails:
            numbers += slots
            numbers += [0] * (stride - len(slots))
        self._numbers = (ctypes.c_int32 * len(numbers))(*numbers)
        at, size = ctypes.addressof(self._numbers), 4 * len(first)
        self._first, self._context, self._tail = at, at + size, at + 2 * size
        self.position, self.write, self._tails = at + 3 * size, at + 4 * size, at + 5 * size

    def reach(self) -> Reach:
        return Reach(self._first, self._context, self._tail, self._tails, self._stride, self._most)

    def place(self, places: Sequence[int]) -> None:
        """Change which row of the rotations each node reads."""
        nodes = len(self.positions)
        self._numbers[3 * nodes : 4 * nodes] = list(places)


def rows_of(spans: Sequence[Span]) -> Rows:
    """Lay out the nodes of all spans."""
    first, context, write = list[int](), list[int](), list[int]()
    tails: list[list[int]] = []
    for span in spans:
        own, shape, nodes = span.base + span.length, span.shape, span.nodes
        write += range(own, own + nodes)
        first += [span.base] * nodes
        if shape.is_chain:
            context += range(span.length, span.length + nodes)
            tails += [[own + i] for i in range(nodes)]
            continue
        context += [span.length] * nodes
        tails += [[own + node for node in path] for path in shape.paths]
    return Rows(first, context, tails, write)
