"""Random weights in every format that the compiled kernels read, rows for them, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from forerun.models.cuda.cubin.packing import (
    Strips,
    pack_bf16,
    pack_bytes,
    pack_e4m3,
    pack_int4,
    pack_int8_groups,
    pack_k,
    pair_gates,
)
from forerun.models.cuda.cubin.products import Cut, Products, quantise_rows

FORMATS = (
    "bf16", "e4m3", "e4m3_blocks", "int8", "e4m3_weights", "int4_128", "int4_32", "int4_zeros_128", "int4_zeros_32",
    "int4_mins_32", "int4_k_32", "bytes_k_16", "int8_groups_32",
)  # fmt: skip
MOST_ROWS = 1024


def make(name: str, outputs: int, depth: int, gated: bool = False) -> tuple[Strips, Tensor]:
    """A random weight in a format, and the numbers it stands for [N, K] in float32."""
    order = pair_gates if gated else (lambda given: given)
    weight = torch.randn(outputs, depth, device="cuda") * torch.rand(outputs, 1, device="cuda").add(0.1) / depth**0.5
    if name == "bf16":
        held = weight.bfloat16()
        packed, numbers = pack_bf16(order(held)), held.float()
    elif name in ("int8", "e4m3_weights", "e4m3"):
        scales = weight.abs().amax(1) / (127.0 if name == "int8" else 448.0)
        data = weight / scales[:, None]
        data = data.round().to(torch.int8) if name == "int8" else data.to(torch.float8_e4m3fn)
        if name == "e4m3":
            packed = pack_e4m3(order(data.view(torch.uint8)).view(data.dtype), order(scales))
        else:
            packed = pack_bytes(order(data.view(torch.uint8)).view(data.dtype), order(scales))
        numbers = data.float() * scales[:, None]
    elif name == "e4m3_blocks":
        tiles = weight.view(-(-outputs // 128), -1, depth // 128, 128)
        scales = tiles.abs().amax((1, 3)) / 448.0
        data = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        numbers = (data.float() * scales[:, None, :, None]).view(outputs, depth)
        packed = pack_e4m3(data.view(outputs, depth), None, scales)
    elif name in ("int4_mins_32", "int4_k_32", "bytes_k_16", "int8_groups_32"):
        packed, numbers = make_gguf(name, weight, order)
    else:
        group = int(name.rsplit("_", 1)[1])
        parts = weight.view(outputs, -1, group)
        zeros = torch.full(parts.shape[:2], 8, device="cuda")
        if "zeros" in name:
            zeros = torch.randint(4, 13, parts.shape[:2], device="cuda")
        dtype = torch.float16 if group == 32 else torch.bfloat16
        scales = (parts.abs().amax(2) / 7.0).to(dtype)
        data = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
        numbers = ((data - zeros[..., None]) * scales.float()[..., None]).view(outputs, depth)
        given = zeros if "zeros" in name else None
        packed = pack_int4(
            order(data.view(outputs, depth).to(torch.uint8)), order(scales), None if given is None else order(given)
        )
    return replace(packed, gated=gated), numbers


def make_gguf(name: str, weight: Tensor, order: Callable[[Tensor], Tensor]) -> tuple[Strips, Tensor]:
    """As in GGUF files: groups with scales, and minima that are no multiples of them."""
    (outputs, depth), group = weight.shape, int(name.rsplit("_", 1)[1])
    most = 63 if name == "bytes_k_16" else 127 if name == "int8_groups_32" else 15
    parts = weight.view(outputs, -1, group)

    def by_column(values: Tensor) -> Tensor:
        return values.float().repeat_interleave(depth // values.shape[1], 1)

    if name == "int8_groups_32":
        scales = (parts.abs().amax(2) / most).half()
        data = (weight / by_column(scales)).round().clamp(-most, most)
        return pack_int8_groups(order(data.to(torch.int8)), order(scales)), data * by_column(scales)
    wanted, lowest = (parts.amax(2) - parts.amin(2)) / most, -parts.amin(2)
    if name == "int4_mins_32":
        scales, minima = wanted.half(), lowest.half()
        data = ((weight + by_column(minima)) / by_column(scales)).round().clamp(0, most)
        return (
            pack_int4(order(data.to(torch.uint8)), order(scales), minima=order(minima)),
            data * by_column(scales) - by_column(minima),
        )
    in_block, signs = 128 // group, torch.ones_like(wanted)
    if name == "bytes_k_16":
        signs[:, ::3] = -1  # Q6_K has such scales
    scales, minima = ((each.view(outputs, -1, in_block).amax(2) / 63).half() for each in (wanted, lowest))
    steps, lows = (
        (each / one.float().repeat_interleave(in_block, 1)).round().clamp(1, 127)
        for each, one in ((wanted, scales), (lowest, minima))
    )
    factors, less = by_column(steps) * by_column(scales), by_column(lows) * by_column(minima)
    data = ((weight + less) / factors).round().clamp(0, most)
    numbers = by_column(signs) * (data * factors - less)
    given = data, steps * signs, lows * signs, scales, minima
    return pack_k(*(order(each) for each in given)), numbers


class Rows:
    """Random rows, also as e4m3 where the weight is."""

    def __init__(self, depth: int, count: int = MOST_ROWS) -> None:
        spread = torch.rand(count, depth, device="cuda").mul(6).sub(4).exp2()
        self.plain = (torch.randn(count, depth, device="cuda") * spread).bfloat16()
        self.bytes = torch.zeros(count, depth, device="cuda", dtype=torch.uint8)
        self.scales = torch.zeros(-(-depth // 128), -(-count // 256) * 256, device="cuda")[:, :count]
        if depth % 128 == 0:
            quantise_rows(self.plain, count, self.bytes, self.scales)

    def numbers(self, weight: Strips) -> Tensor:
        if weight.format != "e4m3":
            return self.plain.double()
        return (
            self.bytes.view(torch.float8_e4m3fn).double()
            * self.scales.T.double().repeat_interleave(128, 1)[:, : self.bytes.shape[1]]
        )


def multiply(products: Products, weight: Strips, rows: Rows, count: int, out: Tensor, cut: Cut | None = None) -> None:
    if weight.format == "e4m3":
        products.multiply(weight, rows.bytes, count, out, cut, rows.scales)
    else:
        products.multiply(weight, rows.plain, count, out, cut)


def new_out(weight: Strips, count: int) -> Tensor:
    wide = weight.outputs // 2 if weight.gated else weight.outputs
    return torch.full(
        (count, wide), float("nan"), device="cuda", dtype=torch.bfloat16 if weight.gated else torch.float32
    )
