"""Calls of the native library that draft: an EAGLE head's layers, and the likeliest entries of rows of logits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32

import torch
from torch import Tensor

from forerun.models.native import library as native
from forerun.models.native.library import Draft, Head, HeadPass, Top


def run_rows(head: Head, one: HeadPass) -> None:
    if native.library().fr_head_run(head, one):
        raise MemoryError(f"no memory for a pass over {one.rows} rows")


def draft_tree(head: Head, like: HeadPass, draft: Draft) -> None:
    """The new rows of a sequence, and a tree below them, on the slots that `like` points to."""
    if native.library().fr_head_draft(head, like, draft):
        raise MemoryError(f"no memory for a draft of {draft.nodes} nodes")


def top_rows(logits: Tensor, count: int, *, as_log_probs: bool = True) -> tuple[Tensor, Tensor]:
    """The best entries of each row [N, V] float32: values, or log-probabilities, and places, both [N, count]."""
    rows = logits.contiguous()
    if not (rows.dtype == torch.float32 and 1 <= count <= rows.shape[1]):
        raise ValueError(f"{count} best of rows {tuple(rows.shape)} in {rows.dtype}")
    values = rows.new_empty(len(rows), count)
    places = torch.empty(len(rows), count, dtype=torch.int32)
    totals = rows.new_empty(len(rows))
    top = Top(len(rows), rows.shape[1], count, x=rows.data_ptr())
    top.values, top.indices = values.data_ptr(), places.data_ptr()
    top.totals = totals.data_ptr() if as_log_probs else None
    native.match_threads(torch.get_num_threads())
    if native.library().fr_top_rows(top):
        raise MemoryError(f"no memory for the best of {len(rows)} rows")
    return values, places.long()


class Ranking:
    """Where logits and their best entries go, used again and again by one head."""

    def __init__(self, rows: int, count: int, ids: Tensor) -> None:
        self.rows, self.count, self._ids = rows, count, ids  # [V] int32: what each logit stands for
        self.logits = torch.empty(rows, len(ids))
        self._values = (c_float * (rows * count))()
        self._places = (c_int32 * (rows * count))()
        self._totals = (c_float * rows)()
        self._noise = torch.empty(0, len(ids))
        self._logits_at = self.logits.data_ptr()
        self._top = Top(
            count=len(ids),
            x=self._logits_at,
            values=ctypes.addressof(self._values),
            indices=ctypes.addressof(self._places),
            totals=ctypes.addressof(self._totals),
        )

    def rank(
        self, head: Head, out: int, rows: int, count: int, scales: Sequence[float] | None = None
    ) -> tuple[list[float], list[int]]:
        """Log-probabilities and places [N * count], row by row, best first, after `rows` outputs at an address."""
        assert rows <= self.rows and count <= self.count, (rows, count)  # noqa: PT018
        top = self._top
        top.rows, top.k = rows, count
        held = (c_float * rows)(*scales) if scales is not None else None
        top.scale = ctypes.addressof(held) if held is not None else None
        if native.library().fr_head_rank(head, out, self._logits_at, top):
            raise MemoryError(f"no memory for the best of {rows} rows")
        return self._values[: rows * count], self._places[: rows * count]

    def set_noise(self, keys: Sequence[tuple[int, int]], rows: Sequence[int] | None) -> None:
        """The noise that the next ranking takes off: one key each, and which of them a row has (-1 = none)."""
        if rows is None:
            self._top.noise = None
            return
        if len(keys) > len(self._noise):
            self._noise = torch.empty(len(keys), len(self._ids))
        for i, (low, high) in enumerate(keys):
            native.library().fr_log_noise(self._ids.data_ptr(), len(self._ids), low, high, self._noise[i].data_ptr())
        self._noise_rows = (c_int32 * len(rows))(*rows)
        self._top.noise, self._top.noise_row = self._noise.data_ptr(), ctypes.addressof(self._noise_rows)
