"""The parts of an encoder-decoder's layers: linear maps, norms, attention, feed-forward, positions; and their weights.

On a CPU linear layers run on the native kernels, whose rows have the same bits whatever other rows are in the pass.
Without the native library, or on a GPU, torch multiplies, and a row may round differently in other company.

The weights of a T5 or Marian checkpoint are read under the names of the files.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.errors import DamagedFile
from forerun.models.encoder_decoder.config import EncoderDecoderConfig, RelativeConfig, StackConfig
from forerun.models.layers import activate, rms_norm
from forerun.models.load.quants import dequantize
from forerun.models.load.weights import missing_weight, surplus_weights, wrong_shape
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


@dataclass(frozen=True, slots=True)
class Model:
    """All weights; `cross` makes the keys and values of every decoder layer from the encoder's rows."""

    encoder: Stack
    decoder: Stack
    cross: Linear  # [S, D] -> [S, L 2 H Dh]
    head: Linear
    head_bias: Tensor | None  # [V]
    screen: ScreenedHead | None  # the head again, to find the largest logits by


@dataclass(frozen=True, slots=True)
class _Names:
    """How a family calls the parts of layer `at`."""

    layer: str  # {stack} and {i}
    attention: str
    attention_norm: str
    projections: tuple[str, str, str, str]
    cross: str
    cross_norm: str
    feed_forward_norm: tuple[str, str]  # in the encoder, in the decoder
    up: tuple[tuple[str, ...], tuple[str, ...]]
    down: tuple[str, str]
    final_norm: str | None


_MARIAN = _Names(
    layer="model.{stack}.layers.{i}.",
    attention="self_attn.",
    attention_norm="self_attn_layer_norm",
    projections=("q_proj", "k_proj", "v_proj", "out_proj"),
    cross="encoder_attn.",
    cross_norm="encoder_attn_layer_norm",
    feed_forward_norm=("final_layer_norm",) * 2,
    up=(("fc1",),) * 2,
    down=("fc2",) * 2,
    final_norm=None,
)


def _t5_names(gated: bool) -> _Names:
    up = ("wi_0", "wi_1") if gated else ("wi",)
    return _Names(
        layer="{stack}.block.{i}.layer.",
        attention="0.SelfAttention.",
        attention_norm="0.layer_norm",
        projections=("q", "k", "v", "o"),
        cross="1.EncDecAttention.",
        cross_norm="1.layer_norm",
        feed_forward_norm=("1.layer_norm", "2.layer_norm"),
        up=(tuple(f"1.DenseReluDense.{name}" for name in up), tuple(f"2.DenseReluDense.{name}" for name in up)),
        down=("1.DenseReluDense.wo", "2.DenseReluDense.wo"),
        final_norm="{stack}.final_layer_norm",
    )


# other names of what is tied or computed, and a table that T5's first checkpoints have and no T5 reads
_UNREAD = re.compile(
    r"(embed_tokens|shared|embed_positions|lm_head|EncDecAttention\.relative_attention_bias)\.weight$|^final_logits_bias$"
)


class Reader:
    def __init__(
        self,
        weights: Mapping[str, Tensor],
        config: EncoderDecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        mode: FloatMode | None,
    ) -> None:
        self.weights, self.config, self.dtype, self.device, self.mode = weights, config, dtype, device, mode
        # a source has many rows, which torch multiplies faster; it is read by itself, so its bits are its own
        self.encoder_mode = None if mode == "float32" else mode
        self._seen: set[str] = set()  # names that were read
        self.names = _MARIAN if config.family == "marian" else _t5_names(config.gated)

    def model(self) -> Model:
        config = self.config
        encoder, decoder = self._stack("encoder", config.encoder), self._stack("decoder", config.decoder)
        head, bias, cross = self._head(decoder.embedding), self._head_bias(), self._cross_inputs()
        surplus = [name for name in self.weights if name not in self._seen and not _UNREAD.search(name)]
        if surplus:
            raise surplus_weights(self.weights, surplus)
        return Model(
            encoder=encoder,
            decoder=decoder,
            cross=cross,
            head=make_linear(head, None, self.mode),
            head_bias=bias,
            screen=self._screen(head, bias),
        )

    def _head_bias(self) -> Tensor | None:
        """None of zeros, too: most of Marian's models have those."""
        name = "final_logits_bias"
        bias = self._read(name, (1, self.config.vocab_size))[0] if name in self.weights else None
        return bias if bias is not None and bool(bias.any()) else None

    def _screen(self, head: Tensor, bias: Tensor | None) -> ScreenedHead | None:
        """Where the head is float32 and read from memory for every token; blocks of eight bits are 32 wide."""
        if self.mode != "float32" or self.config.width % BLOCK:
            return None
        laws = self.config.source_rules.laws
        return ScreenedHead(head, bias, () if laws is None else [word[-1] for word in laws.bad_words])

    def _stack(self, stack: str, sizes: StackConfig) -> Stack:
        norm = self.names.final_norm
        return Stack(
            embedding=self._embedding(stack),
            positions=self._positions(stack) if self.config.relative is None else None,
            bias=self._bias(stack, sizes) if self.config.relative is not None else None,
            layers=[self._layer(stack, i, sizes) for i in range(sizes.layers)],
            final_norm=None if norm is None else self._norm(norm.format(stack=stack)),
        )

    def _layer(self, stack: str, i: int, sizes: StackConfig) -> Layer:
        names, width = self.names, self.config.width
        mode = self.mode if stack == "decoder" else self.encoder_mode
        at, cross, part = names.layer.format(stack=stack, i=i), None, int(stack == "decoder")
        if part:
            cross = self._attention(at, names.cross, names.cross_norm, names.projections[:1], mode)
        return Layer(
            attention=self._attention(at, names.attention, names.attention_norm, names.projections[:3], mode),
            cross=cross,
            feed_forward=FeedForward(
                norm=self._norm(at + names.feed_forward_norm[part]),
                up=self._linear([at + name for name in names.up[part]], (sizes.inner, width), mode),
                down=self._linear([at + names.down[part]], (width, sizes.inner), mode),
            ),
        )

    def _attention(self, at: str, name: str, norm: str, inputs: tuple[str, ...], mode: FloatMode | None) -> Attention:
        width, wide = self.config.width, self._wide()
        return Attention(
            norm=self._norm(at + norm),
            inputs=self._linear([f"{at}{name}{part}" for part in inputs], (wide, width), mode),
            output=self._linear([f"{at}{name}{self.names.projections[3]}"], (width, wide), mode),
        )

    def _cross_inputs(self) -> Linear:
        """Keys and values of every decoder layer, in one product."""
        names, parts = self.names, list[str]()
        for i in range(self.config.decoder.layers):
            at = names.layer.format(stack="decoder", i=i) + names.cross
            parts += [at + names.projections[1], at + names.projections[2]]
        return self._linear(parts, (self._wide(), self.config.width), self.encoder_mode)

    def _wide(self) -> int:
        return self.config.decoder.heads * self.config.head_dim

    def _embedding(self, stack: str) -> Tensor:
        decodes = stack == "decoder"
        size = self.config.vocab_size if decodes else self.config.source_vocab_size
        own = "model.decoder.embed_tokens.weight" if decodes else "model.encoder.embed_tokens.weight"
        names = [own, "model.shared.weight", "shared.weight", f"{stack}.embed_tokens.weight"]
        # what is tied may be stored once, under any of its names
        names += ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"]
        return self._read(self._first(names), (size, self.config.width))

    def _head(self, embedding: Tensor) -> Tensor:
        has_own = "lm_head.weight" in self.weights
        return self._read("lm_head.weight", tuple(embedding.shape)) if has_own else embedding

    def _positions(self, stack: str) -> Tensor:
        name, shape = (f"model.{stack}.embed_positions.weight", (self.config.source_rules.longest, self.config.width))
        if name in self.weights:
            return self._read(name, shape)
        return sinusoids(*shape).to(self.device, self.dtype)

    def _bias(self, stack: str, sizes: StackConfig) -> Tensor:
        assert self.config.relative is not None
        name = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return self._read(name, (self.config.relative.buckets, sizes.heads))

    def _norm(self, name: str) -> Norm:
        bias = f"{name}.bias"
        return Norm(
            self._read(f"{name}.weight", (self.config.width,)),
            self._read(bias, (self.config.width,)) if bias in self.weights else None,
            self.config.norm_eps,
        )

    def _linear(self, names: list[str], shape: tuple[int, int], mode: FloatMode | None) -> Linear:
        """Several weights of one shape that share their input, as one."""
        weight = torch.cat([self._read(f"{name}.weight", shape) for name in names])
        biases = [self._read(f"{name}.bias", shape[:1]) for name in names if f"{name}.bias" in self.weights]
        if biases and len(biases) != len(names):
            raise DamagedFile(f"some of {names[0]!r} and its like have a bias and some have none")
        return make_linear(weight, torch.cat(biases) if biases else None, mode)

    def _first(self, names: Sequence[str]) -> str:
        return next((name for name in names if name in self.weights), names[0])

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.weights:
            raise missing_weight(self.weights, name)
        self._seen.add(name)
        weight = self.weights[name].detach()
        if tuple(weight.shape) != shape:
            raise wrong_shape(self.weights, name, tuple(weight.shape), shape)
        return weight.to(self.device, self.dtype).contiguous()
