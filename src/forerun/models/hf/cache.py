"""The KV cache behind a transformers model: one row of slots per sequence, rollback by length.

Each layer keeps a slab [rows, heads, slots, width] of keys and one of values. A pass writes its nodes into
the slots after the committed ones; `keep` moves the path's slots together and counts them, so what was
rejected lies past the row's length, where no mask reaches and the next pass writes. The rows in use are
consecutive, so that a pass over the whole batch reads the slab in place instead of copying the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

SLOT_STEP = 256  # slots that a slab grows by


@dataclass(frozen=True, slots=True)
class Placement:
    rows: Tensor  # [n]
    slots: Tensor  # [n, M] the slot of every node, padding included
    first: int  # lowest row
    end: int  # past the highest row
    width: int  # slots read: the longest row and its nodes


class TreeLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer; the model calls `update`, which returns context and nodes."""

    placement: Placement
    keys: Tensor | None
    values: Tensor | None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = _grow(self.keys, key_states, self.placement)
        self.values = _grow(self.values, value_states, self.placement)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.lazy_initialization(key_states, value_states)
        keys, values = self._slabs()
        return _write(keys, key_states, self.placement), _write(values, value_states, self.placement)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.placement.width, 0

    def get_seq_length(self) -> int:
        return self.placement.width - self.placement.slots.shape[1]

    def get_max_length(self) -> int:
        return -1  # transformers' word for "no limit"

    def move(self, rows: Tensor, source: Tensor, destination: Tensor) -> None:
        """Copy slots within rows; the source is read whole before anything is written."""
        for slab in self._slabs():
            at = slab.device
            slab[rows.to(at), :, destination.to(at)] = slab[rows.to(at), :, source.to(at)]

    def copy_row(self, source: int, destination: int) -> None:
        """Copy what a row holds; a pass that failed may not have come to this layer, which then holds nothing of it."""
        for slab in self._slabs():
            if source < len(slab):
                slab[destination] = slab[source]

    def clear(self) -> None:
        self.keys, self.values, self.is_initialized = None, None, False

    def _slabs(self) -> list[Tensor]:
        return [slab for slab in (self.keys, self.values) if slab is not None]


@dataclass(slots=True)
class Row:
    """Where a sequence lies in every slab, and how many of its slots are committed."""

    index: int
    length: int = 0


class TreeCache(Cache):  # type: ignore[misc]
    """All layers' slabs, and which row is whose.

    Rows change owners in one step, after all that can fail: an interrupted call can be repeated.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[TreeLayer() for _ in range(layers)])
        self.rows: dict[int, Row] = {}  # sequence id -> row; their indices are 0, 1, ...

    @property
    def used(self) -> int:
        return sum(row.length for row in self.rows.values())

    def length(self, seq_id: int) -> int:
        return self.rows[seq_id].length if seq_id in self.rows else 0

    def admit(self, seq_id: int) -> None:
        """Give a sequence a row, unless it has one."""
        if seq_id not in self.rows:
            self.rows[seq_id] = Row(len(self.rows))

    def place(self, seq_ids: list[int], nodes: int, device: torch.device) -> Placement:
        """Aim the next pass, of `nodes` nodes a row, at these sequences, given in the order of their rows."""
        rows = [self.rows[seq_id].index for seq_id in seq_ids]
        lengths = [self.rows[seq_id].length for seq_id in seq_ids]
        slots = torch.tensor(lengths, device=device)[:, None] + torch.arange(nodes, device=device)
        placement = Placement(torch.tensor(rows, device=device), slots, rows[0], rows[-1] + 1, max(lengths) + nodes)
        for layer in self.layers:
            layer.placement = placement
        return placement

    def keep(self, seq_ids: list[int], paths: list[list[int]]) -> None:
        """Commit root and path of the nodes written last."""
        moves: list[tuple[int, int, int]] = []
        for seq_id, path in zip(seq_ids, paths, strict=True):
            row = self.rows[seq_id]
            places = enumerate(path, 1)
            moves += [(row.index, row.length + node, row.length + i) for i, node in places if node != i]
        if moves:
            rows, source, destination = torch.tensor(moves).unbind(1)
            for layer in self.layers:
                layer.move(rows, source, destination)
        for seq_id, path in zip(seq_ids, paths, strict=True):
            self.rows[seq_id].length += 1 + len(path)

    def truncate(self, seq_id: int, length: int) -> None:
        row = self.rows.get(seq_id)
        if row is not None:
            row.length = min(row.length, length)

    def release(self, seq_id: int) -> None:
        """Free a row; the last one moves into it, so that the rows in use stay consecutive."""
        if seq_id not in self.rows:
            return
        free, last = self.rows[seq_id].index, len(self.rows) - 1
        rest = {other: row for other, row in self.rows.items() if other != seq_id}
        if free != last:
            mover = next(other for other, row in rest.items() if row.index == last)
            for layer in self.layers:
                layer.copy_row(last, free)
            rest[mover] = Row(free, rest[mover].length)
        self.rows = rest
        if not rest:
            for layer in self.layers:
                layer.clear()


def _grow(slab: Tensor | None, like: Tensor, place: Placement) -> Tensor:
    """The slab, or a larger one with the same contents, so that the placement fits."""
    if slab is None:
        slab = like.new_zeros(0, like.shape[1], 0, like.shape[3])
    if slab.shape[0] >= place.end and slab.shape[2] >= place.width:
        return slab
    rows = max(slab.shape[0], place.end)
    slots = max(slab.shape[2], -(-place.width // SLOT_STEP) * SLOT_STEP)
    larger = like.new_zeros(rows, like.shape[1], slots, like.shape[3])  # zeros: a masked NaN would spread
    larger[: slab.shape[0], :, : slab.shape[2]] = slab
    return larger


def _write(slab: Tensor, new: Tensor, place: Placement) -> Tensor:
    """Put the nodes [n, H, M, D] into the slab; return what the pass reads, a view where that is possible."""
    rows, slots = place.rows.to(slab.device), place.slots.to(slab.device)
    slab[rows[:, None], :, slots] = new.transpose(1, 2)
    if place.end - place.first == len(rows):
        return slab[place.first : place.end, :, : place.width]
    return slab[rows, :, : place.width]
