"""Triton: a product with weights in MXFP4: four bits each, and an exponent of two for every 32 of an output.

These numbers are exact in bfloat16, so a product of them has the bits of one of the same weights widened: what changes
is that a quarter of the bytes is read. `weights.Fours` says how they lie in memory.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
STRIP, STEP = tl.constexpr(16), tl.constexpr(128)  # outputs that lie together, and inputs of theirs

# Eight numbers of a word, in bfloat16: those of the bytes' lower halves times the lower half of $9, those of the upper
# ones times its upper half, which are scales times 2 ** 126. A number's three low bits, where a bfloat16 has the end of
# its exponent and the first of its mantissa, are the number times 2 ** -126; its fourth bit is its sign.
_WIDEN = tl.constexpr("""{
    .reg .b32 first, last, a, b, zero, one, two;
    mov.b32 zero, 0x80008000;
    prmt.b32 one, $9, 0, 0x1010;
    prmt.b32 two, $9, 0, 0x3232;
    prmt.b32 first, $8, 0, 0x4140;
    prmt.b32 last, $8, 0, 0x4342;
    shl.b32 a, first, 6;
    shl.b32 b, first, 12;
    and.b32 a, a, 0x01C001C0;
    lop3.b32 a, b, zero, a, 0xEA;
    fma.rn.bf16x2 a, a, one, zero;
    mov.b32 {$0, $1}, a;
    shl.b32 a, last, 6;
    shl.b32 b, last, 12;
    and.b32 a, a, 0x01C001C0;
    lop3.b32 a, b, zero, a, 0xEA;
    fma.rn.bf16x2 a, a, one, zero;
    mov.b32 {$2, $3}, a;
    shl.b32 a, first, 2;
    shl.b32 b, first, 8;
    and.b32 a, a, 0x01C001C0;
    lop3.b32 a, b, zero, a, 0xEA;
    fma.rn.bf16x2 a, a, two, zero;
    mov.b32 {$4, $5}, a;
    shl.b32 a, last, 2;
    shl.b32 b, last, 8;
    and.b32 a, a, 0x01C001C0;
    lop3.b32 a, b, zero, a, 0xEA;
    fma.rn.bf16x2 a, a, two, zero;
    mov.b32 {$6, $7}, a;
}""")
_EIGHT = tl.constexpr((tl.bfloat16,) * 8)


@triton.jit
def multiply(acc, weights, scales, source, live, expert, first, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr):
    """acc [BN, MT] and the outputs from `first` on of an expert with N of them; `source` [MT] begins rows of K inputs.

    The order of sums is that of one product over STEP inputs after the other.
    """
    n, own = first + tl.arange(0, BN), tl.arange(0, STEP // 2)
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    strip = (expert.to(tl.int64) * (N // STRIP) + n // STRIP) * STEPS
    words = weights.to(tl.pointer_type(tl.int32)) + strip[:, None] * (STRIP * STEP // 8)
    words += (n % STRIP)[:, None] * (STEP // 8) + tl.arange(0, STEP // 8)[None, :]
    scale = scales.to(tl.pointer_type(tl.int32)) + strip[:, None] * (STRIP * 2)
    scale += (n % STRIP)[:, None] * 2 + tl.arange(0, 2)[None, :]
    given = source[:, None] + own[None, :]
    for step in range(STEPS):
        packed = tl.load(words + step * (STRIP * STEP // 8), eviction_policy="evict_first")
        both = tl.load(scale + step * (STRIP * 2))  # a load of less than four bytes would not be asked for ahead
        k = step * STEP + own
        inside, beyond = live[:, None], live[:, None]
        if STEP * STEPS != K:
            inside, beyond = inside & (k < K)[None, :], beyond & (k + STEP // 2 < K)[None, :]
        left = tl.load(given + step * STEP, mask=inside, other=0.0, cache_modifier=".cg")
        right = tl.load(given + step * STEP + STEP // 2, mask=beyond, other=0.0, cache_modifier=".cg")
        both = tl.reshape(tl.broadcast_to(both[:, :, None], (BN, 2, STEP // 16)), (BN, STEP // 8))
        some, others = _widened(packed, both)
        acc = tl.dot(some.to(left.dtype), tl.trans(left), acc)
        acc = tl.dot(others.to(right.dtype), tl.trans(right), acc)
    return acc


@triton.jit
def _widened(packed, both):
    """[BN, W] words and pairs of scales as [BN, 4 W] numbers of the lower halves of bytes, and of the upper ones."""
    if INTERPRETED:
        lower, upper = both << 16, both & -65536
        a, b = _of_code(packed, lower), _of_code(packed >> 8, lower)
        c, d = _of_code(packed >> 16, lower), _of_code(packed >> 24, lower)
        e, f = _of_code(packed >> 4, upper), _of_code(packed >> 12, upper)
        g, h = _of_code(packed >> 20, upper), _of_code(packed >> 28, upper)
    else:
        # it is said to have effects: Triton would otherwise see that an operand came as bytes, and add up in another
        # order on some cards
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _WIDEN, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [packed, both], _EIGHT, is_pure=False, pack=1
        )
    some = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (packed.shape[0], packed.shape[1] * 4))
    others = tl.reshape(tl.join(tl.join(e, g), tl.join(f, h)), (packed.shape[0], packed.shape[1] * 4))
    return some, others


@triton.jit
def _of_code(packed, scale):
    """What the instructions above give, in float32: the number in the lowest four bits of each word."""
    size, sign = packed & 7, 1.0 - 2.0 * ((packed >> 3) & 1)
    high = size >> 1
    whole = tl.where(high > 0, (2 + (size & 1)) << high, 2 * size).to(tl.float32) * 2.0**-63
    return sign * whole * (scale.to(tl.float32, bitcast=True) * 2.0**-65)
