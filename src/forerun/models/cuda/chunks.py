"""Chunks of prompts as rows of a GPU pass, and what several passes have computed, in order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.core.tree import TreeBatch, chain_of
from forerun.core.types import Seq, first_rows
from forerun.models.cuda.plan import MAX_ROWS, ROW_SIZES, Span
from forerun.models.slots import Piece


class Found:
    """Logits and hidden rows of several passes."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.logits: list[Tensor] = []
        self.hidden: dict[int, list[Tensor]] = {layer: [] for layer in layers}


def chunks_of(pieces: Sequence[Piece]) -> list[Span]:
    """Pieces of prompts as rows of a pass."""
    return [
        Span(piece.tokens, chain_of(len(piece.tokens)), piece.extent.pages, piece.extent.length)
        for piece in pieces
    ]


def fitting_rows(nodes: int, rows: int) -> int:
    """About so many rows of prompts beside these nodes, so that the pass has a size without padding.

    The nearest size, up or down: a row costs about the same in any of them, and fewer rows a pass are more passes until
    a prompt is read.
    """
    place = bisect_right(ROW_SIZES, nodes + rows)
    near = min(ROW_SIZES[max(0, place - 1) : place + 1], key=lambda size: (abs(size - nodes - rows), -size))
    return near - nodes if near > 64 and 2 * (near - nodes) >= rows else rows


def rows_beside(nodes: int, rows: int, waiting: int) -> int:
    """Rows of prompts in a pass over so many nodes, where about `rows` are asked for and so many wait."""
    most = waiting if waiting <= rows else fitting_rows(nodes, rows)
    return min(most, max(0, MAX_ROWS - nodes))


def beside_trees(fresh: Sequence[list[int]], trees: TreeBatch, rows: int, least: int = 0) -> list[list[int]]:
    """What of prompts goes into the pass over trees, where about so many rows were asked for; `least` in any case.

    Where there are more, they fill a size that passes have, and pad none. Beside lone roots, and beside trees that were
    grown on a device, no more than fit: those that follow unread ones cannot go into another pass, as the host cannot
    read them. Beside others that leave little of a pass they get one of their own.
    """
    nodes = trees.nodes if trees.form is None else trees.form.rows
    waiting, room = sum(map(len, fresh)), max(0, MAX_ROWS - nodes)
    starts = trees.form is not None or trees.is_plain()
    assert least <= (room if starts else 0), "those that start with this pass fit it"
    if trees.form is None and not trees.is_plain() and 2 * room < min(rows, waiting):
        return first_rows(fresh, rows)
    return first_rows(fresh, max(rows_beside(nodes, rows, waiting), least))


def least_rows(prompts: Sequence[Seq], fresh: Sequence[list[int]], seqs: Sequence[Seq]) -> int:
    """Rows of prompts, in order, until all of those are read that are among `seqs`.

    Their roots are scored behind them in the same pass: a layer writes keys and values of all rows before it attends.
    """
    starting, rows, least = {seq.id for seq in seqs}, 0, 0
    for seq, tokens in zip(prompts, fresh, strict=True):
        rows += len(tokens)
        if seq.id in starting:
            least = rows
    return least


def rows_of(spans: Sequence[Span]) -> int:
    return sum(len(span.tokens) for span in spans)


def joined(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)
