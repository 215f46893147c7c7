"""GGUF families: from a GGUF file's metadata to a config in Hugging Face's settings.

Names of weights in that config are ours, whatever the family's own files call them (gguf_names.py). Which layers of a
hybrid are which is read off their tensors.

Two kinds of rope scaling are not named by the file but stored as tables of divisors per frequency: Llama 3's
(`rope_freqs`), recognised by computing the table from the parameters that Llama 3 models use, and Phi's long rope. The
third such table is Gemma 4's: what does not rotate is divided by 1e30.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from forerun.core.errors import DamagedFile, ForerunError, UnsupportedModel
from forerun.models.families import FAMILIES
from forerun.models.load.gguf import GgufFile, Metadata
from forerun.models.load.gguf_names import LAYER_TENSOR
from forerun.models.load.quants import dequantize

# where the settings of a config come from
_KEYS = {
    "vocab_size": ".vocab_size",
    "hidden_size": ".embedding_length",
    "num_hidden_layers": ".block_count",
    "num_attention_heads": ".attention.head_count",
    "num_key_value_heads": ".attention.head_count_kv",
    "head_dim": ".attention.key_length",
    "intermediate_size": ".feed_forward_length",
    "moe_intermediate_size": ".expert_feed_forward_length",
    "moe_shared_expert_intermediate_size": ".expert_shared_feed_forward_length",
    "shared_expert_intermediate_size": ".expert_shared_feed_forward_length",
    "num_local_experts": ".expert_count",
    "num_experts": ".expert_count",
    "num_experts_per_tok": ".expert_used_count",
    "top_k_experts": ".expert_used_count",
    "rms_norm_eps": ".attention.layer_norm_rms_epsilon",
    "max_position_embeddings": ".context_length",
    "sliding_window": ".attention.sliding_window",
    "rope_theta": ".rope.freq_base",
    "partial_rotary_factor": ".rope.dimension_count",
    "original_max_position_embeddings": ".rope.scaling.original_context_length",
    "rope_scaling": ".rope.scaling.type",
    "rope_type": ".rope.scaling.type",
    "factor": ".rope.scaling.factor",
    "query_pre_attn_scalar": ".attention.key_length",
    "final_logit_softcapping": ".final_logit_softcapping",
    "attn_logit_softcapping": ".attn_logit_softcapping",
    "embedding_multiplier": ".embedding_scale",
    "attention_multiplier": ".attention.scale",
    "residual_multiplier": ".residual_scale",
    "logits_scaling": ".logit_scale",
    "n_routed_experts": ".expert_count",
    "n_shared_experts": ".expert_shared_count",
    "shared_intermediate_size": ".expert_shared_feed_forward_length",
    "first_k_dense_replace": ".leading_dense_block_count",
    "routed_scaling_factor": ".expert_weights_scale",
    "scoring_func": ".expert_gating_func",
    "n_group": ".expert_group_count",
    "topk_group": ".expert_group_used_count",
    "q_lora_rank": ".attention.q_lora_rank",
    "kv_lora_rank": ".attention.kv_lora_rank",
    "v_head_dim": ".attention.value_length_mla",
    "conv_L_cache": ".shortconv.l_cache",
    "linear_conv_kernel_dim": ".ssm.conv_kernel",
    "linear_key_head_dim": ".ssm.state_size",
    "linear_num_key_heads": ".ssm.group_count",
    "linear_num_value_heads": ".ssm.time_step_rank",
    "mamba_d_conv": ".ssm.conv_kernel",
    "mamba_d_state": ".ssm.state_size",
    "mamba_n_groups": ".ssm.group_count",
    "mamba_n_heads": ".ssm.time_step_rank",
    "global_head_dim": ".attention.key_length",
    "num_kv_shared_layers": ".attention.shared_kv_layers",
    "hidden_size_per_layer_input": ".embedding_length_per_layer_input",
}
# of these, the ones that a family reads and a file may have
_REALS = (
    "final_logit_softcapping", "attn_logit_softcapping", "embedding_multiplier", "attention_multiplier",
    "residual_multiplier", "logits_scaling",
)  # fmt: skip

_SIGMOID = 2  # what llama.cpp calls the function of a router

Extra = Callable[[Metadata, GgufFile], dict[str, Any]]


def _llama_extra(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    bias = "blk.0.attn_q.bias" in file.tensors
    return {"attention_bias": bias, "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}


def _mixtral_extra(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.integer(".expert_count"),
        "num_experts_per_tok": metadata.integer(".expert_used_count"),
    }


def _qwen_moe_extra(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    stacked = file.tensors.get("blk.0.ffn_gate_exps.weight")
    width = stacked.shape[1] if stacked is not None and len(stacked.shape) == 3 else None
    settings = {
        "num_experts": metadata.integer(".expert_count"),
        "num_experts_per_tok": metadata.integer(".expert_used_count"),
        "moe_intermediate_size": metadata.integer(".expert_feed_forward_length", width),
        "norm_topk_prob": metadata.architecture not in ("qwen2moe", "olmoe"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    shared = file.tensors.get("blk.0.ffn_gate_shexp.weight")
    if shared is not None:
        length = metadata.integer(".expert_shared_feed_forward_length", shared.shape[0])
        settings["shared_expert_intermediate_size"] = length
    return settings


def _oss_extra(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    inner = metadata.integer(".expert_feed_forward_length", metadata.integer(".feed_forward_length"))
    return {**_mixtral_extra(metadata, file), "intermediate_size": inner, "attention_bias": True}


def _gemma_extra(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    head_dim = metadata.integer(".attention.key_length", 256)
    # The 27B models alone scale their scores by the width per head instead of the head's own width.
    per_head = metadata.integer(".embedding_length") // metadata.integer(".attention.head_count")
    largest = (metadata.architecture, metadata.integer(".block_count")) in (("gemma2", 46), ("gemma3", 62))
    default = 4096 if metadata.architecture == "gemma2" else 1024
    return {
        "sliding_window": metadata.integer(".attention.sliding_window", default),
        "query_pre_attn_scalar": per_head if largest else head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _phi_extra(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    context = metadata.integer(".context_length")
    window = metadata.integer(".attention.sliding_window", 0, least=0)
    original = metadata.integer(".rope.scaling.original_context_length", context)
    return {"sliding_window": window or None, "original_max_position_embeddings": original}


def _smollm3_extra(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    layers = metadata.integer(".block_count")
    return {
        "no_rope_layer_interval": 4,
        "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(layers)],
        "use_sliding_window": False,
    }


def _granite_moe_extra(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    shared = metadata.integer(".expert_shared_feed_forward_length", 0, least=0)
    return {**_llama_extra(metadata, file), **_mixtral_extra(metadata, file), "shared_intermediate_size": shared}


def _exaone_extra(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    """Which layers slide, where the file lists them; EXAONE 4's first files do not."""
    listed = ".attention.sliding_window_pattern"
    slides = metadata.items(listed, bool) if isinstance(metadata.find(listed), list) else []
    kinds = ["sliding_attention" if one else "full_attention" for one in slides]
    if not metadata.find(".attention.sliding_window"):
        kinds = ["full_attention"] * metadata.integer(".block_count")
    return {"layer_types": kinds[: _count_layers(metadata, file)] or None}


def _glm4_extra(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    """The converter makes halves of the neighbours that rotate together in models that read pictures."""
    sections = metadata.find(".rope.dimension_sections")
    return {**_llama_extra(metadata, file), "rope_interleave": not (isinstance(sections, list) and any(sections))}


def _sigmoid_moe_extra(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    """GLM-4.5's and DeepSeek's experts; MiniMax's and LFM2's files do not say that weights sum to 1."""
    normed = metadata.architecture in ("minimax-m2", "lfm2moe")
    count = metadata.integer(".expert_count", 0, least=0)
    return {
        "n_routed_experts": count or None,
        "num_experts_per_tok": metadata.integer(".expert_used_count", 0, least=0) or None,
        "moe_intermediate_size": metadata.integer(".expert_feed_forward_length"),
        "n_shared_experts": metadata.integer(".expert_shared_count", 0, least=0),
        "first_k_dense_replace": metadata.integer(".leading_dense_block_count", 0, least=0),
        "routed_scaling_factor": metadata.real(".expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.flag(".expert_weights_norm", normed),
        "n_group": metadata.integer(".expert_group_count", 1),
        "topk_group": metadata.integer(".expert_group_used_count", 1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _latent_extra(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    """Newer files have the lengths of cached rows under the ordinary keys."""
    rotary = metadata.integer(".rope.dimension_count")
    both = metadata.integer(".attention.key_length_mla", metadata.integer(".attention.key_length"))
    settings = {
        **_sigmoid_moe_extra(metadata, file),
        "num_key_value_heads": metadata.integer(".attention.head_count"),
        "q_lora_rank": metadata.integer(".attention.q_lora_rank", 0, least=0) or None,
        "kv_lora_rank": metadata.integer(".attention.kv_lora_rank"),
        "head_dim": rotary,
        "qk_nope_head_dim": both - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": metadata.integer(".attention.value_length_mla", metadata.integer(".attention.value_length")),
    }
    if model_type_of(metadata) == "deepseek_v2":
        settings["topk_method"] = "greedy" if settings["n_group"] == 1 else "group_limited_greedy"
    return settings


def _states_extra(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    """Of a hybrid: which layers keep a state, by their tensors, and its sizes."""
    family = FAMILIES[model_type_of(metadata)]
    word = {"short_conv": "conv", "delta_net": "linear_attention", "mamba2": "mamba", None: ""}[family.recurrent]
    kinds = list[str]()
    for at in (f"blk.{i}." for i in range(_count_layers(metadata, file))):
        alone = not family.gated and not any(f"{at}{part}.weight" in file.tensors for part in ("ssm_in", "attn_output"))
        alone_kind = "moe" if f"{at}ffn_gate_inp.weight" in file.tensors else "mlp"
        kinds.append(alone_kind if alone else "full_attention" if f"{at}attn_output.weight" in file.tensors else word)
    settings: dict[str, Any] = {"layer_types": kinds}
    if family.recurrent == "short_conv":
        return settings | {"conv_L_cache": metadata.integer(".shortconv.l_cache"), "block_auto_adjust_ff_dim": False}
    heads, inner = metadata.integer(".ssm.time_step_rank"), metadata.integer(".ssm.inner_size")
    if inner % heads:
        metadata.wrong(".ssm.inner_size", inner, f"a multiple of {heads} heads")
    sizes = [metadata.integer(key) for key in (".ssm.conv_kernel", ".ssm.group_count", ".ssm.state_size")]
    names = ["conv_kernel_dim", "num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim"]
    if family.recurrent == "mamba2":
        names = ["d_conv", "n_groups", "d_state", "n_heads", "d_head"]
    start = "mamba_" if family.recurrent == "mamba2" else "linear_"
    settings |= {start + name: size for name, size in zip(names, [*sizes, heads, inner // heads], strict=True)}
    if metadata.architecture.startswith("qwen35"):  # the converter reorders them
        settings["linear_heads_in_turns"] = True
    if family.experts == "qwen":
        settings |= _qwen_moe_extra(metadata, file)
    return settings


def _nemotron_extra(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    settings = _states_extra(metadata, file)
    if "mlp" in settings["layer_types"]:
        dense = file.tensors.get(f"blk.{settings['layer_types'].index('mlp')}.ffn_up.weight")
        settings["intermediate_size"] = 0 if dense is None else dense.shape[0]
    if "moe" in settings["layer_types"]:
        shared = metadata.integer(".expert_shared_feed_forward_length")
        settings |= {**_sigmoid_moe_extra(metadata, file), "moe_shared_expert_intermediate_size": shared}
    return settings


def _granite_hybrid_extra(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    experts, settings = metadata.integer(".expert_count", 0, least=0), _states_extra(metadata, file)
    dense = "ffn_up_shexp" if experts else "ffn_up"
    width = file.tensors.get(f"blk.0.{dense}.weight")
    whole, inner = settings["mamba_n_heads"] * settings["mamba_d_head"], metadata.integer(".embedding_length")
    return settings | {
        "mamba_expand": whole // inner,
        "num_local_experts": experts,
        "num_experts_per_tok": metadata.integer(".expert_used_count", 0, least=0),
        "shared_intermediate_size": metadata.integer(
            ".expert_shared_feed_forward_length", 0 if width is None else width.shape[0]
        ),
        "position_embedding_type": "rope" if metadata.flag(".rope.scaling.finetuned", False) else None,
    }


def _gemma4_extra(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    layers = metadata.integer(".block_count")
    slides = metadata.items(".attention.sliding_window_pattern", bool, required=True)
    heads, inners = metadata.find(".attention.head_count_kv"), metadata.find(".feed_forward_length")
    if len(slides) != layers or any(len(one) != layers for one in (heads, inners) if isinstance(one, list)):
        metadata.wrong(".attention.sliding_window_pattern", "a list", f"a list of {layers}, as the others by layer")
    kinds = ["sliding_attention" if one else "full_attention" for one in slides]
    full = kinds.index("full_attention") if "full_attention" in kinds else layers - 1
    by_layer = heads if isinstance(heads, list) else [metadata.integer(".attention.head_count_kv")] * layers
    wide = inners if isinstance(inners, list) else [metadata.integer(".feed_forward_length")]
    return {
        "layer_types": kinds,
        "head_dim": metadata.integer(".attention.key_length_swa"),
        "global_head_dim": metadata.integer(".attention.key_length"),
        "num_key_value_heads": by_layer[kinds.index("sliding_attention") if any(slides) else full],
        "num_global_key_value_heads": by_layer[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": metadata.integer(".attention.shared_kv_layers", 0, least=0),
        "intermediate_size": wide[0],
        "use_double_wide_mlp": wide[-1] == 2 * wide[0],
        "hidden_size_per_layer_input": metadata.integer(".embedding_length_per_layer_input", 0, least=0),
        "vocab_size_per_layer_input": file.tensors["token_embd.weight"].shape[0],
        "enable_moe_block": "blk.0.ffn_gate_inp.weight" in file.tensors,
        "num_experts": metadata.integer(".expert_count", 0, least=0),
        "top_k_experts": metadata.integer(".expert_used_count", 0, least=0),
        "moe_intermediate_size": metadata.integer(".expert_feed_forward_length", 0, least=0),
        "hidden_activation": "gelu_pytorch_tanh",
    }


# What a file says of a family beyond the settings that all have.
_EXTRAS: dict[str, Extra] = {
    "llama": _llama_extra,
    "qwen2": lambda metadata, file: {"use_sliding_window": False},
    "qwen3": _llama_extra,
    "smollm3": _smollm3_extra,
    "gemma2": _gemma_extra,
    "gemma3_text": _gemma_extra,
    "granite": _llama_extra,
    "glm4": _glm4_extra,
    "exaone4": _exaone_extra,
    "arcee": _llama_extra,
    "phi3": _phi_extra,
    "mixtral": _mixtral_extra,
    "qwen2_moe": _qwen_moe_extra,
    "qwen3_moe": _qwen_moe_extra,
    "gpt_oss": _oss_extra,
    "olmoe": _qwen_moe_extra,
    "granitemoe": _granite_moe_extra,
    "granitemoeshared": _granite_moe_extra,
    "glm4_moe": _sigmoid_moe_extra,
    "dots1": _sigmoid_moe_extra,
    "minimax_m2": _sigmoid_moe_extra,
    "exaone_moe": lambda metadata, file: _sigmoid_moe_extra(metadata, file) | _exaone_extra(metadata, file),
    "deepseek_v2": _latent_extra,
    "deepseek_v3": _latent_extra,
    "lfm2": _states_extra,
    "lfm2_moe": lambda metadata, file: _sigmoid_moe_extra(metadata, file) | _states_extra(metadata, file),
    "qwen3_next": _states_extra,
    "qwen3_5_text": _states_extra,
    "qwen3_5_moe_text": _states_extra,
    "nemotron_h": _nemotron_extra,
    "granitemoehybrid": _granite_hybrid_extra,
    "gemma4_text": _gemma4_extra,
}


# Other names of architectures that are described; of models that read pictures, the file has the language part alone.
_MORE_NAMES = {"nemotron_h_moe": "nemotron_h", "qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3_moe"}


def model_type_of(metadata: Metadata) -> str:
    """Hugging Face's name of a file's family; one architecture name, "llama", covers three."""
    known = {family.gguf: name for name, family in reversed(FAMILIES.items()) if family.gguf is not None}
    known |= _MORE_NAMES
    found = known.get(metadata.architecture)
    if found is None:
        raise UnsupportedModel(
            f"{metadata.path} holds architecture {metadata.architecture[:40]!r}; known in GGUF: "
            f"{', '.join(sorted(known))}. Use the model's Hugging Face folder instead"
        )
    if found == "llama" and metadata.find(".expert_count"):
        return "mixtral"
    if found == "llama" and metadata.find(".attention.sliding_window"):
        return "mistral"
    if found == "granitemoe" and metadata.find(".expert_shared_feed_forward_length"):
        return "granitemoeshared"
    if found == "deepseek_v2" and metadata.find(".expert_gating_func") == _SIGMOID:
        return "deepseek_v3"
    return "olmo3" if found == "olmo2" and metadata.find(".attention.sliding_window") else found


def config_of(file: GgufFile) -> dict[str, Any]:
    metadata = Metadata.of(file)
    model_type = model_type_of(metadata)
    family, layers = FAMILIES[model_type], _count_layers(metadata, file)
    width, heads = metadata.integer(".embedding_length"), metadata.integer(".attention.head_count")
    rope_width = metadata.integer(".rope.dimension_count", max(1, width // heads))
    head_dim = metadata.integer(
        ".attention.key_length", rope_width if family.gguf_interleaves else max(1, width // heads)
    )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != width:
        raise DamagedFile(f"{file.path} is damaged: it has no token_embd.weight of width {width}; pull it again")
    config = {
        "model_type": model_type,
        "architectures": [family.class_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "named_as_llama": True,
        "num_key_value_heads": _largest(metadata, ".attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": _largest(metadata, ".feed_forward_length", 0, least=0),
        "hidden_act": family.settings.get("hidden_act", "silu"),
        "rms_norm_eps": metadata.real(".attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer(".context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id", -1, least=0),
        "eos_token_id": metadata.integer("tokenizer.ggml.eos_token_id", -1, least=0),
        "pad_token_id": metadata.integer("tokenizer.ggml.padding_token_id", -1, least=0),
    }
    config |= {key: None for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] == -1}
    for key in _REALS:
        if key in family.settings and metadata.find(_KEYS[key]):
            config[key] = metadata.real(_KEYS[key])
    if family.slides is not None:
        config["sliding_window"] = metadata.integer(".attention.sliding_window", 0, least=0) or None
    extra = _EXTRAS[model_type](metadata, file) if model_type in _EXTRAS else {}
    if family.latent:
        head_dim = rope_width
    return config | rope_config(metadata, file, head_dim) | extra


def _largest(metadata: Metadata, key: str, default: int, least: int = 1) -> int:
    """A size, or the largest of those of all layers."""
    if not isinstance(metadata.find(key), list):
        return metadata.integer(key, default, least)
    return max(metadata.items(key, int), default=default)


def in_keys(error: ForerunError, metadata: Metadata) -> str:
    """What is wrong with a config that was made of a file, told in the keys of the file."""
    told = re.sub(
        r"\w+", lambda word: metadata.architecture + _KEYS[word[0]] if word[0] in _KEYS else word[0], str(error)
    )
    told = re.sub(r"config\.json of \w+", "its metadata", told).replace("fetch it", "pull it")
    told = re.sub(r": use (the )?transformers.*", "; use the model's Hugging Face folder instead", told)
    return f"{metadata.path} cannot be run: {told}"


def _count_layers(metadata: Metadata, file: GgufFile) -> int:
    """Those that write; layers that only draft come behind them."""
    layers, drafts = metadata.integer(".block_count"), metadata.integer(".nextn_predict_layers", 0, least=0)
    held = {int(found[1]) for name in file.tensors if (found := LAYER_TENSOR.fullmatch(name))}
    whole = held
    if FAMILIES[model_type_of(metadata)].recurrent is None:
        whole = {i for i in held if f"blk.{i}.attn_output.weight" in file.tensors}
    if layers > len(file.tensors) or drafts >= layers or not whole >= set(range(layers - drafts)):
        raise DamagedFile(f"{file.path} is damaged: it lacks some of its {layers} layers; pull it again")
    if max(held) >= layers:
        key = f"{metadata.architecture}.block_count"
        raise DamagedFile(
            f"{file.path} is damaged: it has tensors of {max(held) + 1} layers, but {key} is {layers}; pull it again"
        )
    return layers - drafts


_LLAMA3_CONTEXTS = (8192, 4096, 2048, 16384, 32768)


def rope_config(metadata: Metadata, file: GgufFile, head_dim: int) -> dict[str, Any]:
    """`rope_theta`, `rope_parameters` (transformers 5's form) and, if scaled, `rope_scaling` (the older)."""
    theta = metadata.real(".rope.freq_base", 10000.0)
    if metadata.architecture == "gemma4":
        return {"rope_theta": theta, "rope_parameters": _gemma4_ropes(metadata, file, theta)}
    width = metadata.integer(".rope.dimension_count", head_dim)
    partial = {"partial_rotary_factor": width / head_dim} if width != head_dim else {}
    scaling = _scaling(metadata, file, theta, width)
    plain = {"rope_type": "default", "rope_theta": theta}
    config: dict[str, Any] = {"rope_theta": theta, **partial}
    if FAMILIES[model_type_of(metadata)].local_rope:
        local = metadata.real(".rope.freq_base_swa", 10000.0 if metadata.architecture == "gemma3" else theta)
        config["rope_local_base_freq"] = local
        config["rope_parameters"] = {
            "full_attention": plain | scaling,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    else:
        config["rope_parameters"] = plain | scaling | partial
    return config | ({"rope_scaling": scaling} if scaling else {})


def _gemma4_ropes(metadata: Metadata, file: GgufFile, theta: float) -> dict[str, Any]:
    """In layers without a window the table divides what does not rotate by 1e30, and the rest by 1."""
    table = _table(file, "rope_freqs.weight") if "rope_freqs.weight" in file.tensors else [1.0]
    turns = table.count(1.0)
    if table != [1.0] * turns + [table[-1]] * (len(table) - turns) or (turns < len(table) and table[-1] < 1e20):
        raise UnsupportedModel(f"{file.path} scales its rope by a table that is not Gemma 4's; use its other formats")
    local, width = (
        metadata.integer(".attention.key_length_swa"),
        metadata.integer(".rope.dimension_count_swa", 0, least=0),
    )
    partial = {"partial_rotary_factor": width / local} if width not in (0, local) else {}
    return {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": turns / len(table),
            "rope_theta": theta,
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": metadata.real(".rope.freq_base_swa", 10000.0),
            **partial,
        },
    }


def _scaling(metadata: Metadata, file: GgufFile, theta: float, width: int) -> dict[str, Any]:
    if "rope_factors_long.weight" in file.tensors:
        return _long_rope(metadata, file)
    if "rope_freqs.weight" in file.tensors:
        return _llama3(file, theta, width)
    kind = metadata.text(".rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{file.path} scales its rope by {kind[:40]!r}; known: linear, yarn, longrope, llama3")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata.real(".rope.scaling.factor")}
    if kind == "yarn":
        original = metadata.integer(".rope.scaling.original_context_length", 0, least=0)
        scaling |= {"original_max_position_embeddings": original} if original else {}
        usual = FAMILIES[model_type_of(metadata)].settings.get("rope_parameters", {})
        scaling |= {"truncate": usual["truncate"]} if "truncate" in usual else {}  # no file says it
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if metadata.find(f".rope.scaling.{theirs}") is not None:
                scaling[ours] = metadata.real(f".rope.scaling.{theirs}")
        if metadata.find(".attention.temperature_scale"):
            scaling["llama_4_scaling_beta"] = metadata.real(".attention.temperature_scale")
        if (
            metadata.find(".rope.scaling.yarn_log_multiplier") is not None
        ):  # a tenth of what authors call mscale, mostly
            tenth = 1 if metadata.architecture == "mistral3" else 10
            scale = round(tenth * metadata.real(".rope.scaling.yarn_log_multiplier"), 6)
            scaling |= {"mscale": scale, "mscale_all_dim": scale}
    return scaling


def _table(file: GgufFile, name: str) -> list[float]:
    info = file.tensors.get(name)
    if info is None or len(info.shape) != 1:
        raise DamagedFile(f"{file.path} is damaged: {name} is not a list of factors; pull it again")
    factors: list[float] = dequantize(file.blocks(name)).tolist()
    return factors


def _long_rope(metadata: Metadata, file: GgufFile) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": _table(file, "rope_factors_long.weight"),
        "short_factor": _table(file, "rope_factors_short.weight"),
        "original_max_position_embeddings": metadata.integer(".rope.scaling.original_context_length"),
    }
    if metadata.find(".rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = metadata.real(".rope.scaling.attn_factor")
    return scaling


def _llama3(file: GgufFile, theta: float, width: int) -> dict[str, Any]:
    given = _table(file, "rope_freqs.weight")
    factor = given[-1]
    if all(value == 1.0 for value in given):
        return {}
    for context in _LLAMA3_CONTEXTS:
        made = _llama3_table(theta, width, factor, context)
        if len(made) == len(given) and all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(made, given, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": context,
            }
    raise UnsupportedModel(
        f"{file.path} scales its rope by a table that is not Llama 3's; use the model's Hugging Face folder"
    )


def _llama3_table(theta: float, width: int, factor: float, context: int) -> list[float]:
    """What divides each frequency: 1 below a wavelength of context / 4, `factor` above context."""
    divisors = []
    for i in range(0, width, 2):
        rotations = context / (2 * math.pi * theta ** (i / width))  # rotations within the original context
        if rotations > 4.0:
            divisors.append(1.0)
        elif rotations < 1.0:
            divisors.append(factor)
        else:
            smooth = (rotations - 1.0) / 3.0
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
