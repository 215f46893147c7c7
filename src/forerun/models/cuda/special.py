"""Layers of other kinds as the GPU decoder has them: as ordinary blocks, with what comes on top.

These are layers of different sizes (Gemma 4), latent attention (DeepSeek) and layers with a state (LFM2, Qwen3-Next).
The first
product of latent attention makes queries, or the short row that they are made of, and behind them what is cached of
the token.

A layer without keys of its own has queries alone in its first product. Values that are made of what keys are made of
have a copy of the keys' weight: they lie in the keys' order, which the output's weight undoes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.core.errors import UnsupportedModel
from forerun.models.blocks import Block
from forerun.models.config import DecoderConfig, RecurrentConfig
from forerun.models.cuda.weights import Weight
from forerun.models.hybrid.attention import LatentAttention, SizedAttention
from forerun.models.hybrid.mixers import Memory, ShortConv
from forerun.models.hybrid.rows import RowLinear
from forerun.models.hybrid.weights import GatedAttention, HybridBlock, HybridCheckpoint
from forerun.models.layers import Experts, Mlp

Pack = Callable[[Tensor], Weight]


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What tokens give every layer beside their embedding, P wide."""

    table: Tensor  # [V, L P]
    projection: Weight  # [L P, D]
    norm: Tensor  # [P]


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """What ends a layer: its input, gated by the rows, is added to them, and a number multiplies all."""

    gate: Weight | None  # [P, D]; None = layers have no inputs
    projection: Weight | None  # [D, P]
    norm: Tensor | None  # [D]
    scale: float


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Latent attention beside the first product and the last; N = key_dim, R = rope_dim, V = value_dim, C = rank."""

    queries: Weight | None  # [H (N + R), query_rank]; None = the first product makes them
    query_norm: Tensor | None  # [query_rank]
    norm: Tensor  # [C]
    keys: Tensor  # [H, C, N]
    values: Tensor  # [H, V, C]


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A layer with a state, between its first product and the last."""

    index: int  # among such layers
    taps: Tensor  # [K, C] fp32 of its convolution
    bias: Tensor | None  # [C] fp32
    memory: Memory | None  # what it remembers beside the last inputs; its own products are the layer's


def recurrent_of(block: HybridBlock, config: RecurrentConfig | None, layer: int) -> Recurrent | None:
    if config is None or not isinstance(block.mixer, ShortConv | Memory):
        return None
    convolution, memory = block.mixer.convolution, None
    if isinstance(block.mixer, Memory):
        memory = copy(block.mixer)
        memory.inputs = memory.output = RowLinear(torch.empty(0, 0))
    return Recurrent(config.layers[:layer].count(True), convolution.weight, convolution.bias, memory)


def opens_of(block: HybridBlock, config: DecoderConfig, pack: Pack) -> Weight | None:
    """The gate of what attention finds, [H Dh, D], which lies behind queries, keys and values."""
    if not (config.gated_attention and isinstance(block.mixer, GatedAttention)):
        return None
    return pack(block.mixer.inputs.weight[-config.heads * config.head_dim :].contiguous())


def latent_of(block: HybridBlock, pack: Pack) -> LatentWeights | None:
    mixer = block.mixer
    if not isinstance(mixer, LatentAttention):
        return None
    queries = None if mixer.short_queries is None else pack(mixer.queries.weight)
    keys, values = (part.transpose(1, 2).contiguous() for part in (mixer.keys, mixer.values))
    return LatentWeights(queries, mixer.query_norm, mixer.latent_norm, keys, values)


def inputs_of(checkpoint: HybridCheckpoint, pack: Pack) -> LayerInputs | None:
    inputs = checkpoint.layer_inputs()
    return None if inputs is None else LayerInputs(inputs.table, pack(inputs.projection.weight), inputs.norm)


def end_of(block: HybridBlock, pack: Pack) -> LayerEnd | None:
    end = block.end
    if end is None:
        return None
    if end.gate is None or end.projection is None:
        return LayerEnd(None, None, None, float(end.scale))
    return LayerEnd(pack(end.gate.weight), pack(end.projection.weight), end.norm, float(end.scale))


def ordinary(block: HybridBlock, config: DecoderConfig) -> Block:
    """A layer of any kind without what `end_of`, `latent_of`, `recurrent_of` and `opens_of` have."""
    mixer, mlp = block.mixer, block.mlp
    linear = [] if mlp is None else [mlp.gate_up, mlp.down]
    if isinstance(mixer, LatentAttention):
        first = mixer.queries if mixer.short_queries is None else mixer.short_queries
        _refuse_biases([*linear, first, mixer.queries, mixer.latents, mixer.output])
        qkv = torch.cat((first.weight, mixer.latents.weight))
        return _block(block, qkv, None, mixer.output.weight)
    if isinstance(mixer, ShortConv | Memory):
        _refuse_biases([*linear, mixer.inputs, mixer.output])
        return _block(block, mixer.inputs.weight, None, mixer.output.weight)
    if isinstance(mixer, GatedAttention):
        _refuse_biases([*linear, mixer.output, *([mixer.inputs] if config.gated_attention else [])])
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        made = _block(block, mixer.inputs.weight[:rows].contiguous(), mixer.qk_norm, mixer.output.weight)
        return replace(made, qkv_bias=mixer.inputs.bias)
    assert isinstance(mixer, SizedAttention)
    _refuse_biases([*linear, mixer.queries, mixer.keys, mixer.values, mixer.output])
    parts, norms = [mixer.queries.weight], [mixer.query_norm.expand(config.heads, -1)]
    if mixer.keys is not None:
        assert mixer.key_norm is not None
        values = mixer.keys if mixer.values is None else mixer.values
        parts += [mixer.keys.weight, values.weight]
        norms.append(mixer.key_norm.expand(mixer.kv_heads, -1))
        norms.append(torch.ones_like(norms[-1]))  # values are normed without a weight
    return _block(block, torch.cat(parts), torch.cat(norms), mixer.output.weight)


def _refuse_biases(linear: Sequence[RowLinear | None]) -> None:
    if any(one is not None and one.bias is not None for one in linear):
        raise UnsupportedModel("the GPU decoder has no biases in layers of this kind; use the plain decoder")


def _block(block: HybridBlock, qkv: Tensor, qk_norm: Tensor | None, output: Tensor) -> Block:
    mlp: Mlp | Experts | None = block.experts
    if block.mlp is not None:
        mlp = Mlp(block.mlp.gate_up.weight, block.mlp.down.weight)
    assert mlp is not None
    return Block(
        attention_norm=block.norm,
        qkv=qkv,
        qkv_bias=None,
        qk_norm=qk_norm,
        o=output,
        o_bias=None,
        mlp_norm=block.mlp_norm,
        mlp=mlp,
        after_attention_norm=block.after_mixer,
        after_mlp_norm=block.after_mlp,
    )
