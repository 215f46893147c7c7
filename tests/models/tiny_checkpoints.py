"""Tiny random checkpoints of every family that our decoder runs, with transformers' own model beside each.

They are saved and read back, so that names and config.json are those found on disk.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from forerun.core.types import Needs, TreeBatch
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.families import FAMILIES as DESCRIBED
from forerun.models.hybrid.target import torch_decoder
from forerun.models.native.target import native_decoder
from forerun.testing import FakeSeq

VOCAB = 61
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_YARN = {  # numbers at which rounding the range of blended dimensions, or not, shows
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 100.0,
    "beta_fast": 2.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 100.0,
}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.0, 5.0],
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", "num_key_value_heads": 4},
    "llama3.1": {"model_type": "llama", "rope_parameters": _LLAMA3, "head_dim": 12},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
    },
    "llama-dynamic": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    },
    "llama-yarn": {"model_type": "llama", "head_dim": 16, "rope_parameters": _YARN},
    "smollm2": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "mistral-no-window": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-yarn": {"model_type": "qwen3", "head_dim": 16, "rope_parameters": {**_YARN, "truncate": False}},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2, "tie_word_embeddings": True},
    "smollm3-window": {
        "model_type": "smollm3",
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 5,
    },
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 8,
        "query_pre_attn_scalar": 12,
        "sliding_window": 6,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "final_logit_softcapping": 5.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma3-odd": {  # a group of three queries, no cap, a window of one
        "model_type": "gemma3_text",
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "query_pre_attn_scalar": 20,
        "sliding_window": 1,
        "intermediate_size": 37,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "olmo2": {"model_type": "olmo2", "head_dim": 8, "attention_bias": True},
    "olmo3": {
        "model_type": "olmo3",
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {**_YARN, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
    },
    "glm": {"model_type": "glm", "head_dim": 16, "partial_rotary_factor": 0.5},
    "glm4": {"model_type": "glm4", "head_dim": 12, "partial_rotary_factor": 0.5, "attention_bias": True},
    "phi3": {"model_type": "phi3", "sliding_window": 11},
    "phi3-longrope": {
        "model_type": "phi3",
        "rope_parameters": _LONGROPE,
        "original_max_position_embeddings": 24,
        "tie_word_embeddings": True,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 28, "mlp_only_layers": [1], **_MOE},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 16, "norm_topk_prob": True, **_MOE},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "sliding_window": 6,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "swiglu_limit": 0.6,  # low enough to be reached by many gates and ups
        "rope_parameters": {**_YARN, "truncate": False},
    },
    "gpt_oss-packed": {  # multiples of a block, so that experts can be MXFP4
        "model_type": "gpt_oss",
        "intermediate_size": 96,
        "head_dim": 8,
        "sliding_window": 9,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 2.0,
        "rope_parameters": {**_YARN, "truncate": False},
    },
    "gpt_oss-odd": {  # a group of three queries, a window of one, a last layer that slides
        "model_type": "gpt_oss",
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "intermediate_size": 37,
        "sliding_window": 1,
        "num_local_experts": 5,
        "num_experts_per_tok": 1,
        "swiglu_alpha": 2.5,
        "swiglu_limit": 0.4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150.0},
    },
}
_SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
FAMILIES |= {
    "glm4_moe": {  # as GLM-4.5: queries and keys are normed, biases
        "model_type": "glm4_moe",
        **_SIGMOID,
        "head_dim": 12,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "glm4_moe-groups": {"model_type": "glm4_moe", **_SIGMOID, "n_group": 4, "topk_group": 2, "n_shared_experts": 2},
}
_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES |= {
    "ministral": {"model_type": "ministral", "head_dim": 12, "sliding_window": 5, "layer_types": _WINDOWS},
    "ministral3": {  # queries are scaled from a position on that no other test reaches
        "model_type": "ministral3",
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            **_YARN,
            "original_max_position_embeddings": 256,
            "mscale": 0.8,
            "mscale_all_dim": 1.3,
            "llama_4_scaling_beta": 0.7,
        },
    },
    "gemma": {"model_type": "gemma", "head_dim": 12, "num_attention_heads": 3, "num_key_value_heads": 1},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 12, "attention_out_bias": True, "mlp_bias": True},
    "cwm": {
        "model_type": "cwm",
        "head_dim": 16,
        "sliding_window": 6,
        "rope_parameters": {**_LLAMA3, "factor": 16.0},
        "bos_token_id": 0,
    },
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 12, "use_bias": True},
    "exaone4": {"model_type": "exaone4", "sliding_window": 6, "sliding_window_pattern": 2, "rope_parameters": _LLAMA3},
    "exaone4-no-window": {
        "model_type": "exaone4",
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
        "tie_word_embeddings": True,
    },
    "arcee": {"model_type": "arcee", "head_dim": 12, "rope_parameters": _YARN, "attention_bias": True},
    "helium": {"model_type": "helium", "head_dim": 8, "attention_bias": True},
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 20},
    "flex_olmo": {
        "model_type": "flex_olmo",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 20,
        "norm_topk_prob": True,
    },
    "granitemoe": {
        "model_type": "granitemoe",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 20,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
    },
    "granitemoeshared": {
        "model_type": "granitemoeshared",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 20,
        "shared_intermediate_size": 28,
        "attention_multiplier": 0.35,
        "residual_multiplier": 0.6,
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 20,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 0,
        "moe_layer_end_index": 1,
    },
    "dots1": {"model_type": "dots1", **_SIGMOID, "n_shared_experts": 2, "sliding_window": 6, "max_window_layers": 2},
    "exaone_moe": {
        "model_type": "exaone_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "num_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "sliding_window": 6,
        "layer_types": _WINDOWS,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 20,
        "head_dim": 16,
        "rotary_dim": 8,
    },
    "solar_open": {"model_type": "solar_open", **_SIGMOID, "head_dim": 12, "attention_bias": True},
}
_DELTA_NET = {
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_MAMBA = {
    "max_position_embeddings": 512,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 28,
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
}
HYBRIDS: dict[str, dict[str, Any]] = {  # layers with a recurrent state: HybridDecoder's
    "lfm2": {
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "max_position_embeddings": 512,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "block_multiple_of": 8,
    },
    "lfm2-odd": {  # biases, a longer kernel, no adjusted width, attention last
        "model_type": "lfm2",
        "hidden_size": 36,
        "num_attention_heads": 6,
        "max_position_embeddings": 512,
        "layer_types": ["conv", "conv", "full_attention"],
        "conv_bias": True,
        "conv_L_cache": 5,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False,
    },
    "lfm2-biased": {  # the same for the native kernels, whose heads have a multiple of four dimensions
        "model_type": "lfm2",
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "layer_types": ["conv", "conv", "full_attention"],
        "conv_bias": True,
        "conv_L_cache": 5,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False,
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "num_hidden_layers": 4,
        "max_position_embeddings": 512,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "routed_scaling_factor": 1.7,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_DELTA_NET,
        **_MOE,
        "shared_expert_intermediate_size": 28,
        "mlp_only_layers": [1],
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        **_DELTA_NET,
        "linear_conv_kernel_dim": 3,
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        **_DELTA_NET,
        **_MOE,
        "shared_expert_intermediate_size": 28,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "granite4": {
        "model_type": "granitemoehybrid",
        **_MAMBA,
        "num_local_experts": 0,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
        "mamba_n_groups": 2,
    },
    "granite4-experts": {
        "model_type": "granitemoehybrid",
        **_MAMBA,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "position_embedding_type": "rope",
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "tie_word_embeddings": True,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "max_position_embeddings": 512,
        "head_dim": 12,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 6,
        "ssm_state_size": 12,
        "n_groups": 2,
        "chunk_size": 16,
        "time_step_min": 0.6,
    },
    "nemotron_h-experts": {
        "model_type": "nemotron_h",
        "max_position_embeddings": 512,
        "head_dim": 12,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 6,
        "ssm_state_size": 12,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 28,
        "routed_scaling_factor": 1.7,
        "n_group": 4,
        "topk_group": 2,
    },
}
_LATENT = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    **_SIGMOID,
}
_YARN_MSCALE = {**_YARN, "factor": 8.0, "mscale": 0.8, "mscale_all_dim": 1.3}
LATENT: dict[str, dict[str, Any]] = {  # multi-head latent attention: RowDecoder's, and the native kernels'
    "deepseek_v2": {  # as V2-Lite: queries of the layer's input, greedy choice
        "model_type": "deepseek_v2",
        **_LATENT,
        "q_lora_rank": None,
        "n_shared_experts": 2,
    },
    "deepseek_v2-groups": {
        "model_type": "deepseek_v2",
        **_LATENT,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "rope_parameters": _YARN_MSCALE,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_LATENT,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": _YARN_MSCALE,
    },
    "deepseek_v3-odd": {  # one group, biases, halves that rotate, weights that do not sum to 1, no q_lora
        "model_type": "deepseek_v3",
        **_LATENT,
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": None,
        "kv_lora_rank": 7,
        "qk_rope_head_dim": 6,
        "attention_bias": True,
        "rope_interleave": False,
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 3,
        "first_k_dense_replace": 0,
    },
    "deepseek_v3-wide": {  # three heads, no size a multiple of another, values longer than cached rows
        "model_type": "deepseek_v3",
        **_LATENT,
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 13,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 7,
        "qk_rope_head_dim": 4,
        "v_head_dim": 29,
        "rms_norm_eps": 0.5,  # which norms within attention do not have
        "attention_bias": True,
        "n_group": 1,
        "topk_group": 1,
    },
    "glm4_moe_lite": {  # attention in whole blocks of 32
        "model_type": "glm4_moe_lite",
        **_LATENT,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
}

_SIZED = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "max_position_embeddings": 512,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": VOCAB,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 100.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}
SIZED: dict[str, dict[str, Any]] = {  # layers of different sizes: RowDecoder's, and the native kernels'
    "gemma4": {  # as E2B: layers that share keys and values, twice as wide, inputs of every layer
        **_SIZED,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 5.0,
    },
    "gemma4-equal": {  # as 31B: values that are keys in layers without a window, no inputs of layers
        **_SIZED,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 1,
        "attention_bias": True,
    },
    "gemma4-experts": {  # as 26B-A4B
        **_SIZED,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
    },
    "gemma4-odd": {  # a group of three queries, one size of heads rotates whole, inputs wider than what is within
        **_SIZED,
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "num_hidden_layers": 5,
        "head_dim": 20,
        "global_head_dim": 12,
        "intermediate_size": 37,
        "hidden_size_per_layer_input": 41,
        "sliding_window": 1,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
    },
}


# All of whose parts another family has: the fast tier computes their logits, and leaves the rest to the long one.
RELATIVES = (
    "cwm", "dots1", "ernie4_5", "exaone4-no-window", "exaone_moe", "gemma", "granitemoe", "helium", "ministral",
    "olmoe", "seed_oss", "solar_open",
)  # fmt: skip


def in_tiers(names: Iterable[str]) -> list[Any]:
    """Parameters of a test."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in RELATIVES else name for name in names]


def make_reference(name: str, more: dict[str, Any] | None = None) -> Any:
    """transformers' model of a family with random weights, norms and biases included."""
    settings = {**_BASE, **{**FAMILIES, **HYBRIDS, **LATENT, **SIZED}[name], **(more or {})}
    torch.manual_seed(sum(name.encode()))
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = (
        AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
        .float()
        .eval()
    )
    offset = DESCRIBED[config.model_type].norm_offset
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.normal_(0.0, 0.25)
            if "norm" in key and (not offset or "linear_attn" in key):
                weight.add_(1.0)
        for key, buffer in model.named_buffers():
            if key.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.3)
            if key.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model


def save(model: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and weights as they lie on disk."""
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def make_decoder(
    config: dict[str, Any], weights: dict[str, Tensor], kv_slots: int | None = None, *, native: bool = True
) -> Decoder:
    """In torch; what torch runs row by row on the native kernels, if these can and `native` does not say otherwise."""
    parsed = DecoderConfig.from_hf(config)
    if native and parsed.special is not None:
        made = native_decoder(parsed, weights, "float32", kv_slots, None)
        if made is not None:
            return made
    return torch_decoder(parsed)(parsed, weights, dtype=torch.float32, device="cpu", kv_slots=kv_slots)


def reference_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """[n, V] of a plain pass without a cache."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def score_chain(decoder: Decoder, tokens: Sequence[int], cached: int, max_length: int) -> Tensor:
    """[n - cached, V] with the first tokens prefilled and the others scored as a chain."""
    seq = FakeSeq(7, list(tokens[: cached + 1]), max_length=max_length)
    decoder.prefill([seq], Needs())
    logits = decoder.score([seq], TreeBatch.chains([list(tokens[cached:])]), Needs()).logits
    decoder.release(seq)
    assert logits is not None
    return logits
