"""Inflates an EAGLE head with its target: layers of the large shape with the small head's outputs.

With an inflated target, drafting must cost what it would cost at that size. Layers are inflated as the target's
layers are; what reads two or three rows side by side is inflated part by part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from forerun.core.errors import UnsupportedModel
from forerun.drafters.heads.base import HeadShape
from forerun.drafters.heads.eagle_head import EagleConfig, read_head, write_head
from lab.inflate.model import InflatedWeights, Shape
from lab.inflate.rows import RowInflater

_LAYER, _INNER = re.compile(r"midlayer\.|layers\.\d+\."), "model.layers.0."
H = TypeVar("H", bound=HeadShape)
_WIDE = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")


class HeadInflater(RowInflater):
    """Makes the weights of a larger head one by one."""

    def __init__(
        self, config: HeadShape, shape: Shape, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        if config.target_width != config.width:
            raise UnsupportedModel(
                f"a head {config.width} wide on a target {config.target_width} wide cannot be inflated: "
                "only heads as wide as their target can"
            )
        super().__init__(config.width, shape, dtype, device)
        self.small = config

    def inflate(self, name: str, weight: Tensor) -> Tensor:
        inner = _LAYER.sub("", name, count=1)
        if name in ("d2t", "t2d"):
            return weight
        if name == "fc.weight":
            return self.side_by_side(weight)
        if name in ("lm_head.weight", "embed_tokens.weight"):
            return self.table(weight)
        if inner.endswith(("q_norm.weight", "k_norm.weight")):
            raise UnsupportedModel("a head of this kind with norms of queries and keys cannot be inflated")
        if weight.dim() == 1:
            return self.vector(weight) if name == "fc.bias" else self.norm(weight)
        if inner in _WIDE:
            return torch.cat(
                [self._inner(inner, part) for part in torch.split(weight, self.small.width, 1)], 1
            )
        return self._inner(inner, weight)

    def _inner(self, name: str, weight: Tensor) -> Tensor:
        """As a layer of a model is inflated."""
        values = {
            "model_type": "llama", "hidden_size": self.small.width, "intermediate_size": self.small.inner,
            "num_hidden_layers": 1, "num_attention_heads": self.small.heads, "head_dim": self.small.head_dim,
            "num_key_value_heads": self.small.kv_heads, "vocab_size": self.small.vocab_size,
        }  # fmt: skip
        whole = InflatedWeights(
            values, {_INNER + name: weight}, self.shape, dtype=self.dtype, device=self.device
        )
        return whole[_INNER + name]


def inflated_shape(config: H, shape: Shape) -> H:
    """The head of a target inflated to `shape`; the layers it reads stay, since others are added behind them."""
    return replace(
        config, width=shape.width, inner=shape.inner, heads=shape.heads, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, target_width=shape.width, norm_eps=config.norm_eps * config.width / shape.width,
    )  # fmt: skip


def inflate_head(
    config: EagleConfig,
    weights: Mapping[str, Tensor],
    shape: Shape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> tuple[EagleConfig, dict[str, Tensor]]:
    """The head of a target inflated to `shape`."""
    inflater = HeadInflater(config, shape, dtype, device)
    return inflated_shape(config, shape), {
        name: inflater.inflate(name, weight) for name, weight in weights.items()
    }


def inflate_head_folder(head: Path, shape: Shape, folder: Path, device: torch.device | str = "cpu") -> Path:
    """Write a head's folder anew, for its target at a larger shape."""
    write_head(folder, *inflate_head(*read_head(head), shape, device=device))
    return folder
