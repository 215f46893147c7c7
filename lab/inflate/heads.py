"""Inflates trained heads of every kind with their target: the same drafts at the cost of a larger shape.

EAGLE heads, multi-token-prediction layers and block drafters are layers (eagle/inflate_head, block/inflate). Medusa's
and Hydra's heads are residual blocks on the last row, h + SiLU(W h + b): rows of zeros in W and b add SiLU(0) = 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from forerun.core.errors import UnsupportedModel
from forerun.drafters.heads.medusa import Family, HeadsConfig, read_heads, write_heads
from forerun.drafters.heads.mtp import read_mtp, write_mtp
from lab.inflate.block import inflate_block_folder
from lab.inflate.eagle import inflate_head, inflate_head_folder
from lab.inflate.model import Shape
from lab.inflate.rows import RowInflater


def inflate_folder(
    head: Path, kind: str, shape: Shape, folder: Path, device: torch.device | str = "cpu"
) -> Path:
    """Write the folder of a head of this kind anew, for its target at a larger shape."""
    if kind in ("eagle", "eagle3"):
        return inflate_head_folder(head, shape, folder, device)
    if kind in ("dflash", "dspark"):
        return inflate_block_folder(head, shape, folder, device)
    if kind == "mtp":
        write_mtp(folder, *inflate_head(*read_mtp(head), shape, device=device))
        return folder
    if kind in ("medusa", "hydra"):
        family: Family = "medusa" if kind == "medusa" else "hydra"
        write_heads(folder, *inflate_heads(*read_heads(head, family), shape, device=device))
        return folder
    raise UnsupportedModel(f"heads of the kind {kind!r} cannot be inflated")


def inflate_heads(
    config: HeadsConfig,
    weights: Mapping[str, Tensor],
    shape: Shape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> tuple[HeadsConfig, dict[str, Tensor]]:
    """Medusa's or Hydra's heads of a target inflated to `shape`."""
    rows = RowInflater(config.width, shape, dtype, device)

    def inflated(name: str, weight: Tensor) -> Tensor:
        if name in ("d2t", "t2d"):
            return weight
        if name.endswith("linear.weight"):
            return rows.side_by_side(weight)
        return rows.vector(weight) if weight.dim() == 1 else rows.table(weight)

    larger = replace(config, width=shape.width)
    return larger, {name: inflated(name, weight) for name, weight in weights.items()}
