"""The part of the native library that drafts: an EAGLE head's layers, and the likeliest entries of rows of logits.

Described in the same words as native/forerun.h. A library that was built without it is told apart by its layout.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from forerun.models.native import library as native
from forerun.models.native.library import Fields, Reach, Table, Weights


class HeadLayer(Structure):
    """fr_head_layer: one of its layers."""

    _fields_: ClassVar[Fields] = [
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        *[(name, Weights) for name in ("qkv", "output", "gate_up", "down")],
    ]


class Head(Structure):
    """fr_head: the weights of an EAGLE head."""

    _fields_: ClassVar[Fields] = [
        *[
            (name, c_int64)
            for name in ("width", "heads", "kv_heads", "head_dim", "inner", "features", "parts")
        ],
        *[(name, c_int64) for name in ("joins_token", "norm_before_residual", "norm_output", "depth")],
        ("eps", c_float),
        ("attention_scale", c_float),
        *[(name, c_void_p) for name in ("token_norm", "feature_norm", "out_norm")],
        *[(name, c_void_p) for name in ("input_norm", "part_norms")],
        *[(name, Weights) for name in ("fc", "lm_head")],
        ("layers", POINTER(HeadLayer)),
        ("embedding", Table),
    ]


class HeadPass(Structure):
    """fr_head_pass: the rows of one pass and where everything goes."""

    _fields_: ClassVar[Fields] = [
        ("rows", c_int64),
        ("keys_only", c_int64),
        *[(name, c_void_p) for name in ("tokens", "embedded", "features", "before", "parents", "out")],
        *[(name, c_void_p) for name in ("cosines", "sines", "position", "write")],
        ("reach", Reach),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("head_stride", c_int64),
        ("layer_stride", c_int64),
    ]


class Top(Structure):
    """fr_top: rows of logits, how they are read, and their best entries."""

    _fields_: ClassVar[Fields] = [
        *[(name, c_int64) for name in ("rows", "count", "k")],
        *[(name, c_void_p) for name in ("x", "scale", "noise", "noise_row", "values", "indices", "totals")],
    ]


class Draft(Structure):
    """fr_draft: a whole draft of one sequence, what it may be, and what it became."""

    _fields_: ClassVar[Fields] = [
        ("fresh", c_int64),
        *[(name, c_void_p) for name in ("tokens", "features", "out")],
        *[(name, c_int64) for name in ("base", "length", "nodes", "depth", "width", "frontier", "branch")],
        ("price", c_void_p),
        ("prices", c_int64),
        *[(name, c_double) for name in ("level", "power", "shift")],
        ("ids", c_void_p),
        ("vocabulary", c_int64),
        ("logits", c_void_p),
        ("tree", c_void_p),
        *[(name, c_int64) for name in ("count", "levels", "drafted")],
        *[(name, c_double) for name in ("expected", "first", "further")],
        ("scale", c_float),
    ]


def available() -> bool:
    """Is the library there, and does it draft?"""
    return _load() is not None


@cache
def _load() -> Any:
    if not native.available():
        return None
    library = native.library()
    try:
        library.fr_head_layout.restype = c_int64
        layout = library.fr_head_layout()
        library.fr_top_rows.argtypes = [POINTER(Top)]
        library.fr_log_noise.argtypes = [c_void_p, c_int64, c_uint32, c_uint32, c_void_p]
        library.fr_log_noise.restype = None
        library.fr_head_run.argtypes = [POINTER(Head), POINTER(HeadPass)]
        library.fr_head_rank.argtypes = [POINTER(Head), c_void_p, c_void_p, POINTER(Top)]
        library.fr_head_draft.argtypes = [POINTER(Head), POINTER(HeadPass), POINTER(Draft)]
        library.fr_draft_layout.restype = c_int64
        drafts = library.fr_draft_layout() == ctypes.sizeof(Draft)
    except AttributeError:
        return None
    for function in (library.fr_top_rows, library.fr_head_run, library.fr_head_rank, library.fr_head_draft):
        function.restype = c_int
    sizes = [ctypes.sizeof(part) for part in (Head, HeadPass, Top)]
    return library if drafts and layout == sizes[0] * 10**6 + sizes[1] * 10**3 + sizes[2] else None


def run_rows(head: Head, one: HeadPass) -> None:
    """The head's layers over the rows of one pass."""
    if _load().fr_head_run(head, one):
        raise MemoryError(f"no memory for a pass over {one.rows} rows")


def draft_tree(head: Head, like: HeadPass, draft: Draft) -> None:
    """The new rows of a sequence, and a tree below them, on the slots that `like` points to."""
    if _load().fr_head_draft(head, like, draft):
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
    if _load().fr_top_rows(top):
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
        if _load().fr_head_rank(head, out, self._logits_at, top):
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
            _load().fr_log_noise(self._ids.data_ptr(), len(self._ids), low, high, self._noise[i].data_ptr())
        self._noise_rows = (c_int32 * len(rows))(*rows)
        self._top.noise, self._top.noise_row = self._noise.data_ptr(), ctypes.addressof(self._noise_rows)
