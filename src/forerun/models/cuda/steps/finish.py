"""What follows products whose sums lie in memory: one program per row, or per some heads of a row (kernels/rows.py)."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.models.config import DecoderConfig
from forerun.models.cuda.kernels import rows as kernels_rows
from forerun.models.cuda.network import Layer, Run


class Sums(NamedTuple):
    """[number, apart, N]: the parts of a product's splits, each of `apart` rows, still to be added up."""

    data: Tensor
    number: int
    apart: int


class InBytes(NamedTuple):
    """Rows in e4m3 [R, K], and what each 128 columns of a row were divided by [K / 128, R]."""

    data: Tensor  # uint8
    scales: Tensor


def finish_residual(
    sums: Sums,
    inverses: Tensor,
    count: int,
    x: Tensor,
    out: Tensor,
    norm: Tensor,
    eps: float,
    in_bytes: InBytes | None = None,
) -> None:
    """Add sums to the residual stream, and leave what the next norm needs: rows times its weight, and `inverses`."""
    width = x.shape[1]
    data, scales = (out, inverses) if in_bytes is None else (in_bytes.data.view(torch.float8_e4m3fn), in_bytes.scales)
    kernels_rows.finish_residual[(count,)](
        sums.data, x, out, data, scales, norm, inverses, sums.apart, eps, scales.stride(0), WIDTH=width,
        UP=1 << (width - 1).bit_length(), PARTS=sums.number, BYTES=in_bytes is not None, PDL=True, num_warps=8,
        enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip


def finish_qkv(
    sums: Sums, inverses: Tensor, run: Run, config: DecoderConfig, layer: Layer, kv: Tensor, out: Tensor, normed: bool
) -> None:
    """Make queries, keys and values of sums; kv [2, Hkv, S, D]. `normed`: the rows came with their norm applied."""
    heads = gcd(config.heads, config.kv_heads, 8)
    bias, head_norm, rope = (inverses if one is None else one for one in (layer.qkv_bias, layer.qk_norm, layer.rope))
    kernels_rows.finish_qkv[(run.size.rows, (config.heads + 2 * config.kv_heads) // heads)](
        sums.data, inverses, out, kv[0], kv[1], bias, head_norm, rope, run.positions, run.slots, sums.apart,
        config.norm_eps, kv.stride(1), H=config.heads, HKV=config.kv_heads, D=config.head_dim,
        ROT=0 if layer.rope is None else layer.rope.shape[1], HEADS=heads, PARTS=sums.number,
        BIAS=layer.qkv_bias is not None, HEAD_NORM=layer.qk_norm is not None, ROPE=layer.rope is not None,
        NORMED=normed, PDL=True, num_warps=4, enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip
