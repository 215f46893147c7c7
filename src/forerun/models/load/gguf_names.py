"""Names of a GGUF file's tensors, and the weights of ours that they are.

llama.cpp's converter changes some tensors on the way in, and `Origin` says how to undo it: for the Llama family it
interleaves the rows of the query and key projections per head (its rope rotates neighbouring pairs), for Gemma it
stores the norm weight plus one, and it stacks the experts of a layer into one tensor. Of recurrent layers it stores the
rates that the model's logarithms stand for (and Qwen3.5's value heads in another order, which stays: `in_turns`); what
expands latent attention's rows is two tensors there, of which the keys' one is turned.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any

from forerun.core.errors import DamagedFile, UnsupportedModel
from forerun.models.families import FAMILIES, Family
from forerun.models.load.gguf import GgufFile


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a weight comes from, and what the converter did to it."""

    tensor: str
    heads: int = 0  # rows are interleaved within this many heads; 0 = they are not
    expert: int | None = None  # a slice of a stacked tensor
    half: int | None = None  # of that slice: gates are the first half of the rows there, ups the second
    plus_one: bool = False
    shape: tuple[int, ...] = ()  # where the file has the same numbers in another one
    negative_exp: bool = False  # the file has -exp of it
    values: str = ""  # the tensor that is the second half of every head; the first one has heads of [rank, size]

    @property
    def computed(self) -> bool:
        """Are its numbers, or their places within rows, others than the file's?"""
        return self.negative_exp or bool(self.values)


_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # LFM2's name
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")  # in the order of forerun.models.families
_AFTER_ATTENTION = ("attn_norm", "", "post_attention_norm", "")  # the norm before the feed-forward layer is named so
_NAMED_SO = ("seed_oss", "gpt-oss", "qwen3next", "qwen35", "qwen35moe", "glm4moe")
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",
}
_MEMORY = {"ssm_conv1d": "conv1d", "ssm_dt": "dt_bias", "ssm_a": "A_log", "ssm_norm": "norm", "ssm_out": "out_proj"}
_DELTA_NET = {
    **_MEMORY, "attn_qkv": "in_proj_qkv", "attn_gate": "in_proj_z", "ssm_in": "in_proj_qkvz",
    "ssm_ba": "in_proj_ba", "ssm_beta": "in_proj_b", "ssm_alpha": "in_proj_a",
}  # fmt: skip
_RECURRENT = {
    "short_conv": {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
    "delta_net": {ours: f"linear_attn.{theirs}" for ours, theirs in _DELTA_NET.items()},
    "mamba2": {ours: f"mamba.{theirs}" for ours, theirs in {**_MEMORY, "ssm_in": "in_proj", "ssm_d": "D"}.items()},
}
_VARIED = {
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "mlp.norms.before",
    "post_ffw_norm_2": "mlp.norms.after",
    "post_ffw_norm_1": "mlp.norms.dense",
}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_BESIDE = {f"{ours}_shexp": theirs for ours, theirs in _DENSE.items()}  # Granite's shared expert
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
_FUSED = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}  # where a file has no ffn_gate
_ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_SCALES = {"ffn_gate_inp": "mlp.gate.scale", "ffn_down_exps": "mlp.gate.per_expert_scale"}  # Gemma 4's
_BARE = ("sinks", "A_log", "D", "dt_bias", "layer_scalar", "e_score_correction_bias")  # weights without .weight
LAYER_TENSOR = re.compile(r"blk\.(\d{1,9})\.([a-z0-9_]+(?:\.[a-z_]+)??)(?:\.(\d{1,9}))?(?:\.(weight|bias|scale))?")
_LAYER_WEIGHT = re.compile(r"model\.layers\.(\d+)\.(.+?)(?:\.(weight|bias))?")


def _names_of(family: Family, file: GgufFile) -> dict[str, str]:
    """The file's names of a layer's tensors, and ours."""
    told = _AFTER_ATTENTION if family.gguf in _NAMED_SO else _NORMS
    names = dict(_ATTENTION)
    names |= {ours: theirs for ours, theirs in zip(told, family.norms, strict=True) if theirs is not None}
    names |= {"attn_sinks": "self_attn.sinks"} if family.sinks else {}
    names |= _LATENT if family.latent else {}
    names |= _VARIED if family.varied else {}
    names |= _DENSE if family.experts or not family.gated or "blk.0.ffn_gate.weight" in file.tensors else _FUSED
    if family.experts is not None:
        names |= _MIXTRAL if family.experts == "mixtral" else _EXPERTS
        names |= _BESIDE if family.experts == "granite" else {}
    return names | (_RECURRENT[family.recurrent] if family.recurrent else {})


def origins_of(file: GgufFile, config: dict[str, Any]) -> dict[str, Origin]:
    """Our name of each weight, and where in the file it comes from; layers that only draft are left out."""
    names, origins = _names_of(FAMILIES[config["model_type"]], file), dict[str, Origin]()
    for tensor in file.tensors:
        found = LAYER_TENSOR.fullmatch(tensor)
        drafts = found is not None and int(found[1]) >= config["num_hidden_layers"]
        if tensor not in _ROPE_TABLES and not drafts:
            origins |= _map_tensor(file, tensor, names, config)
    return origins


def tensor_of(file: GgufFile, name: str, family: Family) -> str:
    """What a file of this architecture would call a weight that it lacks."""
    layer = _LAYER_WEIGHT.fullmatch(name)
    stem, _, kind = name.rpartition(".")
    if layer is None:
        return next((f"{ours}.{kind}" for ours, theirs in _TOP.items() if theirs == stem), name)
    part = re.sub(r"\.\d+\.", ".{}.", layer[2])
    kind = layer[3] or "weight"
    return next(
        (f"blk.{layer[1]}.{ours}.{kind}" for ours, theirs in _names_of(family, file).items() if theirs == part), name
    )


def _map_tensor(file: GgufFile, tensor: str, names: dict[str, str], config: dict[str, Any]) -> dict[str, Origin]:
    family = FAMILIES[config["model_type"]]
    stem, _, kind = tensor.rpartition(".")
    if stem in _TOP and kind in ("weight", "bias"):
        plus_one = family.norm_offset and stem == "output_norm"
        return {f"{_TOP[stem]}.{kind}": Origin(tensor, plus_one=plus_one)}
    match = LAYER_TENSOR.fullmatch(tensor)
    part = match[2] if match else ""
    if match and match[3] is not None:
        part += "_exps"  # older files list the experts one by one
    joined = f"{stem.removesuffix(part)}attn_kv_b.weight" in file.tensors
    if family.latent and (part == "attn_v_b" or (part == "attn_k_b" and joined)):
        return {}  # with attn_k_b, or the same as attn_kv_b
    if match is None or part not in names:
        raise UnsupportedModel(f"{file.path}: tensor {tensor[:80]!r} is not known for {config['model_type']}")
    name = f"model.layers.{match[1]}.{names[part]}"
    if match[4] == "scale":
        if not family.varied or part not in _SCALES:
            raise UnsupportedModel(f"{file.path}: tensor {tensor[:80]!r} is not known for {config['model_type']}")
        return {f"model.layers.{match[1]}.{_SCALES[part]}": Origin(tensor)}
    if not names[part].endswith(_BARE):
        name += f".{match[4] or 'weight'}"
    if match[3] is not None:
        return {name.format(match[3]): Origin(tensor)}
    if part == "ffn_gate_up_exps":
        count = range(_count_experts(file, tensor))
        if file.tensors[tensor].shape[1] % 2:
            raise DamagedFile(f"{file.path} is damaged: the rows of {tensor} are no gates and ups; pull it again")
        halves = [(name.replace("gate_up", one), half) for half, one in enumerate(("gate", "up"))]
        return {one.format(i): Origin(tensor, expert=i, half=half) for one, half in halves for i in count}
    if part.endswith("_exps"):
        return {name.format(i): Origin(tensor, expert=i) for i in range(_count_experts(file, tensor))}
    return {name: _origin_in_layer(file, tensor, part, family, config)}


def _origin_in_layer(file: GgufFile, tensor: str, part: str, family: Family, config: dict[str, Any]) -> Origin:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    given = file.tensors[tensor].shape
    shape: tuple[int, ...] = ()
    if part in ("ssm_a", "ssm_d", "ssm_norm"):
        shape = (prod(given),)
    elif part in ("ssm_conv1d", "shortconv.conv") and tensor.endswith(".weight"):
        shape = (given[0], 1, given[-1])
    elif part == "ffn_gate_inp_shexp":
        shape = (1, given[-1])
    values = ""
    if part == "attn_k_b":
        values = tensor.replace("attn_k_b", "attn_v_b")
        if values not in file.tensors or not len(given) == len(file.tensors[values].shape) == 3:
            raise DamagedFile(f"{file.path} is damaged: {tensor} and {values} are no heads' weights; pull it again")
        shape = (given[0] * (given[2] + file.tensors[values].shape[1]), given[1])
    elif shape and prod(shape) != prod(given):
        raise DamagedFile(f"{file.path} is damaged: {tensor} has shape {given}, not {shape}; pull it again")
    return Origin(
        tensor,
        heads=heads.get(part, 0) if family.gguf_interleaves else 0,
        plus_one=family.norm_offset and part.endswith("norm") and part != "ssm_norm",
        shape=shape,
        negative_exp=part == "ssm_a",
        values=values,
    )


def _count_experts(file: GgufFile, tensor: str) -> int:
    shape = file.tensors[tensor].shape
    if len(shape) != (2 if tensor.endswith(".bias") else 3) or shape[0] > 4096:
        raise DamagedFile(f"{file.path} is damaged: {tensor} has shape {shape}, not experts; pull it again")
    return shape[0]
