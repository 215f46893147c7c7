"""Rows that change their places in a drafted round: one kernel each on a GPU (kernels_features.py), torch elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from forerun.drafters.eagle.cuda.draft_plan import ROOM
from forerun.models.cuda.early_start import starts_early
from forerun.models.cuda.last_round import STEPS, LastRound
from forerun.types import TreeForm


def append_decided(
    into: Tensor,
    hidden: Sequence[Tensor],
    sent: Tensor,
    last: LastRound,
    form: TreeForm,
    fused: bool | None = None,
) -> None:
    """Add root and path of each tree, as the device has decided them, to the rows of its sequence.

    `sent` is [2, B]: the first place of a tree's sequence, -1 = nobody owns the tree; and the rows that it has. The
    last row of `into` is never read: what nobody owns may go there.
    """
    if into.device.type == "cuda" if fused is None else fused:
        from forerun.drafters.eagle.cuda import kernels_features

        width = hidden[0].shape[1]
        kernels_features.append[(form.trees, form.depth + 1)](
            tuple(hidden), into, sent, last.accepted, last.rows, form.trees, STEPS, ROOM=ROOM, WIDTH=width,
            UP=1 << (width - 1).bit_length(), num_warps=4,
        )  # fmt: skip
        return
    first, seen = sent[..., None]
    steps = torch.arange(form.depth + 1, device=first.device)
    kept = (steps <= last.accepted[: form.trees, None]) & (first >= 0)
    places = torch.where(kept, first + (seen + steps) % ROOM, len(into) - 1)
    copy_rows(into, hidden, last.rows[: form.trees, : form.depth + 1].flatten(), places.flatten())


def copy_rows(into: Tensor, hidden: Sequence[Tensor], sources: Tensor, places: Tensor) -> None:
    """Rows of all layers side by side."""
    into.index_copy_(0, places, torch.cat([rows.index_select(0, sources) for rows in hidden], -1))


def pick_plainly(buffers: Iterable[Tensor], rows: Tensor) -> None:
    """Bring some rows of each buffer to its start."""
    for buffer in buffers:
        buffer[: len(rows)] = buffer.index_select(0, rows)


def pick_fused(x: Tensor, queries: Tensor, lifts: Tensor, rows: Tensor) -> None:
    """The same in one kernel, for the buffers that the head reads next."""
    from forerun.drafters.eagle.cuda import kernels_features

    widths, pdl = (x.shape[1], queries.shape[1]), starts_early(x.device)
    up = 1 << max(2, (len(rows) - 1).bit_length())
    columns = min(512, 8192 // up)
    kernels_features.pick[(-(-max(widths) // columns),)](
        x, queries, lifts, rows, len(rows), *widths, B_UP=up, COLUMNS=columns, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
