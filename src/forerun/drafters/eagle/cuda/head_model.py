"""HeadModel: the weights of a drafting head on the device, as a model whose first layer has another input.

A head of int8 weights has rows of whole numbers in two bytes (see packed.py) in all products. Their size must then
be right to within a few powers of two, and is known beforehand: behind a norm from the norm's weight, attention's and
the gate's from the weights that made them. These lifts are powers of two that are folded into norms and scales when the
head is loaded. Only the residual stream is handed on before its norm is known; it is lifted by how large a row's
input features are, and by how large what all layers add to them should be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.config import DecoderConfig
from forerun.models.cuda.network import Layer, Model
from forerun.models.cuda.packed import Packed, Weight, WeightKind, pack
from forerun.models.cuda.plan import LONGEST
from forerun.models.pages import TREE_MARGIN

LIFTED_TO = 128.0  # root mean square of rows of whole numbers: 256 times as much is still held
ResidualStart = Literal["features", "normed", "nothing"]  # "normed": the features behind their norm
BYTES_STEP = 32  # depth of one product of bytes on tensor cores


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer of a head: rows of queries and keys paired up for rotation, gate and up interleaved."""

    input_norm: Tensor  # [D] in front of attention; EAGLE's first layers have none
    qkv: Tensor  # [(H + 2 Hkv) Dh, D]; 2D in EAGLE-3's first layer
    o: Tensor  # [D, H Dh]
    mlp_norm: Tensor
    gate_up: Tensor  # [2I, D]
    down: Tensor  # [D, I]
    qk_norm: Tensor | None = None  # [H + Hkv, Dh]


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """What a head is made of."""

    embedding: Tensor  # [V, D] the target's, or its own
    token_norm: Tensor  # [D]
    feature_norm: Tensor  # [D]
    layers: Sequence[LayerWeights]
    norm: Tensor | None  # behind all layers; None = there is none
    head: Tensor  # [Vd, D]
    mix: Tensor | None = None  # [D, 2D] EAGLE-1: makes the input, in place of the two norms
    mix_bias: Tensor | None = None
    entry: Tensor | None = None  # [D, 2D] MTP: makes the input of an ordinary layer, behind the two norms


class HeadModel(Model):
    """A head as a model whose first layer has another input."""

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
        first = weights.layers[0]
        norm = torch.ones_like(first.mlp_norm) if weights.norm is None else weights.norm
        self.token_norm, self.feature_norm, self.final_norm = (
            norm.to(device, dtype) for norm in (weights.token_norm, weights.feature_norm, norm)
        )
        self.norms_output = weights.norm is not None
        self.starts_from: ResidualStart = "normed" if normed_residual else "features"
        if weights.entry is not None:
            self.starts_from = "nothing"
        self.mix, self.mix_bias = (
            None if part is None else part.to(device, dtype) for part in (weights.mix, weights.mix_bias)
        )
        widest = first.qkv if weights.entry is None else weights.entry
        self.entering = widest.shape[1]  # columns of what goes into the first product
        self.whole = kind == "int8" and not any(
            weight.shape[1] % BYTES_STEP for weight in (first.o, first.down, weights.head)
        )
        with torch.no_grad(), torch.inference_mode(False):
            self.embedding = weights.embedding.to(device, dtype)
            self.lift = 1.0  # of what goes into the first product
            self.added = 0.0  # mean square of what all layers together should add to a row's features
            self._head_norm = self.final_norm
            self.head = self._packed(weights.head)
            self.entry = None if weights.entry is None else self._packed(weights.entry)
            rope = self._rope(0)
            self.layers = [self._layer_of(part, rope) for part in weights.layers]
            if self.whole:
                self._lift(weights)

    def next_norm(self, layer: int) -> Tensor:
        return self._head_norm if layer + 1 == len(self.layers) else self.layers[layer + 1].attention_norm

    def _layer_of(self, weights: LayerWeights, rope: Tensor) -> Layer:
        return Layer(
            attention_norm=weights.input_norm.to(self.device, self.dtype),
            qkv=self._packed(weights.qkv),
            qkv_bias=None,
            qk_norm=None if weights.qk_norm is None else weights.qk_norm.to(self.device, self.dtype),
            o=self._packed(weights.o),
            mlp_norm=weights.mlp_norm.to(self.device, self.dtype),
            gate_up=self._packed(weights.gate_up),
            down=self._packed(weights.down),
            rope=rope,
            window=0,
        )

    def mixed(self, tokens: Tensor, carried: Tensor) -> Tensor:
        """[N, D] EAGLE-1's input of these tokens and features."""
        assert self.mix is not None
        both = torch.cat((F.embedding(tokens.long(), self.embedding), carried.to(self.dtype)), -1)
        found = both @ self.mix.t()
        return found if self.mix_bias is None else found + self.mix_bias

    def _packed(self, weight: Tensor) -> Weight:
        return pack(weight.to(self.device, self.dtype).contiguous(), self.kind)

    def _lift(self, weights: HeadWeights) -> None:
        """The same head for rows of whole numbers: they are scaled up where written and down where read."""
        entering, last = torch.cat((self.token_norm, self.feature_norm)), lift_of(self.final_norm)
        self.lift = lift_of(entering)
        self.added = _size(self.feature_norm) ** 2 if self.starts_from == "normed" else 0.0
        if weights.entry is not None:
            self.entry = cast(Packed, self.entry).scaled(1 / self.lift)
            self.added = _size(_outputs(weights.entry, entering)) ** 2
        self.head, self._head_norm = cast(Packed, self.head).scaled(1 / last), self.final_norm * last
        lifted = list[Layer]()
        for i, (layer, plain) in enumerate(zip(self.layers, weights.layers, strict=True)):
            ordinary = i > 0 or self.entry is not None
            norm = layer.attention_norm if ordinary else entering
            lift = lift_of(norm) if ordinary else self.lift
            found, added = self._lifted(layer, plain, norm, lift)
            lifted.append(replace(found, attention_norm=norm * lift) if ordinary else found)
            self.added += added
        self.layers = lifted

    def _lifted(self, layer: Layer, plain: LayerWeights, norm: Tensor, lift: float) -> tuple[Layer, float]:
        """A layer that reads rows behind this norm times `lift`, and the mean square of what it should add to them."""
        qkv, o, gate_up, down = (cast(Packed, w) for w in (layer.qkv, layer.o, layer.gate_up, layer.down))
        first_value = (self.config.heads + self.config.kv_heads) * self.config.head_dim
        gated = lift_of(layer.mlp_norm)
        values = _outputs(plain.qkv[first_value:], norm)
        gate, up = (_outputs(plain.gate_up[i::2], layer.mlp_norm) for i in range(2))
        units = _size(gate) * up
        found, inner = lift_of(values), lift_of(units)
        parts = [_size(values) * _size(_lengths(plain.o)), _size(units) * _size(_lengths(plain.down))]
        into_values = torch.ones_like(qkv.scales)
        into_values[first_value:] = found
        into_inner = torch.ones_like(gate_up.scales)
        into_inner[1::2] = inner
        lifted = replace(
            layer,
            qkv=qkv.scaled(into_values / lift),
            o=o.scaled(1 / found),
            mlp_norm=layer.mlp_norm * gated,
            gate_up=gate_up.scaled(into_inner / gated),
            down=down.scaled(1 / inner),
        )
        return lifted, sum(part * part for part in parts)


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
