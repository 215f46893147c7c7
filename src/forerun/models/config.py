"""DecoderConfig: the architecture of a checkpoint, read from its config.json.

Families spell the same architecture differently, and their files leave out whatever equals the family's default
(forerun.models.families); here every spelling becomes one `DecoderConfig`, with an entry per layer where layers differ.
A family or setting that is not understood raises UnsupportedModel: never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forerun.core.errors import DamagedFile, UnsupportedModel, brief
from forerun.models.families import BEFORE, COMMON, FAMILIES, WRAPPED, Family, Norms, RecurrentKind, rotates
from forerun.models.moe import MOST_LAYERS, MoeConfig, moe_of, positive, size_of, sparse_layers
from forerun.models.rope import RopeConfig, magnitude

Activation = Literal["silu", "gelu_tanh", "relu2"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}
_PATTERN = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}  # letters of hybrid_override_pattern
_MOST_HEADS = 1 << 16
_OFF_BY_NULL = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank")
# Settings that only some families read: others have them in their files and do without.
_SOME_FAMILIES = {key for described in FAMILIES.values() for key in described.settings} - {
    *COMMON, "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "partial_rotary_factor",
    "rope_parameters", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention: a token's cached row is a latent, normed, and one rotated key of all heads.

    A head's key is made of the latent, without positions, and the rotated part; its value is made of the latent.
    """

    query_rank: int | None  # queries are made of a short row, too; None = of the layer's input
    rank: int  # of the latent
    key_dim: int  # of a head, without the part that rotates
    rope_dim: int
    value_dim: int

    @property
    def row(self) -> int:
        """Numbers that are cached of a token."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class VariedConfig:
    """Layers of different sizes, some of which read the keys and values of an earlier layer (Gemma 4)."""

    sizes: tuple[tuple[int, int], ...]  # [L] KV heads, and numbers of a head
    inners: tuple[int, ...]  # [L] feed-forward widths
    sources: tuple[int, ...]  # [L] whose keys and values a layer reads, counted among the layers that have their own
    owns: tuple[bool, ...]  # [L]
    keys_are_values: tuple[bool, ...]  # [L] values are made of what keys are made of
    input_width: int  # of what a token adds to every layer apart from its embedding; 0 = nothing

    @property
    def row(self) -> int:
        """Numbers of a token's keys in the largest layer."""
        return max(heads * dim for heads, dim in self.sizes)


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Layers that keep a state of fixed size in the place of keys and values."""

    kind: RecurrentKind
    layers: tuple[bool, ...]  # [L] which layers these are; the others have attention
    kernel: int  # inputs that their convolution reads, the row's own included
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0  # of a head
    value_dim: int = 0
    norm_groups: int = 1  # Mamba-2: what is found is normed in so many groups
    in_turns: bool = False  # value heads are the first of every key head, then the second; or key head by key head
    least_step: float = 0.0  # Mamba-2: steps are at least as long
    mlp_alone: tuple[bool, ...] = ()  # [L] a layer is one part: which are feed-forward ones; () = layers have both


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer with rotary positions and gated feed-forward layers."""

    family: str
    vocab_size: int
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_length: int
    norm_eps: float
    activation: Activation
    tied: bool  # the head is the embedding
    ropes: tuple[RopeConfig, ...]
    layer_ropes: tuple[int | None, ...]  # [L] index into ropes; None = no positions in this layer
    windows: tuple[int | None, ...]  # [L] how many positions a node sees, itself included; None = all
    attention_scale: float
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and feed-forward layers add to the residual stream
    logit_scale: float = 1.0
    qk_norm: Literal["head", "all"] | None = None  # queries and keys are normed head by head, or all heads at once
    norm_offset: bool = False  # norms multiply by 1 + weight
    norms: Norms = BEFORE
    rope_pairs: Literal["halves", "neighbours"] = "halves"  # dimensions that the checkpoint rotates together
    sinks: bool = False  # every query head has a learned score that takes weight and brings no value
    moe: MoeConfig | None = None
    sparse: tuple[bool, ...] = ()  # [L] which layers have experts
    latent: LatentConfig | None = None  # kv_heads is 1 then, and head_dim what is cached of a token
    varied: VariedConfig | None = None  # likewise, of a token's keys
    recurrent: RecurrentConfig | None = None
    gated_attention: bool = False  # what attention finds is multiplied by a sigmoid of the layer's input
    gated: bool = True  # feed-forward layers multiply an opened gate by a second product
    names: tuple[tuple[str, str], ...] = ()  # parts of the names of weights: ours, and those in the files

    @property
    def kv_layers(self) -> int:
        """Layers with keys and values of their own."""
        return self.kv_source(self.layers) if self.varied is None else self.varied.owns.count(True)

    def kv_source(self, layer: int) -> int:
        """Whose keys and values a layer with attention reads, counted among the layers that have their own."""
        if self.varied is not None:
            return self.varied.sources[layer]
        states = self.recurrent
        return layer - (states.layers[:layer].count(True) + states.mlp_alone[:layer].count(True) if states else 0)

    def kv_sizes(self, layer: int) -> tuple[int, int]:
        """KV heads of a layer, and numbers of a head."""
        return (self.kv_heads, self.head_dim) if self.varied is None else self.varied.sizes[layer]

    def inner_of(self, layer: int) -> int:
        """The feed-forward width of a layer."""
        return self.inner if self.varied is None else self.varied.inners[layer]

    @property
    def kv_parts(self) -> int:
        """Rows per token, head and layer in the KV cache: a key and a value, or one latent that is both."""
        return 2 if self.latent is None else 1

    @property
    def special(self) -> str | None:
        """What only the decoder in torch that works row by row has (models/hybrid); None = nothing."""
        kinds = ("recurrent states", "latent attention", "layers of different sizes")
        return next((name for name in kinds if name in self.features), None)

    def file_name(self, name: str) -> str:
        """What the files call a weight."""
        for ours, theirs in self.names:
            name = name.replace(ours, theirs)
        return name

    @property
    def features(self) -> tuple[str, ...]:
        """What it has beyond Llama's parts; a backend that lacks one of them says which."""
        return tuple(name for name, there in self.parts.items() if there)

    @property
    def parts(self) -> dict[str, bool]:
        """All that some family has beyond Llama's parts, and whether this model has it."""
        norms = self.norms
        return {
            "GeGLU": self.activation == "gelu_tanh",
            "soft caps of attention scores": self.attention_softcap is not None,
            "soft caps of logits": self.logit_softcap is not None,
            "scaled embeddings": self.embedding_scale != 1.0,
            "scaled residuals": self.residual_scale != 1.0,
            "scaled logits": self.logit_scale != 1.0,
            "norms with an offset": self.norm_offset,
            "norms behind attention and feed-forward layers": norms.after_attention is not None,
            "layers without a norm before attention": norms.before_attention is None,
            "norms over all heads of queries and keys": self.qk_norm == "all",
            "several ropes": len(self.ropes) > 1,
            "ropes that change with every token": any(rope.kind == "dynamic" for rope in self.ropes),
            "rotations of neighbours": self.rope_pairs == "neighbours",
            "layers without positions": None in self.layer_ropes,
            "sliding windows": any(self.windows),
            "attention sinks": self.sinks,
            "experts": self.moe is not None,
            "experts with biases": self.moe is not None and self.moe.biases,
            "clamped gates": self.moe is not None and self.moe.clamp is not None,
            "sigmoid routers": self.moe is not None and self.moe.sigmoid,
            "corrected softmax routers": self.moe is not None and self.moe.corrected and not self.moe.sigmoid,
            "groups of experts": self.moe is not None and self.moe.groups[0] > 1,
            "scaled experts": self.moe is not None and self.moe.scale != 1.0,
            "shared experts without a gate": self.moe is not None
            and self.moe.shared_inner is not None
            and not self.moe.shared_gate,
            "latent attention": self.latent is not None,
            "layers of different sizes": self.varied is not None,
            "recurrent states": self.recurrent is not None,
            "gates behind attention": self.gated_attention,
            "feed-forward layers without gates": not self.gated,
        }

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read a config.json; UnsupportedModel says what about it we cannot run."""
        family, values = _flatten(config)
        try:
            return _read(family, values)
        except KeyError as missing:
            lacks = f"config.json of {family} lacks {missing}"
            raise UnsupportedModel(f"{lacks}: is it the model's own config?") from missing
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise DamagedFile(
                f"config.json of {family} has a value that cannot be ({brief(error)}); fetch it again"
            ) from error


def _read(family: str, values: Mapping[str, Any]) -> DecoderConfig:
    layers = size_of(values, "num_hidden_layers", MOST_LAYERS)
    heads = size_of(values, "num_attention_heads", _MOST_HEADS)
    width = size_of(values, "hidden_size")
    head_dim = size_of(values, "head_dim", _MOST_HEADS, max(1, width // heads))
    kv_heads = size_of(values, "num_key_value_heads", _MOST_HEADS, heads)
    if heads % kv_heads or head_dim % 2:
        said = f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        raise ValueError(f"{said}, or head_dim {head_dim} odd")
    described = FAMILIES[family]
    latent, kinds = _latent(values) if described.latent else None, _layer_types(family, values, layers)
    varied = _varied(values, kinds, kv_heads, head_dim) if described.varied else None
    rotary = (head_dim, head_dim) if latent is None else (latent.rope_dim, latent.rope_dim)
    if varied is not None:
        rotary = varied.sizes[-1][1], head_dim
    kv_heads, head_dim = (kv_heads, head_dim) if (rows := latent or varied) is None else (1, rows.row)
    window = size_of(values, "sliding_window") if values.get("sliding_window") else None
    ropes, layer_ropes = _ropes(family, values, kinds, rotary)
    moe = moe_of(described, values)
    return DecoderConfig(
        family=family,
        vocab_size=size_of(values, "vocab_size"),
        width=width,
        inner=_inner(values, moe, layers),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_length=_max_length(described, values, ropes),
        norm_eps=positive(values, "rms_norm_eps"),
        activation=_activation(values["hidden_act"], described.gated),
        tied=bool(values["tie_word_embeddings"]),
        ropes=ropes,
        layer_ropes=layer_ropes,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        attention_scale=_attention_scale(values, head_dim) if latent is None else _latent_scale(values, latent),
        attention_softcap=_softcap(values, "attn_logit_softcapping"),
        logit_softcap=_softcap(values, "final_logit_softcapping"),
        embedding_scale=width**0.5 if described.scaled_embedding else positive(values, "embedding_multiplier", 1.0),
        residual_scale=positive(values, "residual_multiplier", 1.0),
        logit_scale=1.0 / positive(values, "logits_scaling", 1.0),
        qk_norm=described.qk_norm if values.get("use_qk_norm", True) else None,
        norm_offset=described.norm_offset,
        norms=described.norms,
        rope_pairs=described.rope_pairs if values.get("rope_interleave", True) else "halves",
        sinks=described.sinks,
        moe=moe,
        sparse=sparse_layers(values, layers) if moe else (False,) * layers,
        latent=latent,
        varied=varied,
        recurrent=None if described.recurrent is None else _recurrent(described.recurrent, values, layers),
        gated_attention=described.gated_attention,
        gated=described.gated,
        names=() if values.get("named_as_llama") else described.names,
    )


def _varied(values: Mapping[str, Any], kinds: list[str], kv_heads: int, head_dim: int) -> VariedConfig:
    """By layer, from the file's list of exceptions, or from the settings of layers without a window."""
    layers, full, equal = len(kinds), "full_attention", bool(values["attention_k_eq_v"])
    whole = {"head_dim": values["global_head_dim"]}
    if equal and values["num_global_key_value_heads"]:
        whole["num_key_value_heads"] = values["num_global_key_value_heads"]
    listed = values["per_layer_config"] or {str(i): whole for i, kind in enumerate(kinds) if kind == full}
    usual = {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    sizes = [{**usual, **listed.get(str(i), {})} for i in range(layers)]
    first = layers - int(values["num_kv_shared_layers"])
    if not 1 <= first <= layers or not set(kinds) <= set(kinds[:first]):
        raise ValueError(f"num_kv_shared_layers={values['num_kv_shared_layers']} of {layers} layers")
    lasts = {kind: i for i, kind in enumerate(kinds[:first])}
    wide = 2 if values["use_double_wide_mlp"] else 1
    inner, width = size_of(values, "intermediate_size"), int(values["hidden_size_per_layer_input"])
    return VariedConfig(
        sizes=tuple(
            (size_of(one, "num_key_value_heads", _MOST_HEADS), size_of(one, "head_dim", _MOST_HEADS)) for one in sizes
        ),
        inners=tuple(inner * (wide if i >= first else 1) for i in range(layers)),
        sources=tuple(i if i < first else lasts[kind] for i, kind in enumerate(kinds)),
        owns=tuple(i < first for i in range(layers)),
        keys_are_values=tuple(equal and kind == full for kind in kinds),
        input_width=width,
    )


def _latent(values: Mapping[str, Any]) -> LatentConfig:
    return LatentConfig(
        query_rank=None if values["q_lora_rank"] is None else size_of(values, "q_lora_rank"),
        rank=size_of(values, "kv_lora_rank"),
        key_dim=size_of(values, "qk_nope_head_dim", _MOST_HEADS),
        rope_dim=size_of(values, "qk_rope_head_dim", _MOST_HEADS),
        value_dim=size_of(values, "v_head_dim", _MOST_HEADS),
    )


def _latent_scale(values: Mapping[str, Any], latent: LatentConfig) -> float:
    """YaRN's magnitude of all dimensions multiplies queries and keys, also those that do not rotate."""
    rope, scale = values.get("rope_scaling") or values.get("rope_parameters") or {}, 1.0
    if (rope.get("rope_type") or rope.get("type") or "default") != "default" and rope.get("mscale_all_dim"):
        scale = magnitude(float(rope["factor"]), float(rope["mscale_all_dim"]))
    return float((latent.key_dim + latent.rope_dim) ** -0.5 * scale * scale)


def _recurrent(kind: RecurrentKind, values: Mapping[str, Any], layers: int) -> RecurrentConfig:
    """Which layers keep a state, by the file's list or the family's rule, and the sizes of the state."""
    attends = values.get("full_attn_idxs")
    made = ["full_attention" if attends is None or i in attends else "conv" for i in range(layers)]
    if kind != "short_conv":
        every = size_of(values, "full_attention_interval", default=layers + 1)
        made = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    kinds, attention = values.get("layer_types") or made, ("full_attention", "attention")
    parts = () if "mamba_expand" in values or kind != "mamba2" else ("mlp", "moe")  # of layers that are one part
    if len(kinds) != layers or not set(kinds) <= {*attention, *parts, "conv", "linear_attention", "mamba"}:
        raise UnsupportedModel(f"layer_types={kinds!r:.120}: must be {layers} of full_attention or a recurrent kind")
    which = tuple(one not in (*attention, *parts) for one in kinds)
    if kind == "short_conv":
        return RecurrentConfig(kind, which, size_of(values, "conv_L_cache", _MOST_HEADS))
    names = [f"linear_{name}" for name in ("conv_kernel_dim", "num_key_heads", "num_value_heads", "key_head_dim")]
    if kind == "mamba2":
        names = [f"mamba_{name}" for name in ("d_conv", "n_groups", "n_heads", "d_state")]
    kernel, key_heads, value_heads, key_dim = (size_of(values, name, _MOST_HEADS) for name in names)
    if value_heads % key_heads:
        raise ValueError(f"{names[2]} {value_heads} is no multiple of {names[1]} {key_heads}")
    if parts:  # Nemotron-H
        least, alone = float(values["time_step_min"]), tuple(one in parts for one in kinds)
        value_dim = size_of(values, "mamba_d_head", _MOST_HEADS)
        sizes = key_heads, value_heads, key_dim, value_dim, key_heads
        return RecurrentConfig(kind, which, kernel, *sizes, least_step=least, mlp_alone=alone)
    if kind == "mamba2":
        low, high = values.get("time_step_limit") or (0.0, float("inf"))
        if low != 0.0 or high not in (float("inf"), {"__float__": "Infinity"}):
            raise UnsupportedModel(f"time_step_limit={values['time_step_limit']!r:.60} is not 0 to infinity")
        value_dim, rest = divmod(size_of(values, "mamba_expand") * size_of(values, "hidden_size"), value_heads)
        if rest or values["mamba_d_head"] not in ("auto", value_dim):
            raise ValueError(f"mamba_d_head is {values['mamba_d_head']!r:.40} with {value_heads} heads")
    else:
        value_dim = size_of(values, "linear_value_head_dim", _MOST_HEADS)
    in_turns = bool(values.get("linear_heads_in_turns"))
    return RecurrentConfig(kind, which, kernel, key_heads, value_heads, key_dim, value_dim, in_turns=in_turns)


def _attention_scale(values: Mapping[str, Any], head_dim: int) -> float:
    if "attention_multiplier" in values:
        return positive(values, "attention_multiplier")
    return float(positive(values, "query_pre_attn_scalar", float(head_dim)) ** -0.5)


def _softcap(values: Mapping[str, Any], key: str) -> float | None:
    return None if values.get(key) is None else positive(values, key)


def _inner(values: Mapping[str, Any], moe: MoeConfig | None, layers: int) -> int:
    """The feed-forward width; a model whose layers all have experts need not have one."""
    if moe is not None and all(sparse_layers(values, layers)) and not values.get("intermediate_size"):
        return 0
    inner = size_of(values, "shared_intermediate_size" if "shared_intermediate_size" in values else "intermediate_size")
    if values.get("block_auto_adjust_ff_dim"):  # LFM2
        unit, share = size_of(values, "block_multiple_of"), float(values.get("block_ffn_dim_multiplier") or 1.0)
        inner = -(-int(share * int(2 * inner / 3)) // unit) * unit
    return inner


def supports(config: Mapping[str, Any]) -> bool:
    """Can our decoder run a checkpoint with this config.json?"""
    try:
        DecoderConfig.from_hf(config)
    except UnsupportedModel:
        return False
    return True


def has_states(config: Mapping[str, Any]) -> bool:
    """Is it of a family with recurrent states? transformers does not roll these back: no other decoder runs it."""
    name = config.get("model_type")
    if not isinstance(name, str):
        return False
    family = FAMILIES.get(WRAPPED[name].family if name in WRAPPED else name)
    return family is not None and family.recurrent is not None


def _flatten(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The family, and its settings with defaults filled in and nested text settings brought up."""
    family = config.get("model_type")
    if isinstance(family, str) and family in WRAPPED:
        family, config = _language_part(family, config)
    if not isinstance(family, str) or family not in FAMILIES:
        known = f"docs/supported.md lists {len(FAMILIES)}"
        raise UnsupportedModel(f"model_type={family!r:.60} is not one of ours ({known}): use the transformers backend")
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):  # with the last, text is causal
        raise UnsupportedModel(f"{family} with use_bidirectional_attention=True cannot be decoded left to right")
    described = FAMILIES[family].settings
    given = {key: value for key, value in config.items() if value is not None or key in _OFF_BY_NULL}
    spelled = FAMILIES[family].spellings
    given = {spelled.get(key, key): value for key, value in given.items()}
    if "hybrid_override_pattern" in described and "hybrid_override_pattern" in given:
        given.setdefault("layer_types", [_PATTERN.get(one, one) for one in given["hybrid_override_pattern"]])
    if "layer_types" in given and "hybrid_override_pattern" in described:
        given["num_hidden_layers"] = len(given["layer_types"])
    for key, value in FAMILIES[family].only.items():
        if given.get(key, value) != value:
            raise UnsupportedModel(f"{key}={given[key]!r:.60} of {family}: only {value!r} is supported")
    if described.get("rotary_dim", 0) is None and "rotary_dim" in given:  # MiniMax
        given.setdefault("partial_rotary_factor", given["rotary_dim"] / given.get("head_dim", described["head_dim"]))
    if family == "gemma" and given.get("hidden_act") == "gelu":  # whose first files mean the other one by it
        given["hidden_act"] = "gelu_pytorch_tanh"
    if "hidden_activation" in given:
        given["hidden_act"] = given["hidden_activation"]
    unread = {key for key in _SOME_FAMILIES if key not in described}
    return family, {**COMMON, **described, **{key: value for key, value in given.items() if key not in unread}}


def _language_part(outer: str, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Family and settings of the language model in a checkpoint that reads pictures too."""
    wrapped, nested = WRAPPED[outer], config.get("text_config", config)
    if not isinstance(nested, Mapping):
        raise DamagedFile(f"text_config in config.json is {nested!r:.60}, not settings; fetch it again")
    family = nested.get("model_type", wrapped.family)
    if family in (outer, f"{outer}_text"):
        family = wrapped.family
    values, tie = {**wrapped.settings, **nested}, "tie_word_embeddings"
    if tie in config:  # the head is the whole's
        values[tie] = config[tie]
    rope = values.get("rope_scaling")
    if isinstance(rope, Mapping) and rope.get("type") == "mrope":  # an old name: of text, all positions are equal
        values["rope_scaling"] = {**rope, "type": "default"}
    return family, values


def _layer_types(family: str, values: Mapping[str, Any], layers: int) -> list[str]:
    """Which layers have a sliding window: by the file's list, else by the family's own rule."""
    slides = FAMILIES[family].slides
    if len(values.get("no_rope_layers") or range(layers)) != layers:
        raise ValueError(f"no_rope_layers has {len(values['no_rope_layers'])} entries for {layers} layers")
    if slides is None or not values.get("use_sliding_window", True):
        return ["full_attention"] * layers
    kinds = list(values.get("layer_types") or ())
    kinds = kinds or ["sliding_attention" if slides(values, i) else "full_attention" for i in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(
            f"layer_types={kinds!r:.120} of {family}: {layers} of full_attention or sliding_attention"
        )
    if FAMILIES[family].varied:
        kinds[-1] = "full_attention"  # whatever the file says
    return kinds


def _ropes(
    family: str, values: Mapping[str, Any], kinds: list[str], dims: tuple[int, int]
) -> tuple[tuple[RopeConfig, ...], tuple[int | None, ...]]:
    """The distinct ropes, and which one each layer uses; `dims` are those of layers without and with a window."""
    given = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    if FAMILIES[family].local_rope:
        nested = dict(values.get("rope_parameters") or {})
        full = {"rope_theta": values["rope_theta"], **(nested.get("full_attention") or {})}
        full.update(values.get("rope_scaling") or {})
        theta = values.get("rope_local_base_freq", values["rope_theta"])
        local = {"rope_theta": theta, **(nested.get("sliding_attention") or {})}
        both = (RopeConfig.from_hf(full, values, dims[0]), RopeConfig.from_hf(local, values, dims[1]))
        if both[0] == both[1]:
            return both[:1], (0,) * len(kinds)
        return both, tuple(int(kind == "sliding_attention") for kind in kinds)
    rope = RopeConfig.from_hf(given, values, dims[0])
    if family == "phi3" and rope.kind == "yarn":
        raise UnsupportedModel("rope type 'yarn' in a phi3 config is ambiguous: use the transformers backend")
    if values.get("position_embedding_type", "rope") != "rope":
        return (rope,), (None,) * len(kinds)
    if FAMILIES[family].rope_in_windows and values.get("sliding_window"):
        return (rope,), tuple(None if kind == "full_attention" else 0 for kind in kinds)
    return (rope,), tuple(0 if rotates(values, i) else None for i in range(len(kinds)))


def _max_length(described: Family, values: Mapping[str, Any], ropes: tuple[RopeConfig, ...]) -> int:
    """Scaled ropes reach beyond max_position_embeddings in files that give the length before scaling.

    Ministral 3 multiplies queries by 1 + beta log(1 + position // original): up to that length by 1, and there it ends.
    """
    rope, longest = ropes[0], size_of(values, "max_position_embeddings")
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if given.get("llama_4_scaling_beta"):
        return min(longest, size_of(given, "original_max_position_embeddings", default=longest))
    if rope.kind in ("linear", "dynamic", "yarn") and not described.local_rope:
        return max(longest, int(rope.context * rope.factor))
    return longest


def _activation(name: object, gated: bool) -> Activation:
    if not isinstance(name, str) or name not in _ACTIVATIONS or (name == "relu2") == gated:
        raise UnsupportedModel(f"hidden_act={name!r:.60} is not one of {', '.join(_ACTIVATIONS)}: use transformers")
    return _ACTIVATIONS[name]
