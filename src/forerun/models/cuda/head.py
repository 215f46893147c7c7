"""A drafting head of one layer, run by the steps of the GPU decoder.

An EAGLE-3 head's layer is a decoder layer with a wider way in: the normed embedding of a token beside a normed row
of features. So everything behind that way in (rotation, slots, tree attention, gate, residuals, the LM head over
the draft's own vocabulary) is what the target's passes are made of. Only keys and values outlast a pass, and they
depend on what goes in alone: a text is caught up with by the way in and the first product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.config import DecoderConfig
from forerun.models.cuda.network import TREE_MARGIN, Buffers, Layer, Model, Run
from forerun.models.cuda.packed import Weight, WeightKind, pack
from forerun.models.cuda.plain import PlainSteps
from forerun.models.cuda.plan import LONGEST, MAX_ROWS
from forerun.models.kv import KVStore


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """What a head is made of: rows of queries and keys paired up for rotation, gate and up by turns."""

    embedding: Tensor  # [V, D] the target's, or its own
    token_norm: Tensor  # [D]
    feature_norm: Tensor  # [D]
    qkv: Tensor  # [(H + 2 Hkv) Dh, 2D]
    o: Tensor  # [D, H Dh]
    mlp_norm: Tensor
    gate_up: Tensor  # [2I, D]
    down: Tensor  # [D, I]
    norm: Tensor
    head: Tensor  # [Vd, D]


class HeadModel(Model):
    """A head in the place of a model: one layer, entered by another way."""

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
        self.token_norm, self.feature_norm, self.final_norm = (
            norm.to(device, dtype) for norm in (weights.token_norm, weights.feature_norm, weights.norm)
        )
        self.normed_residual = normed_residual  # the residual stream starts from the normed features
        with torch.no_grad(), torch.inference_mode(False):
            self.embedding = weights.embedding.to(device, dtype)
            self.head = self._packed(weights.head)
            self.layers = [
                Layer(
                    attention_norm=self.feature_norm,  # applied on the way in
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
            ]

    def _packed(self, weight: Tensor) -> Weight:
        return pack(weight.to(self.device, self.dtype).contiguous(), self.kind)


class HeadSteps(Protocol):
    """The decoder's steps and the way in."""

    def enter(self, run: Run, carried: Tensor) -> None: ...
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
        width = model.config.width
        self.entered = torch.empty(MAX_ROWS, 2 * width, dtype=model.dtype, device=model.device)

    def enter(self, run: Run, carried: Tensor) -> None:
        model, rows, eps = self._head_model, run.size.rows, self.model.config.norm_eps
        embedded = F.embedding(run.tokens.long(), model.embedding).float()
        normed = F.rms_norm(carried.float(), carried.shape[-1:], model.feature_norm.float(), eps)
        token = F.rms_norm(embedded, embedded.shape[-1:], model.token_norm.float(), eps)
        self.entered[:rows] = torch.cat((token, normed), -1).to(model.dtype)
        self.buffers.x[:rows] = normed if model.normed_residual else carried.float()

    def _into_attention(self, run: Run, weights: Layer) -> Tensor:
        return self.entered[: run.size.rows]


class HeadNet:
    """A head with its buffers and the slots of its texts."""

    def __init__(self, model: HeadModel, kv_slots: int, kernels: str) -> None:
        config = model.config
        self.model, self.buffers = model, Buffers(model)
        self.kv = KVStore(
            1, config.kv_heads, config.head_dim, dtype=model.dtype, device=model.device, capacity=kv_slots
        )
        self.steps: HeadSteps
        if kernels == "triton":
            from forerun.models.cuda.fused import FusedHeadSteps

            self.steps = FusedHeadSteps(model, self.buffers, self.kv.data)
        else:
            self.steps = PlainHeadSteps(model, self.buffers, self.kv.data)

    @property
    def out(self) -> Tensor:
        """[MAX_ROWS, D] fp32: what the rows of the last pass came to, before the norm."""
        return self.buffers.x

    @property
    def logits(self) -> Tensor:
        """[MAX_ROWS, Vd] fp32 of what follows the rows of the last pass."""
        return self.buffers.logits

    def keep(self, run: Run, carried: Tensor) -> None:
        """Keys and values of rows, and nothing else."""
        self.steps.enter(run, carried)
        self.steps.qkv(run, 0)

    def run(self, run: Run, carried: Tensor) -> None:
        """All of the layer, and the logits."""
        self.keep(run, carried)
        self.steps.attend(run, 0)
        self.steps.leave_attention(run, 0)
        self.steps.gate(run, 0)
        self.steps.leave_mlp(run, 0)
        self.steps.head(run)
