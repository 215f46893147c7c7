"""What a description of a model family says; and the families with ordinary attention and one feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Slides = Callable[[Mapping[str, Any], int], bool]
RecurrentKind = Literal["short_conv", "delta_net", "mamba2"]


class Norms(NamedTuple):
    """What the files call a layer's norms; None = there is no norm in that place."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


BEFORE = Norms()
SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
ONLY_AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
GLM4_NORMS = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def in_every_layer(values: Mapping[str, Any], layer: int) -> bool:
    return True


def but_every_nth(values: Mapping[str, Any], layer: int) -> bool:
    return bool((layer + 1) % int(values["sliding_window_pattern"]))


def but_the_first_of_four(values: Mapping[str, Any], layer: int) -> bool:
    return layer % 4 > 0


def from_a_layer_on(values: Mapping[str, Any], layer: int) -> bool:
    return bool(layer >= values["max_window_layers"])


def in_the_first_even_layers(values: Mapping[str, Any], layer: int) -> bool:
    return bool(layer % 2 == 0 and layer < values["max_window_layers"])


def without_positions(values: Mapping[str, Any], layer: int) -> bool:
    return not rotates(values, layer)


def rotates(values: Mapping[str, Any], layer: int) -> bool:
    """Has this layer rotary positions? SmolLM3 leaves some out; its list says 1 where they are *in*."""
    if "no_rope_layer_interval" not in values:
        return True
    listed = values.get("no_rope_layers")
    return bool(listed[layer] if listed else (layer + 1) % int(values["no_rope_layer_interval"]))


@dataclass(frozen=True, slots=True)
class Family:
    """One family; settings are those of config.json, by their names there."""

    class_name: str  # transformers'
    settings: Mapping[str, Any] = field(default_factory=dict)  # that it reads, and their values where the file has none
    norms: Norms = BEFORE
    norm_offset: bool = False  # norms multiply by 1 + weight
    scaled_embedding: bool = False  # by the root of the width
    qk_norm: Literal["head", "all"] | None = None  # queries and keys are normed head by head, or all heads at once
    slides: Slides | None = None  # which layers have the sliding window, where no layer_types say so
    local_rope: bool = False  # layers with a window have a rope of their own
    rope_in_windows: bool = False  # layers without a window have no positions, where there is a window
    rope_pairs: Literal["halves", "neighbours"] = "halves"  # which dimensions rotate together
    sinks: bool = False  # every query head has a learned score that takes weight and brings no value
    experts: Literal["mixtral", "qwen", "gpt_oss", "granite", "deepseek", "gemma"] | None = None
    shared_gate: bool = True  # what its shared expert gives is multiplied by a sigmoid of the row
    varied: bool = False  # layers of two sizes, some of which read the keys and values of earlier ones (Gemma 4)
    latent: bool = False  # keys and values of all heads are made of one short row per token (MLA)
    recurrent: RecurrentKind | None = None  # what the layers that layer_types calls neither full nor sliding are
    gated_attention: bool = False  # what attention finds is multiplied by a sigmoid of the layer's input
    gated: bool = True  # feed-forward layers multiply an opened gate by a second product
    only: Mapping[str, Any] = field(default_factory=dict)  # settings that must be this, where the file has them
    spellings: Mapping[str, str] = field(default_factory=dict)  # its own names of common settings, and ours
    names: tuple[tuple[str, str], ...] = ()  # parts of the names of weights: ours, and those in its files
    gguf: str | None = None  # llama.cpp's name of the architecture
    gguf_interleaves: bool = False  # its converter makes neighbours of the halves that rotate together


# What a config.json means where it says nothing. Everything else must be in the file.
COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}


QWEN: dict[str, Any] = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
GEMMA: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "tie_word_embeddings": True,
}
_MINISTRAL3_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_CWM_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_GLM: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "rope_interleave": True,
}
GRANITE: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
EXAONE: dict[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "layer_types": None,
}

DENSE: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", {"max_position_embeddings": 2048}, gguf="llama", gguf_interleaves=True),
    "mistral": Family(
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        slides=in_every_layer,
        gguf="llama",
        gguf_interleaves=True,
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072, "layer_types": None},
        slides=in_every_layer,
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "rope_parameters": _MINISTRAL3_ROPE,
            "max_position_embeddings": 262144,
            "sliding_window": None,
        },
        slides=in_every_layer,
        gguf="mistral3",
        gguf_interleaves=True,
    ),
    "qwen2": Family("Qwen2ForCausalLM", {**QWEN, "layer_types": None}, slides=from_a_layer_on, gguf="qwen2"),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**QWEN, "layer_types": None, "head_dim": 128},
        qk_norm="head",
        slides=from_a_layer_on,
        gguf="qwen3",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "sliding_window": None,
            "use_sliding_window": False,
            "layer_types": None,
        },
        slides=without_positions,
        gguf="smollm3",
        gguf_interleaves=True,
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288},
        gguf="seed_oss",
    ),
    "cwm": Family(
        "CwmForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "rope_parameters": _CWM_ROPE,
            "max_position_embeddings": 131072,
            "sliding_window": 8192,
            "layer_types": None,
        },
        slides=but_the_first_of_four,
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
        rope_pairs="neighbours",
        gguf="ernie4_5",
    ),
    "helium": Family(
        "HeliumForCausalLM",
        {"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "max_position_embeddings": 4096},
        rope_pairs="neighbours",
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2"},
        gated=False,
        gguf="arcee",
        gguf_interleaves=True,
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        {
            "vocab_size": 256000,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        norm_offset=True,
        scaled_embedding=True,
        gguf="gemma",
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            **GEMMA,
            "vocab_size": 256000,
            "sliding_window_pattern": 2,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        norms=SANDWICH,
        norm_offset=True,
        scaled_embedding=True,
        slides=but_every_nth,
        gguf="gemma2",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            **GEMMA,
            "vocab_size": 262208,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 131072,
            "final_logit_softcapping": None,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        norms=SANDWICH,
        norm_offset=True,
        scaled_embedding=True,
        qk_norm="head",
        slides=but_every_nth,
        local_rope=True,
        gguf="gemma3",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "sliding_window": None},
        slides=in_every_layer,
        gguf="phi3",
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        norms=ONLY_AFTER,
        qk_norm="all",
        gguf="olmo2",
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "layer_types": None,
        },
        norms=ONLY_AFTER,
        qk_norm="all",
        slides=but_every_nth,
        local_rope=True,
        gguf="olmo2",
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        EXAONE,
        norms=ONLY_AFTER,
        qk_norm="head",
        slides=but_every_nth,
        rope_in_windows=True,
        gguf="exaone4",
    ),
    "granite": Family("GraniteForCausalLM", GRANITE, gguf="granite", gguf_interleaves=True),
    "glm": Family("GlmForCausalLM", _GLM, rope_pairs="neighbours"),
    "glm4": Family("Glm4ForCausalLM", _GLM, norms=GLM4_NORMS, rope_pairs="neighbours", gguf="glm4"),
}
