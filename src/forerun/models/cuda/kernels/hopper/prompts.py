"""Gluon: attention of prompts behind long contexts, on tensor cores that are kept busy (Hopper only).

One warp fetches pages of keys and values with the copy engine; two groups of four warps each take 64 queries, and
neither waits for the other, so that one multiplies while the other weighs scores. Every number has the bits that
`tiled.attend` gives it: the same products of the same steps, splits added up in the same order. A program takes a group
of chained nodes with all splits of its context and writes what they found.
"""

# mypy: ignore-errors
# The bodies are Gluon's language, not Python: types and operators mean something else there.

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from forerun.models.cuda.kernels.hopper.wide import _gdc_launch, _gdc_wait

QUERIES = 128  # of a group, at most
TILE, HALF, FIELDS = (
    gl.constexpr(64),
    gl.constexpr(64),
    gl.constexpr(8),
)  # a page; queries of four warps; ints per group
PART = gl.constexpr(2.0**-22)  # the last place of numbers from 2 to 4


def describe(kept: Any) -> Any:
    """What the copy engine needs to know to fetch pages of the keys or values [Hkv, S, D] of a layer."""
    heads, slots, dim = kept.shape
    rows = kept.as_strided(((heads - 1) * (kept.stride(0) // dim) + slots, dim), (dim, 1))
    layout = gl.NVMMASharedLayout.get_default_for([TILE.value, dim], gl.bfloat16)
    return TensorDescriptor.from_tensor(rows, [TILE.value, dim], layout)


@gluon.jit
def _fetch(keys, values, ints, pages, tiles, row, k, v, full_k, full_v, empty_k, empty_v, D: gl.constexpr,
           STAGES: gl.constexpr):  # fmt: skip
    """Keep all stages filled with pages, in order; behind the last keys they come once more, for nobody."""
    bytes: gl.constexpr = TILE * D * 2
    slot, phase = 0, 1
    page = gl.load(ints + pages)
    _gdc_wait()
    if tiles > 0:
        mbarrier.expect(full_k.index(0), bytes)
        tma.async_copy_global_to_shared(keys, [row + page * TILE, 0], full_k.index(0), k.index(0))
    for i in range(tiles):
        place = row + page * TILE
        page = gl.load(ints + pages + gl.minimum(i + 1, tiles - 1))
        mbarrier.wait(empty_v.index(slot), phase)
        mbarrier.expect(full_v.index(slot), bytes)
        tma.async_copy_global_to_shared(values, [place, 0], full_v.index(slot), v.index(slot))
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
        mbarrier.wait(empty_k.index(slot), phase)
        mbarrier.expect(full_k.index(slot), bytes)
        tma.async_copy_global_to_shared(keys, [row + page * TILE, 0], full_k.index(slot), k.index(slot))


@gluon.jit
def _rise(top, found):
    """As attention.rise."""
    higher = gl.maximum(top, found)
    safe = gl.where(higher == float("-inf"), 0.0, higher)
    return higher, safe, gl.exp2(top - safe)


@gluon.jit
def _split_start(s):
    return gl.where(s < 8, s * 128, gl.where(s < 20, 1024 + (s - 8) * 256, 4096 + (s - 20) * 1024))


@gluon.jit
def _split_of(p):
    return gl.where(p < 1024, p // 128, gl.where(p < 4096, 8 + (p - 1024) // 256, 20 + (p - 4096) // 1024))


@gluon.jit
def _without_rest(v, first, last, D: gl.constexpr):
    """Zero the values behind the last position: whatever is there must not count, not even what is no number."""
    SIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    for i in gl.static_range(TILE // 16):
        some = v.slice(16 * i, 16, 0)
        p = first + 16 * i + gl.arange(0, 16, gl.SliceLayout(1, SIDE))
        some.store(gl.where((p <= last)[:, None], some.load(SIDE), 0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _add_tile(q, k, v, full_k, full_v, empty_k, empty_v, slot, phase, scores, at, first, last, top, total, acc, scale,
              D: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, SCORES: gl.constexpr,
              FOUND: gl.constexpr):  # fmt: skip
    """As tiled._add_tile, of the page in a slot, whose scores are there; those of the next are found meanwhile."""
    after = gl.where(slot == STAGES - 1, 0, slot + 1)
    mbarrier.wait(full_k.index(after), gl.where(after == 0, phase ^ 1, phase))
    found = warpgroup_mma(q, k.index(after).permute([1, 0]), gl.zeros([HALF, TILE], gl.float32, SCORES), is_async=True)
    scores = scores * scale
    if MASKED:
        p = first + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
        scores = gl.where(p[None, :] <= at[:, None], scores, float("-inf"))
    top, safe, shrink = _rise(top, gl.max(scores, 1))
    weights = gl.exp2(scores - safe[:, None])
    total = total * shrink + gl.sum((weights + 2.0).to(gl.int32, bitcast=True), 1).to(gl.float32) * PART
    given = gl.convert_layout(weights.to(gl.bfloat16), gl.DotOperandLayout(0, FOUND, 2))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, FOUND))[:, None]
    mbarrier.wait(full_v.index(slot), phase)
    if MASKED and first + TILE - 1 > last:
        _without_rest(v.index(slot), first, last, D)
    acc = warpgroup_mma(given, v.index(slot), acc, is_async=True)
    found = warpgroup_mma_wait(1, deps=[found])
    mbarrier.arrive(empty_k.index(after))
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty_v.index(slot))
    return found, top, total, acc


@gluon.jit
def _find(half, queries, positions, group, tiles, least, last, out, scale, h, q, k, v, full_k, full_v, empty_k, empty_v,
          H: gl.constexpr, HKV: gl.constexpr, EACH: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
          ROOM: gl.constexpr):  # fmt: skip
    """Half of a group's queries: all splits of what they see, and what they find there."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    FOUND: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    SIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    first, count = gl.load(group + 2), gl.load(group + 3)
    _gdc_wait()
    r = half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SIDE))
    real = (r // EACH < count) & (r % EACH < H // HKV)
    row = (first + r // EACH) * H + h * (H // HKV) + r % EACH
    d = gl.arange(0, D, gl.SliceLayout(0, SIDE))
    own = q.index(half)
    own.store(gl.load(queries + row[:, None] * D + d[None, :], mask=real[:, None], other=0.0))
    fence_async_shared()
    gl.thread_barrier()
    r = half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
    at = gl.load(positions + first + r // EACH, mask=(r // EACH < count) & (r % EACH < H // HKV), other=-1)
    all_top = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    all_total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, SCORES))
    all_acc = gl.zeros([HALF, D], gl.float32, FOUND)
    total, acc = all_total, all_acc
    slot, phase, clear = 0, 0, (least + 1) // TILE
    scores = gl.zeros([HALF, TILE], gl.float32, SCORES)
    if tiles > 0:
        mbarrier.wait(full_k.index(0), 0)
        scores = warpgroup_mma(q.index(half), k.index(0).permute([1, 0]), scores)
        mbarrier.arrive(empty_k.index(0))
    for s in range(_split_of(last) + 1):
        top = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))  # the others shrink to nothing
        start, end = _split_start(s) // TILE, gl.minimum(_split_start(s + 1) // TILE, tiles)
        middle = gl.maximum(start, gl.minimum(end, clear))
        for i in range(start, middle):
            scores, top, total, acc = _add_tile(q.index(half), k, v, full_k, full_v, empty_k, empty_v, slot, phase,
                                                scores, at, i * TILE, last, top, total, acc, scale, D, STAGES, False,
                                                SCORES, FOUND)  # fmt: skip
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        for i in range(middle, end):
            scores, top, total, acc = _add_tile(q.index(half), k, v, full_k, full_v, empty_k, empty_v, slot, phase,
                                                scores, at, i * TILE, last, top, total, acc, scale, D, STAGES, True,
                                                SCORES, FOUND)  # fmt: skip
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        all_top, safe, shrink = _rise(all_top, top)
        weight = gl.exp2(top - safe)
        all_total = all_total * shrink + total * weight
        all_acc = (all_acc * gl.convert_layout(shrink, gl.SliceLayout(1, FOUND))[:, None]
                   + acc * gl.convert_layout(weight, gl.SliceLayout(1, FOUND))[:, None])  # fmt: skip
    r = half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, FOUND))
    real = (r // EACH < count) & (r % EACH < H // HKV)
    row = (first + r // EACH) * H + h * (H // HKV) + r % EACH
    place = row[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, FOUND))[None, :]
    _put(out, place, all_acc / gl.convert_layout(all_total, gl.SliceLayout(1, FOUND))[:, None], real[:, None],
         ROOM * H * D)  # fmt: skip


@gluon.jit
def _put(into, place, values, mask, PLANE: gl.constexpr):
    """As linear.put_rows."""
    if PLANE > 0:
        held = gl.minimum(gl.maximum(values, -32639.0), 32639.0)
        number = ((held + 12582912.0) - 12582912.0).to(gl.int32)
        high = (number + 128) >> 8
        gl.store(into + place, high.to(gl.int8), mask=mask)
        gl.store(into + place + PLANE, (number - high * 256).to(gl.int8), mask=mask)
    else:
        gl.store(into + place, values.to(into.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["head_rows"])
def attend(queries, keys, values, ints, groups, positions, out, scale, head_rows, H: gl.constexpr, HKV: gl.constexpr,
           EACH: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, ROOM: gl.constexpr,
           num_warps: gl.constexpr):  # fmt: skip
    """One group and one key-value head, whose pages begin at row h * head_rows of what `keys` and `values` describe."""
    group, h = groups + (gl.num_programs(0) - 1 - gl.program_id(0)) * FIELDS, gl.program_id(1)
    first, count, pages = gl.load(group + 2), gl.load(group + 3), gl.load(group + 7)
    least = gl.load(positions + first)
    last = gl.load(positions + first + gl.maximum(count - 1, 0))
    tiles = gl.where(count > 0, last // TILE + 1, 0)
    last = gl.where(count > 0, last, -1)
    layout: gl.constexpr = keys.layout
    q = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, D], layout)
    k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, D], layout)
    v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, D], layout)
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_k.index(i), count=1)
        mbarrier.init(full_v.index(i), count=1)
        mbarrier.init(empty_k.index(i), count=2)
        mbarrier.init(empty_v.index(i), count=2)
    fence_async_shared()
    _gdc_launch()
    gl.warp_specialize(
        [
            (_find, (0, queries, positions, group, tiles, least, last, out, scale, h, q, k, v, full_k, full_v, empty_k,
                     empty_v, H, HKV, EACH, D, STAGES, ROOM)),
            (_find, (1, queries, positions, group, tiles, least, last, out, scale, h, q, k, v, full_k, full_v, empty_k,
                     empty_v, H, HKV, EACH, D, STAGES, ROOM)),
            (_fetch, (keys, values, ints, pages, tiles, h * head_rows, k, v, full_k, full_v, empty_k, empty_v, D,
                      STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
