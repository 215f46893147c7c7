"""Triton: the splits of a context, and how what nodes found in them is added up: one by one, in order.

What a node found in some positions is three things: the highest score, the sum of the weights of all scores against
that, and the values by these weights. Programs of attention (kernels_attention.py) leave them in memory for `combine`,
or add them up themselves: the same operations in the same order, so the same bits.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

from forerun.models.cuda.kernels_linear import put_rows

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
def _combine(out, m, position, parts, tops, sums, split_stride, H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
             WINDOW: tl.constexpr, STEP: tl.constexpr, ROOM: tl.constexpr):  # fmt: skip
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
    put_rows(out, head[:, None] * D + d[None, :], acc / total[:, None], (head >= 0)[:, None], ROOM * H * D)


@triton.jit(do_not_specialize=["rows"])
def combine(out, positions, parts, tops, sums, split_stride, rows, H: tl.constexpr, D: tl.constexpr,
            HEADS: tl.constexpr, WINDOW: tl.constexpr, STEP: tl.constexpr, SKIPS: tl.constexpr, MOST: tl.constexpr,
            ROOM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Add up the splits of one row and HEADS heads; a warp has a head.

    SKIPS: of every so many-th row, MOST at most, but for those whose splits were added up before.
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
                    _combine(out, m, tl.load(positions + m), parts, tops, sums, split_stride, H, D, HEADS, WINDOW,
                             STEP, ROOM)  # fmt: skip
    else:
        _combine(out, i, position, parts, tops, sums, split_stride, H, D, HEADS, WINDOW, STEP, ROOM)
