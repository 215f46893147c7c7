"""Gluon: products of 65 rows and more with a large weight, on tensor cores that are kept busy (Hopper only).

One warp fetches tiles with the copy engine, eight warps multiply them, and a program takes one tile after another, so
that fetching goes on while results are written. Every number has the bits that `linear.linear` gives it:
tensor cores add up the same steps of 16 along K in the same order, in a fresh sum for each of the weight's splits, and
splits are added from zero in order: here (SEQUENTIAL) or where the parts are read (rows.py). Only how many
outputs and rows a tile has is different, and no sum depends on that.

Rows of a tile come in up to three pieces, because shapes are powers of two and a batch of 160 rows should not cost
what 256 cost.
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

STEP = 64  # along K: what one line of swizzled shared memory holds
PARTS, GATED, LOGITS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
_BK = gl.constexpr(STEP)


def describe(matrix: Any, rows: int, columns: int = STEP) -> Any:
    """What the copy engine needs to know to fetch or write tiles of a matrix."""
    dtype = gl.bfloat16 if matrix.element_size() == 2 else gl.float32
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


@gluon.jit
def _gdc_wait():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _gdc_launch():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _place(unit, ROW_TILES: gl.constexpr, PARALLEL: gl.constexpr):
    """Which tile of outputs, which split and which tile of rows: programs side by side share a weight."""
    return unit // (ROW_TILES * PARALLEL), (unit // ROW_TILES) % PARALLEL, unit % ROW_TILES


@gluon.jit
def _fetch_weights(left, right, n0, k, bar, into, MODE: gl.constexpr, BN: gl.constexpr):
    if MODE == GATED:
        half: gl.constexpr = BN // 2
        tma.async_copy_global_to_shared(left, [n0 // 2, k], bar, into.slice(0, half, 0))
        tma.async_copy_global_to_shared(right, [n0 // 2, k], bar, into.slice(half, half, 0))
    else:
        tma.async_copy_global_to_shared(left, [n0, k], bar, into)


@gluon.jit
def _fetch_rows(a0, a1, a2, first, k, bar, r0, r1, r2, P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr):
    tma.async_copy_global_to_shared(a0, [first, k], bar, r0)
    if P1 > 0:
        tma.async_copy_global_to_shared(a1, [first + P0, k], bar, r1)
    if P2 > 0:
        tma.async_copy_global_to_shared(a2, [first + P0 + P1, k], bar, r2)


@gluon.jit
def _fetch(left, right, a0, a1, a2, w, r0, r1, r2, full, empty, units, K: gl.constexpr, MODE: gl.constexpr,
           BN: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, ROW_TILES: gl.constexpr,
           PARALLEL: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Keep all stages filled. The first weights are fetched before the preceding kernel has ended."""
    steps: gl.constexpr = K // PARALLEL // _BK
    MT: gl.constexpr = P0 + P1 + P2
    bytes: gl.constexpr = (BN + MT) * _BK * 2
    tile, split, row_tile = _place(gl.program_id(0), ROW_TILES, PARALLEL)
    k0 = split * (K // PARALLEL)
    for i in gl.static_range(STAGES):
        mbarrier.expect(full.index(i), bytes)
        _fetch_weights(left, right, tile * BN, k0 + i * _BK, full.index(i), w.index(i), MODE, BN)
    _gdc_wait()
    for i in gl.static_range(STAGES):
        _fetch_rows(a0, a1, a2, row_tile * MT, k0 + i * _BK, full.index(i), r0.index(i), r1.index(i), r2.index(i),
                    P0, P1, P2)  # fmt: skip
    slot, phase = 0, 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        tile, split, row_tile = _place(unit, ROW_TILES, PARALLEL)
        k0 = split * (K // PARALLEL)
        begin = gl.where(unit == gl.program_id(0), STAGES, 0)
        for step in range(begin, steps):
            bar = full.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(bar, bytes)
            _fetch_weights(left, right, tile * BN, k0 + step * _BK, bar, w.index(slot), MODE, BN)
            _fetch_rows(a0, a1, a2, row_tile * MT, k0 + step * _BK, bar, r0.index(slot), r1.index(slot), r2.index(slot),
                        P0, P1, P2)  # fmt: skip
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def _multiply(w, r0, r1, r2, full, empty, slot, phase, steps, BN: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr,
              P2: gl.constexpr, STAGES: gl.constexpr, L0: gl.constexpr, L1: gl.constexpr,
              L2: gl.constexpr):  # fmt: skip
    """[BN, P0], [BN, P1] and [BN, P2] over one stretch of K; a stage is free when the next has begun."""
    pieces: gl.constexpr = 1 + (P1 > 0) + (P2 > 0)
    acc0 = gl.zeros([BN, P0], gl.float32, L0)
    acc1 = gl.zeros([BN, P1 if P1 > 0 else P0], gl.float32, L1)
    acc2 = gl.zeros([BN, P2 if P2 > 0 else P0], gl.float32, L2)
    for k in range(steps):
        mbarrier.wait(full.index(slot), phase)
        weights = w.index(slot)
        acc0 = warpgroup_mma(weights, r0.index(slot).permute([1, 0]), acc0, is_async=True)
        if P1 > 0:
            acc1 = warpgroup_mma(weights, r1.index(slot).permute([1, 0]), acc1, is_async=True)
        if P2 > 0:
            acc2 = warpgroup_mma(weights, r2.index(slot).permute([1, 0]), acc2, is_async=True)
        if pieces == 1:
            acc0 = warpgroup_mma_wait(1, deps=[acc0])
        elif pieces == 2:
            acc0, acc1 = warpgroup_mma_wait(2, deps=[acc0, acc1])
        else:
            acc0, acc1, acc2 = warpgroup_mma_wait(3, deps=[acc0, acc1, acc2])
        mbarrier.arrive(empty.index(gl.where(slot == 0, STAGES, slot) - 1), pred=k > 0)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    if pieces == 1:
        acc0 = warpgroup_mma_wait(0, deps=[acc0])
    elif pieces == 2:
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
    else:
        acc0, acc1, acc2 = warpgroup_mma_wait(0, deps=[acc0, acc1, acc2])
    mbarrier.arrive(empty.index(gl.where(slot == 0, STAGES, slot) - 1))
    return acc0, acc1, acc2, slot, phase


@gluon.jit
def _put_numbers(acc, into, first, n0, N: gl.constexpr, BN: gl.constexpr, P: gl.constexpr, LAYOUT: gl.constexpr):
    """fp32 to [rows, N]; eight threads that hold neighbouring outputs fill a sector of 32 bytes."""
    n = n0 + gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
    rows = first + gl.arange(0, P, gl.SliceLayout(0, LAYOUT))
    place = rows.to(gl.int64)[None, :] * N + n[:, None]
    if N % BN == 0:
        gl.store(into + place, acc)
    else:
        gl.store(into + place, acc, mask=(n < N)[:, None])


@gluon.jit
def _scaled(acc, inverses, first, P: gl.constexpr, LAYOUT: gl.constexpr):
    rows = first + gl.arange(0, P, gl.SliceLayout(0, LAYOUT))
    return acc * gl.load(inverses + rows, cache_modifier=".cg")[None, :]


@gluon.jit
def _put_gated(acc, desc, staging, first, n0, BN: gl.constexpr, P: gl.constexpr, GELU: gl.constexpr):
    """Gates are the first half of a tile's outputs and ups the second: both of a unit lie in one thread."""
    half: gl.constexpr = BN // 2
    gate, up = acc.reshape([2, half, P]).permute([1, 2, 0]).split()
    z = gate
    if GELU:  # as in linear.open_gate
        z = gate * (1.5957691216057308 + 0.07135481282875852 * gate * gate)
    inner = (gate / (1.0 + gl.exp(-z)) * up).to(staging.dtype)
    tma.store_wait(0)
    gl.thread_barrier()
    staging.store(inner.permute([1, 0]))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(desc, [first, n0 // 2], staging)


@gluon.jit
def _with_delta(acc, delta, first, n0, N: gl.constexpr, BN: gl.constexpr, P: gl.constexpr, LAYOUT: gl.constexpr):
    """What adapters add to a tile of gates and ups; in `delta` [rows, N] all ups lie behind all gates."""
    half: gl.constexpr = BN // 2
    n = gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
    rows = first + gl.arange(0, P, gl.SliceLayout(0, LAYOUT))
    unit = n0 // 2 + n % half
    place = rows[None, :] * N + (unit + n // half * (N // 2))[:, None]
    if N % BN == 0:
        return acc + gl.load(delta + place, cache_modifier=".cg")
    return acc + gl.load(delta + place, mask=(unit < N // 2)[:, None], other=0.0, cache_modifier=".cg")


@gluon.jit
def _put(acc, out, into, staging, inverses, delta, first, n0, split, M, N: gl.constexpr, MODE: gl.constexpr,
         BN: gl.constexpr, P: gl.constexpr, LAYOUT: gl.constexpr, ADAPTED: gl.constexpr,
         GELU: gl.constexpr):  # fmt: skip
    """What follows the product of one piece, by kind."""
    if ADAPTED:
        acc = _with_delta(acc, delta, first, n0, N, BN, P, LAYOUT)
    if MODE == PARTS:
        _put_numbers(acc, out + split.to(gl.int64) * M * N, first, n0, N, BN, P, LAYOUT)
    elif MODE == LOGITS:
        _put_numbers(_scaled(acc, inverses, first, P, LAYOUT), out, first, n0, N, BN, P, LAYOUT)
    else:
        _put_gated(_scaled(acc, inverses, first, P, LAYOUT), into, staging, first, n0, BN, P, GELU)


@gluon.jit
def _consume(w, r0, r1, r2, full, empty, out, into0, into1, into2, staging, inverses, delta, units, M,
             N: gl.constexpr, K: gl.constexpr, MODE: gl.constexpr, BN: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr,
             P2: gl.constexpr, ROW_TILES: gl.constexpr, PARALLEL: gl.constexpr, SEQUENTIAL: gl.constexpr,
             STAGES: gl.constexpr, L0: gl.constexpr, L1: gl.constexpr, L2: gl.constexpr,
             ADAPTED: gl.constexpr, GELU: gl.constexpr):  # fmt: skip
    MT: gl.constexpr = P0 + P1 + P2
    _gdc_wait()
    slot, phase = 0, 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        tile, split, row_tile = _place(unit, ROW_TILES, PARALLEL)
        steps: gl.constexpr = K // (PARALLEL * SEQUENTIAL) // _BK
        acc0, acc1, acc2, slot, phase = _multiply(w, r0, r1, r2, full, empty, slot, phase, steps, BN, P0, P1, P2,
                                                  STAGES, L0, L1, L2)  # fmt: skip
        if SEQUENTIAL > 1:
            sum0 = 0.0 + acc0
            sum1 = 0.0 + acc1
            sum2 = 0.0 + acc2
            for _ in range(SEQUENTIAL - 1):
                acc0, acc1, acc2, slot, phase = _multiply(w, r0, r1, r2, full, empty, slot, phase, steps, BN, P0, P1,
                                                          P2, STAGES, L0, L1, L2)  # fmt: skip
                sum0 = sum0 + acc0
                if P1 > 0:
                    sum1 = sum1 + acc1
                if P2 > 0:
                    sum2 = sum2 + acc2
            acc0, acc1, acc2 = sum0, sum1, sum2
        n0, first = tile * BN, row_tile * MT
        _put(acc0, out, into0, staging.slice(0, P0, 0), inverses, delta, first, n0, split, M, N, MODE, BN, P0, L0,
             ADAPTED, GELU)  # fmt: skip
        if P1 > 0:
            _put(acc1, out, into1, staging.slice(0, P1, 0), inverses, delta, first + P0, n0, split, M, N, MODE, BN, P1,
                 L1, ADAPTED, GELU)  # fmt: skip
        if P2 > 0:
            _put(acc2, out, into2, staging.slice(0, P2, 0), inverses, delta, first + P0 + P1, n0, split, M, N, MODE, BN,
                 P2, L2, ADAPTED, GELU)  # fmt: skip
    if MODE == GATED:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["units", "M"])
def wide(left, right, a0, a1, a2, out, into0, into1, into2, inverses, delta, units, M, N: gl.constexpr,
         K: gl.constexpr, MODE: gl.constexpr, BN: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr,
         WARPS_N: gl.constexpr, ROW_TILES: gl.constexpr, PARALLEL: gl.constexpr, SEQUENTIAL: gl.constexpr,
         STAGES: gl.constexpr, ADAPTED: gl.constexpr, GELU: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Tiles of BN outputs for P0 + P1 + P2 rows; `left` and `right` describe the weight: in GATED gates and ups.

    There `delta` is added to the product where rows have adapters (ADAPTED); others finish their sums elsewhere.
    """
    dtype: gl.constexpr = left.dtype
    L0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps // WARPS_N, WARPS_N], [16, P0 // WARPS_N, 16])
    L1: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [num_warps // WARPS_N, WARPS_N], [16, (P1 if P1 > 0 else P0) // WARPS_N, 16]
    )
    L2: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [num_warps // WARPS_N, WARPS_N], [16, (P2 if P2 > 0 else P0) // WARPS_N, 16]
    )
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, _BK], dtype)
    w = gl.allocate_shared_memory(dtype, [STAGES, BN, _BK], w_layout)
    r0 = gl.allocate_shared_memory(dtype, [STAGES, P0, _BK], a0.layout)
    r1 = r0
    r2 = r0
    if P1 > 0:
        r1 = gl.allocate_shared_memory(dtype, [STAGES, P1, _BK], a1.layout)
    if P2 > 0:
        r2 = gl.allocate_shared_memory(dtype, [STAGES, P2, _BK], a2.layout)
    staging = r0.index(0)
    if MODE == GATED:
        staging = gl.allocate_shared_memory(dtype, [P0, BN // 2], into0.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    _gdc_launch()
    gl.warp_specialize(
        [
            (_consume, (w, r0, r1, r2, full, empty, out, into0, into1, into2, staging, inverses, delta, units, M, N, K,
                        MODE, BN, P0, P1, P2, ROW_TILES, PARALLEL, SEQUENTIAL, STAGES, L0, L1, L2, ADAPTED, GELU)),
            (_fetch, (left, right, a0, a1, a2, w, r0, r1, r2, full, empty, units, K, MODE, BN, P0, P1, P2, ROW_TILES,
                      PARALLEL, STAGES)),
        ],
        [1],
        [24],
    )  # fmt: skip
