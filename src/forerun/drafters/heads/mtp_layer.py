"""FamilyLayer: a multi-token-prediction layer that is made of its checkpoint's own parts, in torch.

GLM-4.5's has half-rotated heads and experts, DeepSeek-V3's latent attention and experts, Qwen3-Next's gated attention
and experts. The weights are read as a layer of the target is; what a row attends to is the caller's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from forerun.core.errors import UnsupportedModel
from forerun.drafters.heads.eagle_head import Attend
from forerun.drafters.heads.formats import check_weight
from forerun.models.config import DecoderConfig
from forerun.models.hybrid.latent import LatentAttention
from forerun.models.hybrid.rows import threads_for_rows
from forerun.models.hybrid.weights import GatedAttention, HybridCheckpoint
from forerun.models.layers import gate, mix, norm_heads_, rms_norm, rotate_
from forerun.models.load.shapes import expected_shapes

_HERE, _THERE = "midlayer.", "model.layers.0."


def family_layer(values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> DecoderConfig | None:
    """The shape of the layer, as a model of one; None where config.json names no family with parts beyond Llama's."""
    try:
        config = DecoderConfig.from_hf(values)
    except UnsupportedModel:
        return None
    partly = config.ropes[0].dims < config.head_dim
    if config.moe is None and config.latent is None and not config.gated_attention and not partly:
        return None
    sparse = f"{_HERE}mlp.gate.weight" in weights
    return replace(config, layers=1, recurrent=None, windows=(None,), layer_ropes=(0,), sparse=(sparse,))


def check_layer(folder: Path, config: DecoderConfig, weights: Mapping[str, Tensor]) -> None:
    """Every weight of the layer is there, of its shape, and there is none that is not read."""
    named = _named(weights)
    shapes = {n: s for n, s in expected_shapes(config, cast(Any, named)) if n.startswith(_THERE)}
    for name, shape in shapes.items():
        check_weight(folder, named, name, shape)
    if surplus := next((name for name in named if name not in shapes), None):
        raise UnsupportedModel(
            f"the multi-token-prediction layer of {folder} has {surplus.removeprefix(_THERE)!r}, which a layer of "
            f"{config.family} has not; train one with `forerun train mtp`"
        )


def _named(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_THERE + n.removeprefix(_HERE): w for n, w in weights.items() if n.startswith(_HERE)}


class FamilyLayer:
    """Weights in one precision on one device, and a pass over any rows."""

    def __init__(
        self, config: DecoderConfig, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._block = HybridCheckpoint(_named(weights), config, dtype, device).hybrid_block(0)

    def behind(self, x: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        """Rows x [N, D] through the layer."""
        block, config = self._block, self._config
        assert block.norm is not None and block.mlp_norm is not None  # noqa: PT018
        norm = partial(rms_norm, eps=config.norm_eps)
        with threads_for_rows(x.device):
            rows, turns = norm(x, weight=block.norm), torch.view_as_real(rotations)
            if isinstance(block.mixer, LatentAttention):
                x = x + self._latent(rows, block.mixer, turns, attend)
            else:
                assert isinstance(block.mixer, GatedAttention)
                x = x + self._ordinary(rows, block.mixer, rotations, attend)
            rows = norm(x, weight=block.mlp_norm)
            if block.experts is not None:
                assert config.moe is not None
                return x + mix(rows, block.experts, config.moe, config.activation)
            assert block.mlp is not None
            return x + block.mlp.down(gate(block.mlp.gate_up(rows), config.activation))

    def _latent(self, rows: Tensor, mixer: LatentAttention, turns: Tensor, attend: Attend) -> Tensor:
        """Queries, which the caller divides by the root of their width, are scaled as the family scales them."""
        queries, latents = mixer.projected(rows, turns)
        queries = queries * (self._config.attention_scale * queries.shape[-1] ** 0.5)
        found = attend(queries, latents[:, None], latents[:, None], 0).view_as(queries)
        return mixer.expanded(found[..., : mixer.config.rank])

    def _ordinary(self, rows: Tensor, mixer: GatedAttention, rotations: Tensor, attend: Attend) -> Tensor:
        config, wide = self._config, mixer.inputs(rows)
        heads, dim, both = config.heads, config.head_dim, config.heads + config.kv_heads
        rotary = wide[:, : both * dim].reshape(len(rows), both, dim)
        values = wide[:, both * dim : (both + config.kv_heads) * dim].view(len(rows), -1, dim)
        if mixer.qk_norm is not None:
            norm_heads_(rotary, mixer.qk_norm, heads, config.qk_norm == "all", config.norm_eps)
        rotate_(rotary[..., : config.ropes[0].dims].view(len(rows), both, -1, 2), rotations)
        found = attend(rotary[:, :heads], rotary[:, heads:], values, 0)
        if config.gated_attention:
            found = found * wide[:, -heads * dim :].sigmoid()
        return mixer.output(found)
