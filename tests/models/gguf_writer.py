"""Writes a tiny transformers checkpoint as llama.cpp's converter does, by gguf's own writer and names of tensors.

What the converter changes is done here in the converter's terms, family by family.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.models.config import DecoderConfig
from forerun.models.families import FAMILIES
from tests.models.tiny_gguf import gguf

ARCHITECTURES = {
    "lfm2": "LFM2", "qwen3_next": "QWEN3NEXT", "qwen3_5_text": "QWEN35", "qwen3_5_moe_text": "QWEN35MOE",
    "granitemoehybrid": "GRANITE_HYBRID", "nemotron_h": "NEMOTRON_H", "deepseek_v2": "DEEPSEEK2",
    "deepseek_v3": "DEEPSEEK2", "glm4_moe_lite": "DEEPSEEK2", "glm4_moe": "GLM4_MOE", "gemma4_text": "GEMMA4",
    "lfm2_moe": "LFM2MOE", "minimax_m2": "MINIMAXM2", "dots1": "DOTS1", "exaone_moe": "EXAONE_MOE", "olmoe": "OLMOE",
    "granitemoe": "GRANITE_MOE", "granitemoeshared": "GRANITE_MOE", "arcee": "ARCEE", "ministral3": "MISTRAL3",
    "gemma": "GEMMA", "seed_oss": "SEED_OSS", "ernie4_5": "ERNIE4_5", "exaone4": "EXAONE4",
    "glm4": "GLM4",
}  # fmt: skip
KEYS = {
    "final_logit_softcapping": "final_logit_softcapping", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale", "attention_multiplier": "attention.scale",
}  # fmt: skip


def write_gguf(
    path: Path, config: dict[str, Any], weights: dict[str, Tensor], kind: str | None = None, **more: Any
) -> str:
    """`kind`: of the matrices, where it fits; `more`: keys of the architecture, None = left out."""
    family = config["model_type"]
    parsed = DecoderConfig.from_hf(config)
    experts = "_MOE" if family == "nemotron_h" and parsed.moe is not None else ""
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[family] + experts]
    writer = gguf.GGUFWriter(str(path), arch := gguf.MODEL_ARCH_NAMES[architecture])
    for key, value in {**keys_of(config, parsed), **more}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        if value is not None:
            add[type(value)](f"{arch}.{key}", value)
    if parsed.ropes[0].kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{i}" for i in range(parsed.vocab_size)])
    writer.add_token_types([1] * parsed.vocab_size)
    writer.add_token_merges([])
    names = gguf.get_tensor_name_map(architecture, parsed.layers)
    for key, weight in converted(config, parsed, weights):
        ours = names.get_name(key, try_suffixes=(".weight", ".bias")) or key
        assert ours.startswith(("blk", "token", "output", "per_layer", "rope")), key
        numbers, packs = weight.float().contiguous().numpy(), None
        if kind and weight.dim() > 1 and not weight.shape[-1] % 32 and not ours.endswith(("_inp.weight", "ssm_a")):
            packs = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(ours, numbers if packs is None else gguf.quants.quantize(numbers, packs), raw_dtype=packs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def keys_of(config: dict[str, Any], parsed: DecoderConfig) -> dict[str, Any]:
    rope, states, latent = parsed.ropes[0], parsed.recurrent, parsed.latent
    found: dict[str, Any] = {
        "block_count": parsed.layers,
        "context_length": parsed.max_length,
        "embedding_length": parsed.width,
        "feed_forward_length": parsed.moe.inner if parsed.inner == 0 and parsed.moe else parsed.inner,
        "attention.head_count": parsed.heads,
        "attention.head_count_kv": parsed.kv_heads,
        "attention.key_length": parsed.head_dim,
        "attention.layer_norm_rms_epsilon": float(parsed.norm_eps),
        "rope.freq_base": float(rope.theta),
        "rope.dimension_count": rope.dims,
    }
    found |= {ours: float(config[key]) for key, ours in KEYS.items() if config.get(key) is not None}
    if rope.kind == "yarn":
        found |= {"rope.scaling.factor": rope.factor, "rope.scaling.original_context_length": rope.context}
        found |= {"rope.scaling.yarn_beta_fast": float(rope.betas[0])}
    if parsed.moe is not None:
        found |= {"expert_count": parsed.moe.experts, "expert_used_count": parsed.moe.per_token}
        if config["model_type"] not in ("olmoe", "granitemoe", "granitemoeshared"):
            found |= {"expert_feed_forward_length": parsed.moe.inner}
    if (parsed.moe is not None and parsed.moe.sigmoid) or config["model_type"] == "deepseek_v2":
        found |= sigmoid_keys(config)
    if parsed.moe is not None and states is not None and states.mlp_alone:
        found["expert_shared_feed_forward_length"] = parsed.moe.shared_inner
    if states is not None:
        found |= state_keys(parsed)
    if latent is not None:
        found |= {
            "attention.q_lora_rank": latent.query_rank, "attention.kv_lora_rank": latent.rank,
            "attention.key_length": latent.row, "attention.value_length": latent.rank,
            "attention.key_length_mla": latent.key_dim + latent.rope_dim,
            "attention.value_length_mla": latent.value_dim, "rope.dimension_count": latent.rope_dim,
        }  # fmt: skip
        if scale := config["rope_parameters"].get("mscale_all_dim"):
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * scale
    if config["model_type"] == "granitemoehybrid":
        found |= {"rope.scaling.finetuned": config.get("position_embedding_type") == "rope"}
        found |= {"feed_forward_length": config["intermediate_size"]}
        found |= {"expert_shared_feed_forward_length": config["shared_intermediate_size"]}
    if config["model_type"] == "granitemoeshared":
        found |= {"expert_shared_feed_forward_length": config["shared_intermediate_size"]}
    if config["model_type"] in ("exaone4", "exaone_moe"):
        slides = [window is not None for window in parsed.windows]
        found |= {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": slides}
    if beta := config.get("rope_parameters", {}).get("llama_4_scaling_beta"):
        found |= {"attention.temperature_scale": beta}
        found |= {"rope.scaling.yarn_log_multiplier": config["rope_parameters"]["mscale_all_dim"]}
    return found | (varied_keys(config, parsed) if parsed.varied is not None else {})


def sigmoid_keys(config: dict[str, Any]) -> dict[str, Any]:
    sigmoid, scale = config["model_type"] != "deepseek_v2", config.get("routed_scaling_factor")
    said = sigmoid and config["model_type"] not in ("minimax_m2", "lfm2_moe")
    return {
        "expert_shared_count": config.get("n_shared_experts", config.get("num_shared_experts")),
        "leading_dense_block_count": config.get("first_k_dense_replace", config.get("num_dense_layers", 0)),
        "feed_forward_length": config["intermediate_size"],
        "expert_weights_scale": None if scale is None else float(scale),
        "expert_weights_norm": bool(config["norm_topk_prob"]) if said else None,
        "expert_gating_func": 2 if sigmoid else 1,
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
    }


def state_keys(parsed: DecoderConfig) -> dict[str, Any]:
    states = parsed.recurrent
    assert states is not None
    kv_heads = [0 if one else parsed.kv_heads for one in states.layers]
    if states.mlp_alone:
        kv_heads = [0 if one else count for one, count in zip(states.mlp_alone, kv_heads, strict=True)]
    if states.kind == "short_conv":
        return {"shortconv.l_cache": states.kernel, "attention.head_count_kv": kv_heads}
    found: dict[str, Any] = {
        "ssm.conv_kernel": states.kernel, "ssm.state_size": states.key_dim, "ssm.group_count": states.key_heads,
        "ssm.time_step_rank": states.value_heads, "ssm.inner_size": states.value_heads * states.value_dim,
    }  # fmt: skip
    if states.mlp_alone:
        found["feed_forward_length"] = [parsed.inner if one else 0 for one in states.mlp_alone]
    return found if states.kind == "delta_net" else found | {"attention.head_count_kv": kv_heads}


def varied_keys(config: dict[str, Any], parsed: DecoderConfig) -> dict[str, Any]:
    varied = parsed.varied
    assert varied is not None
    return {
        "attention.key_length": varied.sizes[-1][1],
        "attention.key_length_swa": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [window is not None for window in parsed.windows],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "attention.head_count_kv": [heads for heads, _ in varied.sizes],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "feed_forward_length": list(varied.inners) if config["use_double_wide_mlp"] else varied.inners[0],
        "rope.dimension_count": varied.sizes[-1][1],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": float(parsed.ropes[-1].theta),
    }


def converted(
    config: dict[str, Any], parsed: DecoderConfig, weights: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Under names that gguf's table knows, or those of the file itself."""
    experts: dict[str, list[Tensor]] = {}
    for key in weights:
        at, _, number = key.rpartition(".experts.")
        if at and number[0].isdigit():  # experts one by one: in their order
            experts.setdefault(f"{at}.experts.{number.split('.', 1)[1]}", [])
    for stem, parts in experts.items():
        at, end = stem.split(".experts.")
        count = sum(key.startswith(f"{at}.experts.") and key.endswith(end) for key in weights)
        parts += [weights[f"{at}.experts.{i}.{end}"] for i in range(count)]
        if ".feed_forward." in stem:  # LFM2's
            stem = stem.removeprefix("model.")
        yield stem.replace("backbone.", "model.").replace(".mixer.", ".mlp."), torch.stack(parts)
    for key, weight in weights.items():
        if ".experts." not in key or not key.rpartition(".experts.")[2][0].isdigit():
            yield from converted_weight(config, parsed, key, weight)
    if parsed.varied is not None:
        share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
        half = parsed.varied.sizes[-1][1] // 2
        turning = int(half * share)
        yield "rope_freqs.weight", torch.tensor([1.0] * turning + [1e30] * (half - turning))


def converted_weight(
    config: dict[str, Any], parsed: DecoderConfig, key: str, weight: Tensor
) -> Iterator[tuple[str, Tensor]]:
    family, at = config["model_type"], key.rpartition(".")[0]
    layer = f"blk.{key.split('.layers.')[1].split('.')[0]}" if ".layers." in key else ""
    if parsed.norm_offset and key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
        weight = weight + 1
    if FAMILIES[family].gguf_interleaves and "self_attn" in key and key.split(".")[-2] in ("q_proj", "k_proj"):
        heads = parsed.heads if "q_proj" in key else parsed.kv_heads
        weight = weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
    if family.startswith("qwen3_5") and "linear_attn." in key:
        weight = in_turns(config, key, weight)
    if key.endswith((".A_log", ".D")):
        number = weight if key.endswith("D") else -weight.exp()
        yield (
            f"{layer}.ssm_{'d' if key.endswith('D') else 'a'}",
            number if family.startswith("qwen") else number[:, None],
        )
    elif key.endswith("dt_bias"):
        yield f"{layer}.ssm_dt.bias", weight
    elif key.endswith(("conv1d.weight", "conv.conv.weight")):
        yield key, weight.squeeze(1)
    elif key.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        yield key, weight.view(config.get("n_groups") or config["mamba_n_groups"], -1)
    elif "in_proj_qkvz" in key:
        keys, sizes = config["linear_num_key_heads"], [config["linear_key_head_dim"]] * 2
        each = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
        parts = weight.view(keys, -1, parsed.width).split([*sizes, each, each], 1)
        q, k, v, z = (part.reshape(-1, parsed.width) for part in parts)
        yield f"{layer}.attn_qkv.weight", torch.cat((q, k, v))
        yield f"{layer}.attn_gate.weight", z
    elif key.endswith("kv_b_proj.weight"):
        latent = parsed.latent
        assert latent is not None
        k, v = weight.view(parsed.heads, -1, latent.rank).split([latent.key_dim, latent.value_dim], 1)
        yield f"{layer}.attn_k_b.weight", k.transpose(1, 2)
        yield f"{layer}.attn_v_b.weight", v
    elif family == "gemma4_text" and key.endswith("experts.gate_up_proj"):
        yield f"{layer}.ffn_gate_up_exps.weight", weight
    elif key.endswith(("router.scale", "per_expert_scale")):
        yield f"{layer}.{'ffn_down_exps' if 'per_expert' in key else 'ffn_gate_inp'}.scale", weight
    elif key.endswith(("input_linear.weight", "experts.gate_up_proj")):
        gate, up = weight.chunk(2, -2)
        end = "" if config.get("num_local_experts") == 0 else "_shexp" if "shared_mlp" in key else "_exps"
        yield f"{layer}.ffn_gate{end}.weight", gate
        yield f"{layer}.ffn_up{end}.weight", up
    elif key.endswith(("output_linear.weight", "experts.down_proj")):
        end = "" if config.get("num_local_experts") == 0 else "_shexp" if "shared_mlp" in key else "_exps"
        yield f"{layer}.ffn_down{end}.weight", weight
    elif key.endswith(("e_score_correction_bias", "expert_bias")):
        yield f"{layer}.exp_probs_b.bias", weight
    elif key.endswith("layer_scalar"):
        yield f"{layer}.layer_output_scale.weight", weight
    else:
        yield f"{at}.{key.rpartition('.')[2]}", weight


def in_turns(config: dict[str, Any], key: str, weight: Tensor) -> Tensor:
    """Value heads of Qwen3.5's recurrent layers, which come key head by key head: the first of each, the second..."""
    keys, heads, size = (config[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "value_head_dim"))
    if key.endswith((".A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        size = 1
    if "out_proj" in key:
        return in_turns(config, ".in_proj_z.weight", weight.t()).t()
    first = 2 * keys * config["linear_key_head_dim"] if "qkv" in key or "conv1d" in key else 0
    if "linear_attn.norm" in key:
        return weight
    rest = weight[first:].view(keys, heads // keys, size, *weight.shape[1:]).transpose(0, 1)
    return torch.cat((weight[:first], rest.reshape(-1, *weight.shape[1:])))
