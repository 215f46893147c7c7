"""AfterPass: what follows a pass on the device: accepted paths to their places, hidden rows beside keys and values."""

from __future__ import annotations

import torch

from forerun.models.cuda.graphs import Replays
from forerun.models.cuda.grown import GrownBuffers
from forerun.models.cuda.network import Buffers
from forerun.models.cuda.plan import MAX_ROWS, Plan
from forerun.models.paged import PagedKV
from forerun.types import TreeForm


class AfterPass:
    """Small pieces of work on the KV pool, captured when they are first done."""

    def __init__(self, kv: PagedKV, buffers: Buffers, grown: GrownBuffers, replays: Replays) -> None:
        self.kv, self.buffers, self.grown, self.replays = kv, buffers, grown, replays

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
        self.replays.do(name, lambda: self.kv.move_on_device(*self.grown.moves_of(form)))

    def keep_rows(self, plan: Plan, layers: tuple[int, ...]) -> None:
        """Keep the hidden rows of a pass beside keys and values, from buffer to slot: one replay per size of pass."""
        config, dtype = self.buffers.model.config, self.buffers.model.dtype
        kept, rows = [self.kv.rows_of(layer, config.width, dtype) for layer in layers], plan.size.rows

        def keep() -> None:
            places = self.buffers.ints[MAX_ROWS + 2 * rows : MAX_ROWS + 3 * rows].long()
            places = torch.where(places < 0, self.kv.capacity, places)  # padding
            for layer, into in zip(layers, kept, strict=True):
                into.index_copy_(0, places, self.buffers.hidden(layer)[:rows])

        if layers:
            self.replays.do(("keep", rows, layers), keep)
