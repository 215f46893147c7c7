"""What each model family is made of, one description per family: every backend, reader and file format reads these.

A description says where a layer has norms, which layers have a sliding window, and which settings its config.json may
have beyond the common ones, with what each means where the file leaves it out: a setting that is not listed here is not
read. `forerun.models.config` makes a `DecoderConfig` of a description and a file, the backends run that, and
`forerun.models.load.gguf_families` finds the same settings and weights in GGUF files. docs/add-a-family.md adds one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from forerun.models.families.dense import DENSE
from forerun.models.families.experts import EXPERTS
from forerun.models.families.family import BEFORE, COMMON, Family, Norms, RecurrentKind, rotates
from forerun.models.families.special import SPECIAL

__all__ = ["BEFORE", "COMMON", "FAMILIES", "WRAPPED", "Family", "Norms", "RecurrentKind", "Wrapped", "rotates"]

FAMILIES: dict[str, Family] = {**DENSE, **EXPERTS, **SPECIAL}


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
    "qwen3_vl_moe": Wrapped(
        "qwen3_moe", {"rope_theta": 500_000.0, "max_position_embeddings": 128_000, "norm_topk_prob": True}
    ),
    "mistral3": Wrapped("mistral"),
    "glm4v": Wrapped("glm4", {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}),
    "glm4v_moe": Wrapped("glm4_moe", {"max_position_embeddings": 65536}),
    "qwen3_5": Wrapped("qwen3_5_text"),
    "qwen3_5_moe": Wrapped("qwen3_5_moe_text"),
}
