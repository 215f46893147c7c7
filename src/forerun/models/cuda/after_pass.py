"""AfterPass: what follows a pass on the device: accepted paths to their places, hidden rows beside keys and values.

On a GPU one or two kernels do each (kernels_after.py), elsewhere torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.core.types import TreeForm
from forerun.models.cuda.graphs import Replays
from forerun.models.cuda.grown import GrownBuffers
from forerun.models.cuda.network import Buffers
from forerun.models.cuda.plan import MAX_ROWS, ROW_SIZES, Plan, Size, padding
from forerun.models.paged import PagedKV

AT_ONCE = 4096  # numbers that one program moves


class AfterPass:
    """Small pieces of work on the KV pool, captured when they are first done."""

    def __init__(
        self, kv: PagedKV, buffers: Buffers, grown: GrownBuffers, replays: Replays, fused: bool
    ) -> None:
        self.kv, self.buffers, self.grown, self.replays = kv, buffers, grown, replays
        self.fused = fused  # by kernels, or in plain torch

    def move_decided(self) -> None:
        """Move the paths of the last pass over grown trees to their places, if that was not done."""
        grown = self.grown
        if grown.form is not None and grown.moved < grown.passes:
            if not grown.form.chain:  # whose paths are where they belong
                self.move(grown.form)
            grown.moved = grown.passes

    def move(self, form: TreeForm) -> None:
        """In all layers; which slots, the device itself has computed."""
        name = "move", form, tuple(self.kv.hidden)
        self.replays.do(name, lambda: self._move(form))

    def _move(self, form: TreeForm) -> None:
        if not self.fused:
            self.kv.move_on_device(*self.grown.moves_of(form))
            return
        data = self.kv.data
        size, slots = data.shape[-1], data.shape[-2]
        self._move_fused(form, (data,), size, slots * size, size)
        if rows := tuple(self.kv.hidden.values()):
            width = rows[0].shape[1]
            self._move_fused(form, rows, size := width & -width, size, width)

    def _move_fused(
        self, form: TreeForm, tensors: tuple[Tensor, ...], size: int, plane_stride: int, row_stride: int
    ) -> None:
        """Tensors of one layout: planes of so many numbers of each slot."""
        from forerun.models.cuda import kernels_after

        moves, columns = self.grown.moves, tensors[0][..., 0, :].numel()
        steps = 1 << max(2, (form.depth - 1).bit_length())
        kernels_after.move[(form.trees, -(-columns * steps // AT_ONCE))](
            tensors, moves, moves.stride(0), plane_stride, row_stride, columns // size, form.depth, SIZE=size,
            STEPS_UP=steps, COLUMNS=AT_ONCE // steps, num_warps=4,
        )  # fmt: skip

    def warm_up(self, layers: tuple[int, ...]) -> None:
        """Capture what keeps the rows of these layers, for passes of every size; what is kept is dropped."""
        for rows in ROW_SIZES if self.replays.capture else ():
            plan = padding(Size(rows, 1, 1))
            self.buffers.send(plan)
            self.keep_rows(plan, layers)

    def keep_rows(self, plan: Plan, layers: tuple[int, ...]) -> None:
        """Keep the hidden rows of a pass beside keys and values, from buffer to slot: one replay per size of pass."""
        config, dtype = self.buffers.model.config, self.buffers.model.dtype
        kept, rows = [self.kv.rows_of(layer, config.width, dtype) for layer in layers], plan.size.rows
        if layers:
            hidden = [self.buffers.hidden(layer) for layer in layers]
            self.replays.do(("keep", rows, layers), lambda: self._keep(hidden, kept, rows))

    def _keep(self, hidden: Sequence[Tensor], kept: Sequence[Tensor], rows: int) -> None:
        ints, slots_at, width = self.buffers.ints, MAX_ROWS + 2 * rows, hidden[0].shape[1]
        if self.fused:
            from forerun.models.cuda import kernels_after

            kernels_after.keep[(rows,)](
                tuple(hidden), tuple(kept), ints, slots_at, WIDTH=width, UP=1 << (width - 1).bit_length(),
                num_warps=4,
            )  # fmt: skip
            return
        places = ints[slots_at : slots_at + rows].long()
        places = torch.where(places < 0, self.kv.capacity, places)  # padding
        for some, into in zip(hidden, kept, strict=True):
            into.index_copy_(0, places, some[:rows])
