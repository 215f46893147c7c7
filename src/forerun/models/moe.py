"""MoeConfig: the experts of a checkpoint, read from its config.json, and which of its layers have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.core.errors import UnsupportedModel
from forerun.models.families import Family

# Far beyond any model; a file that says more is damaged, and must not make us allocate what it says.
MOST_LAYERS, LARGEST = 1 << 14, 1 << 31


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Feed-forward layers made of experts, of which a router picks a few per row."""

    experts: int
    per_token: int
    inner: int
    renormalise: bool  # the picked experts' weights sum to 1
    shared_inner: int | None  # width of the expert that every row also goes through
    biases: bool = False  # of the router and of every expert
    beside_mlp: bool = False  # what a dense feed-forward layer gives is added
    normed_apart: bool = False  # both are normed before that, and experts read rows of a norm of their own (Gemma 4)
    clamp: tuple[float, float] | None = None  # gpt-oss's gates: a limit, and what multiplies the gate in the sigmoid
    sigmoid: bool = False  # scores are sigmoids
    corrected: bool = False  # for the choice, a learned number is added to each score
    groups: tuple[int, int] = (1, 1)  # of experts, and how many of them a row may pick from: those of the best scores
    scale: float = 1.0  # of the picked experts' weights
    wide_router: bool = False  # its scores are computed in fp32
    shared_gate: bool = True  # what the shared expert gives is multiplied by a sigmoid of the row


def size_of(values: Mapping[str, Any], key: str, most: int = LARGEST, default: int | None = None) -> int:
    """A count or width: a whole number from 1 that some model could have."""
    value = values[key] if default is None else values.get(key) or default
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{key} is {value!r:.40}, not a whole number from 1 to {most}")
    return value


def positive(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = float(values[key] if default is None else values.get(key, default))
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{key} is {value}, not a positive number")
    return value


def _with_shared(described: Family, values: Mapping[str, Any]) -> MoeConfig:
    """Experts in groups beside shared ones, without a gate; the settings that name a router must be the family's."""
    method, scoring = values["topk_method"], values["scoring_func"]
    corrected = described.settings["topk_method"] == "noaux_tc"
    known = ("noaux_tc",) if corrected else ("greedy", "group_limited_greedy")
    if scoring != described.settings["scoring_func"] or method not in known:
        raise UnsupportedModel(f"topk_method={method!r:.60} with scoring_func={scoring!r:.40} is no router of ours")
    if values["moe_layer_freq"] != 1:
        raise UnsupportedModel(f"moe_layer_freq={values['moe_layer_freq']!r:.40}: only 1 is supported")
    experts, inner = size_of(values, "n_routed_experts", MOST_LAYERS), size_of(values, "moe_intermediate_size")
    groups = 1, 1
    if method != "greedy":
        count = size_of(values, "n_group", experts)
        groups = (1, 1) if count == 1 else (count, size_of(values, "topk_group", count))
    shared = inner * size_of(values, "n_shared_experts") if values.get("n_shared_experts") else None
    if "moe_shared_expert_intermediate_size" in described.settings:  # Nemotron-H
        shared = size_of(values, "moe_shared_expert_intermediate_size")
        if values["moe_latent_size"] is not None:
            raise UnsupportedModel("moe_latent_size: experts of a narrower row are not supported; use transformers")
    if experts % groups[0] or experts < 2 * groups[0]:
        raise ValueError(f"n_routed_experts {experts} cannot be in n_group {groups[0]}")
    return MoeConfig(
        experts=experts,
        per_token=size_of(values, "num_experts_per_tok", experts // groups[0] * groups[1]),
        inner=inner,
        renormalise=corrected and bool(values["norm_topk_prob"]),
        shared_inner=shared,
        sigmoid=scoring == "sigmoid",
        corrected=corrected,
        groups=groups,
        scale=positive(values, "routed_scaling_factor"),
        wide_router=True,
        shared_gate=False,
    )


def moe_of(described: Family, values: Mapping[str, Any]) -> MoeConfig | None:
    if described.experts == "deepseek":
        parts = "hybrid_override_pattern" in described.settings  # a layer is one part: Nemotron-H
        return None if parts and "moe" not in (values["layer_types"] or ()) else _with_shared(described, values)
    key, apart = "num_local_experts" if values.get("num_local_experts") else "num_experts", described.varied
    if described.experts is None or not values.get(key) or (apart and not values["enable_moe_block"]):
        return None
    experts, qwen = size_of(values, key, MOST_LAYERS), described.experts == "qwen"
    shared, limit = "shared_expert_intermediate_size", "swiglu_limit"
    return MoeConfig(
        experts=experts,
        per_token=size_of(values, "top_k_experts" if apart else "num_experts_per_tok", experts),
        inner=size_of(values, "moe_intermediate_size" if qwen or apart else "intermediate_size"),
        renormalise=not qwen or bool(values.get("norm_topk_prob", False)),
        shared_inner=size_of(values, shared) if values.get(shared, 0) != 0 else None,
        biases=described.experts == "gpt_oss",
        beside_mlp=described.experts in ("granite", "gemma"),
        normed_apart=apart,
        wide_router=apart,
        shared_gate=described.shared_gate,
        clamp=(positive(values, limit), positive(values, "swiglu_alpha")) if limit in described.settings else None,
    )


def sparse_layers(values: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    if "moe" in (kinds := values.get("layer_types") or ()):
        return tuple(kind == "moe" for kind in kinds)
    if kinds := values.get("mlp_layer_types"):
        if len(kinds) != layers or not set(kinds) <= {"sparse", "dense"}:
            raise ValueError(f"mlp_layer_types={kinds!r:.120}: must be {layers} of sparse or dense")
        return tuple(kind == "sparse" for kind in kinds)
    period, dense = int(values.get("decoder_sparse_step", 1)), values.get("mlp_only_layers") or ()
    first, last = int(values.get("first_k_dense_replace", 0)), int(values.get("moe_layer_end_index", -1))
    last = layers - 1 if last == -1 else last
    return tuple(first <= i <= last and i not in dense and (i + 1) % period == 0 for i in range(layers))
