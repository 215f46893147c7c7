"""The steps of a head's layers as kernels: the target's, in Triton or compiled ahead, with another input step."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.drafters.device import kernels
from forerun.drafters.device.head import HeadModel, ResidualStart, pick_fused
from forerun.models.cuda.network import Buffers, Run
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.cuda.steps.compiled import CompiledSteps
from forerun.models.cuda.steps.fused import LOGITS, QKV, RESIDUAL, FusedSteps, Product
from forerun.models.cuda.steps.tiles import power_of_two
from forerun.models.cuda.weights import rows_of

STARTS: dict[ResidualStart, int] = {"features": 0, "normed": 1, "nothing": 2}  # as in kernels


class FusedHeadSteps(FusedSteps):
    """The same as forerun.drafters.device.head.PlainHeadSteps, by kernels."""

    def __init__(self, model: HeadModel, buffers: Buffers, kv: Tensor) -> None:
        super().__init__(model, buffers, kv)
        self._head_model = model
        self._spare_x = torch.empty_like(buffers.x)
        self.entered = torch.empty(MAX_ROWS, model.entering, dtype=model.dtype, device=model.device)
        if not model.norms_output:
            self.wide = None  # whose logits are always of normed rows
        if model.whole:
            self.entered, buffers.rows, buffers.found, buffers.inner = (
                torch.empty(2, *rows.shape, dtype=torch.int8, device=model.device)
                for rows in (self.entered, buffers.rows, buffers.found, buffers.inner)
            )

    def enter(self, run: Run, carried: Tensor, sources: Tensor | None = None) -> None:
        model, rows = self._head_model, run.size.rows
        if model.mix is not None:
            carried = carried if sources is None else carried.index_select(0, sources)
            self.entered[:rows] = model.mixed(run.tokens, carried)
            self.buffers.x[:rows] = self.entered[:rows].float()
            return
        if sources is not None:  # rows are read that others overwrite
            self.buffers.x, self._spare_x = self._spare_x, self.buffers.x
        kernels.enter[(rows,)](
            run.tokens, model.embedding, carried, run.tokens if sources is None else sources, model.token_norm,
            model.feature_norm, self.entered, self.buffers.x, self.lifts, model.lift, model.added,
            model.config.norm_eps,
            WIDTH=self.width, UP=power_of_two(self.width), START=STARTS[model.starts_from], ROOM=self.room,
            IN_ORDER=sources is None, PDL=self.pdl, num_warps=8, launch_pdl=self.pdl,
        )  # fmt: skip
        if model.entry is not None:
            norm = model.layers[0].attention_norm
            self._linear(run, Product("entry", RESIDUAL, self.entered, model.entry, self.buffers.rows, norm=norm))

    def pick(self, rows: Tensor) -> None:
        pick_fused(self.buffers.x, self.buffers.queries, self.lifts, rows)

    def qkv(self, run: Run, layer: int) -> None:
        if layer or self._head_model.entry is not None:
            super().qkv(run, layer)
            return
        name, weights = "entering" if "entering" in self.tiles else "qkv", self.model.layers[0]
        self._linear(run, Product(name, QKV, self.entered, weights.qkv, self.buffers.queries, normed=True))

    def keys_and_values(self, run: Run, layer: int) -> None:
        """As `qkv` finds them, to the last bit, without the queries: most of the product, where prompts are read."""
        weights, heads, name = self.model.layers[layer], self.model.config.heads, "qkv"
        if self.wide is not None or "qkv" in self.apart or weights.qkv_bias is not None:
            self.qkv(run, layer)
            return
        given, normed = self.buffers.rows, self.bare
        if not layer and self._head_model.entry is None:
            given, normed, name = self.entered, True, "entering" if "entering" in self.tiles else "qkv"
        own = rows_of(weights.qkv, heads * self.model.config.head_dim, weights.qkv.shape[0])
        product = Product(name, QKV, given, own, self.buffers.queries, layer=layer, normed=normed, heads=0)
        self._narrow_linear(run, product)

    def head(self, run: Run) -> None:
        plain = not self._head_model.norms_output
        rows, logits = self.buffers.rows, self.buffers.logits
        self._linear(run, Product("head", LOGITS, rows, self.model.head, logits, normed=plain))


class CompiledHeadSteps(FusedHeadSteps, CompiledSteps):
    """The same for a head whose weights all are `Strips`."""

    def keys_and_values(self, run: Run, layer: int) -> None:
        """Beside the queries: a part of a packed weight is no weight."""
        self.qkv(run, layer)
