"""The parts of an encoder-decoder's layers, as data: norms, attention, feed-forward; and what works row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.encoder_decoder.config import Activation, EncoderDecoderConfig
from forerun.models.encoder_decoder.linear import Linear
from forerun.models.layers import rms_norm


@dataclass(frozen=True, slots=True)
class Norm:
    """A layer norm, or T5's RMS norm where it has no bias."""

    weight: Tensor  # [D]
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention within a stack, or of the decoder to the source, whose keys and values are made apart."""

    norm: Norm
    inputs: Linear  # queries, keys and values; to the source, queries alone
    output: Linear


@dataclass(frozen=True, slots=True)
class FeedForward:
    """up is gate and up side by side where it is gated."""

    norm: Norm
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer; `cross` is None in the encoder."""

    attention: Attention
    cross: Attention | None
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class Stack:
    """The encoder or the decoder."""

    embedding: Tensor  # [V, D]
    positions: Tensor | None  # [P, D] added to the embedding
    bias: Tensor | None  # [buckets, H] of T5's distances, for all layers
    layers: list[Layer]
    final_norm: Norm | None

    def embed(self, tokens: list[int], positions: list[int], scale: float) -> Tensor:
        """[M, D] the rows that enter the first layer."""
        device = self.embedding.device
        x = F.embedding(torch.tensor(tokens, device=device), self.embedding)
        if scale != 1.0:
            x = x * scale
        if self.positions is not None:
            x = x + F.embedding(torch.tensor(positions, device=device), self.positions)
        return x


def apply_part(x: Tensor, norm: Norm, norms_first: bool, part: Callable[[Tensor], Tensor]) -> Tensor:
    """The residual around a part of a layer, with its norm before it or behind it."""
    if norms_first:
        return x + part(norm(x))
    return norm(x + part(x))


def feed_forward(x: Tensor, part: FeedForward, config: EncoderDecoderConfig) -> Tensor:
    """x [M, D] -> [M, D]."""
    inner = part.up(x)
    if not config.gated:
        return part.down(activate(inner, config.activation))
    half = inner.shape[-1] // 2
    return part.down(activate(inner[:, :half].contiguous(), config.activation) * inner[:, half:])


def activate(x: Tensor, activation: Activation) -> Tensor:
    if activation == "relu":
        return F.relu(x)
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
