"""Triton: keys and values of 16 or 8 bits: how a row of 8 bits is written, and how attention reads either kind.

FORMAT says which: PLAIN, or INT8 or E4M3, where the row of one head and token has a scale, its largest number's share
of 127 or 448. Stores of 8 bits come as two tensors, the numbers and the scales; PLAIN ones are one tensor, and
kernels compiled for them have no trace of the others.

Numbers of 8 bits become 16-bit numbers before any product, exactly. Scales of keys multiply scores, those of values
weights: one multiplication per column of a tile, by whichever program, so a row's bits do not depend on its company.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

PLAIN, INT8, E4M3 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Four int8 numbers to bfloat16. 128 with the seven low bits for a mantissa, less 128 or, for negative numbers, 256.
_FROM_INT8 = tl.constexpr("""{
    .reg .b32 pair, low, high, minus;
    mov.b32 minus, 0xbf80bf80;
    prmt.b32 pair, $2, 0, 0x4140;
    lop3.b32 low, pair, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 high, pair, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, high, minus, low;
    prmt.b32 pair, $2, 0, 0x4342;
    lop3.b32 low, pair, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 high, pair, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $1, high, minus, low;
}""")
# Four e4m3 numbers to bfloat16: the same bits in its places are 2 ** 120 times too small, subnormal numbers too.
_FROM_E4M3 = tl.constexpr("""{
    .reg .b32 pair, sign, lift, none;
    mov.b32 lift, 0x7b807b80;
    mov.b32 none, 0x80008000;
    prmt.b32 pair, $2, 0, 0x1404;
    and.b32 sign, pair, 0x80008000;
    shr.u32 pair, pair, 4;
    lop3.b32 pair, pair, 0x07f007f0, sign, 0xea;
    fma.rn.bf16x2 $0, pair, lift, none;
    prmt.b32 pair, $2, 0, 0x3424;
    and.b32 sign, pair, 0x80008000;
    shr.u32 pair, pair, 4;
    lop3.b32 pair, pair, 0x07f007f0, sign, 0xea;
    fma.rn.bf16x2 $1, pair, lift, none;
}""")


@triton.constexpr_function
def value_type(dtype):
    """Of values of 8 bits in a product: weights times their scales may be too small for float16."""
    return tl.bfloat16 if dtype == tl.float16 else dtype


@triton.jit
def head_of(store, h, head_stride, D: tl.constexpr, FORMAT: tl.constexpr):
    """The keys or values of one head, in a store of many."""
    if FORMAT == PLAIN:
        return store + h.to(tl.int64) * head_stride
    else:  # noqa: RET505  (without it Triton would compile both)
        return store[0] + h.to(tl.int64) * head_stride, store[1] + h.to(tl.int64) * (head_stride // D)


@triton.jit
def read(store, slot, D: tl.constexpr, DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    """The rows [T, D] in these slots, in a type of 16 bits, and their scales [T] (PLAIN: none)."""
    place = slot.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    if FORMAT == PLAIN:
        return tl.load(store + place, cache_modifier=".cg"), 1.0
    else:  # noqa: RET505
        scales = tl.load(store[1] + slot, cache_modifier=".cg")
        return _widened(tl.load(store[0] + place, cache_modifier=".cg"), DTYPE, FORMAT), scales


@triton.jit
def read_some(store, slot, there, D: tl.constexpr, DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    """The same; zeros where a slot is not `there`."""
    place = slot.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    if FORMAT == PLAIN:
        return tl.load(store + place, mask=there[:, None], other=0.0, cache_modifier=".cg"), 1.0
    else:  # noqa: RET505
        scales = tl.load(store[1] + slot, mask=there, other=0.0, cache_modifier=".cg")
        found = tl.load(store[0] + place, mask=there[:, None], other=0, cache_modifier=".cg")
        return _widened(found, DTYPE, FORMAT), scales


@triton.jit
def _widened(found, DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    """Numbers of 8 bits, given as int8, in a wider type.

    The instructions are said to have effects: Triton would otherwise see that operands of a product came as bytes, and
    have tensor cores of one kind, but not of the other, add up positions in an order that suits bytes.
    """
    if INTERPRETED:
        wide = found.to(tl.float8e4nv, bitcast=True).to(tl.float32) if FORMAT == E4M3 else found.to(tl.float32)
    else:
        ASM: tl.constexpr = _FROM_E4M3 if FORMAT == E4M3 else _FROM_INT8
        wide = tl.inline_asm_elementwise(ASM, "=r,=r,r", [found], dtype=tl.bfloat16, is_pure=False, pack=4)
    return wide.to(DTYPE)


@triton.jit
def score_scale(scale, scales, FORMAT: tl.constexpr):
    """What scores with keys of these scales are multiplied by."""
    if FORMAT == PLAIN:
        return scale
    else:  # noqa: RET505
        return (scale * scales)[None, :]


@triton.jit
def for_values(weights, scales, values, FORMAT: tl.constexpr):
    """Weights as what multiplies values of these scales."""
    if FORMAT != PLAIN:
        weights = weights * scales[None, :]
    return weights.to(values.dtype)


@triton.jit
def put(store, head, slot, head_stride, rows, found, there, D: tl.constexpr, FORMAT: tl.constexpr):
    """Write rows [R, D] of these heads at a slot: as `found`, which has the type of the cache, or in 8 bits."""
    place = head[:, None] * head_stride + slot * D + tl.arange(0, D)[None, :]
    if FORMAT == PLAIN:
        tl.store(store + place, found, mask=there[:, None])
    else:
        _store_bytes(store, head * (head_stride // D) + slot, place, rows, there, FORMAT)


@triton.jit
def _store_bytes(store, slot, place, rows, there, FORMAT: tl.constexpr):
    """Write rows [R, D] in 8 bits at `place`, and their scales at `slot` [R]; what is not a number is not lost."""
    sizes = tl.where(rows == rows, tl.abs(rows), float("inf"))
    MOST: tl.constexpr = 448.0 if FORMAT == E4M3 else 127.0
    most = tl.max(sizes, 1)
    steps = rows * tl.where(most > 1e-30, tl.div_rn(MOST, most), 0.0)[:, None]
    if FORMAT == E4M3:
        numbers = steps.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    else:
        # 1.5 * 2^23: the nearest, even where two are
        numbers = ((steps + 12582912.0) - 12582912.0).to(tl.int8)
    tl.store(store[0] + place, numbers, mask=there[:, None])
    tl.store(store[1] + slot, tl.div_rn(most, MOST), mask=there)
