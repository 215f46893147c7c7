"""Triton: attention of tiled passes over keys and values of 8 bits, where groups have few queries: a warp by itself.

The sums are those of kernels/tiled.py, number for number. There four warps hand numbers of 16 bits to each other
through shared memory, and wait for each other ten times a tile. Here a program is one warp, values are asked for where
the tensor cores need them, as columns of V^T, and stay in registers; programs are many, so that the memory is busy.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

from forerun.models.cuda.kernels.attention import FIELDS, LOG2_E, PART, TILE, rise, split_start
from forerun.models.cuda.kernels.kv_bytes import E4M3, INTERPRETED, fetch, head_of, number, wide

# Of two words of four numbers each, one of a position and one of the next: pairs of either's numbers, times the scales
# of the positions ($10).
_FROM_E4M3 = tl.constexpr("""{
    .reg .b16 first, second;
    .reg .b32 pairs, found;
    prmt.b32 pairs, $8, $9, 0x5140;
    mov.b32 {first, second}, pairs;
    cvt.rn.f16x2.e4m3x2 found, first;
    mul.rn.f16x2 found, found, $10;
    mov.b32 {$0, $1}, found;
    cvt.rn.f16x2.e4m3x2 found, second;
    mul.rn.f16x2 found, found, $10;
    mov.b32 {$2, $3}, found;
    prmt.b32 pairs, $8, $9, 0x7362;
    mov.b32 {first, second}, pairs;
    cvt.rn.f16x2.e4m3x2 found, first;
    mul.rn.f16x2 found, found, $10;
    mov.b32 {$4, $5}, found;
    cvt.rn.f16x2.e4m3x2 found, second;
    mul.rn.f16x2 found, found, $10;
    mov.b32 {$6, $7}, found;
}""")
# An int8 number and 128 are the low bits of 1024 and more.
_FROM_INT8 = tl.constexpr("""{
    .reg .b32 low, high, less, thousand, pairs;
    mov.b32 less, 0x64806480;
    mov.b32 thousand, 0x64646464;
    prmt.b32 pairs, $8, $9, 0x5140;
    xor.b32 pairs, pairs, 0x80808080;
    prmt.b32 low, pairs, thousand, 0x4140;
    prmt.b32 high, pairs, thousand, 0x4342;
    sub.rn.f16x2 low, low, less;
    sub.rn.f16x2 high, high, less;
    mul.rn.f16x2 low, low, $10;
    mul.rn.f16x2 high, high, $10;
    mov.b32 {$0, $1}, low;
    mov.b32 {$2, $3}, high;
    prmt.b32 pairs, $8, $9, 0x7362;
    xor.b32 pairs, pairs, 0x80808080;
    prmt.b32 low, pairs, thousand, 0x4140;
    prmt.b32 high, pairs, thousand, 0x4342;
    sub.rn.f16x2 low, low, less;
    sub.rn.f16x2 high, high, less;
    mul.rn.f16x2 low, low, $10;
    mul.rn.f16x2 high, high, $10;
    mov.b32 {$4, $5}, low;
    mov.b32 {$6, $7}, high;
}""")
_EIGHT = tl.constexpr((tl.float16,) * 8)


@triton.jit
def _rows(values, slot, ROW: tl.constexpr, D: tl.constexpr):
    """Of each block of 16 positions the rows ROW, ROW + 2, + 4 and + 6, as words [4, 8, 4, D / 32]; and their scales.

    Thread 4 c + t of a warp has piece c of row ROW + 2 t: what a product of tensor cores wants of V^T.
    """
    t, piece = tl.arange(0, 4)[:, None, None, None] * 2, tl.arange(0, 8)[None, :, None, None]
    block, word = tl.arange(0, 4)[None, None, :, None] * 16, tl.arange(0, D // 32)[None, None, None, :]
    row = block + t + ROW
    words = values[0].to(tl.pointer_type(tl.int32)) + slot.to(tl.int64) * (D // 4)
    place = tl.max_contiguous(tl.multiple_of(row * (D // 4) + piece * (D // 32) + word, (1, 1, 1, D // 32)),
                              (1, 1, 1, D // 32))  # fmt: skip
    return tl.load(words + place, cache_modifier=".cg"), tl.load(values[1] + slot + row, cache_modifier=".cg")


@triton.jit
def _values(values, slot, D: tl.constexpr):
    """The values of a page, as they are kept."""
    return _rows(values, slot, 0, D), _rows(values, slot, 1, D), _rows(values, slot, 8, D), _rows(values, slot, 9, D)


@triton.jit
def _pairs(first, second, FORMAT: tl.constexpr):
    """Of two rows' words: [..., 2 rows, 2, 2], numbers times scales in float16."""
    if INTERPRETED:
        a, b = number(first[0], first[1], 0, FORMAT), number(second[0], second[1], 0, FORMAT)
        c, d = number(first[0], first[1], 8, FORMAT), number(second[0], second[1], 8, FORMAT)
        e, f = number(first[0], first[1], 16, FORMAT), number(second[0], second[1], 16, FORMAT)
        g, h = number(first[0], first[1], 24, FORMAT), number(second[0], second[1], 24, FORMAT)
    else:
        BOTH: tl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        by = tl.inline_asm_elementwise(BOTH, "=r,f,f", [first[1], second[1]], tl.int32, is_pure=True, pack=1)
        ASM: tl.constexpr = _FROM_E4M3 if FORMAT == E4M3 else _FROM_INT8
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [first[0], second[0], by], _EIGHT, is_pure=True, pack=1)  # fmt: skip
    return tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))


@triton.jit
def _columns(kept, D: tl.constexpr, FORMAT: tl.constexpr):
    """V^T [D, TILE]; row 8 (4 w + i) + c is number 4 w + i of piece c."""
    near, far = _pairs(kept[0], kept[1], FORMAT), _pairs(kept[2], kept[3], FORMAT)
    all = tl.join(near, far)  # t, piece, block, word, row, low, high, 8 rows on
    found = tl.reshape(tl.permute(all, (3, 6, 5, 1, 2, 7, 0, 4)), (D, TILE))
    if INTERPRETED:
        return found
    else:  # noqa: RET505
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [found], tl.float16, is_pure=False, pack=2)


@triton.jit
def attend_few(queries, keys, values, ints, groups, positions, parts, tops, sums, scale, head_stride, split_stride,
               PROGRAMS, H: tl.constexpr, HKV: tl.constexpr, EACH: tl.constexpr, D: tl.constexpr,
               WINDOW: tl.constexpr, CAP: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
               FORMAT: tl.constexpr):  # fmt: skip
    """One group, one key-value head, every n-th split: what its queries found in each, unnormalised, in fp32."""
    g, h, rank = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = groups + g * FIELDS
    low, high, first, count = tl.load(group), tl.load(group + 1), tl.load(group + 2), tl.load(group + 3)
    branches, length, pages = tl.load(group + 4), tl.load(group + 5), tl.load(group + 7)
    mine, theirs = head_of(keys, h, head_stride, D, FORMAT), head_of(values, h, head_stride, D, FORMAT)
    r, d, t = tl.arange(0, SIZE), tl.arange(0, D), tl.arange(0, TILE)
    PIECE: tl.constexpr = D // 8
    place = (d % 8) * PIECE + d // 8  # of the rows of V^T
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for r0 in range(0, count * EACH, SIZE):
        here = (r0 + r) // EACH
        real = (here < count) & (r % EACH < H // HKV)
        at = tl.load(positions + first + here, mask=real, other=-1)
        row = (first + here) * H + h * (H // HKV) + r % EACH
        last = tl.max(at, 0)
        behind = tl.where(branches > 0, (length // TILE) * TILE, last + 1)
        near = last * 0
        if WINDOW > 0:
            near = tl.maximum(((tl.min(tl.where(real, at, 1 << 30), 0) - WINDOW + 1) // TILE) * TILE, 0)
        q = tl.load(queries + row[None, :] * D + d[:, None], mask=real[None, :], other=0.0, cache_modifier=".cg")
        for i in range(rank, high - low, PROGRAMS):
            s = high - 1 - i
            start, end = tl.maximum(split_start(s), near), tl.minimum(split_start(s + 1), behind)
            top = tl.full((SIZE,), float("-inf"), dtype=tl.float32)
            total, acc = tl.zeros((SIZE,), dtype=tl.float32), tl.zeros((D, SIZE), dtype=tl.float32)
            slot = tl.load(ints + pages + start // TILE, mask=start < end, other=0) * TILE
            # where a tile's numbers were needed last, those of the next are asked for
            k, v = fetch(mine, slot + t, D, FORMAT), _values(theirs, slot, D)
            slot = tl.load(ints + pages + start // TILE + 1, mask=start + TILE < end, other=0) * TILE
            for p0 in tl.range(start, end, TILE, num_stages=1):
                scores = tl.dot(wide(k, FORMAT), q)
                k = fetch(mine, slot + t, D, FORMAT)
                scores *= scale
                if CAP > 0:
                    scores = CAP - 2 * CAP / (1.0 + tl.exp2(scores * (2 * LOG2_E)))
                p = p0 + t[:, None]
                seen = p <= at[None, :]
                if WINDOW > 0:
                    seen = seen & (p > at[None, :] - WINDOW)
                scores = tl.where(seen, scores, float("-inf"))
                top, safe, shrink = rise(top, tl.max(scores, 0))
                weights = tl.exp2(scores - safe[None, :])
                total = total * shrink + tl.sum((weights + 2.0).to(tl.int32, bitcast=True), 0).to(tl.float32) * PART
                acc = tl.dot(_columns(v, D, FORMAT), weights.to(tl.float16), acc * shrink[None, :])
                v = _values(theirs, slot, D)
                slot = tl.load(ints + pages + p0 // TILE + 2, mask=p0 + 2 * TILE < end, other=0) * TILE
            part = (s * split_stride + row).to(tl.int64)
            tl.store(parts + part[None, :] * D + place[:, None], acc, mask=real[None, :])
            tl.store(tops + part, top, mask=real)
            tl.store(sums + part, total, mask=real)
