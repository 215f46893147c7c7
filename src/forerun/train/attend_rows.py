"""Triton attention kernel for writing training data: one query row per sequence over a static KV cache.

Each row reads only its filled slots: sequences differ in length, and a masked kernel reads the longest for every row;
on one H200 that was two thirds of a step.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import torch
import triton
import triton.language as tl

ROWS = tl.constexpr(16)  # the least that a product takes; a group of heads fills some of them
TILE = tl.constexpr(64)  # slots per step


@triton.jit
def _attend_rows(queries, keys, values, places, out, scale, row_stride, head_stride,
                 HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr):  # fmt: skip
    b, h = tl.program_id(0), tl.program_id(1)
    last = tl.load(places + b)
    r, d, t = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, TILE)
    mine = ((b * HKV + h) * GROUP + r)[:, None] * D + d[None, :]
    q = tl.load(queries + mine, mask=(r < GROUP)[:, None], other=0.0)
    base = b.to(tl.int64) * row_stride + h * head_stride
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    found = tl.zeros((ROWS, D), dtype=tl.float32)
    for start in range(0, last + 1, TILE):
        slot = start + t
        there = slot <= last
        place = base + slot[:, None] * D + d[None, :]
        k = tl.load(keys + place, mask=there[:, None], other=0.0)
        v = tl.load(values + place, mask=there[:, None], other=0.0)
        scores = tl.where(there[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        found = tl.dot(weights.to(v.dtype), v, found * shrink[:, None])
        top = higher
    tl.store(out + mine, (found / total[:, None]).to(out.dtype.element_ty), mask=(r < GROUP)[:, None])


def attend_rows(queries: torch.Tensor, cache: torch.Tensor, places: torch.Tensor, scale: float) -> torch.Tensor:
    """Queries [B, Hkv, G, Dh] over slots 0..places[b] of cache [2, B, Hkv, S, Dh]; the last two dims are dense."""
    queries = queries.contiguous()
    out = torch.empty_like(queries)
    batch, kv_heads, group, dim = queries.shape
    _attend_rows[(batch, kv_heads)](
        queries, cache[0], cache[1], places, out, scale * 1.4426950408889634,
        cache.stride(1), cache.stride(2), kv_heads, group, dim,
    )  # fmt: skip
    return out
