"""Triton: products of a few rows with a large weight, and the steps that are fused into them.

A pass over few nodes is bound by reading the weights once, so a layer is four such products and attention, and
norms, residuals, rotations, the write to the KV store and the gate are beginnings or ends of them. A norm is
split: the writer of the residual stream also writes it times the next norm's weight, and the sum of squares of
every tile of columns; the reader multiplies its result by the inverse root mean square.

The bits of a row must not depend on how many rows there are. Weights are the first operand of the product, so
rows only decide its width; which tile, how many splits and in what order they add up depends on the weight's
shape alone. Sums across a tile follow the layout in registers, which does change with the number of rows: they
are sums of squares, and run in double precision. The compiler must not fuse a multiplication with an addition
(`enable_fp_fusion=False` at the launch).
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

from typing import Any

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from forerun.models.cuda.kernels.adapters import added, ask_for_others, seconds_of, wait_until_begun

QKV, GATED, RESIDUAL, LOGITS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


def describe(matrix: Any, rows: int, columns: int) -> Any:
    """What the copy engine needs to know to fetch tiles of a matrix."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


@triton.jit
def put_rows(into, place, values, mask, PLANE: tl.constexpr):
    """Store rows in their type, or (PLANE > 0) as whole numbers: the high bytes, and PLANE further the low ones."""
    if PLANE > 0:
        held = tl.minimum(tl.maximum(values, -32639.0), 32639.0)
        # 1.5 * 2^23: the nearest, even where two are
        number = ((held + 12582912.0) - 12582912.0).to(tl.int32)
        high = (number + 128) >> 8
        tl.store(into + place, high.to(tl.int8), mask=mask)
        tl.store(into + place + PLANE, (number - high * 256).to(tl.int8), mask=mask)
    else:
        tl.store(into + place, values.to(into.dtype.element_ty), mask=mask)


@triton.jit
def _before(x, squares, tile, rows, live, N: tl.constexpr, MODE: tl.constexpr, BN: tl.constexpr,
            TILES: tl.constexpr, TILES_UP: tl.constexpr):  # fmt: skip
    """What a tile needs of the rows that go in: the residual stream [BN, MT] where that is added to, else the
    sums of squares [MT, TILES_UP] that the tiles of columns left, zero beyond the last."""
    if MODE == RESIDUAL:
        place = rows[None, :] * N + (tile * BN + tl.arange(0, BN))[:, None]
        return tl.load(x + place, mask=live[None, :], other=0.0, cache_modifier=".cg")
    else:  # noqa: RET505  (without it Triton would compile both)
        columns = tl.arange(0, TILES_UP)
        inside = live[:, None] & (columns < TILES)[None, :]
        place = rows[:, None] * TILES_UP + columns[None, :]
        return tl.load(squares + place, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def _sum_of_squares(t):
    """[BN, MT] -> [MT] in fp64: exact squares, and sums whose order does not reach the 24 bits they are used in."""
    wide = t.to(tl.float64)
    return tl.sum(wide * wide, 0)


@triton.jit
def open_gate(gate, up, GELU: tl.constexpr):
    """SwiGLU, or GeGLU by the hyperbolic tangent, which is a logistic function of another number."""
    z = gate
    if GELU:
        z = gate * (1.5957691216057308 + 0.07135481282875852 * gate * gate)
    return gate / (1.0 + tl.exp(-z)) * up


@triton.jit
def _pairs(t, HALF: tl.constexpr, MT: tl.constexpr):
    """The even and the odd rows of [2 HALF, MT]."""
    return tl.split(tl.permute(tl.reshape(t, (HALF, 2, MT)), (0, 2, 1)))


@triton.jit
def _finish_qkv(acc, n0, rows, live, out, keys, values, bias, head_norm, rope, positions, slots, eps, head_stride,
                H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, ROT: tl.constexpr, BIAS: tl.constexpr,
                HEAD_NORM: tl.constexpr, ROPE: tl.constexpr, BN: tl.constexpr, MT: tl.constexpr):  # fmt: skip
    """Norm queries and keys by head, rotate them, and store queries, keys and values."""
    n = n0 + tl.arange(0, BN)
    turned = n0 < (H + HKV) * D
    if BIAS:
        acc += tl.load(bias + n).to(tl.float32)[:, None]
    if HEAD_NORM:  # a tile is a head
        inverse = tl.rsqrt(_sum_of_squares(acc).to(tl.float32) / D + eps)
        weight = tl.load(head_norm + n, mask=n < (H + HKV) * D, other=0.0).to(tl.float32)
        acc = tl.where(turned, acc * inverse[None, :] * weight[:, None], acc)
    if ROPE:
        pair = ((n0 + 2 * tl.arange(0, BN // 2)) % D) // 2
        position = tl.load(positions + rows, mask=live, other=0).to(tl.int64)
        turn = rope + position[None, :] * (2 * ROT) + pair[:, None] * 2
        moved = (pair < ROT)[:, None] & live[None, :] & turned
        cos = tl.load(turn, mask=moved, other=1.0)
        sin = tl.load(turn + 1, mask=moved, other=0.0)
        even, odd = _pairs(acc, BN // 2, MT)
        both = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        acc = tl.reshape(tl.permute(both, (0, 2, 1)), (BN, MT))
    found = acc.to(out.dtype.element_ty)
    if n0 < H * D:
        tl.store(out + rows[None, :] * (H * D) + n[:, None], found, mask=live[None, :])
    else:
        slot = tl.load(slots + rows, mask=live, other=-1).to(tl.int64)
        column = (n - H * D) % (HKV * D)
        into = (column // D)[:, None] * head_stride + slot[None, :] * D + (column % D)[:, None]
        if turned:
            tl.store(keys + into, found, mask=(slot >= 0)[None, :])
        else:
            tl.store(values + into, found, mask=(slot >= 0)[None, :])


@triton.jit
def _finish_residual(acc, old, lift, tile, n0, rows, live, x, out, squares, norm, N: tl.constexpr, BN: tl.constexpr,
                     TILES: tl.constexpr, TILES_UP: tl.constexpr, ROOM: tl.constexpr, SHARE: tl.constexpr):  # fmt: skip
    """Add to the residual stream, and leave what the next norm needs: a tile may be several of the norm's TILES."""
    n = n0 + tl.arange(0, BN)
    place = rows[None, :] * N + n[:, None]
    if SHARE != 1.0:
        acc = acc * SHARE
    acc += old
    tl.store(x + place, acc, mask=live[None, :])
    scaled = acc * tl.load(norm + n).to(tl.float32)[:, None]
    if ROOM > 0:
        scaled = scaled * lift[None, :]
    put_rows(out, place, scaled, live[None, :], ROOM * N)
    for i in tl.static_range(BN * TILES // N):
        own = (tl.arange(0, BN) // (N // TILES) == i)[:, None]
        place = squares + rows * TILES_UP + tile * (BN * TILES // N) + i
        tl.store(place, _sum_of_squares(tl.where(own, acc, 0.0)), mask=live)


@triton.jit
def _put_numbers(acc, n0, rows, live, out, N: tl.constexpr, BN: tl.constexpr):
    """As they are: logits, or sums that a program per row goes on with."""
    n = n0 + tl.arange(0, BN)
    place = rows[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out + place, acc, mask=live[None, :] & (n < N)[:, None])


@triton.jit
def _finish(acc, scale, before, lift, tile, rows, live, out, x, squares, norm, keys, values, bias, head_norm,
            rope, positions, slots, eps, head_stride, N: tl.constexpr, K: tl.constexpr, MODE: tl.constexpr,
            BN: tl.constexpr, MT: tl.constexpr, TILES: tl.constexpr, TILES_UP: tl.constexpr, H: tl.constexpr,
            HKV: tl.constexpr, D: tl.constexpr, ROT: tl.constexpr, BIAS: tl.constexpr, HEAD_NORM: tl.constexpr,
            ROPE: tl.constexpr, W8: tl.constexpr, NORMED: tl.constexpr, ROOM: tl.constexpr, GELU: tl.constexpr,
            SUMS: tl.constexpr, SHARE: tl.constexpr):  # fmt: skip
    """What follows the product of a tile, by kind; `before` is what `_before` found, where it was asked early."""
    n0 = tile * BN
    if W8:
        acc = acc * scale
    if MT < 128 or SUMS:
        given = before
    else:
        given = _before(x, squares, tile, rows, live, N, MODE, BN, TILES, TILES_UP)
    if SUMS:
        _put_numbers(acc, n0, rows, live, out, N, BN)
    elif MODE == RESIDUAL:
        _finish_residual(acc, given, lift, tile, n0, rows, live, x, out, squares, norm, N, BN, TILES, TILES_UP, ROOM,
                         SHARE)  # fmt: skip
    else:
        if not NORMED:
            inverse = tl.rsqrt(tl.sum(given, 1).to(tl.float32) / K + eps)
            if ROOM > 0:
                inverse = inverse / lift
            acc = acc * inverse[None, :]
        if MODE == QKV:
            _finish_qkv(acc, n0, rows, live, out, keys, values, bias, head_norm, rope, positions, slots, eps,
                        head_stride, H, HKV, D, ROT, BIAS, HEAD_NORM, ROPE, BN, MT)  # fmt: skip
        elif MODE == GATED:
            gate, up = _pairs(acc, BN // 2, MT)
            n = tile * (BN // 2) + tl.arange(0, BN // 2)
            inner = open_gate(gate, up, GELU)
            place = rows[None, :] * (N // 2) + n[:, None]
            put_rows(out, place, inner, live[None, :], ROOM * (N // 2))
        else:
            _put_numbers(acc, n0, rows, live, out, N, BN)


@triton.jit
def _product(a, w, weights, tile, first, k0, rows, live, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
             BK: tl.constexpr, SPLIT: tl.constexpr, MT: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """[BN, MT] over one stretch of K; weights are brought to the rows' type."""
    acc = tl.zeros((BN, MT), dtype=tl.float32)
    if TMA:
        for k in range(k0, k0 + K // SPLIT, BK):
            right = a.load([first, k])
            acc = tl.dot(weights.load([tile * BN, k]).to(right.dtype), right.T, acc)
    else:
        n, ks = tl.arange(0, BN), tl.arange(0, BK)
        there = (tile * BN + n < N)[:, None]
        start = w + tile.to(tl.int64) * (BN * K) + k0 + n * K
        weight = start[:, None] + ks[None, :]
        row = a + rows[:, None] * K + k0 + ks[None, :]
        for k in range(0, K // SPLIT, BK):
            if N % BN == 0:
                left = tl.load(weight + k, eviction_policy="evict_first")
            else:
                left = tl.load(weight + k, mask=there, other=0.0, eviction_policy="evict_first")
            right = tl.load(row + k, mask=live[:, None], other=0.0, cache_modifier=".cg")
            acc = tl.dot(left.to(right.dtype), tl.trans(right), acc)
    if K // SPLIT == BK:
        # Triton makes dot(a, b, c) of dot(a, b, 0) + c, another order of sums, and c is the residual stream or what
        # adapters add, whichever comes first. Products of several steps are a loop, which it leaves alone.
        acc = tl.where(live[None, :], acc, 0.0)
    return acc


@triton.jit
def _product_of_bytes(a, w, tile, first, k0, M, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                      SPLIT: tl.constexpr, MT: tl.constexpr, ROOM: tl.constexpr):  # fmt: skip
    """The same with rows of whole numbers, the high bytes and the low ones side by side; sums are exact."""
    n, ks, both = tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, 2 * MT)
    there = (tile * BN + n < N)[:, None]
    rows = first + both % MT
    live = (rows < M)[:, None]
    start = w + tile.to(tl.int64) * (BN * K) + k0 + n * K
    weight = start[:, None] + ks[None, :]
    row = a + ((both // MT) * ROOM + rows)[:, None] * K + k0 + ks[None, :]
    acc = tl.zeros((BN, 2 * MT), dtype=tl.int32)
    for k in range(0, K // SPLIT, BK):
        if N % BN == 0:
            left = tl.load(weight + k, eviction_policy="evict_first")
        else:
            left = tl.load(weight + k, mask=there, other=0, eviction_policy="evict_first")
        right = tl.load(row + k, mask=live, other=0)
        acc = tl.dot(left, tl.trans(right), acc, out_dtype=tl.int32)
    halves = tl.permute(tl.reshape(acc.to(tl.float32), (BN, 2, MT)), (0, 2, 1))
    high, low = tl.split(halves)
    return high * 256.0 + low


@triton.jit
def _part_of(n0, MODE: tl.constexpr, H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr):
    """Which of the matrices that a product has side by side the outputs from n0 on are of."""
    part = n0 * 0
    if MODE == QKV:
        part = (n0 >= H * D).to(tl.int32) + (n0 >= (H + HKV) * D).to(tl.int32)
    return part


# Weights of one byte (W8) have a scale that multiplies the finished sum. Rows of one byte (ROOM) were multiplied by a
# number of their own where they are handed on before their norm is known. Where the copy engine is used, `a` and
# `weights` are descriptors of rows and weight. What other kernels of the pass wrote is read past the L1 cache, which a
# program that started early may share with them.
#
# Where rows have adapters (RANK > 0), what they add is added to the product before anything is made of it
# (adapters.py). The kernel before this one is then `down`, beside which this one runs: rows are waited for by a flag,
# and what `down` itself leaves behind the product.
#
# SUMS: whatever the mode, the sums are all that is left, because whole rows are needed to go on (rows.py). SHARE: of
# what is added to the residual stream.
@triton.jit(do_not_specialize=["M"])
def linear(a, w, weights, scales, out, x, squares, lifts, norm, keys, values, bias, head_norm, rope, positions, slots,
           partial, counters, begun, adapters, owners, chosen, ranks, middle, seconds, M, eps, head_stride,
           N: tl.constexpr, K: tl.constexpr, MODE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
           SPLIT: tl.constexpr, MT: tl.constexpr, TILES: tl.constexpr, TILES_UP: tl.constexpr, H: tl.constexpr,
           HKV: tl.constexpr, D: tl.constexpr, ROT: tl.constexpr, BIAS: tl.constexpr, HEAD_NORM: tl.constexpr,
           ROPE: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr, W8: tl.constexpr, NORMED: tl.constexpr,
           ROOM: tl.constexpr, RANK: tl.constexpr, ADAPTED_ROOM: tl.constexpr, GELU: tl.constexpr,
           SUMS: tl.constexpr, SHARE: tl.constexpr):  # fmt: skip
    """One tile of BN outputs for MT rows, over one of SPLIT stretches of K; the last split to end adds them up."""
    tile, split = tl.program_id(1), tl.program_id(2)
    first, k0 = tl.program_id(0) * MT, split * (K // SPLIT)
    rows = first + tl.arange(0, MT)
    live, n = rows < M, tl.arange(0, BN)
    if RANK > 0:
        TOGETHER: tl.constexpr = 16 if BN * MT <= 2048 else (8 if BN * MT <= 4096 else 4)
        PARTS: tl.constexpr = 3 if MODE == QKV else (2 if MODE == GATED else 1)
        count, part = tl.load(adapters), _part_of(tile * BN, MODE, H, HKV, D)
        owner = tl.load(owners + rows, mask=live, other=-1)
        left = seconds_of(chosen, ranks, seconds, 0, 0, part, tile * BN + n, N, PARTS, RANK, TOGETHER, BN)
    if PDL:
        if RANK > 0:
            ask_for_others(count, chosen, seconds, tile * BN + n, N, PARTS, RANK, TOGETHER)
            wait_until_begun(begun, TMA)
        else:
            tl.extra.cuda.gdc_wait()
    before, lift, scale = 0.0, 1.0, 1.0
    if MT < 128 and not SUMS:  # asked for early where there are registers to hold it
        before = _before(x, squares, tile, rows, live, N, MODE, BN, TILES, TILES_UP)
    if ROOM > 0:
        lift = tl.load(lifts + rows, mask=live, other=1.0, cache_modifier=".cg")
        acc = _product_of_bytes(a, w, tile, first, k0, M, N, K, BN, BK, SPLIT, MT, ROOM)
    else:
        acc = _product(a, w, weights, tile, first, k0, rows, live, N, K, BN, BK, SPLIT, MT, TMA)
    if PDL:  # not before: the next kernel's programs would take the place of this one's
        if RANK > 0:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if W8:
        scale = tl.load(scales + tile * BN + n, mask=tile * BN + n < N, other=0.0)[:, None]
    SCALED: tl.constexpr = W8 and RANK == 0  # what adapters add has no scale
    total, last = acc, True
    if SPLIT > 1:
        place = tile * tl.num_programs(0) + tl.program_id(0)
        part_place = partial + place * (SPLIT * BN * MT) + n[:, None] * MT + tl.arange(0, MT)[None, :]
        tl.store(part_place + split * (BN * MT), acc)
        tl.debug_barrier()  # all of this program's part is written before it is counted
        last = tl.atomic_add(counters + place, 1, sem="acq_rel") == SPLIT - 1
    if last:
        if SPLIT > 1:
            total = tl.zeros((BN, MT), dtype=tl.float32)
            for i in tl.static_range(SPLIT):
                total += tl.load(part_place + i * (BN * MT), cache_modifier=".cg")
            tl.store(counters + place, 0)
        if RANK > 0:
            total = total * scale if W8 else total
            total += added(left, count, chosen, owner, ranks, seconds, middle, part, tile * BN + n, rows, N,
                           PARTS, RANK, TOGETHER, ADAPTED_ROOM, BN, MT)  # fmt: skip
        _finish(total, scale, before, lift, tile, rows, live, out, x, squares, norm, keys, values, bias, head_norm,
                rope, positions, slots, eps, head_stride, N, K, MODE, BN, MT, TILES, TILES_UP, H, HKV, D, ROT, BIAS,
                HEAD_NORM, ROPE, SCALED, NORMED, ROOM, GELU, SUMS, SHARE)  # fmt: skip
