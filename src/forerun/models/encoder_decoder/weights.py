"""Reads the weights of a T5 or Marian checkpoint, under the names of the files, into the parts of `layers.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.errors import DamagedFile
from forerun.models.encoder_decoder.config import EncoderDecoderConfig, StackConfig
from forerun.models.encoder_decoder.layers import (
    Attention,
    FeedForward,
    Layer,
    Linear,
    Norm,
    ScreenedHead,
    Stack,
    make_linear,
    sinusoids,
)
from forerun.models.load.weights import missing_weight, surplus_weights, wrong_shape
from forerun.models.native.library import BLOCK
from forerun.models.native.packing import FloatMode


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
