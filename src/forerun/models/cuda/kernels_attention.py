"""Triton: tree attention that reads positions in order, so that a node's bits do not depend on its neighbours.

Keys are read by absolute position: first the committed tokens, then the node's own ancestors by depth, found
through a table of nodes. A tile of positions is a page of the KV cache, found through the sequence's table of pages;
a sequence without one has its slots in a row. Positions are cut into splits at fixed places (short ones near the
start, longer ones further out), each is read in tiles of 64 positions, and `combine` adds a node's splits up in order.
Which programs do that work, and how many splits each of them takes, depends on the batch; the order of every sum
depends on the node's position alone.

A program takes a *group*: nodes of one sequence of which each is an ancestor of the next (a chain), or any
nodes where the split lies wholly in committed tokens, or one node.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

from forerun.models.cuda.kernels_linear import put_rows

ROWS = tl.constexpr(64)  # queries per program: nodes times heads of a group; unused ones cost nothing to read
TILE = tl.constexpr(64)  # positions per step, and slots of a page
FIELDS = tl.constexpr(8)  # ints per group; see plan.py


@triton.jit
def _split_start(s):
    """Where split s starts; plan.py has the inverse."""
    return tl.where(s < 8, s * 128, tl.where(s < 20, 1024 + (s - 8) * 256, 4096 + (s - 20) * 1024))


@triton.jit
def _split_of(p):
    return tl.where(p < 1024, p // 128, tl.where(p < 4096, 8 + (p - 1024) // 256, 20 + (p - 4096) // 1024))


@triton.jit
def _walk(q, at, last, start, end, top, total, acc, keys, values, ints, base, length, ancestors, pages, scale,
          D: tl.constexpr, WINDOW: tl.constexpr, TABLE: tl.constexpr):  # fmt: skip
    """Attend to the positions from start to end, in order; TABLE: some may lie behind the committed tokens."""
    d, t = tl.arange(0, D), tl.arange(0, TILE)
    for p0 in range(start, end, TILE):
        p = p0 + t
        if TABLE:
            there = p <= last
            own = tl.load(ints + ancestors + (p - length), mask=there & (p >= length), other=0)
            written = tl.where(p < length, p, length + own)  # counted in the order in which rows were written
            page = tl.load(ints + pages + written // TILE, mask=there & (pages > 0), other=0)
            slot = tl.where(pages > 0, page * TILE + written % TILE, base + written)
            place = slot.to(tl.int64)[:, None] * D + d[None, :]
            k = tl.load(keys + place, mask=there[:, None], other=0.0, cache_modifier=".cg")
            v = tl.load(values + place, mask=there[:, None], other=0.0, cache_modifier=".cg")
        else:
            page = tl.load(ints + pages + p0 // TILE)  # without a table: some number
            slot = tl.where(pages > 0, page * TILE, base + p0) + t
            place = slot.to(tl.int64)[:, None] * D + d[None, :]
            k = tl.load(keys + place, cache_modifier=".cg")
            v = tl.load(values + place, cache_modifier=".cg")
        found = tl.dot(q, tl.trans(k)) * scale
        seen = p[None, :] <= at[:, None]
        if WINDOW > 0:
            seen = seen & (p[None, :] > at[:, None] - WINDOW)
        found = tl.where(seen, found, float("-inf"))
        higher = tl.maximum(top, tl.max(found, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # rows that see nothing yet
        weights = tl.exp2(found - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        top = higher
    return top, total, acc


@triton.jit(do_not_specialize=["EACH_TREE", "LONE", "PROGRAMS"])
def attend(queries, keys, values, ints, groups, positions, parts, tops, sums, scale, head_stride, split_stride,
           EACH_TREE, LONE, PROGRAMS, H: tl.constexpr, HKV: tl.constexpr, EACH: tl.constexpr, D: tl.constexpr,
           WINDOW: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One group, one key-value head, every so many-th split: what its queries found in each, unnormalised, in fp32.

    Trees have EACH_TREE groups each. The last LONE of them have one program, which takes all of their few splits, the
    others PROGRAMS.
    """
    h, shared = tl.program_id(1), EACH_TREE - LONE
    units = shared * PROGRAMS + LONE
    tree, unit = tl.program_id(0) // units, tl.program_id(0) % units
    alone = unit >= shared * PROGRAMS
    wide = tl.maximum(shared, 1)
    g = tree * EACH_TREE + tl.where(alone, unit - shared * PROGRAMS + shared, unit % wide)
    turn, step = tl.where(alone, 0, unit // wide), tl.where(alone, 1, PROGRAMS)
    group = groups + g * FIELDS
    low, high = tl.load(group), tl.load(group + 1)
    first, count = tl.load(group + 2), tl.load(group + 3)
    base, length = tl.load(group + 4), tl.load(group + 5)
    ancestors, pages = tl.load(group + 6), tl.load(group + 7)
    r, d = tl.arange(0, ROWS), tl.arange(0, D)
    real = (r // EACH < count) & (r % EACH < H // HKV)
    node = first + r // EACH
    at = tl.load(positions + node, mask=real, other=-1)  # the plan is there before any kernel of the pass
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if low + turn < high:
        head = h * (H // HKV) + r % EACH
        place = (node * H + head)[:, None] * D + d[None, :]
        q = tl.load(queries + place, mask=real[:, None], other=0.0, cache_modifier=".cg")
        last = tl.max(at, 0)
        mine, theirs = keys + h.to(tl.int64) * head_stride, values + h.to(tl.int64) * head_stride
        for s in range(low + turn, high, step):
            start, end = _split_start(s), tl.minimum(_split_start(s + 1), last + 1)
            if WINDOW > 0:  # tiles that no node of the group sees are passed over
                near = tl.load(positions + first) - WINDOW + 1
                start = tl.maximum(start, (near // TILE) * TILE)
            top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
            total = tl.zeros((ROWS,), dtype=tl.float32)
            acc = tl.zeros((ROWS, D), dtype=tl.float32)
            middle = tl.maximum(start, tl.minimum(end, (length // TILE) * TILE))
            top, total, acc = _walk(q, at, last, start, middle, top, total, acc, mine, theirs, ints, base, length,
                                    ancestors, pages, scale, D, WINDOW, False)  # fmt: skip
            top, total, acc = _walk(q, at, last, middle, end, top, total, acc, mine, theirs, ints, base, length,
                                    ancestors, pages, scale, D, WINDOW, True)  # fmt: skip
            row = s * split_stride + node * H + head
            tl.store(parts + row.to(tl.int64)[:, None] * D + d[None, :], acc, mask=real[:, None])
            tl.store(tops + row, top, mask=real)
            tl.store(sums + row, total, mask=real)


@triton.jit
def combine(out, positions, parts, tops, sums, split_stride, H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
            WINDOW: tl.constexpr, STEP: tl.constexpr, ROOM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Add up the splits of one node and HEADS heads, STEP at a time, in order; a warp has a head."""
    m = tl.program_id(0)
    position = tl.load(positions + m)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    last = _split_of(position)
    low = last * 0
    if WINDOW > 0:
        low = _split_of(tl.maximum(position - WINDOW + 1, 0))
    d = tl.arange(0, D)
    head = m * H + tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    top = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((HEADS,), dtype=tl.float32)
    acc = tl.zeros((HEADS, D), dtype=tl.float32)
    for s0 in range((low // STEP) * STEP, last + 1, STEP):
        s = s0 + tl.arange(0, STEP)
        inside = (head >= 0)[:, None] & ((s >= low) & (s <= last))[None, :]
        row = head[:, None] + s[None, :] * split_stride
        heights = tl.load(tops + row, mask=inside, other=float("-inf"), cache_modifier=".cg")
        share = tl.load(sums + row, mask=inside, other=0.0, cache_modifier=".cg")
        place = row.to(tl.int64)[:, :, None] * D + d[None, None, :]
        part = tl.load(parts + place, mask=inside[:, :, None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(heights, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(heights - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(share * weight, 1)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 1)
        top = higher
    put_rows(out, head[:, None] * D + d[None, :], acc / total[:, None], (head >= 0)[:, None], ROOM * H * D)
