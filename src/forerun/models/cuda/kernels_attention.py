"""Triton: tree attention that reads positions in order, so that a node's bits do not depend on its neighbours.

Keys are read by absolute position: first the committed tokens, then the node's own ancestors by depth, found
through a table of nodes. A tile of positions is a page of the KV cache, found through the sequence's table of pages;
a sequence without one has its slots in a row. Positions are cut into splits at fixed places (short ones near the
start, longer ones further out), each is read in tiles of 64 positions, and `combine` adds a node's splits up in order.
Which programs do that work, and how many splits each of them takes, depends on the batch; the order of every sum
depends on the node's position alone.

A program takes a *group*: nodes of one sequence of which each is an ancestor of the next (a chain), or any
nodes where the split lies wholly in committed tokens, or one node. Or it takes a few single nodes of a tree together:
they share the committed tokens of a tile but for its last block of 16 positions, and from there on every node has
columns of its own. That changes no bit. A row's scores and their maximum do not depend on other columns; its
weights are added up in whole numbers, in which order does not matter; and products with the values are added up
by blocks of 16 positions, in order, where blocks of other nodes have a weight of zero.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

from forerun.models.cuda.kernels_linear import put_rows

ROWS = tl.constexpr(64)  # queries per program: nodes times heads of a group; unused ones cost nothing to read
TILE = tl.constexpr(64)  # positions per step, and slots of a page
FIELDS = tl.constexpr(8)  # ints per group; see plan.py
BLOCK = tl.constexpr(16)  # positions that are added up in one step of the tensor cores
TOGETHER = tl.constexpr(2)  # lone nodes of a tree that a program takes; plan.py: TOGETHER
OWN = tl.constexpr(32)  # columns of each: two blocks, in which all of its ancestors lie (plan.py: DEEPEST)
TWO = tl.constexpr(0x40000000)  # 2.0 as an integer
PART = tl.constexpr(2.0**-22)  # the last place of numbers from 2 to 4


@triton.jit
def _split_start(s):
    """Where split s starts; plan.py has the inverse."""
    return tl.where(s < 8, s * 128, tl.where(s < 20, 1024 + (s - 8) * 256, 4096 + (s - 20) * 1024))


@triton.jit
def _split_of(p):
    return tl.where(p < 1024, p // 128, tl.where(p < 4096, 8 + (p - 1024) // 256, 20 + (p - 4096) // 1024))


@triton.jit
def _slots(p, there, ints, base, length, ancestors, pages):
    """Where positions lie of which some are behind the committed tokens: those are found among the ancestors."""
    own = tl.load(ints + ancestors + (p - length), mask=there & (p >= length), other=0)
    written = tl.where(p < length, p, length + own)  # counted in the order in which rows were written
    page = tl.load(ints + pages + written // TILE, mask=there & (pages > 0), other=0)
    return tl.where(pages > 0, page * TILE + written % TILE, base + written)


@triton.jit
def _read(rows, slot, there, D: tl.constexpr):
    place = slot.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(rows + place, mask=there[:, None], other=0.0, cache_modifier=".cg")


@triton.jit
def _scores(q, k, p, at, those, scale, WINDOW: tl.constexpr):
    """Of columns that lie at positions p; minus infinity where a row is not one of `those` or sees no such position."""
    seen = those & (p[None, :] <= at[:, None])
    if WINDOW > 0:
        seen = seen & (p[None, :] > at[:, None] - WINDOW)
    return tl.where(seen, tl.dot(q, tl.trans(k)) * scale, float("-inf"))


@triton.jit
def _rise(top, found):
    """The highest score so far; the same as something to subtract; and what earlier weights are worth now."""
    higher = tl.maximum(top, found)
    safe = tl.where(higher == float("-inf"), 0.0, higher)  # rows that see nothing yet
    return higher, safe, tl.exp2(top - safe)


@triton.jit
def _whole(weights):
    """Weights from 0 to 1 as whole numbers of 2 ** -22: in these the order of a sum does not matter."""
    return (weights + 2.0).to(tl.int32, bitcast=True) - TWO


@triton.jit
def _walk(q, at, last, start, end, top, total, acc, keys, values, ints, base, length, ancestors, pages, scale,
          D: tl.constexpr, WINDOW: tl.constexpr, TABLE: tl.constexpr):  # fmt: skip
    """Attend to the positions from start to end, in order; TABLE: some may lie behind the committed tokens."""
    d, t = tl.arange(0, D), tl.arange(0, TILE)
    for p0 in range(start, end, TILE):
        p = p0 + t
        if TABLE:
            slot = _slots(p, p <= last, ints, base, length, ancestors, pages)
            k, v = _read(keys, slot, p <= last, D), _read(values, slot, p <= last, D)
        else:
            page = tl.load(ints + pages + p0 // TILE)  # without a table: some number
            slot = tl.where(pages > 0, page * TILE, base + p0) + t
            place = slot.to(tl.int64)[:, None] * D + d[None, :]
            k = tl.load(keys + place, cache_modifier=".cg")
            v = tl.load(values + place, cache_modifier=".cg")
        found = _scores(q, k, p, at, (at >= 0)[:, None], scale, WINDOW)
        top, safe, shrink = _rise(top, tl.max(found, 1))
        weights = tl.exp2(found - safe[:, None])
        total = total * shrink + tl.sum(_whole(weights), 1).to(tl.float32) * PART
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return top, total, acc


@triton.jit
def _own_slots(owner, group, count, positions, first, ints, base, length, pages):
    """Where the columns of single nodes lie, OWN to each from position `first` on, and which of them there are."""
    p = first + tl.arange(0, TILE) % OWN
    there = (owner < count) & (p <= tl.load(positions + owner, mask=owner < count, other=-1))
    ancestors = tl.load(group + owner * FIELDS + 6, mask=owner < count, other=0)
    return _slots(p, there, ints, base, length, ancestors, pages), there


@triton.jit
def _walk_tree(q, at, member, start, end, top, total, acc, keys, values, ints, base, length, pages, own, is_own, scale,
               D: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    """The same for single nodes of one tree from the tile in which it starts: committed blocks, then own columns."""
    t = tl.arange(0, TILE)
    first = (length // BLOCK) * BLOCK  # from here on each has columns of its own
    for p0 in range(start, end, TILE):
        p, mine, there = p0 + t, first + t % OWN, p0 + t < first
        slot = _slots(p, there, ints, base, length, 0, pages)
        here = is_own & (mine >= p0) & (mine < p0 + TILE)
        k, more_k = _read(keys, slot, there, D), _read(keys, own, here, D)
        v, more_v = _read(values, slot, there, D), _read(values, own, here, D)
        found = _scores(q, k, p, at, there[None, :], scale, WINDOW)
        theirs = here[None, :] & ((t // OWN)[None, :] == member[:, None])
        more = _scores(q, more_k, mine, at, theirs, scale, WINDOW)
        top, safe, shrink = _rise(top, tl.maximum(tl.max(found, 1), tl.max(more, 1)))
        weights, more = tl.exp2(found - safe[:, None]), tl.exp2(more - safe[:, None])
        total = total * shrink + tl.sum(_whole(weights) + _whole(more), 1).to(tl.float32) * PART
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        acc = tl.dot(more.to(v.dtype), more_v, acc)
    return top, total, acc


@triton.jit
def _attend(queries, keys, values, ints, group, count, positions, parts, tops, sums, scale, split_stride, h, low, high,
            step, H: tl.constexpr, HKV: tl.constexpr, EACH: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
            SIZE: tl.constexpr, TREE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Every so many-th split of a group, each by itself. TREE: a few single nodes of one tree, all of their splits."""
    first, base, length = tl.load(group + 2), tl.load(group + 4), tl.load(group + 5)
    ancestors, pages = tl.load(group + 6), tl.load(group + 7)
    r, d = tl.arange(0, SIZE), tl.arange(0, D)
    real = (r // EACH < count) & (r % EACH < H // HKV)
    at = tl.load(positions + first + r // EACH, mask=real, other=-1)
    if TREE:
        own, is_own = _own_slots(tl.arange(0, TILE) // OWN, group, count, positions + first, (length // BLOCK) * BLOCK,
                                 ints, base, length, pages)  # fmt: skip
    row = (first + r // EACH) * H + h * (H // HKV) + r % EACH
    last = tl.max(at, 0)
    if PDL:  # the plan is there before any kernel of the pass
        tl.extra.cuda.gdc_wait()
    q = tl.load(queries + row[:, None] * D + d[None, :], mask=real[:, None], other=0.0, cache_modifier=".cg")
    for s in range(low, _split_of(last) + 1 if TREE else high, step):
        start, end = _split_start(s), tl.minimum(_split_start(s + 1), last + 1)
        if WINDOW > 0:  # tiles that no node of the group sees are passed over
            near = tl.min(tl.where(real, at, last), 0) - WINDOW + 1
            start = tl.maximum(start, (near // TILE) * TILE)
        top = tl.full((SIZE,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((SIZE,), dtype=tl.float32)
        acc = tl.zeros((SIZE, D), dtype=tl.float32)
        middle = tl.maximum(start, tl.minimum(end, (length // TILE) * TILE))
        top, total, acc = _walk(q, at, last, start, middle, top, total, acc, keys, values, ints, base, length,
                                ancestors, pages, scale, D, WINDOW, False)  # fmt: skip
        if TREE:
            top, total, acc = _walk_tree(q, at, r // EACH, middle, end, top, total, acc, keys, values, ints, base,
                                         length, pages, own, is_own, scale, D, WINDOW)  # fmt: skip
        else:
            top, total, acc = _walk(q, at, last, middle, end, top, total, acc, keys, values, ints, base, length,
                                    ancestors, pages, scale, D, WINDOW, True)  # fmt: skip
        place = (s * split_stride + row).to(tl.int64)
        tl.store(parts + place[:, None] * D + d[None, :], acc, mask=real[:, None])
        tl.store(tops + place, top, mask=real)
        tl.store(sums + place, total, mask=real)


@triton.jit(do_not_specialize=["EACH_TREE", "LONE", "PROGRAMS"])
def attend(queries, keys, values, ints, groups, positions, parts, tops, sums, scale, head_stride, split_stride,
           EACH_TREE, LONE, PROGRAMS, H: tl.constexpr, HKV: tl.constexpr, EACH: tl.constexpr, D: tl.constexpr,
           WINDOW: tl.constexpr, TREES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One group, one key-value head, every so many-th split: what its queries found in each, unnormalised, in fp32.

    Trees have EACH_TREE groups each. The last LONE of them (none without TREES) are single nodes, of which a program
    takes TOGETHER; the others have PROGRAMS each.
    """
    h, shared = tl.program_id(1), EACH_TREE - LONE
    units = shared * PROGRAMS + (LONE + TOGETHER - 1) // TOGETHER
    tree, unit = tl.program_id(0) // units, tl.program_id(0) % units
    alone, wide = unit >= shared * PROGRAMS, tl.maximum(shared, 1)
    g = tl.where(alone, shared + (unit - shared * PROGRAMS) * TOGETHER, unit % wide)
    group = groups + (tree * EACH_TREE + g) * FIELDS
    low, high, count = tl.load(group), tl.load(group + 1), tl.load(group + 3)
    mine, theirs = keys + h.to(tl.int64) * head_stride, values + h.to(tl.int64) * head_stride
    FEW: tl.constexpr = TOGETHER * EACH if TOGETHER * EACH > BLOCK else BLOCK
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if TREES and alone & (low < high):
        _attend(queries, mine, theirs, ints, group, tl.minimum(TOGETHER, EACH_TREE - g), positions, parts, tops, sums,
                scale, split_stride, h, low, high, 1, H, HKV, EACH, D, WINDOW, FEW, True, PDL)  # fmt: skip
    elif (unit < shared * PROGRAMS) & (low + unit // wide < high):
        _attend(queries, mine, theirs, ints, group, count, positions, parts, tops, sums, scale, split_stride, h,
                low + unit // wide, high, PROGRAMS, H, HKV, EACH, D, WINDOW, ROWS, False, PDL)  # fmt: skip
    elif PDL:
        tl.extra.cuda.gdc_wait()


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
