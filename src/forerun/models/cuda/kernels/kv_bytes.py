"""Triton: keys and values of 16 or 8 bits: how a row of 8 bits is written, and how attention reads either kind.

FORMAT says which: PLAIN, or INT8 or E4M3, where the row of one head and token has a scale, its largest number's share
of 127 or 448, rounded up to a float16. Stores of 8 bits come as two tensors, the numbers and the scales; PLAIN ones are
one tensor, and kernels compiled for them have no trace of the others.

Numbers of 8 bits are multiplied by their scale in float16 where they are read, each by itself; attention then does what
it does over float16, with queries in float16. So a row's bits do not depend on its company. Rows whose largest number
is over 65,504 are not finite then, which shows; steps are no finer than 2 ** -24.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

PLAIN, INT8, E4M3 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Four numbers times a scale, in float16; $5: the scale twice. An int8 number and 128 are the low bits of 1024 and more.
_FROM_INT8 = tl.constexpr("""{
    .reg .b32 whole, low, high, less, thousand;
    mov.b32 less, 0x64806480;
    mov.b32 thousand, 0x64646464;
    xor.b32 whole, $4, 0x80808080;
    prmt.b32 low, whole, thousand, 0x4140;
    prmt.b32 high, whole, thousand, 0x4342;
    sub.rn.f16x2 low, low, less;
    sub.rn.f16x2 high, high, less;
    mul.rn.f16x2 low, low, $5;
    mul.rn.f16x2 high, high, $5;
    mov.b32 {$0, $1}, low;
    mov.b32 {$2, $3}, high;
}""")
_FROM_E4M3 = tl.constexpr("""{
    .reg .b16 first, second;
    .reg .b32 low, high;
    mov.b32 {first, second}, $4;
    cvt.rn.f16x2.e4m3x2 low, first;
    cvt.rn.f16x2.e4m3x2 high, second;
    mul.rn.f16x2 low, low, $5;
    mul.rn.f16x2 high, high, $5;
    mov.b32 {$0, $1}, low;
    mov.b32 {$2, $3}, high;
}""")
_FOUR = tl.constexpr((tl.float16, tl.float16, tl.float16, tl.float16))


@triton.jit
def head_of(store, h, head_stride, D: tl.constexpr, FORMAT: tl.constexpr):
    """The keys or values of one head, in a store of many."""
    if FORMAT == PLAIN:
        return store + h.to(tl.int64) * head_stride
    else:  # noqa: RET505  (without it Triton would compile both)
        return store[0] + h.to(tl.int64) * head_stride, store[1] + h.to(tl.int64) * (head_stride // D)


@triton.jit
def fetch(store, slot, D: tl.constexpr, FORMAT: tl.constexpr, WORDS: tl.constexpr = 4):
    """The rows [T, D] in these slots as they are kept, numbers of 8 bits by fours, and their scales: for `wide`.

    WORDS: of such a row a thread asks for so many at once.
    """
    if FORMAT == PLAIN:
        place = slot.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
        return tl.load(store + place, cache_modifier=".cg")
    else:  # noqa: RET505
        words = store[0].to(tl.pointer_type(tl.int32)) + slot.to(tl.int64)[:, None] * (D // 4)
        words = tl.max_contiguous(words + tl.arange(0, D // 4)[None, :], (1, WORDS))
        scales = tl.load(store[1] + slot, cache_modifier=".cg")
        return tl.load(words, cache_modifier=".cg"), scales


@triton.jit
def fetch_some(store, slot, there, D: tl.constexpr, FORMAT: tl.constexpr):
    """The same; zeros where a slot is not `there`."""
    if FORMAT == PLAIN:
        place = slot.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
        return tl.load(store + place, mask=there[:, None], other=0.0, cache_modifier=".cg")
    else:  # noqa: RET505
        words = store[0].to(tl.pointer_type(tl.int32)) + slot.to(tl.int64)[:, None] * (D // 4)
        words += tl.arange(0, D // 4)[None, :]
        scales = tl.load(store[1] + slot, mask=there, other=0.0, cache_modifier=".cg")
        return tl.load(words, mask=there[:, None], other=0, cache_modifier=".cg"), scales


@triton.jit
def wide(fetched, FORMAT: tl.constexpr):
    """Rows as operands of a product: of 8 bits, given by fours, times the scales of their rows.

    The last instruction is said to have effects: Triton would otherwise see that an operand came as bytes, and have
    tensor cores of one kind, but not of the other, add up in an order that suits bytes.
    """
    if FORMAT == PLAIN:
        return fetched
    else:  # noqa: RET505
        words, scales = fetched[0], fetched[1][:, None]
        if INTERPRETED:
            a, b = number(words, scales, 0, FORMAT), number(words, scales, 8, FORMAT)
            c, d = number(words, scales, 16, FORMAT), number(words, scales, 24, FORMAT)
        else:
            TWICE: tl.constexpr = "cvt.rn.f16x2.f32 $0, $1, $1;"
            by = tl.inline_asm_elementwise(TWICE, "=r,f", [scales], tl.int32, is_pure=True, pack=1)
            ASM: tl.constexpr = _FROM_E4M3 if FORMAT == E4M3 else _FROM_INT8
            a, b, c, d = tl.inline_asm_elementwise(ASM, "=h,=h,=h,=h,r,r", [words, by], _FOUR, is_pure=True, pack=1)
        found = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (words.shape[0], words.shape[1] * 4))
        if INTERPRETED:
            return found
        else:  # noqa: RET505
            return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [found], tl.float16, is_pure=False, pack=2)


@triton.jit
def number(words, scales, SHIFT: tl.constexpr, FORMAT: tl.constexpr):
    """What the instructions make of one of four numbers."""
    numbers = (words >> SHIFT).to(tl.int8)
    if FORMAT == E4M3:
        numbers = numbers.to(tl.float8e4nv, bitcast=True)
    return numbers.to(tl.float32).to(tl.float16) * scales.to(tl.float16)


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
    scales = _rounded_up(tl.div_rn(tl.max(sizes, 1), MOST))
    steps = rows * tl.where(scales > 0, tl.div_rn(1.0, scales), 0.0)[:, None]
    if FORMAT == E4M3:
        numbers = steps.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    else:
        # 1.5 * 2^23: the nearest, even where two are
        numbers = ((steps + 12582912.0) - 12582912.0).to(tl.int8)
    tl.store(store[0] + place, numbers, mask=there[:, None])
    tl.store(store[1] + slot, scales, mask=there)


@triton.jit
def _rounded_up(numbers):
    """To numbers that float16 has; none of them is negative."""
    near = numbers.to(tl.float16)
    more = (near.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)
    return tl.where(near.to(tl.float32) < numbers, more, near).to(tl.float32)
