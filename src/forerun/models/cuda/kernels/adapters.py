"""Triton: what LoRA adapters add to a product, row by row: up (scale * down row).

The host sorts the rows of a pass by adapter, in units of at most ROWS rows of one adapter, whose ints are
[slot, rows ..]: a slot of NONE says that nothing is added to these rows, one of EMPTY that the unit is not there.
`down` reads the first matrices once for all rows of a unit. What it leaves is multiplied by the second matrices where
the product itself ends (`added`, in linear.py), or before it (`up`, for wide products).

The product that follows `down` starts with it and runs beside it: it waits at its end for what `down` leaves, and
before it reads rows only until these are written, which `down` says (`begun`) when the kernels before it have ended.

Bits of a row depend on that row and its adapter alone. Tiles have one size whatever the pass has; sums along the depth
are cut by the weight's shape. `added` multiplies the matrices of many adapters, side by side, by rows that are zero
where an adapter is not theirs: tensor cores add sixteen ranks in a step, all of one adapter, and a step of zeros
changes no bit of a sum. Numbers of adapters must be finite for that; the host refuses others.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

ROWS, RANKS, NONE, EMPTY = 16, 16, -1, -2  # rows of a unit, and ranks that are added up in one step
PRODUCTS = 4  # of a layer: each has a flag in `begun`, sixteen ints apart
_ROWS, _RANKS, _PRODUCTS, _EMPTY = tl.constexpr(ROWS), tl.constexpr(RANKS), tl.constexpr(PRODUCTS), tl.constexpr(EMPTY)


@triton.jit
def down(units, ranks, scales, a, matrices, middle, partial, counters, begun, WHICH: tl.constexpr, K: tl.constexpr,
         PARTS: tl.constexpr, RANK: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ROOM: tl.constexpr,
         PDL: tl.constexpr):  # fmt: skip
    """Sixteen ranks of one unit, over one of SPLIT stretches of K; the last split to end adds them up, in their order.

    `matrices` [slots, PARTS, RANK, K], `ranks` [slots, PARTS]. What is left in `middle` [2, ROOM, PARTS, RANK] are two
    numbers of the weights' type, whose sum has twice as many bits as one. All that earlier kernels did not write is
    asked for before they have ended.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    unit, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, ks = tl.arange(0, _ROWS), tl.arange(0, BK)
    part, rank = block // (RANK // _RANKS), block % (RANK // _RANKS) * _RANKS
    slot = tl.load(units + unit * (_ROWS + 1))
    if (slot == _EMPTY) & (unit > 0):
        return
    rows = tl.load(units + unit * (_ROWS + 1) + 1 + m)
    changed = (slot >= 0) & (rank < tl.load(ranks + tl.maximum(slot, 0) * PARTS + part))
    r, k0, live = rank + tl.arange(0, _RANKS), split * (K // SPLIT), rows >= 0
    weight = matrices + ((slot.to(tl.int64) * PARTS + part) * RANK + r)[:, None] * K + k0 + ks[None, :]
    left = tl.load(weight, mask=changed & (r >= 0)[:, None], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if (unit == 0) & (block == 0) & (split == 0):
            _say_begun(begun, WHICH)
    into = middle + (rows[None, :] * PARTS + part) * RANK + r[:, None]
    if changed:
        row = a + rows.to(tl.int64)[:, None] * K + k0 + ks[None, :]
        right = tl.load(row, mask=live[:, None], other=0.0, cache_modifier=".cg")
        acc = tl.dot(left, tl.trans(right), input_precision="ieee")
        for k in range(BK, K // SPLIT, BK):
            left = tl.load(weight + k)
            right = tl.load(row + k, mask=live[:, None], other=0.0, cache_modifier=".cg")
            acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
        scale = tl.load(scales + slot)
        if SPLIT == 1:
            _put_both(acc * scale, into, live, ROOM * PARTS * RANK)
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
                _put_both(total * scale, into, live, ROOM * PARTS * RANK)
    elif split == 0:
        _put_both(tl.zeros((_RANKS, _ROWS), dtype=tl.float32), into, live, ROOM * PARTS * RANK)


@triton.jit
def _say_begun(begun, WHICH: tl.constexpr):
    """Nobody waits for the other products of a layer now: the one before this has ended, the next has not started."""
    every = tl.arange(0, _PRODUCTS)
    tl.store(begun + every * _RANKS, 0, mask=every != WHICH)
    tl.debug_barrier()
    tl.atomic_xchg(begun + WHICH * _RANKS, 1, sem="release")


@triton.jit
def wait_until_begun(begun, TMA: tl.constexpr):
    """Until the rows of the product whose flag this is are written; the copy engine (TMA) needs a fence of its own."""
    while tl.atomic_add(begun, 0, sem="acquire") == 0:
        pass
    if TMA:
        tl.inline_asm_elementwise("fence.proxy.async; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _put_both(value, into, live, FURTHER: tl.constexpr):
    high = value.to(into.dtype.element_ty)
    low = (value - high.to(tl.float32)).to(into.dtype.element_ty)
    tl.store(into, high, mask=live[None, :])
    tl.store(into + FURTHER, low, mask=live[None, :])


@triton.jit
def seconds_of(chosen, ranks, matrices, first, r0, part, n, N: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
               TOGETHER: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """[BN, TOGETHER * 16]: outputs n of the second matrices of TOGETHER adapters side by side, sixteen ranks of each.

    `matrices` [slots, N, RANK], parts one after another; of two parts (gate and up) outputs n take turns. `part`: that
    of all n, else.
    """
    slot, r = tl.load(chosen + first + tl.arange(0, TOGETHER)), r0 + tl.arange(0, _RANKS)
    rank = tl.load(ranks + slot * PARTS + part, mask=slot >= 0, other=0)
    output = n
    if PARTS == 2:
        rank = tl.maximum(rank, tl.load(ranks + slot * PARTS + 1, mask=slot >= 0, other=0))
        output = n % 2 * (N // 2) + n // 2
    begin = slot.to(tl.int64) * (N * RANK)
    place = begin[None, :, None] + (output * RANK)[:, None, None] + r[None, None, :]
    there = (r0 < rank)[None, :, None] & (n < N)[:, None, None]
    return tl.reshape(tl.load(matrices + place, mask=there, other=0.0), (BN, TOGETHER * _RANKS))


@triton.jit
def ask_for_others(count, chosen, matrices, n, N: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
                   TOGETHER: tl.constexpr):  # fmt: skip
    """Bring what `seconds_of` will find of all adapters behind the first ones to the L2 cache, and wait for nothing."""
    output = tl.minimum(n, N - 1)
    if PARTS == 2:
        output = output % 2 * (N // 2) + output // 2
    for first in tl.range(TOGETHER, count, TOGETHER, num_stages=1):
        slot = tl.maximum(tl.load(chosen + first + tl.arange(0, TOGETHER)), 0).to(tl.int64)
        for r0 in tl.range(0, RANK, _RANKS, num_stages=1):
            place = matrices + (slot * (N * RANK))[:, None] + (output * RANK + r0)[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place.to(tl.int64)], dtype=tl.int32, is_pure=False,
                pack=1,
            )  # fmt: skip


@triton.jit
def _add(total, left, chosen, owner, middle, first, r0, part, n, rows, PARTS: tl.constexpr, RANK: tl.constexpr,
         TOGETHER: tl.constexpr, ROOM: tl.constexpr, MT: tl.constexpr):  # fmt: skip
    """Add what `left`, of `seconds_of`, gives of rows: each times the numbers that its own adapter left."""
    slot, r = tl.load(chosen + first + tl.arange(0, TOGETHER)), r0 + tl.arange(0, _RANKS)
    own = (slot >= 0)[None, :] & (slot[None, :] == owner[:, None])
    given = middle + (rows * (PARTS * RANK) + part * RANK)[:, None, None] + r[None, None, :]
    given = tl.broadcast_to(given, (MT, TOGETHER, _RANKS))
    for p in tl.static_range(2 if PARTS == 2 else 1):
        some = left
        if PARTS == 2:
            some = tl.where((n % 2 == p)[:, None], left, tl.zeros_like(left))
        for which in tl.static_range(2):
            from_here = given + (which * (ROOM * PARTS * RANK) + p * RANK)
            right = tl.load(from_here, mask=own[:, :, None], other=0.0, cache_modifier=".cg")
            right = tl.reshape(right, (MT, TOGETHER * _RANKS))
            total = tl.dot(some, tl.trans(right), total, input_precision="ieee")
    return total


@triton.jit
def added(left, count, chosen, owner, ranks, matrices, middle, part, n, rows, N: tl.constexpr, PARTS: tl.constexpr,
          RANK: tl.constexpr, TOGETHER: tl.constexpr, ROOM: tl.constexpr, BN: tl.constexpr,
          MT: tl.constexpr):  # fmt: skip
    """[BN, MT] what adapters add to outputs n of rows; `left`: what `seconds_of` finds of the first ones.

    `chosen` names the slots of the `count` adapters that the pass has, `owner` that of each row.
    """
    total = tl.zeros((BN, MT), dtype=tl.float32)
    total = _add(total, left, chosen, owner, middle, 0, 0, part, n, rows, PARTS, RANK, TOGETHER, ROOM, MT)
    for r0 in tl.range(_RANKS, RANK, _RANKS, num_stages=1):
        more = seconds_of(chosen, ranks, matrices, 0, r0, part, n, N, PARTS, RANK, TOGETHER, BN)
        total = _add(total, more, chosen, owner, middle, 0, r0, part, n, rows, PARTS, RANK, TOGETHER, ROOM, MT)
    for first in tl.range(TOGETHER, count, TOGETHER, num_stages=1):
        for r0 in tl.range(0, RANK, _RANKS, num_stages=1):
            more = seconds_of(chosen, ranks, matrices, first, r0, part, n, N, PARTS, RANK, TOGETHER, BN)
            total = _add(total, more, chosen, owner, middle, first, r0, part, n, rows, PARTS, RANK, TOGETHER, ROOM, MT)
    return total


@triton.jit
def up(units, ranks, middle, matrices, delta, N: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, PARTS: tl.constexpr,
       RANK: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, ROOM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """STEPS times BN outputs of one part of one unit, to `delta` [rows, N] fp32; rows without an adapter get zeros.

    The first part has N0 outputs, the others N1 each; in `delta` they lie one after another.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    unit, tile = tl.program_id(0), tl.program_id(1)
    first: tl.constexpr = (N0 + BN * STEPS - 1) // (BN * STEPS)
    other: tl.constexpr = (N1 + BN * STEPS - 1) // (BN * STEPS)
    further = tl.maximum(tile - first, 0)
    part = tl.where(tile < first, 0, 1 + further // other)
    t = tl.where(tile < first, tile, further % other)
    size = tl.where(tile < first, N0, N1)
    before = tl.where(tile < first, 0, N0 + further // other * N1)
    m, r, n = tl.arange(0, _ROWS), tl.arange(0, _RANKS), t * (BN * STEPS) + tl.arange(0, BN)
    slot = tl.load(units + unit * (_ROWS + 1))
    if (slot == _EMPTY) & (unit > 0):  # the first one waits for the kernels before: others count on that
        return
    rows = tl.load(units + unit * (_ROWS + 1) + 1 + m)
    live = rows >= 0
    rank = tl.load(ranks + slot * PARTS + part, mask=slot >= 0, other=0)
    weight = matrices + (slot.to(tl.int64) * N + before + n)[:, None] * RANK + r[None, :]
    left = tl.load(weight, mask=(n < size)[:, None] & (rank > 0), other=0.0)  # ranks are whole sixteens
    if PDL:
        tl.extra.cuda.gdc_wait()
    given = middle + rows.to(tl.int64)[:, None] * (PARTS * RANK) + part * RANK + r[None, :]
    into = delta + rows.to(tl.int64)[None, :] * N + (before + n)[:, None]
    for step in tl.range(0, STEPS, num_stages=1):
        acc = tl.zeros((BN, _ROWS), dtype=tl.float32)
        for k in tl.range(0, RANK, _RANKS, num_stages=1):
            own = live[:, None] & (k < rank)
            high = tl.load(given + k, mask=own, other=0.0, cache_modifier=".cg")
            low = tl.load(given + ROOM * PARTS * RANK + k, mask=own, other=0.0, cache_modifier=".cg")
            # what is multiplied next is asked for now
            ended = k + _RANKS >= RANK
            r1, n1 = tl.where(ended, 0, k + _RANKS), tl.where(ended, step + 1, step) * BN
            there = (n + n1 < size)[:, None] & (r1 < rank) & (n1 < BN * STEPS)
            following = tl.load(weight + (n1 * RANK + r1), mask=there, other=0.0)
            acc = tl.dot(left, tl.trans(high), acc, input_precision="ieee")
            acc = tl.dot(left, tl.trans(low), acc, input_precision="ieee")
            left = following
        tl.store(into + step * BN, acc, mask=live[None, :] & (n + step * BN < size)[:, None])
