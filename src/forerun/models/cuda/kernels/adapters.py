"""Triton: what LoRA adapters add to a product, row by row: delta = up (scale * down row).

Rows are sorted by adapter on the host, in units of at most ROWS rows of one adapter, whose ints are [slot, rows ..]: a
slot of NONE says that nothing is added to these rows, one of EMPTY that the unit is not there. A unit's numbers are
read once for all of its rows. All tiles have one size whatever the pass has, and sums along the depth are cut by the
weight's shape alone, so that a row's bits depend on that row and its adapter: neither on other rows nor on what else
is loaded.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

ROWS, RANKS, NONE, EMPTY = 16, 16, -1, -2  # rows of a unit, and ranks that a program multiplies at once
_ROWS, _RANKS = tl.constexpr(ROWS), tl.constexpr(RANKS)


@triton.jit
def down(units, ranks, scales, a, matrices, middle, partial, counters, K: tl.constexpr, PARTS: tl.constexpr,
         RANK: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Sixteen ranks of one unit, over one of SPLIT stretches of K; the last split to end adds them up, in their order.

    `matrices` [slots, PARTS, RANK, K], `ranks` [slots, PARTS], `middle` [rows, PARTS, RANK] fp32.
    """
    unit, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot = tl.load(units + unit * (_ROWS + 1))
    part, rank = block // (RANK // _RANKS), block % (RANK // _RANKS) * _RANKS
    limit = tl.load(ranks + tl.maximum(slot, 0) * PARTS + part)
    if (slot >= 0) & (rank < limit):
        m, r, ks = tl.arange(0, _ROWS), rank + tl.arange(0, _RANKS), tl.arange(0, BK)
        rows = tl.load(units + unit * (_ROWS + 1) + 1 + m)
        live = rows >= 0
        k0 = split * (K // SPLIT)
        weight = matrices + ((slot.to(tl.int64) * PARTS + part) * RANK + r)[:, None] * K + k0 + ks[None, :]
        row = a + rows.to(tl.int64)[:, None] * K + k0 + ks[None, :]
        acc = tl.zeros((_RANKS, _ROWS), dtype=tl.float32)
        for k in range(0, K // SPLIT, BK):
            left = tl.load(weight + k)
            right = tl.load(row + k, mask=live[:, None], other=0.0, cache_modifier=".cg")
            acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
        if PDL:  # not before: the next kernel's programs would take the place of this one's
            tl.extra.cuda.gdc_launch_dependents()
        scale = tl.load(scales + slot)
        into = middle + (rows[None, :] * PARTS + part) * RANK + r[:, None]
        if SPLIT == 1:
            tl.store(into, acc * scale, mask=live[None, :])
        else:
            place = unit * (PARTS * (RANK // _RANKS)) + block
            at = partial + place * (SPLIT * _RANKS * _ROWS) + tl.arange(0, _RANKS)[:, None] * _ROWS + m[None, :]
            tl.store(at + split * (_RANKS * _ROWS), acc)
            tl.debug_barrier()  # all of this program's part is written before it is counted
            if tl.atomic_add(counters + place, 1, sem="acq_rel") == SPLIT - 1:
                total = tl.zeros((_RANKS, _ROWS), dtype=tl.float32)
                for i in tl.static_range(SPLIT):
                    total += tl.load(at + i * (_RANKS * _ROWS), cache_modifier=".cg")
                tl.store(counters + place, 0)
                tl.store(into, total * scale, mask=live[None, :])


@triton.jit
def up(units, ranks, middle, matrices, delta, N: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, PARTS: tl.constexpr,
       RANK: tl.constexpr, BN: tl.constexpr, TURNS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN outputs of one part of one unit, to `delta` [rows, N] fp32; rows without an adapter get zeros.

    `matrices` [slots, N, RANK], parts one after another: the first has N0 outputs, the others N1 each. In `delta` the
    outputs of both parts take turns (TURNS), as in gate and up, or follow each other.
    """
    unit, tile = tl.program_id(0), tl.program_id(1)
    first: tl.constexpr = (N0 + BN - 1) // BN
    other: tl.constexpr = (N1 + BN - 1) // BN
    further = tl.maximum(tile - first, 0)
    part = tl.where(tile < first, 0, 1 + further // other)
    t = tl.where(tile < first, tile, further % other)
    size = tl.where(tile < first, N0, N1)
    before = tl.where(tile < first, 0, N0 + further // other * N1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot = tl.load(units + unit * (_ROWS + 1))
    if slot >= -1:
        m, r, n = tl.arange(0, _ROWS), tl.arange(0, _RANKS), t * BN + tl.arange(0, BN)
        rows = tl.load(units + unit * (_ROWS + 1) + 1 + m)
        live, inside = rows >= 0, n < size
        acc = tl.zeros((BN, _ROWS), dtype=tl.float32)
        rank = tl.where(slot >= 0, tl.load(ranks + tl.maximum(slot, 0) * PARTS + part), 0)
        weight = matrices + (slot.to(tl.int64) * N + before + n)[:, None] * RANK + r[None, :]
        given = middle + (rows[:, None] * PARTS + part) * RANK + r[None, :]
        for k in range(0, RANK, _RANKS):
            if k < rank:
                left = tl.load(weight + k, mask=inside[:, None], other=0.0)
                right = tl.load(given + k, mask=live[:, None], other=0.0, cache_modifier=".cg")
                # in two numbers of the weights' type, which hold twice as many bits as one
                high = right.to(left.dtype)
                low = (right - high.to(tl.float32)).to(left.dtype)
                acc = tl.dot(left, tl.trans(high), acc, input_precision="ieee")
                acc = tl.dot(left, tl.trans(low), acc, input_precision="ieee")
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        if TURNS:
            column = n * 2 + part
        else:
            column = before + n
        place = rows.to(tl.int64)[None, :] * N + column[:, None]
        tl.store(delta + place, acc, mask=live[None, :] & inside[:, None])
