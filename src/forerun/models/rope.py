"""Rotary positions (RoPE): the settings of a rope, and the frequencies that follow from them.

Two kinds have frequencies that depend on the sequence length. Longrope has two sets, for texts of up to `context`
tokens and for longer ones: a text that grows beyond is read anew (docs/decisions/16). Dynamic ropes use the length that
a sequence *may become*, which is known when it is admitted: keys never have to be computed again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from forerun.core.errors import UnsupportedModel

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]

_KINDS: dict[str, RopeKind] = {
    "default": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "proportional": "proportional",
    "su": "longrope",  # the name in the first Phi-3 files
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become angles. `context` is the length the model was trained for."""

    kind: RopeKind
    theta: float
    dims: int  # how many of a head's dimensions rotate, from the front
    context: int
    factor: float = 1.0
    attention_factor: float | None = None  # yarn, longrope: None = by the formula
    betas: tuple[float, float] = (32.0, 1.0)  # yarn: fast, slow
    mscales: tuple[float, float] | None = None  # yarn
    truncate: bool = True  # yarn
    frequency_factors: tuple[float, float] = (1.0, 4.0)  # llama3: low, high
    short_factors: tuple[float, ...] = ()  # longrope: up to `context`
    long_factors: tuple[float, ...] = ()  # longrope: beyond
    angles: int | None = None  # proportional: pairs that rotate, the fastest; the others stay

    @classmethod
    def from_hf(cls, given: Mapping[str, Any], values: Mapping[str, Any], head_dim: int) -> RopeConfig:
        """Read `rope_scaling` or `rope_parameters`; `values` is the config it is in."""
        name = given.get("rope_type") or given.get("type") or "default"
        if name not in _KINDS:
            known = ", ".join(_KINDS)
            raise UnsupportedModel(f"rope type {name!r:.60} is not one of {known}: use the transformers backend")
        longest = context = int(values["max_position_embeddings"])
        if _KINDS[name] in ("llama3", "yarn", "longrope"):
            key = "original_max_position_embeddings"
            context = int(values.get(key) or given.get(key) or longest)
        share = given.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
        is_proportional = _KINDS[name] == "proportional"
        dims = head_dim if is_proportional else int(head_dim * share)
        if not 2 <= dims <= head_dim or dims % 2 or context < 1:
            raise ValueError(f"a rope over {dims} of {head_dim} dimensions and a context of {context}")
        for key in ("short_factor", "long_factor"):
            if _KINDS[name] == "longrope" and len(given.get(key) or ()) != dims // 2:
                raise UnsupportedModel(f"longrope needs {dims // 2} numbers in {key}: {given.get(key)!r:.60}")
        mscales = given.get("mscale"), given.get("mscale_all_dim")
        attention_factor = given.get("attention_factor")
        rope = cls(
            kind=_KINDS[name],
            theta=float(given.get("rope_theta") or values["rope_theta"]),
            dims=dims,
            context=context,
            factor=float(given.get("factor") or longest / context),
            attention_factor=None if attention_factor is None else float(attention_factor),
            betas=(float(given.get("beta_fast") or 32), float(given.get("beta_slow") or 1)),
            mscales=(float(mscales[0]), float(mscales[1])) if mscales[0] and mscales[1] else None,
            truncate=bool(given.get("truncate", True)),
            frequency_factors=(float(given.get("low_freq_factor", 1)), float(given.get("high_freq_factor", 4))),
            short_factors=tuple(map(float, given.get("short_factor") or ())),
            long_factors=tuple(map(float, given.get("long_factor") or ())),
            angles=int(head_dim * share // 2) if is_proportional else None,
        )
        for regime in {0, rope.regime(context + 1)}:
            rates, scale = frequencies(rope, regime)
            if not (bool(rates.isfinite().all()) and 0 < scale < math.inf):
                raise ValueError(f"the {name} rope's settings give no angles")
        return rope

    @property
    def has_regimes(self) -> bool:
        return self.kind in ("dynamic", "longrope")

    def regime(self, length: int) -> int:
        """Sequences of equal regime share frequencies: 0 but for dynamic and longrope beyond their context."""
        if not self.has_regimes or length <= self.context:
            return 0
        return length if self.kind == "dynamic" else 1


def frequencies(rope: RopeConfig, regime: int) -> tuple[Tensor, float]:
    """Radians per position [dims/2] fp32, and what cosines and sines are multiplied by."""
    powers = torch.arange(0, rope.dims, 2, dtype=torch.int64).float() / rope.dims
    plain = 1.0 / rope.theta**powers
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "proportional":
        return torch.where(torch.arange(len(plain)) < (rope.angles or 0), plain / rope.factor, 0.0), 1.0
    if rope.kind == "dynamic":
        stretch = rope.factor * max(regime, rope.context) / rope.context - (rope.factor - 1)
        return 1.0 / (rope.theta * stretch ** (rope.dims / (rope.dims - 2))) ** powers, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, powers)
    if rope.kind == "longrope":
        factors = torch.tensor(rope.long_factors if regime else rope.short_factors, dtype=torch.float32)
        scale = 1.0
        if rope.factor > 1:
            scale = math.sqrt(1 + math.log(rope.factor) / math.log(rope.context))
        return 1.0 / (factors * rope.theta**powers), rope.attention_factor or scale
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Slow frequencies are stretched, fast ones kept, those between blended."""
    low, high = rope.frequency_factors
    rotations = rope.context * plain / (2 * math.pi)  # full rotations within the context
    blend = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeConfig, powers: Tensor) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate below `slow` rotations within the context, keep above `fast`."""

    def dimension(rotations: float) -> float:
        return rope.dims * math.log(rope.context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.betas[0]), dimension(rope.betas[1])
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    span = high - low if high != low else 0.001
    keep = 1 - ((torch.arange(rope.dims // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    plain = 1.0 / rope.theta**powers
    blended = plain / rope.factor * (1 - keep) + plain * keep
    if rope.attention_factor is not None:
        return blended, rope.attention_factor
    if rope.mscales is not None:
        return blended, magnitude(rope.factor, rope.mscales[0]) / magnitude(rope.factor, rope.mscales[1])
    return blended, magnitude(rope.factor, 1.0)


def magnitude(factor: float, weight: float) -> float:
    """YaRN's: what queries and keys of a context stretched by this factor are multiplied by."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
