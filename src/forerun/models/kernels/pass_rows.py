"""The rows of one pass as the native kernels read them: what each node sees, where it is, where its keys go.

A node sees a run of slots and then a few more by depth, its own last. A chain lies in a row already, so its nodes
have longer runs and a tail of one; the nodes of a tree share the run and have their own paths as tails.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from forerun.models.attention import Span
from forerun.models.kernels.native_library import Reach

_COLUMNS = (
    "first",
    "context",
    "tail",
    "position",
    "write",
    "tails",
)  # in this order, M numbers each but the last


class Rows:
    """Columns of integers in one piece of memory, which lives as long as this object."""

    def __init__(self, columns: dict[str, list[int]], stride: int) -> None:
        self.positions, self.stride = columns["position"], stride
        self.nodes = len(self.positions)
        self.most = max(map(sum, zip(columns["context"], columns["tail"], strict=True)), default=0)
        flat = [number for name in _COLUMNS for number in columns[name]]
        self._numbers = (ctypes.c_int32 * len(flat))(*flat)
        self._base = ctypes.addressof(self._numbers)

    def at(self, column: str) -> int:
        return self._base + _COLUMNS.index(column) * self.nodes * ctypes.sizeof(ctypes.c_int32)

    def reach(self) -> Reach:
        columns = (self.at(name) for name in ("first", "context", "tail", "tails"))
        return Reach(*columns, tail_stride=self.stride, most=self.most)

    def place(self, places: Sequence[int]) -> None:
        """Change which row of the rotations each node reads."""
        start = _COLUMNS.index("position") * self.nodes
        self._numbers[start : start + self.nodes] = list(places)


def rows_of(spans: Sequence[Span]) -> Rows:
    """Lay out the nodes of all spans."""
    columns: dict[str, list[int]] = {name: [] for name in _COLUMNS}
    tails: list[list[int]] = []
    for span in spans:
        own, parents = span.base + span.length, span.parents
        columns["write"].extend(range(own, own + span.nodes))
        columns["first"].extend([span.base] * span.nodes)
        if parents is None or all(parent == i - 1 for i, parent in enumerate(parents)):
            columns["context"].extend(range(span.length, span.length + span.nodes))
            tails.extend([own + i] for i in range(span.nodes))
            continue
        columns["context"].extend([span.length] * span.nodes)
        paths: list[list[int]] = []
        for i, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else ()), own + i])
        tails.extend(paths)
    stride = max(map(len, tails), default=1)
    columns["tail"] = [len(tail) for tail in tails]
    columns["tails"] = [slot for tail in tails for slot in (*tail, *[0] * (stride - len(tail)))]
    columns["position"] = [a + b - 1 for a, b in zip(columns["context"], columns["tail"], strict=True)]
    return Rows(columns, stride)
