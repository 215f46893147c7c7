"""Inflates a block drafter with its target: layers of the large shape with the small drafter's outputs.

Layers, features and norms go as in an EAGLE head. Norms of queries and keys divide by a smaller root mean square where
a head is wider; and since they undo any factor on a query, what scores lose in a wider head is given to its norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from forerun.drafters.heads.block_head import BlockConfig, read_block, write_block
from lab.inflate.eagle import HeadInflater, inflated_shape
from lab.inflate.model import Shape


class BlockInflater(HeadInflater):
    """Makes the weights of a larger drafter one by one."""

    def inflate(self, name: str, weight: Tensor) -> Tensor:
        inner = name.split(".", 2)[2] if name.startswith("layers.") else ""
        width, wide = self.small.width, self.shape.width
        if inner.endswith(("q_norm.weight", "k_norm.weight")):
            return self._head_norm(weight, scored="q_norm" in inner)
        if inner == "self_attn.q_proj.weight":
            return self._queries(inner, weight)
        if inner:
            return self.norm(weight) if weight.dim() == 1 else self._inner(inner, weight)
        if name == "markov_head.up.weight":
            return torch.nn.functional.pad(self._placed(weight), (0, 0, 0, wide - width))
        if name == "markov_head.down.weight":
            return torch.nn.functional.pad(self._placed(weight), (0, wide - width))
        if name == "confidence_head.proj.weight":
            placed = self._placed(weight)
            rows, markov = placed[:, :width], placed[:, width:]
            return torch.cat((torch.nn.functional.pad(rows, (0, wide - width)), markov), 1)
        if name == "mask_embedding":
            return torch.nn.functional.pad(self._placed(weight), (0, wide - width))
        if name.startswith(("markov_head.", "confidence_head.")):
            return self._placed(weight)
        return super().inflate(name, weight)

    def _placed(self, weight: Tensor) -> Tensor:
        return weight.to(self.device, self.dtype)

    def _places(self) -> Tensor:
        """[Dh] where each dimension of a small head goes: pair i is dimensions i and i + Dh/2."""
        old, new = self.small.head_dim, self.shape.head_dim
        first = torch.arange(old // 2, device=self.device) * (new // old)
        return torch.cat((first, first + new // 2))

    def _head_norm(self, weight: Tensor, *, scored: bool) -> Tensor:
        new = torch.ones(self.shape.head_dim, dtype=self.dtype, device=self.device)
        shrink = 1.0 if scored else math.sqrt(self.small.head_dim / self.shape.head_dim)
        new[self._places()] = (weight.float().to(self.device) * shrink).to(new)
        return new

    def _queries(self, name: str, weight: Tensor) -> Tensor:
        """Heads that are kept are zero between their dimensions: their norm counts all of a head."""
        group, wide = self.small.heads // self.small.kv_heads, self.shape.heads // self.shape.kv_heads
        new = torch.unflatten(self._inner(name, weight), 0, (self.shape.heads, self.shape.head_dim))
        kept = [(head // group) * wide + head % group for head in range(self.small.heads)]
        between = torch.ones(self.shape.head_dim, dtype=torch.bool, device=self.device)
        between[self._places()] = False
        new[torch.tensor(kept, device=self.device)[:, None], between.nonzero()[:, 0]] = 0
        return new.flatten(0, 1)


def inflate_block(
    config: BlockConfig,
    weights: Mapping[str, Tensor],
    shape: Shape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> tuple[BlockConfig, dict[str, Tensor]]:
    """The drafter of a target inflated to `shape`."""
    inflater = BlockInflater(config, shape, dtype, device)
    return inflated_shape(config, shape), {
        name: inflater.inflate(name, weight) for name, weight in weights.items()
    }


def inflate_block_folder(head: Path, shape: Shape, folder: Path, device: torch.device | str = "cpu") -> Path:
    """Write a drafter's folder anew, for its target at a larger shape."""
    write_block(folder, *inflate_block(*read_block(head), shape, device=device))
    return folder
