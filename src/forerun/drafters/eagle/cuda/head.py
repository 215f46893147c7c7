"""A drafting head of one layer, run by the steps of the GPU decoder.

An EAGLE-3 head's layer is a decoder layer with a wider input: the normed embedding of a token beside a normed row
of features. So everything after the input (rotation, slots, tree attention, gate, residuals, the LM head over the
draft vocabulary) is shared with the target's passes. Only keys and values outlast a pass, and they depend on the input
alone: rows of a prompt need only the input step and the first product. An EAGLE-1 head has no norms before its layer:
one product makes its input, and the residual stream, of embedding and features.

A head of int8 weights has rows of whole numbers in two bytes (see packed.py) in all five products. Their size must then
be right to within a few powers of two, and is known beforehand: behind a norm from the norm's weight, attention's and
the gate's from the weights that made them. These lifts are powers of two that are folded into norms and scales when the
head is loaded. Only the residual stream is handed on before its norm is known; it is lifted by how large a row's
input features are, and by how large what the layer adds to them should be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters.eagle.cuda.feature_copies import pick_plainly
from forerun.models.config import DecoderConfig
from forerun.models.cuda.network import Buffers, Layer, Model, Run
from forerun.models.cuda.packed import Packed, Weight, WeightKind, pack, times, whole
from forerun.models.cuda.plain import PlainSteps
from forerun.models.cuda.plan import LONGEST, MAX_ROWS
from forerun.models.pages import PAGE, TREE_MARGIN, PagePool, pages_for

LIFTED_TO = 128.0  # root mean square of rows of whole numbers: 256 times as much is still held
BYTES_STEP = 32  # depth of one product of bytes on tensor cores


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """What a head is made of: rows of queries and keys paired up for rotation, gate and up interleaved."""

    embedding: Tensor  # [V, D] the target's, or its own
    token_norm: Tensor  # [D]
    feature_norm: Tensor  # [D]
    qkv: Tensor  # [(H + 2 Hkv) Dh, 2D], or D where `mix` makes the input
    o: Tensor  # [D, H Dh]
    mlp_norm: Tensor
    gate_up: Tensor  # [2I, D]
    down: Tensor  # [D, I]
    norm: Tensor | None  # behind the layer; None = there is none
    head: Tensor  # [Vd, D]
    mix: Tensor | None = None  # [D, 2D] EAGLE-1: makes the input, in place of the two norms
    mix_bias: Tensor | None = None


class HeadModel(Model):
    """A head as a model of one layer with another input."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: HeadWeights,
        dtype: torch.dtype,
        device: torch.device,
        kind: WeightKind,
        normed_residual: bool,
    ) -> None:
        self.config, self.dtype, self.device, self.kind = config, dtype, device, kind
        self.max_length = min(config.max_length, LONGEST - TREE_MARGIN)
        norm = torch.ones_like(weights.mlp_norm) if weights.norm is None else weights.norm
        self.token_norm, self.feature_norm, self.final_norm = (
            norm.to(device, dtype) for norm in (weights.token_norm, weights.feature_norm, norm)
        )
        self.norms_output = weights.norm is not None
        self.normed_residual = normed_residual  # the residual stream starts from the normed features
        self.mix, self.mix_bias = (
            None if part is None else part.to(device, dtype) for part in (weights.mix, weights.mix_bias)
        )
        self.entering = weights.qkv.shape[1]  # columns of what goes into the first product
        self.whole = kind == "int8" and not any(
            weight.shape[1] % BYTES_STEP for weight in (weights.o, weights.down, weights.head)
        )
        with torch.no_grad(), torch.inference_mode(False):
            self.embedding = weights.embedding.to(device, dtype)
            self.lift = 1.0  # of what goes into the first product
            self.added = 0.0  # mean square of what should be added to a row's features
            self._head_norm = self.final_norm
            self.head = self._packed(weights.head)
            layer = Layer(
                attention_norm=self.feature_norm,  # applied to the input
                qkv=self._packed(weights.qkv),
                qkv_bias=None,
                qk_norm=None,
                o=self._packed(weights.o),
                mlp_norm=weights.mlp_norm.to(device, dtype),
                gate_up=self._packed(weights.gate_up),
                down=self._packed(weights.down),
                rope=self._rope(0),
                window=0,
            )
            self.layers = [self._lifted(layer, weights) if self.whole else layer]

    def next_norm(self, layer: int) -> Tensor:
        return self._head_norm

    def mixed(self, tokens: Tensor, carried: Tensor) -> Tensor:
        """[N, D] EAGLE-1's input of these tokens and features."""
        assert self.mix is not None
        both = torch.cat((F.embedding(tokens.long(), self.embedding), carried.to(self.dtype)), -1)
        found = both @ self.mix.t()
        return found if self.mix_bias is None else found + self.mix_bias

    def _packed(self, weight: Tensor) -> Weight:
        return pack(weight.to(self.device, self.dtype).contiguous(), self.kind)

    def _lifted(self, layer: Layer, weights: HeadWeights) -> Layer:
        """The same layer for rows of whole numbers: who writes them multiplies, who reads them divides."""
        qkv, o, gate_up, down, head = (
            cast(Packed, w) for w in (layer.qkv, layer.o, layer.gate_up, layer.down, self.head)
        )
        first_value = (self.config.heads + self.config.kv_heads) * self.config.head_dim
        entering = torch.cat((self.token_norm, self.feature_norm))
        self.lift, gated, last = lift_of(entering), lift_of(layer.mlp_norm), lift_of(self.final_norm)
        values = _outputs(weights.qkv[first_value:], entering)
        gate, up = (_outputs(weights.gate_up[i::2], layer.mlp_norm) for i in range(2))
        units = _size(gate) * up
        found, inner = lift_of(values), lift_of(units)
        parts = [_size(values) * _size(_lengths(weights.o)), _size(units) * _size(_lengths(weights.down))]
        parts += [_size(self.feature_norm)] if self.normed_residual else []
        self.added = sum(part * part for part in parts)
        into_values = torch.ones_like(qkv.scales)
        into_values[first_value:] = found
        into_inner = torch.ones_like(gate_up.scales)
        into_inner[1::2] = inner
        self.head, self._head_norm = head.scaled(1 / last), self.final_norm * last
        return replace(
            layer,
            qkv=qkv.scaled(into_values / self.lift),
            o=o.scaled(1 / found),
            mlp_norm=layer.mlp_norm * gated,
            gate_up=gate_up.scaled(into_inner / gated),
            down=down.scaled(1 / inner),
        )


def lift_of(sizes: Tensor) -> float:
    """The power of two that brings numbers of these sizes to about LIFTED_TO."""
    return float(2.0 ** round(math.log2(LIFTED_TO / _size(sizes))))


def _size(values: Tensor) -> float:
    return max(1e-6, float(values.float().square().mean().sqrt()))


def _outputs(weight: Tensor, norm: Tensor) -> Tensor:
    """[N] how large the outputs of normed rows are, if their numbers go together by chance."""
    return _lengths(weight.to(norm) * norm)


def _lengths(weight: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(weight.float(), dim=1)
    return lengths


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
        self.buffers.x[:rows] = normed if model.normed_residual else carried.float()
        if model.whole:
            squares = 0.0 if model.normed_residual else carried.float().square().mean(-1, keepdim=True)
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
            rows = self._normed(run, self.model.next_norm(0))
        else:
            rows = self.buffers.x[: run.size.rows].to(self.model.dtype)
        self.buffers.logits[: run.size.rows] = times(rows, self.model.head).float()

    def _into_attention(self, run: Run, weights: Layer) -> Tensor:
        return self.entered[: run.size.rows]

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
        self.pool = PagePool(pages_for(kv_slots))  # nobody shares a head's pages: only hidden rows are shared
        with torch.inference_mode(False):
            shape = 1, 2, config.kv_heads, PAGE * self.pool.size, config.head_dim
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
        """Keys and values of rows, and nothing else."""
        self.steps.enter(run, carried, sources)
        self.steps.qkv(run, 0)

    def run(self, run: Run, carried: Tensor, sources: Tensor | None = None) -> None:
        """All of the layer, and the logits; `sources` says which rows of `carried` to take, None = all."""
        self.keep(run, carried, sources)
        self._finish(run)

    def run_some(self, run: Run, carried: Tensor, some: Run, rows: Tensor) -> None:
        """Keys and values of all rows, the rest of the layer and the logits for some of them only."""
        self.keep(run, carried)
        self.steps.pick(rows)
        self._finish(some)

    def _finish(self, run: Run) -> None:
        self.steps.attend(run, 0)
        self.steps.leave_attention(run, 0)
        self.steps.gate(run, 0)
        self.steps.leave_mlp(run, 0)
        self.steps.head(run)
