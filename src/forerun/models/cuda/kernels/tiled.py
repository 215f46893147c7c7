"""Triton: attention of tiled passes, behind long contexts: all nodes of a tree share every tile of the context.

The sums are those of kernels/attention.py, number for number: a row has the same bits by either kernel, and which of
them computes it may depend on its company (plan.py: Size). Here a program of `attend` takes a group of up to 128
queries. Nodes of a chain read all that each of them sees. Those of a tree that branches read the committed tokens up to
the tile in which the tree starts, and leave what they found there; `combine_trees` goes on from it, node by node, with
the tiles that hold ancestors. Rows of passes without such trees are added up by `combine` of kernels/attention.py.

A row's scores do not depend on other rows of its tile; its weights are added up in whole numbers, in which order does
not matter; products with the values are added up by blocks of 16 positions, in order, by tensor cores of any shape.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

from forerun.models.cuda.kernels.attention import (
    FIELDS,
    FINISHED,
    LOG2_E,
    PART,
    TILE,
    add_sinks,
    add_split,
    nothing_found,
    rise,
    split_of,
    split_start,
    split_width,
)
from forerun.models.cuda.kernels.kv_bytes import PLAIN, fetch, fetch_some, head_of, wide
from forerun.models.cuda.kernels.linear import put_rows

FEWEST = tl.constexpr(16)  # rows of the smallest product of tensor cores


@triton.jit
def _add_tile(q, k, v, seen, top, total, acc, scale, CAP: tl.constexpr, MASKED: tl.constexpr,
              FORMAT: tl.constexpr):  # fmt: skip
    """Add what rows find in a tile to what they found before it; CAP > 0: scores are CAP times a tangent at most.

    Weights from 0 to 1 are added up as whole numbers of 2 ** -22: in these the order does not matter. As an integer
    2.0 is 2 ** 30, so that those of 64 columns are a multiple of 2 ** 32, which is nothing.
    """
    scores = tl.dot(q, tl.trans(wide(k, FORMAT)))
    v = wide(v, FORMAT)
    scores *= scale
    if CAP > 0:  # cap * tanh; `scale` is divided by the cap
        scores = CAP - 2 * CAP / (1.0 + tl.exp2(scores * (2 * LOG2_E)))
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    top, safe, shrink = rise(top, tl.max(scores, 1))
    weights = tl.exp2(scores - safe[:, None])
    total = total * shrink + tl.sum((weights + 2.0).to(tl.int32, bitcast=True), 1).to(tl.float32) * PART
    return top, total, tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])


@triton.jit
def _walk(q, at, last, start, end, top, total, acc, whole, all_top, all_total, all_acc, keys, values, ints, pages,
          scale, D: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr, WALKS: tl.constexpr,
          STAGES: tl.constexpr, FORMAT: tl.constexpr):  # fmt: skip
    """Attend to the positions from start to end, in order; MASKED: some rows may not see all of them.

    `whole`: they are of any number of splits, and where one starts the one before it is added to all before that.
    """
    t = tl.arange(0, TILE)
    HELD: tl.constexpr = FORMAT != PLAIN and D <= 128 and not MASKED
    page = tl.load(ints + pages + start // TILE, mask=start < end, other=0)  # the next one's
    if HELD:
        next_k, next_v = fetch(keys, page * TILE + t, D, FORMAT, 2), fetch(values, page * TILE + t, D, FORMAT, 2)
        page = tl.load(ints + pages + start // TILE + 1, mask=start + TILE < end, other=0)
    for p0 in tl.range(start, end, TILE, num_stages=1 if MASKED or HELD else STAGES):
        p, slot, seen = p0 + t, page * TILE + t, True
        if MASKED:
            k = fetch_some(keys, slot, p <= last, D, FORMAT)
            v = fetch_some(values, slot, p <= last, D, FORMAT)
            seen = p[None, :] <= at[:, None]
        elif HELD:
            k, v = next_k, next_v
            next_k, next_v = fetch(keys, slot, D, FORMAT, 2), fetch(values, slot, D, FORMAT, 2)
        else:
            k, v = fetch(keys, slot, D, FORMAT), fetch(values, slot, D, FORMAT)
        AHEAD: tl.constexpr = 2 if HELD else 1
        page = tl.load(ints + pages + p0 // TILE + AHEAD, mask=p0 + AHEAD * TILE < end, other=0)
        if WINDOW > 0:
            seen = seen & (p[None, :] > at[:, None] - WINDOW)
        # here and not at the end: behind a product, under a condition, Triton 3.6 does not wait for it
        if WALKS and whole & (p0 % split_width(p0) == 0):
            all_top, all_total, all_acc = add_split(all_top, all_total, all_acc, top, total, acc)
            top = tl.full((q.shape[0],), float("-inf"), dtype=tl.float32)  # total and acc shrink to nothing
        top, total, acc = _add_tile(q, k, v, seen, top, total, acc, scale, CAP, MASKED or WINDOW > 0,
                                    FORMAT)  # fmt: skip
    return top, total, acc, all_top, all_total, all_acc


@triton.jit
def _attend(queries, keys, values, ints, group, first, count, positions, out, parts, tops, sums, sinks, scale,
            split_stride, h, low, high, rank, step, whole, H: tl.constexpr, HKV: tl.constexpr, EACH: tl.constexpr,
            D: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, SIZE: tl.constexpr,
            WALKS: tl.constexpr, STAGES: tl.constexpr, ROOM: tl.constexpr, PDL: tl.constexpr,
            FORMAT: tl.constexpr):  # fmt: skip
    """Every n-th split of some nodes, each by itself.

    `whole`, where WALKS: all splits at once; what the nodes found goes straight to `out`.
    """
    branches, length, pages = tl.load(group + 4), tl.load(group + 5), tl.load(group + 7)
    r, d = tl.arange(0, SIZE), tl.arange(0, D)
    real = (r // EACH < count) & (r % EACH < H // HKV)
    at = tl.load(positions + first + r // EACH, mask=real, other=-1)
    row = (first + r // EACH) * H + h * (H // HKV) + r % EACH
    last, least = tl.max(at, 0), tl.min(tl.where(real, at, 1 << 30), 0)
    behind = tl.where(branches > 0, (length // TILE) * TILE, last + 1)
    clear = tl.minimum(((least + 1) // TILE) * TILE, behind)  # up to here all rows see all positions
    near = last * 0
    if WINDOW > 0:  # tiles that no node of the group sees are passed over
        near = tl.maximum(((least - WINDOW + 1) // TILE) * TILE, 0)
    if PDL:  # the plan is there before any kernel of the pass
        tl.extra.cuda.gdc_wait()
    q = tl.load(queries + row[:, None] * D + d[None, :], mask=real[:, None], other=0.0, cache_modifier=".cg")
    for i in range(rank, high - low, step):
        s = high - 1 - i  # the last ones are the longest: they start first
        start, end = tl.maximum(split_start(s), near), tl.minimum(split_start(s + 1), behind)
        if WALKS:
            start, end = tl.where(whole, near, start), tl.where(whole, behind, end)
        top, total, acc = nothing_found(SIZE, D)
        all_top, all_total, all_acc = nothing_found(SIZE, D)
        middle = tl.maximum(start, tl.minimum(end, clear))
        top, total, acc, all_top, all_total, all_acc = _walk(
            q, at, last, start, middle, top, total, acc, whole, all_top, all_total, all_acc, keys, values, ints, pages,
            scale, D, WINDOW, CAP, False, WALKS, STAGES, FORMAT)  # fmt: skip
        top, total, acc, all_top, all_total, all_acc = _walk(
            q, at, last, middle, end, top, total, acc, whole, all_top, all_total, all_acc, keys, values, ints, pages,
            scale, D, WINDOW, CAP, True, WALKS, STAGES, FORMAT)  # fmt: skip
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


@triton.jit(do_not_specialize=["first_page", "most"])
def spread(keys, values, ints, groups, positions, numbers, head_stride, first_page, most, EACH: tl.constexpr,
           D: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr, FORMAT: tl.constexpr):  # fmt: skip
    """Write what large groups see as numbers of 16 bits, in the order of their pages in `ints`; `most` pages of these.

    The last group of a sequence has this done: it sees most. Where there are several, the first is large.
    """
    g, h, rank = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = groups + g * FIELDS
    first, count, length, pages = tl.load(group + 2), tl.load(group + 3), tl.load(group + 5), tl.load(group + 7)
    before = tl.load(group - FIELDS + 7, mask=g > 0, other=-1)
    behind = tl.load(group + FIELDS + 7, mask=g + 1 < tl.num_programs(0), other=-1)
    t, d = tl.arange(0, TILE), tl.arange(0, D)
    FEW: tl.constexpr = 2 * EACH if 2 * EACH > FEWEST else FEWEST
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if (count > 0) & (behind != pages) & ((count * EACH > FEW) | (before == pages)):
        start = length * 0
        if WINDOW > 0:
            start = tl.maximum(length - WINDOW + 1, 0) // TILE
        end = tl.minimum(tl.load(positions + first + count - 1) // TILE + 1, most - (pages - first_page))
        for i in range(start + rank, end, tl.num_programs(2)):
            slot = tl.load(ints + pages + i) * TILE + t
            place = ((h.to(tl.int64) * most + pages - first_page + i) * TILE + t)[:, None] * D + d[None, :]
            k = fetch(head_of(keys, h, head_stride, D, FORMAT), slot, D, FORMAT)
            v = fetch(head_of(values, h, head_stride, D, FORMAT), slot, D, FORMAT)
            tl.store(numbers + place, wide(k, FORMAT))
            tl.store(numbers + tl.num_programs(1).to(tl.int64) * most * (TILE * D) + place, wide(v, FORMAT))


@triton.jit(do_not_specialize=["PROGRAMS", "WALKED", "first_page", "most"])
def attend(queries, keys, values, ints, groups, positions, out, parts, tops, sums, sinks, scale, head_stride,
           split_stride, PROGRAMS, WALKED, numbers, in_order, first_page, most, H: tl.constexpr, HKV: tl.constexpr,
           EACH: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
           SIZE: tl.constexpr, WALKS: tl.constexpr, NARROW: tl.constexpr, STAGES: tl.constexpr,
           SPREAD: tl.constexpr, ROOM: tl.constexpr, PDL: tl.constexpr, FORMAT: tl.constexpr):  # fmt: skip
    """One group, one key-value head, every n-th split: what its queries found in each, unnormalised, in fp32.

    Each group has PROGRAMS. WALKS: where a group has all splits of its nodes, and no more than WALKED, one
    program takes all of them and writes what was found to `out`. A group of more than SIZE queries is read in parts.
    NARROW: small groups have programs of few rows; unused rows cost no reading, but registers. SPREAD: large groups
    read what `spread` wrote, if there was room; `in_order` are the places of its pages.
    """
    # groups of one split are neighbours, and find each other's tiles in the cache; the last are of
    # prompts, and take longest; programs that find nothing to do start last
    g, h, rank, whole = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2), False
    group = groups + g * FIELDS
    low, high, first, count = tl.load(group), tl.load(group + 1), tl.load(group + 2), tl.load(group + 3)
    mine, theirs = head_of(keys, h, head_stride, D, FORMAT), head_of(values, h, head_stride, D, FORMAT)
    FEW: tl.constexpr = 2 * EACH if 2 * EACH > FEWEST else FEWEST
    if WALKS:
        end = tl.load(positions + first + tl.maximum(count - 1, 0))
        whole = (tl.load(group + 4) == 0) & (low == 0) & (high <= WALKED) & (high > split_of(end))
    step = tl.where(whole, high, PROGRAMS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if low + rank < tl.where(whole, 1, high):
        if SPREAD:
            if (count * EACH > FEW) & (tl.load(group + 7) - first_page + end // TILE < most):
                wide_k = numbers + h.to(tl.int64) * most * (TILE * D)
                wide_v = wide_k + HKV * most.to(tl.int64) * (TILE * D)
                for done in range(0, count, SIZE // EACH):
                    _attend(queries, wide_k, wide_v, in_order - first_page, group, first + done,
                            tl.minimum(count - done, SIZE // EACH), positions, out, parts, tops, sums, sinks, scale,
                            split_stride, h, low, high, rank, step, whole, H, HKV, EACH, D, WINDOW, CAP, SINKS, SIZE,
                            WALKS, STAGES, ROOM, PDL, PLAIN)  # fmt: skip
            else:
                for done in range(0, count, FEW // EACH):
                    _attend(queries, mine, theirs, ints, group, first + done, tl.minimum(count - done, FEW // EACH),
                            positions, out, parts, tops, sums, sinks, scale, split_stride, h, low, high, rank, step,
                            whole, H, HKV, EACH, D, WINDOW, CAP, SINKS, FEW, WALKS, STAGES + 1 if STAGES > 1 else 1,
                            ROOM, PDL, FORMAT)  # fmt: skip
        elif NARROW and count * EACH <= FEW:
            _attend(queries, mine, theirs, ints, group, first, count, positions, out, parts, tops, sums, sinks, scale,
                    split_stride, h, low, high, rank, step, whole, H, HKV, EACH, D, WINDOW, CAP, SINKS, FEW, WALKS,
                    STAGES + 1 if STAGES > 1 else 1, ROOM, PDL, FORMAT)  # fmt: skip
        else:
            for done in range(0, count, SIZE // EACH):
                _attend(queries, mine, theirs, ints, group, first + done, tl.minimum(count - done, SIZE // EACH),
                        positions, out, parts, tops, sums, sinks, scale, split_stride, h, low, high, rank, step, whole,
                        H, HKV, EACH, D, WINDOW, CAP, SINKS, SIZE, WALKS, STAGES, ROOM, PDL, FORMAT)  # fmt: skip
    elif PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _add_parts(row, real, low, behind, parts, tops, sums, split_stride, SIZE: tl.constexpr, D: tl.constexpr,
               STEP: tl.constexpr):  # fmt: skip
    """Add up the splits from low to behind; STEP are on their way at once, but are added one by one."""
    d = tl.arange(0, D)
    top, total, acc = nothing_found(SIZE, D)
    for s0 in range(low, behind, STEP):
        found, peak = (), top
        for i in tl.static_range(STEP):
            part = row + (s0 + i) * split_stride
            inside = real & (s0 + i < behind)
            its_top = tl.load(tops + part, mask=inside, other=float("-inf"), cache_modifier=".cg")
            its_total = tl.load(sums + part, mask=inside, other=0.0, cache_modifier=".cg")
            place = part.to(tl.int64)[:, None] * D + d[None, :]
            its_acc = tl.load(parts + place, mask=inside[:, None], other=0.0, cache_modifier=".cg")
            found = found + ((its_top, its_total, its_acc),)  # noqa: RUF005
            peak = tl.maximum(peak, tl.maximum(its_top, its_total))
        for i in tl.static_range(STEP):
            # the same number; but now no load can be put behind what is computed from another
            its_top = tl.minimum(found[i][0], peak)
            top, total, acc = add_split(top, total, acc, its_top, found[i][1], found[i][2])
    return top, total, acc


@triton.jit
def _slots(p, there, ints, length, ancestors, pages):
    """Where positions lie of which some are behind the committed tokens: those are found among the ancestors."""
    own = tl.load(ints + ancestors + (p - length), mask=there & (p >= length), other=0)
    written = tl.where(p < length, p, length + own)  # counted in the order in which rows were written
    return tl.load(ints + pages + written // TILE, mask=there, other=0) * TILE + written % TILE


@triton.jit
def _repeated(values, TIMES: tl.constexpr):
    """Each row so many times."""
    if len(values.shape) == 1:
        return tl.reshape(tl.broadcast_to(values[:, None], (values.shape[0], TIMES)), (values.shape[0] * TIMES,))
    else:  # noqa: RET505  (without it Triton would compile both)
        wide = tl.broadcast_to(values[:, None, :], (values.shape[0], TIMES, values.shape[1]))
        return tl.reshape(wide, (values.shape[0] * TIMES, values.shape[1]))


@triton.jit
def combine_trees(out, queries, keys, values, ints, lone, positions, parts, tops, sums, sinks, scale, head_stride,
                  split_stride, H: tl.constexpr, HKV: tl.constexpr, EACH: tl.constexpr, D: tl.constexpr,
                  WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, STEP: tl.constexpr,
                  SKIPS: tl.constexpr, ROOM: tl.constexpr, PDL: tl.constexpr, FORMAT: tl.constexpr):  # fmt: skip
    """The same of one row and one key-value head, in passes over trees that branch.

    A node of a tree finds what its group left of the split in which the tree starts, and goes on with its ancestors.
    Tensor cores take 16 queries at least: where there are fewer, each is there several times.
    """
    TIMES: tl.constexpr = 1 if EACH > FEWEST else FEWEST // EACH
    m, h = tl.program_id(0), tl.program_id(1)
    r, d, t = tl.arange(0, EACH * TIMES) // TIMES, tl.arange(0, D), tl.arange(0, TILE)
    head, first = tl.arange(0, EACH), m * H + h * (H // HKV)
    own = lone + m * FIELDS
    length, ancestors, pages = tl.load(own + 5), tl.load(own + 6), tl.load(own + 7)
    position = tl.load(positions + m)
    mine, theirs = head_of(keys, h, head_stride, D, FORMAT), head_of(values, h, head_stride, D, FORMAT)
    branches, low, end = ancestors > 0, position * 0, position + 1
    if WINDOW > 0:
        low = split_of(tl.maximum(position - WINDOW + 1, 0))
    start = tl.where(branches, (length // TILE) * TILE, end)
    behind = tl.where(branches, split_of(length), split_of(position) + 1)
    slot = _slots(start + t, start + t < end, ints, length, ancestors, pages)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    finished = False
    if SKIPS:
        finished = tl.load(sums + m * H, cache_modifier=".cg") == FINISHED
    if finished == False:  # noqa: E712
        real, place = (r < H // HKV)[:, None], (first + r)[:, None] * D + d[None, :]
        q = tl.load(queries + place, mask=real, other=0.0, cache_modifier=".cg")
        k = fetch_some(mine, slot, start + t < end, D, FORMAT)
        v = fetch_some(theirs, slot, start + t < end, D, FORMAT)
        part = (behind * split_stride + first + r).to(tl.int64)
        top = tl.load(tops + part, mask=(r < H // HKV) & branches, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(sums + part, mask=(r < H // HKV) & branches, other=0.0, cache_modifier=".cg")
        acc = tl.load(parts + part[:, None] * D + d[None, :], mask=real & branches, other=0.0, cache_modifier=".cg")
        all_top, all_total, all_acc = _add_parts(first + head, head < H // HKV, low, behind, parts, tops, sums,
                                                 split_stride, EACH, D, STEP)  # fmt: skip
        all_top, all_total, all_acc = _repeated(all_top, TIMES), _repeated(all_total, TIMES), _repeated(all_acc, TIMES)
        for p0 in tl.range(start, end, TILE, num_stages=1):
            p = p0 + t
            seen = (p < end)[None, :] & real
            if WINDOW > 0:
                seen = seen & (p > position - WINDOW)[None, :]
            if (p0 > start) & (p0 % split_width(p0) == 0):
                all_top, all_total, all_acc = add_split(all_top, all_total, all_acc, top, total, acc)
                top, total, acc = nothing_found(EACH * TIMES, D)
            top, total, acc = _add_tile(q, k, v, seen, top, total, acc, scale, CAP, True, FORMAT)
            if p0 + TILE < end:
                slot = _slots(p + TILE, p + TILE < end, ints, length, ancestors, pages)
                k = fetch_some(mine, slot, p + TILE < end, D, FORMAT)
                v = fetch_some(theirs, slot, p + TILE < end, D, FORMAT)
        if branches:
            all_top, all_total, all_acc = add_split(all_top, all_total, all_acc, top, total, acc)
        all_total = add_sinks(all_total, all_top, sinks, (first + r) % H, SINKS)
        once = real & (tl.arange(0, EACH * TIMES) % TIMES == 0)[:, None]
        put_rows(out, place, all_acc / all_total[:, None], once, ROOM * H * D)
