"""The parts of an encoder-decoder's layers: linear maps, norms, attention, feed-forward, positions.

On a CPU linear layers run on the native kernels, whose rows have the same bits whatever other rows are in the pass.
Without the native library, or on a GPU, torch multiplies, and a row may round differently in other company.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.encoder_decoder.config import Activation, EncoderDecoderConfig, RelativeConfig
from forerun.models.layers import rms_norm
from forerun.models.native import library as native
from forerun.models.native.packing import FloatMode, pack_floats, side_by_side


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


class Linear(Protocol):
    """x [M, inputs] -> [M, outputs]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class TorchLinear:
    """A weight [outputs, inputs] in torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(x, self.weight.t())
        return torch.addmm(self.bias, x, self.weight.t())


class NativeLinear:
    """A weight as the native kernels read it; `match_threads` must have been called for the pass."""

    def __init__(self, weight: Tensor, bias: Tensor | None, mode: FloatMode) -> None:
        self._packed = pack_floats(weight, mode, bias)
        self._weights = side_by_side([self._packed])
        self._address = ctypes.byref(self._weights)
        self._multiply = native.library().fr_linear_rows

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = x.new_empty(len(x), self._packed.outputs)
        if self._multiply(self._address, x.data_ptr(), y.data_ptr(), len(x)):
            raise MemoryError(f"no memory for the blocks of {len(x)} rows")
        return y


def make_linear(weight: Tensor, bias: Tensor | None, mode: FloatMode | None) -> Linear:
    """By the native kernels in this mode; None = in torch, as the weight is."""
    return TorchLinear(weight, bias) if mode is None else NativeLinear(weight, bias, mode)


def sinusoids(count: int, width: int) -> Tensor:
    """[P, D] sines in the first half of the columns, cosines in the second."""
    columns = np.arange(width)
    angles = np.arange(count)[:, None] / np.power(10000, 2 * (columns // 2) / width)[None, :]
    table = np.concatenate((np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])), axis=1)
    return torch.from_numpy(table).float()


def buckets(distances: Tensor, relative: RelativeConfig, two_sided: bool) -> Tensor:
    """The bucket of every distance key - query: near ones have their own, far ones share by the logarithm."""
    count, found = relative.buckets, torch.zeros_like(distances)
    if two_sided:
        count //= 2
        found = found + (distances > 0) * count
        away = distances.abs()
    else:
        away = (-distances).clamp(min=0)
    exact = count // 2
    far = exact + (
        torch.log(away.clamp(min=1).float() / exact) / math.log(relative.farthest / exact) * (count - exact)
    ).to(torch.long)
    return found + torch.where(away < exact, away, far.clamp(max=count - 1))


def encoder_bias(table: Tensor, length: int, relative: RelativeConfig) -> Tensor:
    """[H, S, S] what T5 adds to the scores between the tokens of a source."""
    places = torch.arange(length, device=table.device)
    found = buckets(places[None, :] - places[:, None], relative, two_sided=True)
    return table[found].permute(2, 0, 1).contiguous()


def decoder_bias(table: Tensor, length: int, relative: RelativeConfig) -> Tensor:
    """[H, N] for the query at position N - 1: what T5 adds to its scores with keys 0 to N - 1.

    For a query further left it is the last columns: the distance counts, not the place.
    """
    distances = torch.arange(1 - length, 1, device=table.device)
    return table[buckets(distances, relative, two_sided=False)].t().contiguous()
