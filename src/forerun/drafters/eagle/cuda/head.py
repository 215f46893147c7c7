"""A drafting head of one layer or of several, run by the steps of the GPU decoder.

An EAGLE-3 head's first layer is a decoder layer with a wider input: the normed embedding of a token beside a normed row
of features. So everything after the input (rotation, slots, tree attention, gate, residuals, further layers, the LM
head over the draft vocabulary) is shared with the target's passes. Only keys and values outlast a pass: rows of a
prompt need all layers but the last, and of that the first product only. In a head of one layer keys and values depend
on the input alone, and such rows attend to nothing. An EAGLE-1 head has no norms before its layer: one product makes
its input, and the residual stream, of embedding and features. A multi-token-prediction layer has both: two norms, then
a product that starts the residual stream, then an ordinary layer.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters.eagle.cuda.feature_copies import pick_plainly
from forerun.drafters.eagle.cuda.head_model import HeadModel
from forerun.models.cuda.network import Buffers, Layer, Run
from forerun.models.cuda.packed import times, whole
from forerun.models.cuda.plain import PlainSteps
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.pages import PAGE, PagePool, pages_for


class HeadSteps(Protocol):
    """The decoder's steps and the head's input step."""

    def enter(self, run: Run, carried: Tensor, sources: Tensor | None = None) -> None: ...
    def pick(self, rows: Tensor) -> None: ...
    def qkv(self, run: Run, layer: int) -> None: ...
    def attend(self, run: Run, layer: int) -> None: ...
    def leave_attention(self, run: Run, layer: int) -> None: ...
    def gate(self, run: Run, layer: int) -> None: ...
    def leave_mlp(self, run: Run, layer: int) -> None: ...
    def head(self, run: Run) -> None: ...


class PlainHeadSteps(PlainSteps):
    """In plain torch."""

    def __init__(self, model: HeadModel, buffers: Buffers, kv: Tensor) -> None:
        super().__init__(model, buffers, kv)
        self._head_model = model
        self.entered = torch.empty(MAX_ROWS, model.entering, dtype=model.dtype, device=model.device)
        self.lifts = torch.ones(MAX_ROWS, 1, device=model.device)

    def enter(self, run: Run, carried: Tensor, sources: Tensor | None = None) -> None:
        """`sources`: which rows of `carried` to take; None = all, in order."""
        carried = carried if sources is None else carried.index_select(0, sources)
        model, rows, eps = self._head_model, run.size.rows, self.model.config.norm_eps
        if model.mix is not None:
            self.entered[:rows] = model.mixed(run.tokens, carried)
            self.buffers.x[:rows] = self.entered[:rows].float()
            return
        embedded = F.embedding(run.tokens.long(), model.embedding).float()
        normed = F.rms_norm(carried.float(), carried.shape[-1:], model.feature_norm.float(), eps)
        token = F.rms_norm(embedded, embedded.shape[-1:], model.token_norm.float(), eps)
        self.entered[:rows] = torch.cat((token, normed), -1).mul(model.lift).to(model.dtype)
        self._round(self.entered[:rows])
        if model.entry is not None:
            self.buffers.x[:rows] = times(self.entered[:rows], model.entry).float()
        else:
            self.buffers.x[:rows] = normed if model.starts_from == "normed" else carried.float()
        if model.whole:
            handed_on = model.starts_from == "features"
            squares = carried.float().square().mean(-1, keepdim=True) if handed_on else 0.0
            self.lifts[:rows] = torch.as_tensor(squares + model.added, device=model.device).rsqrt()

    def pick(self, rows: Tensor) -> None:
        """Go on with these rows only, in this order."""
        pick_plainly((self.buffers.x, self.buffers.queries, self.lifts), rows)

    def attend(self, run: Run, layer: int) -> None:
        super().attend(run, layer)
        self._round(self.buffers.found[: run.size.rows])

    def gate(self, run: Run, layer: int) -> None:
        super().gate(run, layer)
        self._round(self.buffers.inner[: run.size.rows])

    def head(self, run: Run) -> None:
        if self._head_model.norms_output:
            rows = self._normed(run, self.model.next_norm(len(self.model.layers) - 1))
        else:
            rows = self.buffers.x[: run.size.rows].to(self.model.dtype)
        self.buffers.logits[: run.size.rows] = times(rows, self.model.head).float()

    def _into_attention(self, run: Run, weights: Layer) -> Tensor:
        entered = weights is self.model.layers[0] and self._head_model.entry is None
        return self.entered[: run.size.rows] if entered else super()._into_attention(run, weights)

    def _normed(self, run: Run, weight: Tensor) -> Tensor:
        if not self._head_model.whole:
            return super()._normed(run, weight)
        x, lifts = self.buffers.x[: run.size.rows], self.lifts[: run.size.rows]
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.model.config.norm_eps)
        return whole(x * weight.float() * lifts) * (inverse / lifts)

    def _round(self, rows: Tensor) -> None:
        """Rows as a head of int8 weights has them."""
        if self._head_model.whole:
            rows.copy_(whole(rows))


class HeadNet:
    """A head with its buffers, and the pages of its sequences."""

    def __init__(self, model: HeadModel, kv_slots: int, kernels: str) -> None:
        config = model.config
        self.model, self.buffers = model, Buffers(model)
        self.attends = len(model.layers) > 1  # do rows attend that are read for keys and values alone?
        self.group_nodes = 64 // (1 << (config.heads // config.kv_heads - 1).bit_length())
        self.pool = PagePool(pages_for(kv_slots))  # nobody shares a head's pages: only hidden rows are shared
        with torch.inference_mode(False):
            shape = len(model.layers), 2, config.kv_heads, PAGE * self.pool.size, config.head_dim
            self.kv = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.steps: HeadSteps
        if kernels == "triton":
            from forerun.drafters.eagle.cuda.fused_head import FusedHeadSteps

            self.steps = FusedHeadSteps(model, self.buffers, self.kv)
        else:
            self.steps = PlainHeadSteps(model, self.buffers, self.kv)

    @property
    def out(self) -> Tensor:
        """[MAX_ROWS, D] fp32: the outputs of the last pass, before the norm."""
        return self.buffers.x

    @property
    def logits(self) -> Tensor:
        """[MAX_ROWS, Vd] fp32 of what follows the rows of the last pass."""
        return self.buffers.logits

    def keep(self, run: Run, carried: Tensor, sources: Tensor | None = None) -> None:
        """Keys and values of rows in all layers, and nothing else; where there are several, rows attend."""
        self.steps.enter(run, carried, sources)
        last = len(self.model.layers) - 1
        for layer in range(last):
            self.steps.qkv(run, layer)
            self._behind_qkv(run, layer)
        self.steps.qkv(run, last)

    def run(self, run: Run, carried: Tensor, sources: Tensor | None = None) -> None:
        """All layers, and the logits; `sources` says which rows of `carried` to take, None = all."""
        self.keep(run, carried, sources)
        self._finish(run)

    def run_some(self, run: Run, carried: Tensor, some: Run, rows: Tensor) -> None:
        """Keys and values of all rows, the rest of the last layer and the logits for some of them only."""
        self.keep(run, carried)
        self.steps.pick(rows)
        self._finish(some)

    def _finish(self, run: Run) -> None:
        self._behind_qkv(run, len(self.model.layers) - 1)
        self.steps.head(run)

    def _behind_qkv(self, run: Run, layer: int) -> None:
        self.steps.attend(run, layer)
        self.steps.leave_attention(run, layer)
        self.steps.gate(run, layer)
        self.steps.leave_mlp(run, layer)
