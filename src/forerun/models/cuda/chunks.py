"""Chunks of prompts as rows of a GPU pass, and what several passes have computed, in order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.models.cuda.plan import MAX_ROWS, ROW_SIZES, Span
from forerun.models.slots import Piece
from forerun.topology import chain_of
from forerun.trees import TreeBatch
from forerun.types import first_rows


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
    """So many rows of prompts beside these nodes that the pass has a size without padding, if that is most of them."""
    size = ROW_SIZES[bisect_right(ROW_SIZES, nodes + rows) - 1]
    return size - nodes if size > 64 and 2 * (size - nodes) >= rows else rows


def beside_trees(fresh: Sequence[list[int]], trees: TreeBatch, rows: int) -> list[list[int]]:
    """What of prompts goes into the pass over trees, where at most so many rows were asked for.

    Where there may be more, they fill a size that passes have, and pad none. Beside trees that were grown on a device
    no more than fit: trees that follow unread ones cannot go into another pass, as the host cannot read them.
    """
    nodes = trees.nodes if trees.form is None else trees.form.rows
    most = rows if trees.form is None else max(0, min(rows, MAX_ROWS - nodes))
    if sum(map(len, fresh)) == rows:
        most = min(most, fitting_rows(nodes, rows))
    return first_rows(fresh, most)


def rows_of(spans: Sequence[Span]) -> int:
    return sum(len(span.tokens) for span in spans)


def joined(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)
