"""The parts of an encoder-decoder's layers: linear maps, norms, attention, feed-forward, positions.

On a CPU linear layers run on the native kernels, whose rows have the same bits whatever other rows are in the pass.
Without the native library, or on a GPU, torch multiplies, and a row may round differently in other company.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.encoder_decoder.config import Activation, EncoderDecoderConfig, RelativeConfig
from forerun.models.layers import rms_norm
from forerun.models.load.quants import dequantize
from forerun.models.native import library as native
from forerun.models.native.library import BLOCK, F32
from forerun.models.native.packing import FloatMode, PackedWeight, pack_floats, quantize_q8, side_by_side


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


Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Places = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

STEP = 0.503 / 127  # of a block's largest number: how far rounding may move one of its numbers
MOST = 8  # where more than one token in eight may be the largest, all logits are computed
_UP = 1.000001  # norms are rounded to float32: not down
_ROWS = 4096  # rows of the head whose norms are computed at once


class ScreenedHead:
    """Finds the largest logit of a row without reading the whole LM head in float32, provably the same one.

    The head is kept a second time in eight bits, a quarter of the bytes. A pass multiplies by that; what it finds
    is a logit's estimate s, and |s - logit| <= e is known for every token. Tokens with s + e below s - e of some
    other token cannot be the largest: the rest, a few, are computed in float32 by the kernel that computes all
    logits, with its bits.

    Why e holds. W is a token's row of the head and Q what eight bits keep of it; x is a hidden row and z what the
    kernel rounds it to. Then W x - Q z = (W - Q) x + Q (x - z), so |W x - Q z| <= |W - Q| |x| + |Q| |x - z|
    (Cauchy-Schwarz), and |Q| <= |W| + |W - Q|. The norms |W| and |W - Q| are computed at loading; |x - z| is at
    most 0.503 of a step per number, where a block of 32 numbers has steps of its largest / 127 (quantize.c: half a
    step, and the step itself rounded to 16 bits). Both sums are computed in float32: n products of any order are
    within 2 n 2^-24 |W| |x| of their sum (n = inputs + 64 is more than the roundings of any path, a bias, and the
    arithmetic here).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, bannable: Collection[int] = ()) -> None:
        """`weight` [V, D] float32, D a multiple of 32. Any of the `bannable` tokens may later be left out."""
        self._weight, self._rough = weight, NativeLinear(weight, None, "q8")
        self._norms, self._losses = _norms_of(weight)
        self._bias = None if bias is None else bias.numpy()
        self._largest_bias = 0.0 if bias is None else float(bias.abs().max())
        self._bannable = sorted({token for token in bannable if token < len(weight)})
        self._multiply = native.library().fr_linear_rows

    def largest(self, rows: Tensor) -> Tensor | None:
        """[M, D] -> [M, V]: the largest logits of each row are exact, all others estimates that are below.

        None where the estimates decide too little, or where something is not a number.
        """
        x: Floats = rows.numpy()
        logits = self._rough(rows)
        found: Floats = logits.numpy()
        if self._bias is not None:
            found += self._bias
        rivals = np.zeros(found.shape[1], dtype=bool)
        for row, estimates in zip(x, found, strict=True):
            within = self.errors(row)
            least = self._least(estimates, within)
            if not np.isfinite(least):
                return None
            within += estimates
            rivals |= within >= least
        tokens: Places = np.flatnonzero(rivals)
        if len(tokens) * MOST > len(rivals):
            return None
        found[:, tokens] = self._exact(rows, tokens)
        return logits

    def errors(self, x: Floats) -> Floats:
        """[V] how far a row's estimates are from its logits at most."""
        wide = x.astype(np.float64)
        size = float(np.sqrt(wide @ wide))
        steps = np.abs(wide).reshape(-1, BLOCK).max(-1) * STEP
        moved = float(np.sqrt(BLOCK * (steps @ steps)))
        rounded = (len(x) + 64) * 2.0**-23 * (size + moved)
        by_loss, by_norm = size + moved + rounded, moved + rounded
        rest = 2.0**-20 * self._largest_bias + 1e-30
        errors: Floats = self._losses * np.float32(by_loss * _UP)
        errors += self._norms * np.float32(by_norm * _UP)
        errors += np.float32(rest)
        return errors

    def _least(self, estimates: Floats, errors: Floats) -> float:
        """What some logit reaches at least, of a token that is never left out; NaN where an estimate is NaN."""
        best = int(estimates.argmax())  # numpy: the first NaN, where there is one
        if best in self._bannable:
            lower = estimates - errors
            lower[self._bannable] = -np.inf
            best = int(lower.argmax())
        return float(estimates[best]) - float(errors[best])

    def _exact(self, rows: Tensor, tokens: Places) -> Floats:
        """[M, n] these tokens' logits, with the bits that the whole product has."""
        some = self._weight[torch.from_numpy(tokens)]
        weights = side_by_side([PackedWeight(F32, len(some), some.shape[1], some)])
        found = rows.new_empty(len(rows), len(some))
        if self._multiply(ctypes.byref(weights), rows.data_ptr(), found.data_ptr(), len(rows)):
            raise MemoryError(f"no memory for the logits of {len(some)} tokens")
        exact: Floats = found.numpy()
        return exact if self._bias is None else exact + self._bias[tokens]


def _norms_of(weight: Tensor) -> tuple[Floats, Floats]:
    """[V] of each row of the head, and of what eight bits lose of it; rounded up."""
    norms, losses = [], []
    for first in range(0, len(weight), _ROWS):
        rows = weight[first : first + _ROWS]
        kept = dequantize(quantize_q8(rows)).view_as(rows)
        norms.append(rows.double().norm(dim=1))
        losses.append((rows.double() - kept.double()).norm(dim=1))
    both = [(torch.cat(parts) * _UP).float().numpy() for parts in (norms, losses)]
    return both[0], both[1]
