"""What follows products whose sums lie in memory: programs for rows, or for pieces or heads of them (kernels/rows.py).

The next norm is handed on in one of two ways: as the factor of each row, by programs that see a whole row, or as the
sums of squares of its pieces, which as many programs leave side by side: much sooner where there are few rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.models.config import DecoderConfig
from forerun.models.cuda.kernels import rows as kernels_rows
from forerun.models.cuda.network import Layer, Run
from forerun.models.cuda.steps.attention import stores_of

FEW = 64  # rows up to which a program of queries, keys and values has two heads: others would wait for it


class Sums(NamedTuple):
    """[number, apart, N]: the parts of a product's splits, each of `apart` rows, still to be added up."""

    data: Tensor
    number: int
    apart: int


class InBytes(NamedTuple):
    """Rows in e4m3 [R, K], and what each 128 columns of a row were divided by [K / 128, R]."""

    data: Tensor  # uint8
    scales: Tensor


class After(NamedTuple):
    """The norm [D] of what a layer adds to the residual stream, and the columns whose squares are summed together."""

    norm: Tensor
    tile: int


@dataclass(frozen=True, slots=True)
class HandedOn:
    """Where a row's norm is left for the next product: `inverses` [R], or `squares` [R, stride] of `pieces`."""

    inverses: Tensor
    squares: Tensor
    pieces: int = 0  # 0 = inverses
    pdl: bool = True  # do kernels start early?


def columns_of(width: int, pieces: int) -> int:
    """Columns of a piece: a power of two, and whole blocks of 128."""
    up = 1 << (width - 1).bit_length()
    return up if pieces == 0 else max(128, up // pieces)


def finish_residual(
    sums: Sums,
    norms: HandedOn,
    count: int,
    x: Tensor,
    out: Tensor,
    norm: Tensor,
    eps: float,
    in_bytes: InBytes | None = None,
    delta: Tensor | None = None,
    after: After | None = None,
    share: float = 1.0,
    times: float = 1.0,
) -> None:
    """Add a share of sums, and of what adapters add, to the residual stream; leave what the next norm needs.

    `times`: what the stream is multiplied by then.
    """
    width, whole = x.shape[1], norms.pieces == 0 or after is not None
    columns, own = columns_of(width, 0 if whole else norms.pieces), norms.inverses if after is None else after.norm
    data, scales = (out, norms.inverses)
    if in_bytes is not None:
        data, scales = in_bytes.data.view(torch.float8_e4m3fn), in_bytes.scales
    kernels_rows.finish_residual[(count, -(-width // columns))](
        sums.data, or_unused(delta, norms.inverses), x, out, data, scales, norm, own, norms.inverses,
        norms.squares, sums.apart, eps, times, scales.stride(0), norms.squares.stride(0), WIDTH=width, COLUMNS=columns,
        WHOLE=whole, PARTS=sums.number, BYTES=in_bytes is not None, PDL=norms.pdl, ADAPTED=delta is not None,
        AFTER=0 if after is None else after.tile, SHARE=share, num_warps=8 if whole else 4, enable_fp_fusion=False,
        launch_pdl=norms.pdl,
    )  # fmt: skip


def finish_qkv(
    sums: Sums,
    norms: HandedOn,
    run: Run,
    turned: Tensor,
    config: DecoderConfig,
    layer: Layer,
    heads: tuple[int, int],
    kv: Tensor,
    out: Tensor,
    normed: bool,
    delta: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """Make queries, keys and values of sums, and of what adapters add; kv [2, Hkv, S, D].

    `turned` [R]: places of rows in the layer's rope. `heads`: KV heads that the layer writes, and numbers of a head.

    `normed`: the rows came with their norm applied. `scales` [2, Hkv, S]: of keys and values of 8 bits.
    """
    kv_heads, dim = heads
    together = gcd(config.heads, kv_heads, 2 if norms.pieces and run.size.rows <= FEW else 8)
    optional = layer.qkv_bias, layer.qk_norm, layer.rope, delta
    bias, head_norm, rope, added = (or_unused(one, norms.inverses) for one in optional)
    keys, values, kept_as = stores_of(kv, scales)
    kernels_rows.finish_qkv[(run.size.rows, (config.heads + 2 * kv_heads) // together)](
        sums.data, added, norms.inverses, norms.squares, out, keys, values, bias, head_norm, rope, turned,
        run.slots, sums.apart, config.norm_eps, kv.stride(1), norms.squares.stride(0), WIDTH=config.width,
        PIECES=norms.pieces, H=config.heads, HKV=kv_heads, D=dim,
        ROT=0 if layer.rope is None else layer.rope.shape[1], HEADS=together, PARTS=sums.number,
        BIAS=layer.qkv_bias is not None, HEAD_NORM=0 if layer.qk_norm is None else len(layer.qk_norm),
        ALL=config.qk_norm == "all", ROPE=layer.rope is not None, NORMED=normed, SIDE=kv.stride(2) // dim,
        PDL=norms.pdl, ADAPTED=delta is not None, FORMAT=kept_as, num_warps=4,
        enable_fp_fusion=False, launch_pdl=norms.pdl,
    )  # fmt: skip


def finish_gate(sums: Tensor, count: int, out: Tensor, gelu: bool) -> None:
    """Close gates: sums [count, 2I], all gates and then all ups, to out [.., I]."""
    inner = out.shape[1]
    kernels_rows.finish_gate[(count, -(-inner // 1024))](
        sums, out, INNER=inner, COLUMNS=1024, GELU=gelu, PDL=True, num_warps=4, enable_fp_fusion=False,
        launch_pdl=True,
    )  # fmt: skip


def or_unused(tensor: Tensor | None, other: Tensor) -> Tensor:
    """What a kernel is given in the place of a tensor that it does not read."""
    return other if tensor is None else tensor
