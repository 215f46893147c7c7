"""Triton: one program per row: the embedding, the last norm, and what follows wide products (wide.py).

Wide products leave the parts of a weight's splits: they are added from zero in order, and then the same is done with
every number as at the end of `linear.linear`. A program sees a whole row, so it hands on the next norm as one
factor per row; products of few rows hand on sums of squares tile by tile instead, and the embedding leaves both.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

from forerun.models.cuda.kernels.kv_bytes import put
from forerun.models.cuda.kernels.linear import open_gate


@triton.jit
def inverse_root(row, WIDTH: tl.constexpr, UP: tl.constexpr, eps):
    """[1] the factor of a row's norm, from a sum in fp64 as everywhere."""
    wide = tl.reshape(row, (1, UP)).to(tl.float64)
    return tl.rsqrt(tl.sum(wide * wide, 1).to(tl.float32) / WIDTH + eps)


@triton.jit
def _put_squares(row, m, squares, stride, WIDTH: tl.constexpr, UP: tl.constexpr, BN: tl.constexpr):
    """Of each tile of BN columns of a row, for products of few rows."""
    tile = tl.arange(0, UP // BN)
    wide = row.to(tl.float64)
    sums = tl.sum(tl.reshape(wide * wide, (UP // BN, BN)), axis=1)
    tl.store(squares + m * stride + tile, sums, mask=tile < (WIDTH + BN - 1) // BN)


@triton.jit
def embed(tokens, table, x, out, squares, inverses, norm, eps, scale, WIDTH: tl.constexpr, UP: tl.constexpr,
          BN: tl.constexpr, TILES_UP: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Start the residual stream of one row, and leave what the first norm needs."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(0)
    n = tl.arange(0, UP)
    inside = n < WIDTH
    token = tl.load(tokens + m).to(tl.int64)
    row = tl.load(table + token * WIDTH + n, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        row = (row * scale).to(table.dtype.element_ty).to(tl.float32)  # in the table's type, as in transformers
    tl.store(x + m * WIDTH + n, row, mask=inside)
    scaled = row * tl.load(norm + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + m * WIDTH + n, scaled.to(out.dtype.element_ty), mask=inside)
    _put_squares(row, m, squares, TILES_UP, WIDTH, UP, BN)
    tl.store(inverses + m + tl.arange(0, 1), inverse_root(row, WIDTH, UP, eps))


@triton.jit
def turn(positions, slots, pages, out, PAGE: tl.constexpr):
    """Where a row's rotation lies in a table that has those of long texts behind those of others: by its page."""
    m = tl.program_id(0)
    slot = tl.load(slots + m)
    moved = tl.load(pages + slot // PAGE, mask=slot >= 0, other=0)
    tl.store(out + m, tl.load(positions + m) + moved)


@triton.jit
def normalise(x, norm, out, eps, WIDTH: tl.constexpr, UP: tl.constexpr, PDL: tl.constexpr):
    """The last norm of one row, for callers that need it: the LM head does not."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(0)
    n = tl.arange(0, UP)
    inside = n < WIDTH
    row = tl.load(x + m * WIDTH + n, mask=inside, other=0.0, cache_modifier=".cg")
    scale = tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)
    weight = tl.load(norm + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + m * WIDTH + n, (row * scale * weight).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _added_up(parts, place, inside, stride, zeros, PARTS: tl.constexpr):
    total = zeros
    for i in tl.static_range(PARTS):
        total += tl.load(parts + i * stride + place, mask=inside, other=0.0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["APART"])
def finish_residual(parts, delta, x, out, bytes, scales, norm, after, inverses, squares, APART, eps, times,
                    scale_stride, square_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
                    PARTS: tl.constexpr, BYTES: tl.constexpr, PDL: tl.constexpr, ADAPTED: tl.constexpr,
                    AFTER: tl.constexpr, SHARE: tl.constexpr):  # fmt: skip
    """Add a row, or COLUMNS of it, to the residual stream, with what its adapter adds; leave what the next norm needs:
    the factor of the row, or the sum of squares of these columns; with BYTES also the row in e4m3. AFTER > 0: what is
    added, of a whole row, has a norm of its own, and the sums of squares of AFTER columns each are left too. SHARE: of
    what is added; `times`: of all."""
    m, piece = tl.program_id(0), tl.program_id(1)
    n = piece * COLUMNS + tl.arange(0, COLUMNS)
    inside = n < WIDTH
    weight = tl.load(norm + n, mask=inside, other=0.0).to(tl.float32)
    own = weight
    if AFTER > 0:
        own = tl.load(after + n, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        if WHOLE:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not WHOLE:  # a compiled product that came earlier would share multiprocessors unevenly
            tl.extra.cuda.gdc_launch_dependents()
    place = m * WIDTH + n
    old = tl.load(x + place, mask=inside, other=0.0, cache_modifier=".cg")
    stride = APART.to(tl.int64) * WIDTH
    acc = _added_up(parts, place, inside, stride, tl.zeros((COLUMNS,), dtype=tl.float32), PARTS)
    if ADAPTED:
        acc += tl.load(delta + place, mask=inside, other=0.0, cache_modifier=".cg")
    if AFTER > 0:
        acc = acc * inverse_root(acc, WIDTH, COLUMNS, eps) * own
    if SHARE != 1.0:
        acc = acc * SHARE
    acc += old
    acc = acc * times
    tl.store(x + place, acc, mask=inside)
    scaled = (acc * weight).to(out.dtype.element_ty)
    tl.store(out + place, scaled, mask=inside)
    if AFTER > 0:
        _put_squares(acc, m, squares, square_stride, WIDTH, COLUMNS, AFTER)
    if WHOLE:
        tl.store(inverses + m + tl.arange(0, 1), inverse_root(acc, WIDTH, COLUMNS, eps))
    else:
        wide = acc.to(tl.float64)
        tl.store(squares + m * square_stride + piece, tl.sum(wide * wide, 0))
    if BYTES:
        _put_bytes(scaled.to(tl.float32), m, piece, bytes, scales, scale_stride, WIDTH, COLUMNS)


@triton.jit
def _put_bytes(row, m, piece, bytes, scales, scale_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """A piece of a row in e4m3, each 128 columns divided by a scale of their own [WIDTH / 128, rows]."""
    held = tl.reshape(row, (COLUMNS // 128, 128))
    block, column = piece * (COLUMNS // 128) + tl.arange(0, COLUMNS // 128), tl.arange(0, 128)
    most = tl.maximum(tl.max(tl.abs(held), 1), 1e-30)
    number = held * tl.div_rn(448.0, most)[:, None]
    place = m * WIDTH + block[:, None] * 128 + column[None, :]
    there = block < WIDTH // 128
    tl.store(bytes + place, number.to(tl.float8e4nv), mask=there[:, None] & (column >= 0)[None, :])
    tl.store(scales + block * scale_stride + m, tl.div_rn(most, 448.0), mask=there)


@triton.jit
def _made(parts, delta, bias, factor, m, n, stride, WIDE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
          PARTS: tl.constexpr, BIAS: tl.constexpr, NORMED: tl.constexpr, ADAPTED: tl.constexpr):  # fmt: skip
    """Heads n [HEADS, D] of a row of queries, keys and values, before their norms."""
    acc = _added_up(parts, m * WIDE + n, n >= 0, stride, tl.zeros((HEADS, D), dtype=tl.float32), PARTS)
    if ADAPTED:
        acc += tl.load(delta + m * WIDE + n, cache_modifier=".cg")
    if not NORMED:
        acc = acc * factor
    if BIAS:
        acc += tl.load(bias + n).to(tl.float32)
    return acc


@triton.jit(do_not_specialize=["APART"])
def finish_qkv(parts, delta, inverses, squares, out, keys, values, bias, head_norm, rope, positions, slots, APART, eps,
               head_stride, square_stride, WIDTH: tl.constexpr, PIECES: tl.constexpr, H: tl.constexpr,
               HKV: tl.constexpr, D: tl.constexpr, ROT: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
               BIAS: tl.constexpr, HEAD_NORM: tl.constexpr, ALL: tl.constexpr, ROPE: tl.constexpr, NORMED: tl.constexpr,
               SIDE: tl.constexpr, PDL: tl.constexpr, ADAPTED: tl.constexpr, FORMAT: tl.constexpr):  # fmt: skip
    """HEADS heads of one row: norm the first HEAD_NORM heads, each alone or ALL queries and all keys together, rotate
    queries and keys, and store queries, keys and values. SIDE: rows of D numbers from a slot to the next."""
    m, h0 = tl.program_id(0), tl.program_id(1) * HEADS
    heads, d = h0 + tl.arange(0, HEADS), tl.arange(0, D)
    n = heads[:, None] * D + d[None, :]
    turned = h0 < H + HKV
    position = tl.load(positions + m).to(tl.int64)
    slot = tl.load(slots + m).to(tl.int64) * SIDE
    if PDL:
        if PIECES == 0:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if PIECES > 0:
            tl.extra.cuda.gdc_launch_dependents()
    WIDE: tl.constexpr = (H + 2 * HKV) * D
    stride, factor = APART.to(tl.int64) * WIDE, 1.0
    if not NORMED:
        if PIECES == 0:
            factor = tl.load(inverses + m, cache_modifier=".cg")
        else:
            pieces = tl.load(squares + m * square_stride + tl.arange(0, PIECES), cache_modifier=".cg")
            factor = tl.rsqrt(tl.sum(pieces, 0).to(tl.float32) / WIDTH + eps)
    acc = _made(parts, delta, bias, factor, m, n, stride, WIDE, HEADS, D, PARTS, BIAS, NORMED, ADAPTED)
    if HEAD_NORM > 0:
        wide = acc.to(tl.float64)
        total, count = tl.sum(wide * wide, 1), 1
        if ALL:  # every program adds up all heads of queries or of keys
            first, count = tl.where(h0 < H, 0, H), tl.where(h0 < H, H, HKV)
            total = tl.zeros((HEADS,), dtype=tl.float64)
            for h in range(0, count, HEADS):
                some = (first + h + tl.arange(0, HEADS))[:, None] * D + d[None, :]
                wide = _made(parts, delta, bias, factor, m, some, stride, WIDE, HEADS, D, PARTS, BIAS, NORMED,
                             ADAPTED).to(tl.float64)  # fmt: skip
                total += tl.sum(wide * wide, 1)
            total = tl.zeros((HEADS,), dtype=tl.float64) + tl.sum(total, 0)
        inverse = tl.rsqrt(total.to(tl.float32) / (count * D) + eps)
        weight = tl.load(head_norm + n, mask=n < HEAD_NORM * D, other=0.0).to(tl.float32)
        acc = tl.where(h0 < HEAD_NORM, acc * inverse[:, None] * weight, acc)
    if ROPE:
        pair = tl.arange(0, D // 2)
        turn = rope + position * (2 * ROT) + pair * 2
        moved = (pair < ROT) & turned
        cos = tl.load(turn, mask=moved, other=1.0)[None, :]
        sin = tl.load(turn + 1, mask=moved, other=0.0)[None, :]
        even, odd = tl.split(tl.reshape(acc, (HEADS, D // 2, 2)))
        acc = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (HEADS, D))
    found = acc.to(out.dtype.element_ty)
    if HKV == 0 or h0 < H:  # a layer that writes no keys
        tl.store(out + m * (H * D) + n, found)
    else:
        head, there = ((heads - H) % HKV).to(tl.int64), (heads >= 0) & (slot >= 0)
        if turned:
            put(keys, head, slot, head_stride, acc, found, there, D, FORMAT)
        else:
            put(values, head, slot, head_stride, acc, found, there, D, FORMAT)


@triton.jit
def finish_gate(sums, out, INNER: tl.constexpr, COLUMNS: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr):
    """Close the gates of some columns of one row."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    m = tl.program_id(0)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = n < INNER
    gates = tl.load(sums + m * (2 * INNER) + n, mask=inside, other=0.0, cache_modifier=".cg")
    ups = tl.load(sums + m * (2 * INNER) + INNER + n, mask=inside, other=0.0, cache_modifier=".cg")
    if GELU:
        inner = open_gate(gates, ups, True)
    else:
        inner = gates * tl.sigmoid(gates) * ups
    tl.store(out + m * INNER + n, inner.to(out.dtype.element_ty), mask=inside)


@triton.jit
def finish_logits(logits, scale, cap, VOCAB: tl.constexpr, COLUMNS: tl.constexpr, CAPPED: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """Some columns of one row, scaled; CAPPED: `cap` times the hyperbolic tangent of what they are divided by it."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = logits + tl.program_id(0).to(tl.int64) * VOCAB + n
    found = tl.load(place, mask=n < VOCAB, other=0.0, cache_modifier=".cg") * scale
    if CAPPED:
        shrunk = tl.exp(-2.0 * tl.abs(found) / cap)
        size = cap * (1.0 - shrunk) / (1.0 + shrunk)
        found = tl.where(found < 0, -size, size)
    tl.store(place, found, mask=n < VOCAB)
