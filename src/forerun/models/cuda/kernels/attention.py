"""Triton: tree attention that reads positions in order, so that a node's bits do not depend on its neighbours.

Keys are read by absolute position: first the committed tokens, then the node's own ancestors by depth, found
through a table of nodes. A tile of positions is a page of the KV cache, found through the sequence's table of pages;
a sequence without one has its slots in a row. Positions are cut into splits at fixed places (short ones near the
start, longer ones further out), each is read in tiles of 64 positions, and a node's splits are added up in order: a
split gives the highest score, the sum of the weights against it, and the values by these weights. Programs leave them
in memory for `combine`, or add them up themselves: the same operations in the same order, so the same bits. Which
programs do that work depends on the batch (steps/attention.py); the order of every sum depends on the node's position.

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

from forerun.models.cuda.kernels.kv_bytes import fetch, fetch_some, head_of, wide
from forerun.models.cuda.kernels.linear import put_rows

ROWS = tl.constexpr(64)  # queries of the largest group: nodes times heads
TILE = tl.constexpr(64)  # positions per step, and slots of a page
FIELDS = tl.constexpr(8)  # ints per group; see plan.py
BLOCK = tl.constexpr(16)  # positions that are added up in one step of the tensor cores
TOGETHER = tl.constexpr(2)  # lone nodes of a tree that a program takes; plan.py: TOGETHER
OWN = tl.constexpr(32)  # columns of each: two blocks, in which all of its ancestors lie (plan.py: DEEPEST)
TWO = tl.constexpr(0x40000000)  # 2.0 as an integer
PART = tl.constexpr(2.0**-22)  # the last place of numbers from 2 to 4
LOG2_E = tl.constexpr(1.4426950408889634)  # scores are exponents of 2


@triton.jit
def _slots(p, there, ints, base, length, ancestors, pages):
    """Where positions lie of which some are behind the committed tokens: those are found among the ancestors."""
    own = tl.load(ints + ancestors + (p - length), mask=there & (p >= length), other=0)
    written = tl.where(p < length, p, length + own)  # counted in the order in which rows were written
    page = tl.load(ints + pages + written // TILE, mask=there & (pages > 0), other=0)
    return tl.where(pages > 0, page * TILE + written % TILE, base + written)


@triton.jit
def _scores(q, k, p, at, those, scale, WINDOW: tl.constexpr, CAP: tl.constexpr, FORMAT: tl.constexpr):
    """Of columns that lie at positions p; minus infinity where a row is not one of `those` or sees no such position.

    CAP > 0: CAP times the hyperbolic tangent of the product; `scale` is divided by the cap then.
    """
    seen = those & (p[None, :] <= at[:, None])
    if WINDOW > 0:
        seen = seen & (p[None, :] > at[:, None] - WINDOW)
    scores = tl.dot(q, tl.trans(wide(k, FORMAT))) * scale
    if CAP > 0:
        scores = CAP - 2 * CAP / (1.0 + tl.exp2(scores * (2 * LOG2_E)))
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _whole(weights):
    """Weights from 0 to 1 as whole numbers of 2 ** -22: in these the order of a sum does not matter."""
    return (weights + 2.0).to(tl.int32, bitcast=True) - TWO


@triton.jit
def _walk(q, at, last, start, end, top, total, acc, whole, all_top, all_total, all_acc, keys, values, ints, base,
          length, ancestors, pages, scale, D: tl.constexpr, SIDE: tl.constexpr, WINDOW: tl.constexpr,
          CAP: tl.constexpr, TABLE: tl.constexpr, WALKS: tl.constexpr, STAGES: tl.constexpr,
          FORMAT: tl.constexpr):  # fmt: skip
    """Attend to the positions from start to end, in order; TABLE: some may lie behind the committed tokens.

    `whole`: they are of any number of splits, and where one starts the one before it is added to all before that.
    """
    t = tl.arange(0, TILE)
    page = tl.load(ints + pages + start // TILE, mask=start < end, other=0)  # the next one's; without pages: any number
    for p0 in tl.range(start, end, TILE, num_stages=1 if TABLE else STAGES):
        p = p0 + t
        if TABLE:
            slot = _slots(p, p <= last, ints, base, length, ancestors, pages) * SIDE
            k = fetch_some(keys, slot, p <= last, D, FORMAT)
            v = fetch_some(values, slot, p <= last, D, FORMAT)
        else:
            slot = (tl.where(pages > 0, page * TILE, base + p0) + t) * SIDE
            k, v = fetch(keys, slot, D, FORMAT), fetch(values, slot, D, FORMAT)
            page = tl.load(ints + pages + p0 // TILE + 1, mask=p0 + TILE < end, other=0)
        found = _scores(q, k, p, at, (at >= 0)[:, None], scale, WINDOW, CAP, FORMAT)
        # here and not at the end: behind a product, under a condition, Triton 3.6 does not wait for it
        if WALKS and whole & (p0 % split_width(p0) == 0):
            all_top, all_total, all_acc = add_split(all_top, all_total, all_acc, top, total, acc)
            top = tl.full((q.shape[0],), float("-inf"), dtype=tl.float32)  # total and acc shrink to nothing
        top, safe, shrink = rise(top, tl.max(found, 1))
        weights = tl.exp2(found - safe[:, None])
        total = total * shrink + tl.sum(_whole(weights), 1).to(tl.float32) * PART
        v = wide(v, FORMAT)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return top, total, acc, all_top, all_total, all_acc


@triton.jit
def _own_slots(owner, group, count, positions, first, ints, base, length, pages):
    """Where the columns of single nodes lie, OWN to each from position `first` on, and which of them there are."""
    p = first + tl.arange(0, TILE) % OWN
    there = (owner < count) & (p <= tl.load(positions + owner, mask=owner < count, other=-1))
    ancestors = tl.load(group + owner * FIELDS + 6, mask=owner < count, other=0)
    return _slots(p, there, ints, base, length, ancestors, pages), there


@triton.jit
def _walk_tree(q, at, member, start, end, top, total, acc, keys, values, ints, base, length, pages, own, is_own, scale,
               D: tl.constexpr, SIDE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
               FORMAT: tl.constexpr):  # fmt: skip
    """The same for single nodes of one tree from the tile in which it starts: committed blocks, then own columns."""
    t = tl.arange(0, TILE)
    first = (length // BLOCK) * BLOCK  # from here on each has columns of its own
    for p0 in range(start, end, TILE):
        p, mine, there = p0 + t, first + t % OWN, p0 + t < first
        slot = _slots(p, there, ints, base, length, 0, pages) * SIDE
        here = is_own & (mine >= p0) & (mine < p0 + TILE)
        k = fetch_some(keys, slot, there, D, FORMAT)
        more_k = fetch_some(keys, own, here, D, FORMAT)
        v = fetch_some(values, slot, there, D, FORMAT)
        more_v = fetch_some(values, own, here, D, FORMAT)
        found = _scores(q, k, p, at, there[None, :], scale, WINDOW, CAP, FORMAT)
        theirs = here[None, :] & ((t // OWN)[None, :] == member[:, None])
        more = _scores(q, more_k, mine, at, theirs, scale, WINDOW, CAP, FORMAT)
        top, safe, shrink = rise(top, tl.maximum(tl.max(found, 1), tl.max(more, 1)))
        weights, more = tl.exp2(found - safe[:, None]), tl.exp2(more - safe[:, None])
        total = total * shrink + tl.sum(_whole(weights) + _whole(more), 1).to(tl.float32) * PART
        v, more_v = wide(v, FORMAT), wide(more_v, FORMAT)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        acc = tl.dot(more.to(v.dtype), more_v, acc)
    return top, total, acc


@triton.jit
def _attend(queries, keys, values, ints, group, first, count, positions, out, parts, tops, sums, sinks, scale,
            split_stride, h, low, high, step, whole, H: tl.constexpr, HKV: tl.constexpr, EACH: tl.constexpr,
            D: tl.constexpr, SIDE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
            SIZE: tl.constexpr, TREE: tl.constexpr, WALKS: tl.constexpr, STAGES: tl.constexpr, ROOM: tl.constexpr,
            PDL: tl.constexpr, FORMAT: tl.constexpr):  # fmt: skip
    """Every n-th split of a group, each by itself. TREE: of a few single nodes of one tree, all splits.

    `whole`, where WALKS: all splits at once; what the nodes found goes straight to `out`.
    """
    base, length = tl.load(group + 4), tl.load(group + 5)
    ancestors, pages = tl.load(group + 6), tl.load(group + 7)
    r, d = tl.arange(0, SIZE), tl.arange(0, D)
    real = (r // EACH < count) & (r % EACH < H // HKV)
    at = tl.load(positions + first + r // EACH, mask=real, other=-1)
    if TREE:
        own, is_own = _own_slots(tl.arange(0, TILE) // OWN, group, count, positions + first, (length // BLOCK) * BLOCK,
                                 ints, base, length, pages)  # fmt: skip
        own = own * SIDE
    row = (first + r // EACH) * H + h * (H // HKV) + r % EACH
    last = tl.max(at, 0)
    known = length  # positions that are found without looking for ancestors: all of a chain
    if not TREE:
        known = tl.where(ancestors == 0, last + 1, length)
    near = last * 0
    if WINDOW > 0:  # tiles that no node of the group sees are passed over
        near = tl.maximum(((tl.min(tl.where(real, at, last), 0) - WINDOW + 1) // TILE) * TILE, 0)
    if PDL:  # the plan is there before any kernel of the pass
        tl.extra.cuda.gdc_wait()
    q = tl.load(queries + row[:, None] * D + d[None, :], mask=real[:, None], other=0.0, cache_modifier=".cg")
    for s in range(low, split_of(last) + 1 if TREE else high, step):
        start, end = tl.maximum(split_start(s), near), tl.minimum(split_start(s + 1), last + 1)
        if WALKS:
            start, end = tl.where(whole, near, start), tl.where(whole, last + 1, end)
        top, total, acc = nothing_found(SIZE, D)
        all_top, all_total, all_acc = nothing_found(SIZE, D)
        middle = tl.maximum(start, tl.minimum(end, (known // TILE) * TILE))
        top, total, acc, all_top, all_total, all_acc = _walk(
            q, at, last, start, middle, top, total, acc, whole, all_top, all_total, all_acc, keys, values, ints, base,
            length, ancestors, pages, scale, D, SIDE, WINDOW, CAP, False, WALKS, STAGES, FORMAT)  # fmt: skip
        if TREE:
            top, total, acc = _walk_tree(q, at, r // EACH, middle, end, top, total, acc, keys, values, ints, base,
                                         length, pages, own, is_own, scale, D, SIDE, WINDOW, CAP, FORMAT)  # fmt: skip
        else:
            top, total, acc, all_top, all_total, all_acc = _walk(
                q, at, last, middle, end, top, total, acc, whole, all_top, all_total, all_acc, keys, values, ints, base,
                length, ancestors, pages, scale, D, SIDE, WINDOW, CAP, True, WALKS, STAGES, FORMAT)  # fmt: skip
        if WALKS and whole:
            all_top, all_total, all_acc = add_split(all_top, all_total, all_acc, top, total, acc)
            place = row[:, None] * D + d[None, :]
            all_total = add_sinks(all_total, all_top, sinks, row % H, SINKS)
            put_rows(out, place, all_acc / all_total[:, None], real[:, None], ROOM * H * D)
            tl.store(sums + row, FINISHED, mask=real)
        else:
            part = (s * split_stride + row).to(tl.int64)
            tl.store(parts + part[:, None] * D + d[None, :], acc, mask=real[:, None])
            tl.store(tops + part, top, mask=real)
            tl.store(sums + part, total, mask=real)


@triton.jit(do_not_specialize=["EACH_TREE", "LONE", "PROGRAMS", "WALKED"])
def attend(queries, keys, values, ints, groups, positions, out, parts, tops, sums, sinks, scale, head_stride,
           split_stride, EACH_TREE, LONE, PROGRAMS, WALKED, H: tl.constexpr, HKV: tl.constexpr, EACH: tl.constexpr,
           D: tl.constexpr, SIDE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
           TREES: tl.constexpr, WALKS: tl.constexpr, NARROW: tl.constexpr, STAGES: tl.constexpr,
           ROOM: tl.constexpr, PDL: tl.constexpr, FORMAT: tl.constexpr):  # fmt: skip
    """One group, one key-value head, every n-th split: what its queries found in each, unnormalised, in fp32.

    Trees have EACH_TREE groups each. The last LONE of them (none without TREES) are single nodes, of which a program
    takes TOGETHER; the others have PROGRAMS each. WALKS: all groups are counted as those of one tree; where a group has
    all splits of its nodes, and no more than WALKED, one program takes all of them and writes what was found to `out`.
    NARROW: small groups have programs of few rows; unused rows cost no reading, but registers. SIDE: rows of D
    numbers from a slot to the next, where those of several heads lie side by side.
    """
    h, tree, alone, whole = tl.program_id(1), 0, False, False
    if WALKS:  # the last groups are of prompts, and take longest; programs that find nothing to do start last
        g, rank = EACH_TREE - 1 - tl.program_id(0), tl.program_id(2)
    else:
        shared = EACH_TREE - LONE
        units, wide = shared * PROGRAMS + (LONE + TOGETHER - 1) // TOGETHER, tl.maximum(shared, 1)
        tree, unit = tl.program_id(0) // units, tl.program_id(0) % units
        alone = unit >= shared * PROGRAMS
        g, rank = tl.where(alone, shared + (unit - shared * PROGRAMS) * TOGETHER, unit % wide), unit // wide
    group = groups + (tree * EACH_TREE + g) * FIELDS
    low, high, first, count = tl.load(group), tl.load(group + 1), tl.load(group + 2), tl.load(group + 3)
    mine, theirs = head_of(keys, h, head_stride, D, FORMAT), head_of(values, h, head_stride, D, FORMAT)
    FEW: tl.constexpr = TOGETHER * EACH if TOGETHER * EACH > BLOCK else BLOCK
    if WALKS:
        end = tl.load(positions + first + tl.maximum(count - 1, 0))
        whole = (low == 0) & (high <= WALKED) & (high > split_of(end))
    step = tl.where(whole, high, PROGRAMS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if TREES and alone & (low < high):
        _attend(queries, mine, theirs, ints, group, first, tl.minimum(TOGETHER, EACH_TREE - g), positions, out, parts,
                tops, sums, sinks, scale, split_stride, h, low, high, 1, False, H, HKV, EACH, D, SIDE, WINDOW, CAP,
                SINKS, FEW, True, False, STAGES, ROOM, PDL, FORMAT)  # fmt: skip
    elif (alone == False) & (low + rank < tl.where(whole, 1, high)):  # noqa: E712
        if NARROW and count * EACH <= FEW:
            _attend(queries, mine, theirs, ints, group, first, count, positions, out, parts, tops, sums, sinks,
                    scale, split_stride, h, low + rank, high, step, whole, H, HKV, EACH, D, SIDE, WINDOW, CAP,
                    SINKS, FEW, False, WALKS, STAGES + 1 if STAGES > 1 else 1, ROOM, PDL, FORMAT)  # fmt: skip
        else:
            _attend(queries, mine, theirs, ints, group, first, count, positions, out, parts, tops, sums, sinks,
                    scale, split_stride, h, low + rank, high, step, whole, H, HKV, EACH, D, SIDE, WINDOW, CAP,
                    SINKS, ROWS, False, WALKS, STAGES, ROOM, PDL, FORMAT)  # fmt: skip
    elif PDL:
        tl.extra.cuda.gdc_wait()


FINISHED = tl.constexpr(-1.0)  # in the place of a node's first sum of weights: `combine` has nothing to do


@triton.jit
def split_start(s):
    """Where split s starts; plan.py has the inverse."""
    return tl.where(s < 8, s * 128, tl.where(s < 20, 1024 + (s - 8) * 256, 4096 + (s - 20) * 1024))


@triton.jit
def split_width(p):
    """How wide the split is that p lies in; it starts at a multiple of that."""
    return tl.where(p < 1024, 128, tl.where(p < 4096, 256, 1024))


@triton.jit
def split_of(p):
    return tl.where(p < 1024, p // 128, tl.where(p < 4096, 8 + (p - 1024) // 256, 20 + (p - 4096) // 1024))


@triton.jit
def rise(top, found):
    """The highest score so far; the same as something to subtract; and what earlier weights are worth now."""
    higher = tl.maximum(top, found)
    safe = tl.where(higher == float("-inf"), 0.0, higher)  # rows that see nothing yet
    return higher, safe, tl.exp2(top - safe)


@triton.jit
def nothing_found(SIZE: tl.constexpr, D: tl.constexpr):
    """What rows have found before they have seen anything."""
    top = tl.full((SIZE,), float("-inf"), dtype=tl.float32)
    return top, tl.zeros((SIZE,), dtype=tl.float32), tl.zeros((SIZE, D), dtype=tl.float32)


@triton.jit
def add_split(top, total, acc, its_top, its_total, its_acc):
    """Add what was found in the next split to what was found in all before it."""
    higher, safe, shrink = rise(top, its_top)
    weight = tl.exp2(its_top - safe)
    return higher, total * shrink + its_total * weight, acc * shrink[:, None] + its_acc * weight[:, None]


@triton.jit
def add_sinks(total, top, sinks, head, SINKS: tl.constexpr):
    """The sum of all weights, with that of a head's sink: a score of its own that has no value."""
    if SINKS:
        total += tl.exp2(tl.load(sinks + head) * LOG2_E - top)
    return total


@triton.jit
def _combine(out, m, position, parts, tops, sums, sinks, split_stride, H: tl.constexpr, D: tl.constexpr,
             HEADS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, STEP: tl.constexpr,
             ROOM: tl.constexpr):  # fmt: skip
    """One row; STEP splits are on their way at once, but are added up one by one."""
    last = split_of(position)
    low = last * 0
    if WINDOW > 0:
        low = split_of(tl.maximum(position - WINDOW + 1, 0))
    d = tl.arange(0, D)
    head = m * H + tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    top, total, acc = nothing_found(HEADS, D)
    for s0 in range(low, last + 1, STEP):
        found, peak = (), top
        for i in tl.static_range(STEP):
            row = head + (s0 + i) * split_stride
            inside = (head >= 0) & (s0 + i <= last)
            its_top = tl.load(tops + row, mask=inside, other=float("-inf"), cache_modifier=".cg")
            its_total = tl.load(sums + row, mask=inside, other=0.0, cache_modifier=".cg")
            place = row.to(tl.int64)[:, None] * D + d[None, :]
            part = tl.load(parts + place, mask=inside[:, None], other=0.0, cache_modifier=".cg")
            found = found + ((its_top, its_total, part),)  # noqa: RUF005
            peak = tl.maximum(peak, tl.maximum(its_top, its_total))
        for i in tl.static_range(STEP):
            # the same number; but now no load can be put behind what is computed from another
            its_top = tl.minimum(found[i][0], peak)
            top, total, acc = add_split(top, total, acc, its_top, found[i][1], found[i][2])
    total = add_sinks(total, top, sinks, head % H, SINKS)
    put_rows(out, head[:, None] * D + d[None, :], acc / total[:, None], (head >= 0)[:, None], ROOM * H * D)


@triton.jit(do_not_specialize=["rows"])
def combine(out, positions, parts, tops, sums, sinks, split_stride, rows, H: tl.constexpr, D: tl.constexpr,
            HEADS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, STEP: tl.constexpr, SKIPS: tl.constexpr,
            MOST: tl.constexpr, ROOM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Add up the splits of one row and HEADS heads; a warp has a head.

    SKIPS: of every n-th row, MOST at most, but for those whose splits were added up before.
    """
    i, programs = tl.program_id(0), tl.num_programs(0)
    position = tl.load(positions + i)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if SKIPS:
        mine = i + tl.arange(0, MOST) * programs
        first = tl.load(sums + mine * H, mask=mine < rows, other=FINISHED, cache_modifier=".cg")
        if tl.max((first != FINISHED).to(tl.int32), 0) > 0:  # mostly all are finished
            for m in range(i, rows, programs):
                if tl.load(sums + m * H, cache_modifier=".cg") != FINISHED:
                    _combine(out, m, tl.load(positions + m), parts, tops, sums, sinks, split_stride, H, D,
                             HEADS, WINDOW, SINKS, STEP, ROOM)  # fmt: skip
    else:
        _combine(out, i, position, parts, tops, sums, sinks, split_stride, H, D, HEADS, WINDOW, SINKS, STEP,
                 ROOM)  # fmt: skip
