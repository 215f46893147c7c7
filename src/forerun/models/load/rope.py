"""Rotary (RoPE) settings of a GGUF file, in Hugging Face's terms.

Two kinds of scaling are not named by the file but stored as tables of divisors per frequency: Llama 3's
(`rope_freqs`) and Phi's long rope. The first is recognised by computing the table from the parameters that
the Llama 3 models use and comparing.
"""

from __future__ import annotations

import math
from typing import Any

from forerun.core.errors import DamagedFile, UnsupportedModel
from forerun.models.load.gguf import GgufFile
from forerun.models.load.metadata import Metadata
from forerun.models.load.quants import dequantize

_LLAMA3_CONTEXTS = (8192, 4096, 2048, 16384, 32768)


def rope_config(metadata: Metadata, file: GgufFile, head_dim: int) -> dict[str, Any]:
    """`rope_theta`, `rope_parameters` (transformers 5's form) and, if scaled, `rope_scaling` (the older)."""
    theta = metadata.real(".rope.freq_base", 10000.0)
    width = metadata.integer(".rope.dimension_count", head_dim)
    partial = {"partial_rotary_factor": width / head_dim} if width != head_dim else {}
    scaling = _scaling(metadata, file, theta, width)
    plain = {"rope_type": "default", "rope_theta": theta}
    config: dict[str, Any] = {"rope_theta": theta, **partial}
    if metadata.architecture == "gemma3":
        local = metadata.real(".rope.freq_base_swa", 10000.0)
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
        raise UnsupportedModel(
            f"{file.path} scales its rope by {kind[:40]!r}; known: linear, yarn, longrope, llama3"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata.real(".rope.scaling.factor")}
    if kind == "yarn":
        original = metadata.integer(".rope.scaling.original_context_length", 0, least=0)
        scaling |= {"original_max_position_embeddings": original} if original else {}
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
        if len(made) == len(given) and all(
            math.isclose(a, b, rel_tol=1e-4) for a, b in zip(made, given, strict=True)
        ):
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
