"""KVStore: the KV cache, one tensor for all layers, in which every sequence owns a run of slots.

A sequence's run (its extent) is reserved when it is admitted, for its longest possible length plus room for
a tree. So its context is always contiguous: attention reads a view, no gather, and the nodes of a tree are
written right behind the committed tokens. `table` gives the slot of every position for kernels that read
through a table instead.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import InvalidInput

TREE_MARGIN = 257  # slots beyond a sequence's length: the root and 256 nodes, the largest budget
CHUNK = 512  # slots; an unbounded store grows by at least this many


class FreeList:
    """First-fit allocation of runs of slots; neighbours merge when they are given back."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.runs: list[tuple[int, int]] = [(0, size)] if size else []  # (base, size), sorted, never touching

    def copy(self) -> FreeList:
        twin = FreeList(0)
        twin.size, twin.runs = self.size, list(self.runs)
        return twin

    def take(self, size: int) -> int | None:
        """The base of a run of `size` slots, or None where no run is that long."""
        for i, (base, free) in enumerate(self.runs):
            if free >= size:
                self.runs[i : i + 1] = [(base + size, free - size)] if free > size else []
                return base
        return None

    def fits(self, sizes: Sequence[int]) -> bool:
        """Could runs of these sizes be taken, in this order? Free slots need not be in one row."""
        trial = self.copy()
        return all(trial.take(size) is not None for size in sizes)

    def give(self, base: int, size: int) -> None:
        """Return a run taken earlier."""
        insort(self.runs, (base, size))
        merged: list[tuple[int, int]] = []
        for start, length in self.runs:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self.runs = merged

    def grow(self, size: int) -> None:
        """Add `size` slots at the end."""
        self.give(self.size, size)
        self.size += size

    @property
    def free(self) -> int:
        return sum(size for _, size in self.runs)

    @property
    def longest(self) -> int:
        return max((size for _, size in self.runs), default=0)

    @property
    def tail(self) -> int:
        """How many of the last slots are free: what growing adds to."""
        return self.runs[-1][1] if self.runs and sum(self.runs[-1]) == self.size else 0


@dataclass(slots=True)
class Extent:
    """One sequence's slots: `base` to `base + size`, of which the first `length` are committed."""

    base: int
    size: int
    length: int = 0


class KVStore:
    """Keys and values of all sequences: `data` [L, 2, Hkv, S, D], keys at 0 and values at 1.

    The slots of every sequence and the free ones are one value that is replaced in one step: after any failure or
    interrupt, no slot is lost and none has two owners.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int | None,
    ) -> None:
        self.bounded = capacity is not None
        shape = (layers, 2, kv_heads, capacity or 0, head_dim)
        with torch.inference_mode(False):  # written in every mode
            self.data = torch.empty(shape, dtype=dtype, device=device)
        self._state: tuple[FreeList, dict[int, Extent]] = FreeList(capacity or 0), {}

    @property
    def _slots(self) -> FreeList:
        return self._state[0]

    @property
    def used(self) -> int:
        """Slots reserved now."""
        return self._slots.size - self._slots.free

    @property
    def capacity(self) -> int:
        return self._slots.size

    def has_room(self, *sizes: int) -> bool:
        """Could several be given their slots now, in this order?"""
        return not self.bounded or self._slots.fits(sizes)

    def reserve(self, seq_id: int, size: int) -> Extent:
        """Give a sequence its slots until it is released; what it held before is freed."""
        self.release(seq_id)
        slots = self._slots.copy()
        base = slots.take(size)
        if base is None and not self.bounded:
            slots.grow(self._make_room(size - slots.tail))
            base = slots.take(size)
        if base is None:
            raise InvalidInput(
                f"a sequence needs {size} KV slots in a row, but the longest free run of {self.capacity} is "
                f"{slots.longest}: raise kv_slots, lower max_tokens, or wait for a sequence to finish"
            )
        extent = Extent(base, size)
        self._state = slots, {**self._state[1], seq_id: extent}
        return extent

    def release(self, seq_id: int) -> None:
        extents = dict(self._state[1])
        extent = extents.pop(seq_id, None)
        if extent is not None:
            slots = self._slots.copy()
            slots.give(extent.base, extent.size)
            self._state = slots, extents

    def holds(self, seq_id: int) -> bool:
        """Has this sequence slots?"""
        return seq_id in self._state[1]

    def extent(self, seq_id: int) -> Extent:
        extent = self._state[1].get(seq_id)
        if extent is None:
            raise InvalidInput(f"sequence {seq_id} holds no KV slots: prefill it first")
        return extent

    def table(self, seq_id: int) -> Tensor:
        """[size] the slot of every position a sequence may have."""
        extent = self.extent(seq_id)
        return torch.arange(extent.base, extent.base + extent.size, device=self.data.device)

    def accept(self, seq_id: int, path: Sequence[int]) -> list[tuple[int, int]]:
        """Commit a root, written at the first slot behind the committed ones, and some nodes behind it.

        `path` has the nodes' places relative to the root, ascending. Returns the slots to `move` next to the root, as
        (from, to): none where the nodes are already in place. Whatever else was written there is beyond the length,
        and will be overwritten.
        """
        extent = self.extent(seq_id)
        root = extent.base + extent.length
        extent.length += 1 + len(path)
        return [(root + node, root + i) for i, node in enumerate(path, start=1) if node != i]

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy slots, in all layers. A path moves towards its root: no slot is written before it was read."""
        if not moves:
            return
        if self.data.device.type == "cpu":
            for source, place in moves:  # quicker than a gather, for the few that there are
                self.data.select(3, place).copy_(self.data.select(3, source))
        else:
            both = torch.tensor(list(zip(*moves, strict=True))).to(
                self.data.device, non_blocking=True
            )  # [2, P]
            self.data.index_copy_(3, both[1], self.data.index_select(3, both[0]))

    def truncate(self, seq_id: int, length: int) -> None:
        """Forget what is committed beyond the first `length`; unknown sequences are ignored."""
        if seq_id in self._state[1]:
            extent = self._state[1][seq_id]
            extent.length = min(extent.length, length)

    def _make_room(self, size: int) -> int:
        """Grow the tensor by so many slots, by half its size at least, and return how many; the copy is rare."""
        more = max(size, self.capacity // 2)
        more = -(-more // CHUNK) * CHUNK
        old, held = self.data, self.capacity
        with torch.inference_mode(False):
            larger = old.new_empty(*old.shape[:3], held + more, old.shape[4])
        larger[:, :, :, :held] = old[
            :, :, :, :held
        ]  # it may be larger already, if the last call was interrupted
        self.data = larger
        return more
