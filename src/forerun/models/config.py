"""DecoderConfig: the architecture of a checkpoint, read from its config.json.

Families spell the same architecture differently, and their files leave out whatever equals the family's
default; here every spelling becomes one `DecoderConfig`, with one entry per layer where layers differ.
A family or setting that is not understood raises UnsupportedModel: never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forerun.core.errors import DamagedFile, UnsupportedModel, brief
from forerun.models.rope import RopeConfig

Activation = Literal["silu", "gelu_tanh"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
# Far beyond any model; a file that says more is damaged, and must not make us allocate what it says.
_MOST_LAYERS, _MOST_HEADS, _LARGEST = 1 << 14, 1 << 16, 1 << 31
_OFF_BY_NULL = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Feed-forward layers made of experts, of which a router picks a few per row."""

    experts: int
    per_token: int
    inner: int
    renormalise: bool  # the picked experts' weights sum to 1
    shared_inner: int | None  # width of the expert that every row also goes through


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
    qk_norm: bool = False
    norm_offset: bool = False  # norms multiply by 1 + weight
    sandwich_norms: bool = False  # norms after attention and feed-forward too
    moe: MoeConfig | None = None
    sparse: tuple[bool, ...] = ()  # [L] which layers have experts

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


def _size(values: Mapping[str, Any], key: str, most: int = _LARGEST, default: int | None = None) -> int:
    """A count or width: a whole number from 1 that some model could have."""
    value = values[key] if default is None else values.get(key) or default
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{key} is {value!r:.40}, not a whole number from 1 to {most}")
    return value


def _read(family: str, values: Mapping[str, Any]) -> DecoderConfig:
    layers, heads = (
        _size(values, "num_hidden_layers", _MOST_LAYERS),
        _size(values, "num_attention_heads", _MOST_HEADS),
    )
    width = _size(values, "hidden_size")
    head_dim = _size(values, "head_dim", _MOST_HEADS, max(1, width // heads))
    kv_heads = _size(values, "num_key_value_heads", _MOST_HEADS, heads)
    if heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}, or head_dim {head_dim} odd"
        )
    kinds = _layer_types(family, values, layers)
    window = _size(values, "sliding_window") if values.get("sliding_window") else None
    ropes, layer_ropes = _ropes(family, values, kinds, head_dim)
    moe = _moe(family, values)
    gemma = family in ("gemma2", "gemma3_text")
    return DecoderConfig(
        family=family,
        vocab_size=_size(values, "vocab_size"),
        width=width,
        inner=_inner(values, moe, layers),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_length=_max_length(family, _size(values, "max_position_embeddings"), ropes),
        norm_eps=_positive(values, "rms_norm_eps"),
        activation=_activation(values["hidden_act"]),
        tied=bool(values["tie_word_embeddings"]),
        ropes=ropes,
        layer_ropes=layer_ropes,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        attention_scale=(_positive(values, "query_pre_attn_scalar") if gemma else float(head_dim)) ** -0.5,
        attention_softcap=_softcap(values, "attn_logit_softcapping") if family == "gemma2" else None,
        logit_softcap=_softcap(values, "final_logit_softcapping") if gemma else None,
        embedding_scale=float(width) ** 0.5 if gemma else 1.0,
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        norm_offset=gemma,
        sandwich_norms=gemma,
        moe=moe,
        sparse=_sparse_layers(values, layers) if moe else (False,) * layers,
    )


def _positive(values: Mapping[str, Any], key: str) -> float:
    value = float(values[key])
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{key} is {value}, not a positive number")
    return value


def _softcap(values: Mapping[str, Any], key: str) -> float | None:
    return None if values.get(key) is None else _positive(values, key)


def _inner(values: Mapping[str, Any], moe: MoeConfig | None, layers: int) -> int:
    """The feed-forward width; a model whose layers all have experts need not have one."""
    if moe is not None and all(_sparse_layers(values, layers)) and not values.get("intermediate_size"):
        return 0
    return _size(values, "intermediate_size")


def supports(config: Mapping[str, Any]) -> bool:
    """Can our decoder run a checkpoint with this config.json?"""
    try:
        DecoderConfig.from_hf(config)
    except UnsupportedModel:
        return False
    return True


def _flatten(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The family, and its settings with defaults filled in and nested text settings brought up."""
    family = config.get("model_type")
    if family == "gemma3":  # the same decoder, wrapped with a vision tower that text does not use
        nested = {"tie_word_embeddings": config.get("tie_word_embeddings", True)}
        family, config = "gemma3_text", {**nested, **_text_settings(config)}
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModel(f"model_type={family!r:.60} is not one of ours ({known}): use the transformers backend")
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel(f"{family} with use_bidirectional_attention=True cannot be decoded left to right")
    given = {key: value for key, value in config.items() if value is not None or key in _OFF_BY_NULL}
    if "hidden_activation" in given:
        given["hidden_act"] = given["hidden_activation"]
    return family, {**COMMON, **FAMILIES[family], **given}


def _text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    nested = config.get("text_config", {})
    if not isinstance(nested, dict):
        raise DamagedFile(f"text_config in config.json is {nested!r:.60}, not settings; fetch it again")
    return nested


def _layer_types(family: str, values: Mapping[str, Any], layers: int) -> list[str]:
    """Which layers have a sliding window; every family has its own rule where the file has no list."""
    listed = values.get("layer_types")
    if family in ("mistral", "mixtral", "phi3", "llama"):
        return ["full_attention" if family == "llama" else "sliding_attention"] * layers
    if family in ("gemma2", "gemma3_text"):
        slides = [(i + 1) % int(values["sliding_window_pattern"]) != 0 for i in range(layers)]
    elif not values.get("use_sliding_window"):
        return ["full_attention"] * layers
    elif family == "qwen3_moe":
        return ["sliding_attention"] * layers
    elif family == "qwen2_moe":
        slides = [i % 2 == 0 and i < values["max_window_layers"] for i in range(layers)]
    elif family == "smollm3":
        slides = [not rotates for rotates in _rotary_layers(values, layers)]
    else:
        slides = [i >= values["max_window_layers"] for i in range(layers)]
    kinds = list(listed or ["sliding_attention" if s else "full_attention" for s in slides])
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(
            f"layer_types={kinds!r:.120} of {family}: {layers} of full_attention or sliding_attention"
        )
    return kinds


def _rotary_layers(values: Mapping[str, Any], layers: int) -> list[bool]:
    """SmolLM3 leaves positions out of some layers; its list says 1 where they are *in*."""
    period = int(values.get("no_rope_layer_interval", 4))
    listed = values.get("no_rope_layers") or [(i + 1) % period != 0 for i in range(layers)]
    if len(listed) != layers:
        raise ValueError(f"no_rope_layers has {len(listed)} entries for {layers} layers")
    return [bool(flag) for flag in listed]


def _ropes(
    family: str, values: Mapping[str, Any], kinds: list[str], head_dim: int
) -> tuple[tuple[RopeConfig, ...], tuple[int | None, ...]]:
    """The distinct ropes, and which one each layer uses."""
    given = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    if family == "gemma3_text":
        nested = dict(values.get("rope_parameters") or {})
        full = {"rope_theta": values["rope_theta"], **(nested.get("full_attention") or {})}
        full.update(values.get("rope_scaling") or {})
        local = {"rope_theta": values.get("rope_local_base_freq", 10_000.0), **(nested.get("sliding_attention") or {})}
        both = (RopeConfig.from_hf(full, values, head_dim), RopeConfig.from_hf(local, values, head_dim))
        return both, tuple(int(kind == "sliding_attention") for kind in kinds)
    rope = RopeConfig.from_hf(given, values, head_dim)
    if family == "phi3" and rope.kind == "yarn":
        raise UnsupportedModel("rope type 'yarn' in a phi3 config is ambiguous: use the transformers backend")
    if family != "smollm3":
        return (rope,), (0,) * len(kinds)
    return (rope,), tuple(0 if rotates else None for rotates in _rotary_layers(values, len(kinds)))


def _max_length(family: str, longest: int, ropes: tuple[RopeConfig, ...]) -> int:
    """Scaled ropes reach beyond max_position_embeddings in files that give the length before scaling."""
    rope = ropes[0]
    if rope.kind in ("linear", "dynamic", "yarn") and not family.startswith("gemma"):
        return max(longest, int(rope.context * rope.factor))
    return longest


def _activation(name: object) -> Activation:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UnsupportedModel(f"hidden_act={name!r:.60} is not one of {', '.join(_ACTIVATIONS)}: use transformers")
    return _ACTIVATIONS[name]


def _moe(family: str, values: Mapping[str, Any]) -> MoeConfig | None:
    key = "num_local_experts" if values.get("num_local_experts") else "num_experts"
    if family not in ("mixtral", "qwen2_moe", "qwen3_moe") or not values.get(key):
        return None
    experts = _size(values, key, _MOST_LAYERS)
    return MoeConfig(
        experts=experts,
        per_token=_size(values, "num_experts_per_tok", experts),
        inner=_size(values, "intermediate_size" if family == "mixtral" else "moe_intermediate_size"),
        renormalise=family == "mixtral" or bool(values.get("norm_topk_prob", False)),
        shared_inner=_size(values, "shared_expert_intermediate_size") if family == "qwen2_moe" else None,
    )


def _sparse_layers(values: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    period, dense = int(values.get("decoder_sparse_step", 1)), values.get("mlp_only_layers") or ()
    return tuple(i not in dense and (i + 1) % period == 0 for i in range(layers))


# What a config.json of the family means where it says nothing. Everything else must be in the file.
COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_GEMMA: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    "qwen2": {"sliding_window": 4096},
    "qwen3": {"sliding_window": 4096, "head_dim": 128},
    "smollm3": {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
    "gemma2": {
        **_GEMMA,
        "vocab_size": 256000,
        "sliding_window_pattern": 2,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        **_GEMMA,
        "vocab_size": 262208,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
        "rope_theta": 1_000_000.0,
    },
    "phi3": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "mixtral": {
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
    },
    "qwen2_moe": {"sliding_window": 4096},
    "qwen3_moe": {"sliding_window": 4096, "num_key_value_heads": 4},
}
