"""What each model family is made of, one description per family: every backend, reader and file format reads these.

A description says where a layer has norms, which layers have a sliding window, and which settings its config.json may
have beyond the common ones, with what each means where the file leaves it out: a setting that is not listed here is not
read. `forerun.models.config` makes a `DecoderConfig` of a description and a file, the backends run that, and
`forerun.models.load.gguf_families` finds the same settings and weights in GGUF files. docs/add-a-family.md adds one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
_SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_ONLY_AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GLM4 = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def _in_every_layer(values: Mapping[str, Any], layer: int) -> bool:
    return True


def _but_every_nth(values: Mapping[str, Any], layer: int) -> bool:
    return bool((layer + 1) % int(values["sliding_window_pattern"]))


def _from_a_layer_on(values: Mapping[str, Any], layer: int) -> bool:
    return bool(layer >= values["max_window_layers"])


def _in_the_first_even_layers(values: Mapping[str, Any], layer: int) -> bool:
    return bool(layer % 2 == 0 and layer < values["max_window_layers"])


def _without_positions(values: Mapping[str, Any], layer: int) -> bool:
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
    rope_pairs: Literal["halves", "neighbours"] = "halves"  # which dimensions rotate together
    sinks: bool = False  # every query head has a learned score that takes weight and brings no value
    experts: Literal["mixtral", "qwen", "gpt_oss", "granite", "deepseek", "gemma"] | None = None
    varied: bool = False  # layers of two sizes, some of which read the keys and values of earlier ones (Gemma 4)
    latent: bool = False  # keys and values of all heads are made of one short row per token (MLA)
    recurrent: RecurrentKind | None = None  # what the layers that layer_types calls neither full nor sliding are
    gated_attention: bool = False  # what attention finds is multiplied by a sigmoid of the layer's input
    gated: bool = True  # feed-forward layers multiply an opened gate by a second product
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
_QWEN = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
_GEMMA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "tie_word_embeddings": True,
}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
_GLM = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5}
_DELTA_NET = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_SHARED_EXPERTS = (("mlp.shared_expert.", "mlp.shared_experts."),)
_SIGMOID_ROUTER = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
}
_QWEN3_NEXT = Family(
    "Qwen3NextForCausalLM",
    {**_DELTA_NET, "shared_expert_intermediate_size": 512, "norm_topk_prob": True},
    norm_offset=True,
    qk_norm="head",
    experts="qwen",
    recurrent="delta_net",
    gated_attention=True,
    gguf="qwen3next",
)

_DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    {
        "max_position_embeddings": 4096,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        **_SIGMOID_ROUTER,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
    },
    latent=True,
    rope_pairs="neighbours",
    experts="deepseek",
    names=_SHARED_EXPERTS,
    gguf="deepseek2",
)

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", {"max_position_embeddings": 2048}, gguf="llama", gguf_interleaves=True),
    "mistral": Family(
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        slides=_in_every_layer,
        gguf="llama",
        gguf_interleaves=True,
    ),
    "qwen2": Family("Qwen2ForCausalLM", {**_QWEN, "layer_types": None}, slides=_from_a_layer_on, gguf="qwen2"),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**_QWEN, "layer_types": None, "head_dim": 128},
        qk_norm="head",
        slides=_from_a_layer_on,
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
        slides=_without_positions,
        gguf="smollm3",
        gguf_interleaves=True,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            **_GEMMA,
            "vocab_size": 256000,
            "sliding_window_pattern": 2,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        norms=_SANDWICH,
        norm_offset=True,
        scaled_embedding=True,
        slides=_but_every_nth,
        gguf="gemma2",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            "vocab_size": 262208,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 131072,
            "final_logit_softcapping": None,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        norms=_SANDWICH,
        norm_offset=True,
        scaled_embedding=True,
        qk_norm="head",
        slides=_but_every_nth,
        local_rope=True,
        gguf="gemma3",
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        {
            **_GEMMA,
            "vocab_size": 262144,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 131072,
            "final_logit_softcapping": None,
            "attention_multiplier": 1.0,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25}},
            "global_head_dim": 512,
            "num_global_key_value_heads": None,
            "per_layer_config": None,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 256,
            "enable_moe_block": False,
            "top_k_experts": None,
        },
        norms=_SANDWICH,
        experts="gemma",
        names=(
            ("mlp.gate.weight", "router.proj.weight"),
            ("mlp.gate.", "router."),
            ("mlp.experts.", "experts."),
            ("mlp.norms.before", "pre_feedforward_layernorm_2"),
            ("mlp.norms.after", "post_feedforward_layernorm_2"),
            ("mlp.norms.dense", "post_feedforward_layernorm_1"),
        ),
        scaled_embedding=True,
        qk_norm="head",
        slides=_but_every_nth,
        local_rope=True,
        varied=True,
        gguf="gemma4",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "sliding_window": None},
        slides=_in_every_layer,
        gguf="phi3",
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        norms=_ONLY_AFTER,
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
        norms=_ONLY_AFTER,
        qk_norm="all",
        slides=_but_every_nth,
        local_rope=True,
        gguf="olmo2",
    ),
    "granite": Family(
        "GraniteForCausalLM",
        {
            "max_position_embeddings": 2048,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        gguf="granite",
        gguf_interleaves=True,
    ),
    "glm": Family("GlmForCausalLM", _GLM, rope_pairs="neighbours"),
    "glm4": Family("Glm4ForCausalLM", _GLM, norms=_GLM4, rope_pairs="neighbours", gguf="glm4"),
    "mixtral": Family(
        "MixtralForCausalLM",
        {
            "num_key_value_heads": 8,
            "rope_theta": 1_000_000.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "sliding_window": None,
        },
        slides=_in_every_layer,
        experts="mixtral",
        gguf="llama",
        gguf_interleaves=True,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {**_QWEN, "layer_types": None, "shared_expert_intermediate_size": None},
        slides=_in_the_first_even_layers,
        experts="qwen",
        gguf="qwen2moe",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {**_QWEN, "num_key_value_heads": 4},
        qk_norm="head",
        slides=_in_every_layer,
        experts="qwen",
        gguf="qwen3moe",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_parameters": _GPT_OSS_ROPE,
            "max_position_embeddings": 131072,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "layer_types": None,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        slides=_but_every_nth,
        sinks=True,
        experts="gpt_oss",
        gguf="gpt-oss",
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {
            **_DEEPSEEK_V3.settings,
            "max_position_embeddings": 2048,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "n_group": None,
            "topk_group": None,
            "num_experts_per_tok": None,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 0,
        },
        latent=True,
        rope_pairs="neighbours",
        experts="deepseek",
        names=_SHARED_EXPERTS,
        gguf="deepseek2",
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3,
        class_name="Glm4MoeLiteForCausalLM",
        settings={
            **_DEEPSEEK_V3.settings,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "mlp_layer_types": None,
        },
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            **_SIGMOID_ROUTER,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
        },
        qk_norm="head",
        experts="deepseek",
        names=_SHARED_EXPERTS,
        gguf="glm4moe",
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": True,
            "layer_types": None,
            "full_attn_idxs": None,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
        norms=Norms("operator_norm", None, "ffn_norm", None),
        qk_norm="head",
        recurrent="short_conv",
        spellings={
            "norm_eps": "rms_norm_eps",
            "tie_embedding": "tie_word_embeddings",
            "block_ff_dim": "intermediate_size",
        },
        names=(
            ("self_attn.o_proj.", "self_attn.out_proj."),
            ("q_norm.", "q_layernorm."),
            ("k_norm.", "k_layernorm."),
            ("model.norm.", "model.embedding_norm."),
            ("mlp.gate_proj.", "feed_forward.w1."),
            ("mlp.up_proj.", "feed_forward.w3."),
            ("mlp.down_proj.", "feed_forward.w2."),
        ),
        gguf="lfm2",
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": replace(
        _QWEN3_NEXT,
        class_name="Qwen3_5ForCausalLM",
        settings={**_DELTA_NET, "num_key_value_heads": 4},
        experts=None,
        gguf="qwen35",
    ),
    "qwen3_5_moe_text": replace(_QWEN3_NEXT, class_name="Qwen3_5MoeForCausalLM", gguf="qwen35moe"),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        {
            "max_position_embeddings": 2048,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "shared_intermediate_size": 1024,
            "position_embedding_type": None,
            "layer_types": None,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_head": "auto",
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "time_step_limit": None,
        },
        experts="granite",
        recurrent="mamba2",
        names=(
            ("mlp.gate_up_proj.", "shared_mlp.input_linear."),
            ("mlp.down_proj.", "shared_mlp.output_linear."),
            ("mlp.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
            ("mlp.experts.down_proj", "block_sparse_moe.output_linear.weight"),
            ("mlp.gate.weight", "block_sparse_moe.router.layer.weight"),
        ),
        gguf="granitehybrid",
        gguf_interleaves=True,
    ),
    "nemotron_h": Family(  # a layer is one part: Mamba-2, attention, a feed-forward layer or experts
        "NemotronHForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "hidden_act": "relu2",
            "position_embedding_type": None,
            "layer_types": None,
            "hybrid_override_pattern": None,
            "mamba_n_heads": 128,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "mamba_d_head": 64,
            "mamba_d_conv": 4,
            "time_step_min": 0.001,
            **_SIGMOID_ROUTER,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.0,
            "n_routed_experts": 8,
            "moe_shared_expert_intermediate_size": 7688,
            "moe_latent_size": None,
        },
        norms=Norms("norm", None, None, None),
        experts="deepseek",
        recurrent="mamba2",
        gated=False,
        spellings={
            "layers_block_type": "layer_types",
            "layer_norm_epsilon": "rms_norm_eps",
            "mlp_hidden_act": "hidden_act",
            "mamba_num_heads": "mamba_n_heads",
            "mamba_head_dim": "mamba_d_head",
            "ssm_state_size": "mamba_d_state",
            "n_groups": "mamba_n_groups",
            "conv_kernel": "mamba_d_conv",
        },
        names=(
            *_SHARED_EXPERTS,
            ("model.norm.", "backbone.norm_f."),
            ("model.", "backbone."),
            ("embed_tokens.", "embeddings."),
            ("self_attn.", "mixer."),
            ("mamba.", "mixer."),
            ("mlp.", "mixer."),
        ),
        gguf="nemotron_h",
    ),
}


class Wrapped(NamedTuple):
    """The language part of a checkpoint that reads pictures too, in `text_config` or among the settings themselves."""

    family: str
    settings: Mapping[str, Any] = {}  # where the file has none; others are the family's


# Text alone has the same law with and without the other parts: of mrope's three positions per token all are equal.
WRAPPED: dict[str, Wrapped] = {
    "gemma3": Wrapped("gemma3_text"),
    "gemma4": Wrapped("gemma4_text"),
    "qwen2_vl": Wrapped("qwen2", {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}),
    "qwen2_5_vl": Wrapped("qwen2", {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}),
    "qwen3_vl": Wrapped("qwen3", {"rope_theta": 500_000.0, "max_position_embeddings": 128_000}),
    "mistral3": Wrapped("mistral"),
    "qwen3_5": Wrapped("qwen3_5_text"),
    "qwen3_5_moe": Wrapped("qwen3_5_moe_text"),
}
