"""RotationTables: cosines and sines by position, as the native kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.models.attention import Span
from forerun.models.layers import Rotations
from forerun.models.native.pass_rows import Rows

_PIECE = 512  # positions whose rotations are worked out at once


class Table(NamedTuple):
    """Rotations by position, and where they lie in memory."""

    values: Tensor  # [2, N, R] cosines and sines
    positions: int  # N
    cosines: int
    sines: int

    @classmethod
    def of(cls, values: Tensor) -> Table:
        at = values.data_ptr()
        return cls(values, values.shape[1], at, at + values.nbytes // 2)


class RotationTables:
    """The tables of one rope, by regime."""

    def __init__(self, rotations: Rotations) -> None:
        self._rotations = rotations
        self._tables: dict[int, Table] = {}

    def at(self, regime: int, longest: int) -> Table:
        """For positions up to `longest` at least; made a piece at a time, so that none ever changes."""
        table = self._tables.get(regime) or Table.of(torch.empty(2, 0, self._rotations.rope.dims // 2))
        while table.positions <= longest:
            fresh = torch.arange(table.positions, table.positions + _PIECE)
            rotations = self._rotations.at(fresh, regime).squeeze(1)
            piece = torch.stack((rotations.real, rotations.imag))  # [2, _PIECE, R]
            table = self._tables[regime] = Table.of(torch.cat((table.values, piece), dim=1))
        return table

    def of_rows(self, rows: Rows, spans: Sequence[Span], regimes: Sequence[int]) -> Table:
        """The rotations of a pass whose spans have these regimes; the rows' places in them are set."""
        if regimes.count(regimes[0]) == len(regimes):
            return self.at(regimes[0], rows.longest)
        pieces = []  # neighbours of different regimes: a table of just these rows
        for span, regime in zip(spans, regimes, strict=True):
            pieces.append(self.at(regime, rows.longest).values[:, rows.positions[span.first : span.end]])
        rows.place(range(len(rows.positions)))
        return Table.of(torch.cat(pieces, dim=1))
