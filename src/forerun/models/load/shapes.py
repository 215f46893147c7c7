"""Checks the shapes of a checkpoint's weights against its config before anything is allocated.

A damaged config or GGUF header may name millions of heads, layers or experts. Every size that a decoder would
allocate by is compared here with the shapes that the files really hold, which costs no memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from forerun.models.config import DecoderConfig, LatentConfig, RecurrentConfig, VariedConfig
from forerun.models.load.weights import Weights, missing_weight, surplus_weights, wrong_shape
from forerun.models.moe import MoeConfig

Shape = tuple[int, ...]
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


# what a decoder need not read: tables that are computed, a tied head, towers for pictures, and drafting layers
UNREAD = re.compile(
    r"rotary_emb\.inv_freq$|(^|\.)lm_head\.weight$|(^|\.)mtp\.|"
    r"^(model\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|embed_vision|embed_audio)\."
)


def check_shapes(config: DecoderConfig, weights: Weights) -> None:
    """Raise DamagedFile at the first weight that is missing, or of another shape than the config says, or surplus."""
    read = set[str]()
    for name, shape in expected_shapes(config, weights):
        if name not in weights:
            raise missing_weight(weights, name)
        if weights.shape(name) != shape:
            raise wrong_shape(weights, name, weights.shape(name), shape)
        read.add(name)
    surplus = [name for name in weights if name not in read and not UNREAD.search(name)]
    drafting = tuple(name.removesuffix("eh_proj.weight") for name in surplus if name.endswith("eh_proj.weight"))
    surplus = [name for name in surplus if not (drafting and name.startswith(drafting))]
    if surplus:
        raise surplus_weights(weights, surplus)


def expected_shapes(config: DecoderConfig, weights: Weights) -> Iterator[tuple[str, Shape]]:
    """Every weight that a decoder of this config reads, under the names that this checkpoint uses, and its shape."""
    for name, shape in _shapes(config, weights):
        yield config.file_name(name), shape


def _shapes(config: DecoderConfig, weights: Weights) -> Iterator[tuple[str, Shape]]:
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in weights), "model.")
    yield prefix + "embed_tokens.weight", (config.vocab_size, config.width)
    yield prefix + "norm.weight", (config.width,)
    if not config.tied:
        head = next((name for name in _HEADS if name in weights), _HEADS[0])
        yield head, (config.vocab_size, config.width)
    if config.varied is not None and (inputs := config.layers * config.varied.input_width):
        yield prefix + "embed_tokens_per_layer.weight", (config.vocab_size, inputs)
        yield prefix + "per_layer_model_projection.weight", (inputs, config.width)
        yield prefix + "per_layer_projection_norm.weight", (config.varied.input_width,)
    norms = [name for name in config.norms if name is not None]
    for i in range(config.layers):
        at = f"{prefix}layers.{i}."
        yield from ((f"{at}{norm}.weight", (config.width,)) for norm in norms)
        alone = () if config.recurrent is None else config.recurrent.mlp_alone
        if config.recurrent is not None and config.recurrent.layers[i]:
            yield from _recurrent(config, config.recurrent, weights, at)
        elif config.latent is not None:
            yield from _latent(config, config.latent, weights, at + "self_attn.")
        elif config.varied is not None:
            yield from _sized(config, config.varied, i, weights, at)
        elif not (alone and alone[i]):
            yield from _attention(config, weights, at + "self_attn.")
        if alone and not alone[i]:
            continue
        if config.sparse[i]:
            assert config.moe is not None
            yield from _experts(config, config.moe, weights, at)
        if not config.sparse[i] or (config.moe is not None and config.moe.beside_mlp):
            yield from _mlp(config, config.inner_of(i), weights, at + "mlp.")


def _attention(config: DecoderConfig, weights: Weights, at: str) -> Iterator[tuple[str, Shape]]:
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    sizes = {"q": queries * (2 if config.gated_attention else 1), "k": keys, "v": keys}
    if f"{at}qkv_proj.weight" in weights:
        sizes = {"qkv": queries + 2 * keys}
    for name, size in sizes.items():
        yield from _with_bias(weights, f"{at}{name}_proj", size, config.width)
    yield from _with_bias(weights, f"{at}o_proj", config.width, queries)
    if config.qk_norm is not None:
        whole = config.qk_norm == "all"
        for name, size in (("q", queries), ("k", keys)):
            yield f"{at}{name}_norm.weight", (size if whole else config.head_dim,)
    if config.sinks:
        yield f"{at}sinks", (config.heads,)


def _latent(config: DecoderConfig, latent: LatentConfig, weights: Weights, at: str) -> Iterator[tuple[str, Shape]]:
    width, queries = config.width, config.heads * (latent.key_dim + latent.rope_dim)
    if latent.query_rank is None:
        yield at + "q_proj.weight", (queries, width)
    else:
        yield from _with_bias(weights, at + "q_a_proj", latent.query_rank, width)
        yield at + "q_a_layernorm.weight", (latent.query_rank,)
        yield at + "q_b_proj.weight", (queries, latent.query_rank)
    yield from _with_bias(weights, at + "kv_a_proj_with_mqa", latent.row, width)
    yield at + "kv_a_layernorm.weight", (latent.rank,)
    yield at + "kv_b_proj.weight", (config.heads * (latent.key_dim + latent.value_dim), latent.rank)
    yield from _with_bias(weights, at + "o_proj", width, config.heads * latent.value_dim)


def _sized(
    config: DecoderConfig, varied: VariedConfig, index: int, weights: Weights, layer: str
) -> Iterator[tuple[str, Shape]]:
    at, width, (kv_heads, dim) = layer + "self_attn.", config.width, varied.sizes[index]
    queries, keys = config.heads * dim, kv_heads * dim
    yield from _with_bias(weights, at + "q_proj", queries, width)
    yield from _with_bias(weights, at + "o_proj", width, queries)
    yield at + "q_norm.weight", (dim,)
    own: dict[str, Shape] = {"k_proj": (keys, width), "v_proj": (keys, width), "k_norm": (dim,)}
    if varied.keys_are_values[index]:
        del own["v_proj"]
    for name, shape in own.items():  # layers that read those of another may have their own in the file, unread
        if varied.owns[index] or f"{at}{name}.weight" in weights:
            yield f"{at}{name}.weight", shape
        if f"{at}{name}.bias" in weights:
            yield f"{at}{name}.bias", shape[:1]
    yield layer + "layer_scalar", (1,)
    if inputs := varied.input_width:
        yield layer + "per_layer_input_gate.weight", (inputs, width)
        yield layer + "per_layer_projection.weight", (width, inputs)
        yield layer + "post_per_layer_input_norm.weight", (width,)


def _recurrent(whole: DecoderConfig, config: RecurrentConfig, weights: Weights, at: str) -> Iterator[tuple[str, Shape]]:
    width = whole.width
    if config.kind == "short_conv":
        yield from _with_bias(weights, at + "conv.in_proj", 3 * width, width)
        yield from _with_bias(weights, at + "conv.out_proj", width, width)
        yield at + "conv.conv.weight", (width, 1, config.kernel)
        if f"{at}conv.conv.bias" in weights:
            yield at + "conv.conv.bias", (width,)
        return
    keys, values = config.key_heads * config.key_dim, config.value_heads * config.value_dim
    if config.kind == "mamba2":
        at += "mamba."
        yield from _with_bias(weights, at + "in_proj", 2 * values + 2 * keys + config.value_heads, width)
        yield from _with_bias(weights, at + "out_proj", width, values)
        if whole.file_name(f"{at}conv1d.bias") in weights:
            yield at + "conv1d.bias", (2 * keys + values,)
        yield at + "D", (config.value_heads,)
        yield at + "norm.weight", (values,)
    else:
        at += "linear_attn."
        yield from _delta_net(config, width, weights, at)
    yield at + "conv1d.weight", (2 * keys + values, 1, config.kernel)
    yield at + "A_log", (config.value_heads,)
    yield at + "dt_bias", (config.value_heads,)


def _delta_net(config: RecurrentConfig, width: int, weights: Weights, at: str) -> Iterator[tuple[str, Shape]]:
    keys, values = config.key_heads * config.key_dim, config.value_heads * config.value_dim
    sizes, heads = {"qkv": 2 * keys + values, "z": values}, config.value_heads
    if f"{at}in_proj_qkvz.weight" in weights:
        sizes = {"qkvz": 2 * keys + 2 * values}
    sizes |= {"ba": 2 * heads} if f"{at}in_proj_ba.weight" in weights else {"b": heads, "a": heads}
    yield from ((f"{at}in_proj_{name}.weight", (size, width)) for name, size in sizes.items())
    yield at + "norm.weight", (config.value_dim,)
    yield at + "out_proj.weight", (width, values)


def _mlp(config: DecoderConfig, inner: int, weights: Weights, at: str) -> Iterator[tuple[str, Shape]]:
    sizes, width = {"gate": inner, "up": inner} if config.gated else {"up": inner}, config.width
    if config.file_name(f"{at}gate_up_proj.weight") in weights:
        sizes = {"gate_up": 2 * inner}
    for name, size in sizes.items():
        yield from _with_bias(weights, f"{at}{name}_proj", size, width)
    yield from _with_bias(weights, f"{at}down_proj", width, inner)


def _with_bias(weights: Weights, name: str, outputs: int, inputs: int) -> Iterator[tuple[str, Shape]]:
    """A matrix, and its bias where there is one."""
    yield f"{name}.weight", (outputs, inputs)
    if f"{name}.bias" in weights:
        yield f"{name}.bias", (outputs,)


def expert_names(config: DecoderConfig, old: bool) -> tuple[str, ...]:
    """What the files call the matrices of one expert, that of its output last; `old`: as Mixtral's do."""
    if old:
        return "w1", "w3", "w2"
    return ("gate_proj", "up_proj", "down_proj") if config.gated else ("up_proj", "down_proj")


def _experts(config: DecoderConfig, moe: MoeConfig, weights: Weights, at: str) -> Iterator[tuple[str, Shape]]:
    width = config.width
    old = f"{at}block_sparse_moe.gate.weight" in weights
    at += "block_sparse_moe." if old else "mlp."
    yield at + "gate.weight", (moe.experts, width)
    if config.file_name(at + "experts.gate_up_proj") in weights:
        yield at + "experts.gate_up_proj", (moe.experts, 2 * moe.inner, width)
        yield at + "experts.down_proj", (moe.experts, width, moe.inner)
    else:
        old_names = config.file_name(f"{at}experts.0.w1.weight") in weights
        *into, out = expert_names(config, old_names)
        for i in range(moe.experts):
            for name in into:
                yield f"{at}experts.{i}.{name}.weight", (moe.inner, width)
            yield f"{at}experts.{i}.{out}.weight", (width, moe.inner)
    if moe.biases:
        yield at + "gate.bias", (moe.experts,)
        for i in range(moe.experts):
            sizes = {"gate_proj": moe.inner, "up_proj": moe.inner, "down_proj": width}
            yield from ((f"{at}experts.{i}.{name}.bias", (size,)) for name, size in sizes.items())
    if moe.shared_inner is not None:
        yield from _mlp(config, moe.shared_inner, weights, at + "shared_expert.")
        if moe.shared_gate:
            yield at + "shared_expert_gate.weight", (1, width)
    if moe.normed_apart:
        yield at + "gate.scale", (width,)
        yield at + "gate.per_expert_scale", (moe.experts,)
        yield from ((f"{at}norms.{place}.weight", (width,)) for place in ("before", "after", "dense"))
    if moe.corrected:
        name = config.file_name(at + "gate.e_score_correction_bias")
        rows = isinstance(weights, Weights) and name in weights and len(weights.shape(name)) == 2  # ERNIE's: one
        yield at + "gate.e_score_correction_bias", (1, moe.experts) if rows else (moe.experts,)
