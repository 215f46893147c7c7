"""Triton: the way into a drafting head, and how its trees grow.

A level of a draft would be forty small operations; here it is one kernel before the layer and two behind it. `tops`
looks through a stretch of one row's logits, `advance` puts the stretches of all rows of one tree together.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl


@triton.jit
def enter(tokens, table, carried, token_norm, feature_norm, into, x, eps, WIDTH: tl.constexpr, UP: tl.constexpr,
          NORMED_RESIDUAL: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One row: the normed embedding of its token beside its normed features, and the residual stream's start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(0)
    n = tl.arange(0, UP)
    inside = n < WIDTH
    token = tl.load(tokens + m).to(tl.int64)
    row = tl.load(table + token * WIDTH + n, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)
    weight = tl.load(token_norm + n, mask=inside, other=0.0).to(tl.float32)
    place = into + m * (2 * WIDTH) + n
    tl.store(place, (row * scale * weight).to(into.dtype.element_ty), mask=inside)
    feature = tl.load(carried + m * WIDTH + n, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    scale = tl.rsqrt(tl.sum(feature * feature, 0) / WIDTH + eps)
    weight = tl.load(feature_norm + n, mask=inside, other=0.0).to(tl.float32)
    normed = feature * scale * weight
    tl.store(place + WIDTH, normed.to(into.dtype.element_ty), mask=inside)
    if NORMED_RESIDUAL:
        tl.store(x + m * WIDTH + n, normed, mask=inside)
    else:
        tl.store(x + m * WIDTH + n, feature, mask=inside)


@triton.jit
def tops(logits, found, rows, highs, sums, vocab, K: tl.constexpr, CHUNK: tl.constexpr):
    """The K likeliest of one stretch of a row's logits, its maximum, and its sum of exponentials."""
    m, c = tl.program_id(0), tl.program_id(1)
    chunks = tl.num_programs(1)
    n = c * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + m.to(tl.int64) * vocab + n, mask=n < vocab, other=float("-inf"))
    high = tl.max(values, 0)
    tl.store(highs + m * chunks + c, high)
    tl.store(sums + m * chunks + c, tl.sum(tl.exp(values - high), 0))
    place = (m * chunks + c) * K
    for j in range(K):
        best = tl.max(values, 0)
        at = tl.min(tl.where(values == best, n, vocab - 1), 0)
        tl.store(found + place + j, best)
        tl.store(rows + place + j, at)
        values = tl.where(n == at, float("-inf"), values)


@triton.jit(do_not_specialize=["first", "pool_size", "level"])
def advance(found, rows, highs, sums, ids, standing, places, ways, pool_scores, pool_tokens, pool_parents,
            next_standing, next_places, next_tokens, next_parents, next_ways, first, pool_size, log_scale, power,
            level, WIDE: tl.constexpr, WIDE_UP: tl.constexpr, K: tl.constexpr, K_UP: tl.constexpr, C: tl.constexpr,
            C_UP: tl.constexpr, FOUND_UP: tl.constexpr, FRESH: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """One tree: the K children that each of WIDE nodes puts forward, and the FRESH best of all of them."""
    b = tl.program_id(0)
    w, f, k, c = tl.arange(0, WIDE_UP), tl.arange(0, FOUND_UP), tl.arange(0, K_UP), tl.arange(0, C_UP)
    there = w < WIDE
    node = b * WIDE + w
    part = node[:, None] * C + c[None, :]
    inside = there[:, None] & (c < C)[None, :]
    high = tl.load(highs + part, mask=inside, other=float("-inf"))
    share = tl.load(sums + part, mask=inside, other=0.0)
    top = tl.where(there, tl.max(high, 1), 0.0)
    total = tl.sum(tl.where(inside, share * tl.exp(high - top[:, None]), 0.0), 1)
    log_total = top + tl.log(tl.where(there, total, 1.0))
    values = tl.load(found + node[:, None] * (C * K) + f[None, :],
                     mask=there[:, None] & (f < C * K)[None, :], other=float("-inf"))  # fmt: skip
    stands = tl.load(standing + node, mask=there, other=0.0)
    above = tl.load(places + node, mask=there, other=0)
    scores = tl.full((WIDE_UP, K_UP), float("-inf"), dtype=tl.float32)
    pool = b * pool_size + first + w * K
    for j in range(K):
        best = tl.max(values, 1)
        at = tl.min(tl.where(values == best[:, None], f[None, :], C * K - 1), 1)
        confidence = tl.minimum(best - log_total, 0.0)
        score = stands + tl.minimum(confidence * power + log_scale, 0.0)
        row = tl.load(rows + node * (C * K) + at, mask=there, other=0)
        tl.store(pool_scores + pool + j, score, mask=there)
        tl.store(pool_tokens + pool + j, tl.load(ids + row, mask=there, other=0), mask=there)
        tl.store(pool_parents + pool + j, above, mask=there)
        scores = tl.where((k == j)[None, :] & there[:, None], score[:, None], scores)
        values = tl.where(f[None, :] == at[:, None], float("-inf"), values)
    tl.debug_barrier()  # the tokens are read again below, by other threads than wrote them
    flat = w[:, None] * K_UP + k[None, :]
    for i in range(FRESH):
        leader = tl.max(tl.max(scores, 1), 0)
        spot = tl.min(tl.min(tl.where(scores == leader, flat, WIDE_UP * K_UP - 1), 1), 0)
        scores = tl.where(flat == spot, float("-inf"), scores)
        parent, child = spot // K_UP, spot % K_UP
        place = first + parent * K + child
        fresh = b * FRESH + i
        tl.store(next_standing + fresh, leader)
        tl.store(next_places + fresh, place.to(tl.int64))
        token = tl.load(pool_tokens + b * pool_size + place)
        tl.store(next_tokens + fresh, token.to(next_tokens.dtype.element_ty))
        tl.store(next_parents + fresh, (b * WIDE + parent).to(tl.int64))
        for step in range(level):
            way = tl.load(ways + (b * WIDE + parent) * level + step)
            tl.store(next_ways + fresh * (level + 1) + step, way.to(next_ways.dtype.element_ty))
        own = level * WIDTH + i
        tl.store(next_ways + fresh * (level + 1) + level, own.to(next_ways.dtype.element_ty))
