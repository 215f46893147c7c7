"""Triton: multi-head latent attention. A token's cached row is a latent and one rotated key, which all heads read.

Queries are multiplied by the weight that makes keys of latents, and what attention finds by the one that makes values,
head by head (`by_heads`): weights are the first operand, as in kernels/linear.py, and rows only decide the width.

`attend` reads positions as kernels/attention.py does, in the same splits and tiles; a tile is read once, as keys and as
values. Programs share the splits of a group and leave what they find for `combine`; or, where there are many rows, one
program has all splits of a group and adds them up in memory, in the same order: the same bits. Nodes of trees that
branch go on from there (BEHIND), after the programs of the tokens that they share have ended.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

from forerun.models.cuda.kernels.attention import (
    FIELDS,
    PART,
    ROWS,
    TILE,
    _slots,
    _whole,
    add_split,
    nothing_found,
    rise,
    split_of,
    split_start,
)
from forerun.models.cuda.kernels.rows import inverse_root

EPS = tl.constexpr(1e-6)  # of the norms within attention, whatever the config says of others


@triton.jit
def _factor(squares, m, square_stride, eps, WIDTH: tl.constexpr, PIECES: tl.constexpr):
    """Of the norm of the row that went into the product, from the sums of squares of its tiles."""
    pieces = tl.load(squares + m * square_stride + tl.arange(0, PIECES), cache_modifier=".cg")
    return tl.rsqrt(tl.sum(pieces, 0).to(tl.float32) / WIDTH + eps)


@triton.jit
def _turned(given, into, rope, position, factor, there, R: tl.constexpr, ROT: tl.constexpr):
    """Rotate the neighbours of R numbers by a row of the table of rotations."""
    pair = tl.arange(0, R // 2)
    even = tl.load(given + 2 * pair, cache_modifier=".cg") * factor
    odd = tl.load(given + 2 * pair + 1, cache_modifier=".cg") * factor
    turn = rope + position * (2 * ROT) + pair * 2
    cos = tl.load(turn, mask=pair < ROT, other=1.0)
    sin = tl.load(turn + 1, mask=pair < ROT, other=0.0)
    tl.store(into + 2 * pair, (even * cos - odd * sin).to(into.dtype.element_ty), mask=(pair >= 0) & there)
    tl.store(into + 2 * pair + 1, (even * sin + odd * cos).to(into.dtype.element_ty), mask=(pair >= 0) & there)


@triton.jit
def finish(sums, squares, latent_norm, query_norm, store, rope, positions, slots, short, eps, square_stride,
           WIDTH: tl.constexpr, PIECES: tl.constexpr, N: tl.constexpr, SHORT: tl.constexpr, SHORT_UP: tl.constexpr,
           C: tl.constexpr, R: tl.constexpr, ROT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One row, whose last C + R of N sums are what is cached; the first SHORT are what queries are made of."""
    m, c = tl.program_id(0), tl.arange(0, C)
    position, slot = tl.load(positions + m).to(tl.int64), tl.load(slots + m).to(tl.int64)
    weight = tl.load(latent_norm + c).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    factor, row, into = _factor(squares, m, square_stride, eps, WIDTH, PIECES), sums + m * N, store + slot * (C + R)
    latent = tl.load(row + N - C - R + c, cache_modifier=".cg") * factor
    latent = latent * inverse_root(latent, C, C, EPS) * weight
    tl.store(into + c, latent.to(store.dtype.element_ty), mask=(c >= 0) & (slot >= 0))
    _turned(row + N - R, into + C, rope, position, factor, slot >= 0, R, ROT)
    if SHORT > 0:
        n = tl.arange(0, SHORT_UP)
        own = tl.load(row + n, mask=n < SHORT, other=0.0, cache_modifier=".cg") * factor
        own = own * inverse_root(own, SHORT, SHORT_UP, EPS)
        own = own * tl.load(query_norm + n, mask=n < SHORT, other=0.0).to(tl.float32)
        tl.store(short + m * SHORT + n, own.to(short.dtype.element_ty), mask=n < SHORT)


@triton.jit
def turn(sums, squares, rope, positions, plain, queries, eps, square_stride, WIDTH: tl.constexpr, PIECES: tl.constexpr,
         N: tl.constexpr, H: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
         ROT: tl.constexpr, NORMED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One row's queries of one head: the DIM numbers without positions as they are, the R others rotated."""
    m, h, n = tl.program_id(0), tl.program_id(1), tl.arange(0, DIM_UP)
    position, at = tl.load(positions + m).to(tl.int64), (m * H + h).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    factor, row = 1.0, sums + m.to(tl.int64) * N + h * (DIM + R)
    if not NORMED:
        factor = _factor(squares, m, square_stride, eps, WIDTH, PIECES)
    own = tl.load(row + n, mask=n < DIM, other=0.0, cache_modifier=".cg") * factor
    tl.store(plain + at * DIM + n, own.to(plain.dtype.element_ty), mask=n < DIM)
    _turned(row + DIM, queries + at * (C + R) + C, rope, position, factor, h >= 0, R, ROT)


@triton.jit(do_not_specialize=["M"])
def by_heads(rows, weights, out, M, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, OUT: tl.constexpr,
             BN: tl.constexpr, BK: tl.constexpr, MT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Each head of rows [M, H, K] by a weight of its own [H, N, K]; heads of `out` have OUT numbers, N of them now."""
    m, h = tl.program_id(0) * MT + tl.arange(0, MT), tl.program_id(2)
    n, ks = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    at = (m * H + h).to(tl.int64)
    weight = weights + (h.to(tl.int64) * N + n)[:, None] * K + ks[None, :]
    row = rows + at[:, None] * K + ks[None, :]
    acc = tl.zeros((BN, MT), dtype=tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for k in range(0, K, BK):
        right = tl.load(row + k, mask=(m < M)[:, None], other=0.0, cache_modifier=".cg")
        acc = tl.dot(tl.load(weight + k).to(right.dtype), tl.trans(right), acc)
    tl.store(out + at[None, :] * OUT + n[:, None], acc.to(out.dtype.element_ty), mask=(m < M)[None, :])


@triton.jit
def _split(q, turned, at, last, start, end, store, ints, base, length, ancestors, pages, scale, C: tl.constexpr,
           R: tl.constexpr):  # fmt: skip
    """What rows find in the positions from start to end, in order."""
    t, c, u = tl.arange(0, TILE), tl.arange(0, C), tl.arange(0, R)
    top, total, acc = nothing_found(q.shape[0], C)
    for p0 in range(start, end, TILE):
        p = p0 + t
        there = p <= last
        row = store + _slots(p, there, ints, base, length, ancestors, pages).to(tl.int64) * (C + R)
        k = tl.load(row[:, None] + c[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg")
        more = tl.load(row[:, None] + C + u[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg")
        scores = (tl.dot(q, tl.trans(k)) + tl.dot(turned, tl.trans(more))) * scale
        scores = tl.where((at >= 0)[:, None] & (p[None, :] <= at[:, None]), scores, float("-inf"))
        top, safe, shrink = rise(top, tl.max(scores, 1))
        weights = tl.exp2(scores - safe[:, None])
        total = total * shrink + tl.sum(_whole(weights), 1).to(tl.float32) * PART
        acc = tl.dot(weights.to(k.dtype), k, acc * shrink[:, None])
    return top, total, acc


@triton.jit
def _attend(queries, store, ints, group, h, first, count, low, high, rank, step, positions, out, parts, tops, sums,
            scale, split_stride, H: tl.constexpr, EACH: tl.constexpr, TAKEN: tl.constexpr, C: tl.constexpr,
            R: tl.constexpr, SIZE: tl.constexpr, WALKS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Every n-th split of a group, each by itself; or (WALKS) all of them, added up."""
    base, length = tl.load(group + 4), tl.load(group + 5)
    ancestors, pages = tl.load(group + 6), tl.load(group + 7)
    r, c, u = tl.arange(0, SIZE), tl.arange(0, C), tl.arange(0, R)
    real = (r // EACH < count) & (r % EACH < TAKEN)
    at = tl.load(positions + first + r // EACH, mask=real, other=-1)
    row = ((first + r // EACH) * H + h * TAKEN + r % EACH).to(tl.int64)
    last = tl.max(at, 0)
    if PDL:  # the plan is there before any kernel of the pass
        tl.extra.cuda.gdc_wait()
    asked = queries + row[:, None] * (C + R)
    q = tl.load(asked + c[None, :], mask=real[:, None], other=0.0, cache_modifier=".cg")
    turned = tl.load(asked + C + u[None, :], mask=real[:, None], other=0.0, cache_modifier=".cg")
    for s in range(low + rank, high, step):
        start, end = split_start(s), tl.minimum(split_start(s + 1), last + 1)
        top, total, acc = _split(q, turned, at, last, start, end, store, ints, base, length, ancestors, pages, scale, C,
                                 R)  # fmt: skip
        part = row if WALKS else s * split_stride + row
        place = part[:, None] * C + c[None, :]
        if WALKS:
            before = real & (s > 0)
            all_top = tl.load(tops + row, mask=before, other=float("-inf"), cache_modifier=".cg")
            all_total = tl.load(sums + row, mask=before, other=0.0, cache_modifier=".cg")
            all_acc = tl.load(parts + place, mask=before[:, None], other=0.0, cache_modifier=".cg")
            top, total, acc = add_split(all_top, all_total, all_acc, top, total, acc)
            tl.debug_barrier()  # all has been read that is written now
        tl.store(parts + place, acc, mask=real[:, None])
        tl.store(tops + part, top, mask=real)
        tl.store(sums + part, total, mask=real)
        if WALKS:
            tl.debug_barrier()
            if (s == high - 1) & (high > split_of(last)):
                tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["split_stride", "PROGRAMS"])
def attend(queries, store, ints, groups, positions, out, parts, tops, sums, scale, split_stride, PROGRAMS,
           H: tl.constexpr, EACH: tl.constexpr, TAKEN: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
           WALKS: tl.constexpr, BEHIND: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One group and TAKEN heads, in EACH rows: what queries found, unnormalised, in fp32, or (WALKS) all of it.

    BEHIND: the groups that do not start with the text, which go on with what was found before them; else the others.
    """
    g, h, rank = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = groups + g * FIELDS
    low, high, first, count = tl.load(group), tl.load(group + 1), tl.load(group + 2), tl.load(group + 3)
    FEW: tl.constexpr = EACH if EACH > 16 else 16
    step = PROGRAMS
    mine = low + rank < high
    if WALKS:
        mine = mine & ((low > 0) == BEHIND)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if mine:
        if FEW == ROWS:
            _attend(queries, store, ints, group, h, first, count, low, high, rank, step, positions, out, parts, tops,
                    sums, scale, split_stride, H, EACH, TAKEN, C, R, ROWS, WALKS, PDL)  # fmt: skip
        elif count * EACH <= FEW:
            _attend(queries, store, ints, group, h, first, count, low, high, rank, step, positions, out, parts, tops,
                    sums, scale, split_stride, H, EACH, TAKEN, C, R, FEW, WALKS, PDL)  # fmt: skip
        else:
            _attend(queries, store, ints, group, h, first, count, low, high, rank, step, positions, out, parts, tops,
                    sums, scale, split_stride, H, EACH, TAKEN, C, R, ROWS, WALKS, PDL)  # fmt: skip
    elif PDL:
        tl.extra.cuda.gdc_wait()
