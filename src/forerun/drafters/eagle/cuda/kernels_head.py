"""Triton kernels of a drafting head: its input step, and the growth of its trees.

A level of a draft would be forty small operations; here it is one kernel before the layer and two behind it. `tops`
looks through a stretch of one row's logits, `advance` puts the stretches of all rows of one tree together.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

from forerun.kernels_noise import log_exponential
from forerun.models.cuda.kernels_linear import put_rows

# what the residual stream starts from
FEATURES, NORMED, NOTHING = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def enter(tokens, table, carried, sources, token_norm, feature_norm, into, x, lifts, lift, added, eps,
          WIDTH: tl.constexpr, UP: tl.constexpr, START: tl.constexpr, ROOM: tl.constexpr,
          IN_ORDER: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One row: the normed embedding of its token beside its normed features, and the residual stream's start.

    Unless rows of `carried` are taken IN_ORDER, `sources` says which, and `x` must be another buffer. Rows of whole
    numbers (ROOM > 0) go in times `lift`; what the residual stream is handed on with is left in `lifts`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(0)
    n = tl.arange(0, UP)
    inside = n < WIDTH
    token = tl.load(tokens + m, cache_modifier=".cg").to(tl.int64)
    row = tl.load(table + token * WIDTH + n, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)
    weight = tl.load(token_norm + n, mask=inside, other=0.0).to(tl.float32)
    place = m * (2 * WIDTH) + n
    normed = row * scale * weight
    put_rows(into, place, normed * lift, inside, ROOM * 2 * WIDTH)
    source = m if IN_ORDER else tl.load(sources + m, cache_modifier=".cg")
    feature = tl.load(carried + source * WIDTH + n, mask=inside, other=0.0, cache_modifier=".cg").to(
        tl.float32
    )
    squares = tl.sum(feature * feature, 0) / WIDTH
    scale = tl.rsqrt(squares + eps)
    weight = tl.load(feature_norm + n, mask=inside, other=0.0).to(tl.float32)
    normed = feature * scale * weight
    put_rows(into, place + WIDTH, normed * lift, inside, ROOM * 2 * WIDTH)
    if ROOM > 0:
        tl.store(lifts + m, tl.rsqrt((squares if START == FEATURES else 0.0) + added))
    if START == FEATURES:
        first = feature
    elif START == NORMED:
        first = normed
    else:  # a product behind this makes all of it
        first = tl.zeros_like(feature)
    tl.store(x + m * WIDTH + n, first, mask=inside)


@triton.jit
def tops(logits, found, rows, highs, sums, vocab, K: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """The K likeliest of one stretch of a row's logits, its maximum, and its sum of exponentials."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m, c = tl.program_id(0), tl.program_id(1)
    chunks = tl.num_programs(1)
    n = c * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(
        logits + m.to(tl.int64) * vocab + n, mask=n < vocab, other=float("-inf"), cache_modifier=".cg"
    )
    high = tl.max(values, 0)
    tl.store(highs + m * chunks + c, high)
    tl.store(sums + m * chunks + c, tl.sum(tl.exp(values - high), 0))
    place = (m * chunks + c) * K
    for j in range(K):
        best, at = tl.max(values, 0, return_indices=True)  # of equal ones the first
        tl.store(found + place + j, best)
        tl.store(rows + place + j, tl.minimum(c * CHUNK + at, vocab - 1))
        values = tl.where(n == c * CHUNK + at, float("-inf"), values)


@triton.jit(do_not_specialize=["stride", "vocab", "wide", "level", "MOST"])
def add_noise(logits, found, ids, noise, positions, stride, vocab, wide, level, MOST, BLOCK: tl.constexpr):
    """A stretch of one row of a level: its logits times a factor, less the logarithm of the verifier's noise.

    Rows of one tree, `wide` of them, share the noise of their position; trees without any stay as they are.
    """
    row = tl.program_id(0)
    b, n = row // wide, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = n < vocab
    values = tl.load(logits + row.to(tl.int64) * stride + n, mask=here, other=0.0)
    if tl.load(noise + 2 * MOST + b) > 0:
        factor = tl.load(noise + MOST + b).to(tl.float64, bitcast=True).to(tl.float32)
        at = (tl.load(positions + b) + 2 + level).to(tl.int64)
        values = values * factor - log_exponential(
            tl.load(noise + b), at, tl.load(ids + n, mask=here, other=0)
        )
    tl.store(found + row.to(tl.int64) * vocab + n, values, mask=here)


@triton.jit(do_not_specialize=["first", "pool_size", "level"])
def advance(found, rows, highs, sums, ids, log_survivals, places, ancestors, pool_scores, pool_tokens, pool_parents,
            next_scores, next_places, next_tokens, next_parents, next_ancestors, first, pool_size, log_scale, power,
            level, WIDE: tl.constexpr, WIDE_UP: tl.constexpr, K: tl.constexpr, K_UP: tl.constexpr, C: tl.constexpr,
            C_UP: tl.constexpr, FOUND_UP: tl.constexpr, FRESH: tl.constexpr, FRESH_UP: tl.constexpr,
            WIDTH: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One tree: the K children that each of WIDE nodes proposes, and the FRESH best of all of them.

    The two loops work in registers: memory is asked once behind each, for all that they found.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    w, f, k, c = tl.arange(0, WIDE_UP), tl.arange(0, FOUND_UP), tl.arange(0, K_UP), tl.arange(0, C_UP)
    there = w < WIDE
    node = b * WIDE + w
    part = node[:, None] * C + c[None, :]
    inside = there[:, None] & (c < C)[None, :]
    high = tl.load(highs + part, mask=inside, other=float("-inf"), cache_modifier=".cg")
    share = tl.load(sums + part, mask=inside, other=0.0, cache_modifier=".cg")
    top = tl.where(there, tl.max(high, 1), 0.0)
    total = tl.sum(tl.where(inside, share * tl.exp(high - top[:, None]), 0.0), 1)
    log_total = top + tl.log(tl.where(there, total, 1.0))
    values = tl.load(found + node[:, None] * (C * K) + f[None, :], mask=there[:, None] & (f < C * K)[None, :],
                     other=float("-inf"), cache_modifier=".cg")  # fmt: skip
    survival = tl.load(log_survivals + node, mask=there, other=0.0, cache_modifier=".cg")
    above = tl.load(places + node, mask=there, other=0, cache_modifier=".cg")
    bests = tl.full((WIDE_UP, K_UP), float("-inf"), dtype=tl.float32)
    spots = tl.zeros((WIDE_UP, K_UP), dtype=tl.int32)
    for j in range(K):
        best, at = tl.max(values, 1, return_indices=True)
        at = tl.minimum(at, C * K - 1)
        bests = tl.where((k == j)[None, :], best[:, None], bests)
        spots = tl.where((k == j)[None, :], at[:, None], spots)
        values = tl.where(f[None, :] == at[:, None], float("-inf"), values)
    real = there[:, None] & (k < K)[None, :]
    confidence = tl.minimum(bests - log_total[:, None], 0.0)
    scores = survival[:, None] + tl.minimum(confidence * power + log_scale, 0.0)
    row = tl.load(rows + node[:, None] * (C * K) + spots, mask=real, other=0, cache_modifier=".cg")
    pool = b * pool_size + first + w[:, None] * K + k[None, :]
    tl.store(pool_scores + pool, scores, mask=real)
    tl.store(pool_tokens + pool, tl.load(ids + row, mask=real, other=0), mask=real)
    tl.store(pool_parents + pool, tl.broadcast_to(above[:, None], (WIDE_UP, K_UP)), mask=real)
    scores = tl.reshape(tl.where(real, scores, float("-inf")), (WIDE_UP * K_UP,))
    flat = tl.arange(0, WIDE_UP * K_UP)
    i = tl.arange(0, FRESH_UP)
    leaders = tl.zeros((FRESH_UP,), dtype=tl.float32)
    chosen = tl.zeros((FRESH_UP,), dtype=tl.int32)
    for j in range(FRESH):
        leader, spot = tl.max(scores, 0, return_indices=True)
        leaders = tl.where(i == j, leader, leaders)
        chosen = tl.where(i == j, spot, chosen)
        scores = tl.where(flat == spot, float("-inf"), scores)
    tl.debug_barrier()  # the tokens are read again below, by other threads than wrote them
    _hand_on(b, i, leaders, chosen // K_UP, chosen % K_UP, ancestors, pool_tokens + b * pool_size, next_scores,
             next_places, next_tokens, next_parents, next_ancestors, first, level, WIDE, K, FRESH, WIDTH)  # fmt: skip


@triton.jit
def _hand_on(b, i, leaders, parents, children, ancestors, tokens, next_scores, next_places, next_tokens, next_parents,
             next_ancestors, first, level, WIDE: tl.constexpr, K: tl.constexpr, FRESH: tl.constexpr,
             WIDTH: tl.constexpr):  # fmt: skip
    """The next frontier: child by child of some parents, and the ancestors that lead to them."""
    real = i < FRESH
    place, fresh, parent = first + parents * K + children, b * FRESH + i, b * WIDE + parents
    token = tl.load(tokens + place, mask=real, other=0)
    tl.store(next_scores + fresh, leaders, mask=real)
    tl.store(next_places + fresh, place.to(tl.int64), mask=real)
    tl.store(next_tokens + fresh, token.to(next_tokens.dtype.element_ty), mask=real)
    tl.store(next_parents + fresh, parent.to(tl.int64), mask=real)
    for step in range(level):
        way = tl.load(ancestors + parent * level + step, mask=real, other=0, cache_modifier=".cg")
        tl.store(
            next_ancestors + fresh * (level + 1) + step, way.to(next_ancestors.dtype.element_ty), mask=real
        )
    own = level * WIDTH + i
    tl.store(next_ancestors + fresh * (level + 1) + level, own.to(next_ancestors.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["pool_size", "stride", "NODES"])
def cut(pool_scores, pool_tokens, pool_parents, roots, numbers, trees, pool_size, stride, NODES, UP: tl.constexpr,
        PDL: tl.constexpr):  # fmt: skip
    """One tree: of all candidates the NODES best behind their root, in the order in which they were made.

    Scores as whole numbers in the same order; of these the largest that NODES candidates reach, bit by bit. Of those
    that are equal to it the first ones are taken.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, n = tl.program_id(0), tl.arange(0, UP)
    here, place = n < pool_size, b * pool_size + n
    scores = tl.load(pool_scores + place, mask=here, other=0.0, cache_modifier=".cg")
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # there are two zeros
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000
    order = tl.where(here, order, -1)
    least = tl.full((), 0, tl.int64)
    for i in range(32):
        more = least + (tl.full((), 0x80000000, tl.int64) >> i)
        reached = tl.sum((order >= more).to(tl.int32), 0)
        least = tl.where(reached >= NODES, more, least)
    better, equal = (order > least).to(tl.int32), (order == least).to(tl.int32)
    kept = (better > 0) | ((equal > 0) & (tl.cumsum(equal, 0) <= NODES - tl.sum(better, 0)))
    number = tl.cumsum(kept.to(tl.int32), 0)
    tl.store(numbers + place, number, mask=here)
    tl.debug_barrier()  # they are read below by other threads than wrote them
    above = tl.load(pool_parents + place, mask=kept, other=-1, cache_modifier=".cg")
    parent = tl.load(numbers + b * pool_size + tl.maximum(above, 0), mask=kept, other=0)
    node = trees + b * (NODES + 1) + number
    token = tl.load(pool_tokens + place, mask=kept, other=0, cache_modifier=".cg")
    tl.store(node, token, mask=kept)
    tl.store(node + stride, tl.where(above < 0, 0, parent).to(tl.int64), mask=kept)
    root = trees + b * (NODES + 1)
    tl.store(root, tl.load(roots + b).to(tl.int64))
    tl.store(root + stride, tl.full((), -1, tl.int64))
