"""GGUF families: from a GGUF file's metadata and tensor names to Hugging Face's config and weight names.

llama.cpp's converter changes a few tensors on the way in, and `Origin` says how to undo it: for the Llama
family it interleaves the rows of the query and key projections per head (its rope rotates neighbouring pairs),
for Gemma it stores the norm weight plus one, and it stacks the experts of a layer into one tensor.

Two kinds of rope scaling are not named by the file but stored as tables of divisors per frequency: Llama 3's
(`rope_freqs`), recognised by computing the table from the parameters that Llama 3 models use, and Phi's long rope.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forerun.core.errors import DamagedFile, ForerunError, UnsupportedModel
from forerun.models.families import FAMILIES, Family
from forerun.models.load.gguf import GgufFile, Metadata
from forerun.models.load.quants import dequantize


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a weight comes from, and what the converter did to it."""

    tensor: str
    heads: int = 0  # rows are interleaved within this many heads; 0 = they are not
    expert: int | None = None  # a slice of a stacked tensor
    plus_one: bool = False
    as_row: bool = False  # a vector that Hugging Face keeps as a matrix of one row


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")  # in the order of forerun.models.families
_OSS_NORMS = ("attn_norm", "", "post_attention_norm", "")
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_QWEN_MOE = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
_FUSED = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}  # where a file has no ffn_gate
_ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([a-z_]+)(?:\.(\d+))?\.(weight|bias)")
_LAYER_WEIGHT = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
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
    "shared_expert_intermediate_size": ".expert_shared_feed_forward_length",
    "num_local_experts": ".expert_count",
    "num_experts": ".expert_count",
    "num_experts_per_tok": ".expert_used_count",
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
}
# of these, the ones that a family reads and a file may have
_REALS = (
    "final_logit_softcapping", "attn_logit_softcapping", "embedding_multiplier", "attention_multiplier",
    "residual_multiplier", "logits_scaling",
)  # fmt: skip

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
        "norm_topk_prob": metadata.architecture == "qwen3moe",
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


# What a file says of a family beyond the settings that all have.
_EXTRAS: dict[str, Extra] = {
    "llama": _llama_extra,
    "qwen2": lambda metadata, file: {"use_sliding_window": False},
    "qwen3": _llama_extra,
    "smollm3": _smollm3_extra,
    "gemma2": _gemma_extra,
    "gemma3_text": _gemma_extra,
    "granite": _llama_extra,
    "glm4": _llama_extra,
    "phi3": _phi_extra,
    "mixtral": _mixtral_extra,
    "qwen2_moe": _qwen_moe_extra,
    "qwen3_moe": _qwen_moe_extra,
    "gpt_oss": _oss_extra,
}


def model_type_of(metadata: Metadata) -> str:
    """Hugging Face's name of a file's family; one architecture name, "llama", covers three."""
    known = {family.gguf: name for name, family in reversed(FAMILIES.items()) if family.gguf is not None}
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
    return "olmo3" if found == "olmo2" and metadata.find(".attention.sliding_window") else found


def _names_of(family: Family, file: GgufFile) -> dict[str, str]:
    """The file's names of a layer's tensors, and Hugging Face's."""
    told = _OSS_NORMS if family.experts == "gpt_oss" else _NORMS
    norms = {ours: theirs for ours, theirs in zip(told, family.norms, strict=True) if theirs is not None}
    norms |= {"attn_sinks": "self_attn.sinks"} if family.sinks else {}
    if family.experts is not None:
        return _ATTENTION | norms | (_MIXTRAL if family.experts == "mixtral" else _QWEN_MOE)
    return _ATTENTION | norms | (_DENSE if "blk.0.ffn_gate.weight" in file.tensors else _FUSED)


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
        "num_key_value_heads": metadata.integer(".attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": metadata.integer(".feed_forward_length", 0, least=0),
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
    return config | rope_config(metadata, file, head_dim) | extra


def origins_of(file: GgufFile, config: dict[str, Any]) -> dict[str, Origin]:
    """Hugging Face's on-disk name of each weight, and where in the file it comes from."""
    family = FAMILIES[config["model_type"]]
    names = _names_of(family, file)
    origins: dict[str, Origin] = {}
    for tensor in file.tensors:
        if tensor not in _ROPE_TABLES:
            origins |= _map_tensor(file, tensor, family, names, config)
    return origins


def tensor_of(file: GgufFile, name: str) -> str:
    """What a file of this architecture would call a weight that it lacks."""
    if name.endswith(".sinks"):  # a bare parameter there
        name += ".weight"
    layer = _LAYER_WEIGHT.fullmatch(name)
    stem, _, kind = name.rpartition(".")
    if layer is None:
        return next((f"{ours}.{kind}" for ours, theirs in _TOP.items() if theirs == stem), name)
    named = _names_of(FAMILIES[model_type_of(Metadata.of(file))], file).items()
    part = re.sub(r"\.\d+\.", ".{}.", layer[2])
    return next((f"blk.{layer[1]}.{ours}.{layer[3]}" for ours, theirs in named if theirs == part), name)


def in_keys(error: ForerunError, metadata: Metadata) -> str:
    """What is wrong with a config that was made of a file, told in the keys of the file."""
    told = re.sub(
        r"\w+", lambda word: metadata.architecture + _KEYS[word[0]] if word[0] in _KEYS else word[0], str(error)
    )
    told = re.sub(r"config\.json of \w+", "its metadata", told).replace("fetch it", "pull it")
    told = re.sub(r": use (the )?transformers.*", "; use the model's Hugging Face folder instead", told)
    return f"{metadata.path} cannot be run: {told}"


def _map_tensor(
    file: GgufFile, tensor: str, family: Family, names: dict[str, str], config: dict[str, Any]
) -> dict[str, Origin]:
    stem, _, kind = tensor.rpartition(".")
    if stem in _TOP and kind in ("weight", "bias"):
        plus_one = family.norm_offset and stem == "output_norm"
        return {f"{_TOP[stem]}.{kind}": Origin(tensor, plus_one=plus_one)}
    match = _LAYER_TENSOR.fullmatch(tensor)
    part = match[2] if match else ""
    if match and match[3] is not None:
        part += "_exps"  # older files list the experts one by one
    if match is None or part not in names:
        raise UnsupportedModel(f"{file.path}: tensor {tensor[:80]!r} is not known for {config['model_type']}")
    name = f"model.layers.{match[1]}.{names[part]}.{match[4]}"
    if match[3] is not None:
        return {name.format(match[3]): Origin(tensor)}
    if part.endswith("_exps"):
        return {name.format(i): Origin(tensor, expert=i) for i in range(_count_experts(file, tensor))}
    if part == "attn_sinks":
        return {name.removesuffix(".weight"): Origin(tensor)}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    origin = Origin(
        tensor,
        heads=heads.get(part, 0) if family.gguf_interleaves else 0,
        plus_one=family.norm_offset and part.endswith("norm"),
        as_row=part == "ffn_gate_inp_shexp",
    )
    return {name: origin}


def _count_layers(metadata: Metadata, file: GgufFile) -> int:
    layers = metadata.integer(".block_count")
    if layers > len(file.tensors) or any(f"blk.{i}.attn_output.weight" not in file.tensors for i in range(layers)):
        raise DamagedFile(f"{file.path} is damaged: it lacks some of its {layers} layers; pull it again")
    held = 1 + max(int(found[1]) for name in file.tensors if (found := _LAYER_TENSOR.fullmatch(name)))
    if held > layers:
        key = f"{metadata.architecture}.block_count"
        raise DamagedFile(
            f"{file.path} is damaged: it has tensors of {held} layers, but {key} is {layers}; pull it again"
        )
    return layers


def _count_experts(file: GgufFile, tensor: str) -> int:
    shape = file.tensors[tensor].shape
    if len(shape) != (2 if tensor.endswith(".bias") else 3) or shape[0] > 4096:
        raise DamagedFile(f"{file.path} is damaged: {tensor} has shape {shape}, not experts; pull it again")
    return shape[0]


_LLAMA3_CONTEXTS = (8192, 4096, 2048, 16384, 32768)


def rope_config(metadata: Metadata, file: GgufFile, head_dim: int) -> dict[str, Any]:
    """`rope_theta`, `rope_parameters` (transformers 5's form) and, if scaled, `rope_scaling` (the older)."""
    theta = metadata.real(".rope.freq_base", 10000.0)
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
