"""Triton kernels of drafts: a head's input step, the growth of its trees, rows that change places, and plans of drafts.

Each has its twin in torch, and the tests compare both: growth.py and head.py for heads, model_graphs.py for the chains
of draft models. A level of a head's draft would be forty small operations; here it is one kernel before the layer and
two behind it: `tops` looks through a stretch of one row's logits, `advance` puts the stretches of all rows of one tree
together. A plan would be a hundred operations before every draft; sizes of forms are no constants of its kernel, since
there are many forms and one would be compiled for each. A pass of a chain has two kernels behind it: `look` finds the
likeliest token of a stretch of logits, `choose` puts the stretches together and writes what the next pass reads. What
is drafted changes no text: the noise need not be the verifier's to the bit.
"""

import triton
import triton.language as tl

from forerun.core.noise_kernel import log_exponential
from forerun.models.cuda.kernels.linear import put_rows
from forerun.models.cuda.kernels.trees import FIELDS, PAGE, copy_row, split_at, write_group

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.


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
    feature = tl.load(carried + source * WIDTH + n, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
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
    values = tl.load(logits + m.to(tl.int64) * vocab + n, mask=n < vocab, other=float("-inf"), cache_modifier=".cg")
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
        values = values * factor - log_exponential(tl.load(noise + b), at, tl.load(ids + n, mask=here, other=0))
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
        tl.store(next_ancestors + fresh * (level + 1) + step, way.to(next_ancestors.dtype.element_ty), mask=real)
    own = level * WIDTH + i
    tl.store(next_ancestors + fresh * (level + 1) + level, own.to(next_ancestors.dtype.element_ty), mask=real)


@triton.jit
def _mark_dear(worth, prices, NODES, NODES_UP: tl.constexpr):
    """Chances that nodes are accepted -> 1 for those that gain most beyond their price, 0 for the others."""
    i = tl.arange(0, NODES_UP)
    here = i < NODES
    own = tl.load(worth + i, mask=here, other=-1.0)
    mine, theirs = own[:, None], own[None, :]
    better = (theirs > mine) | ((theirs == mine) & (i[None, :] <= i[:, None]))  # itself too
    count = tl.sum(better.to(tl.int32), 1)
    gain = tl.sum(tl.where(better, theirs, 0.0), 1) - tl.load(prices + count, mask=here, other=0.0)
    gain = tl.where(here, gain, float("-inf"))
    most = tl.max(gain, 0)
    best = tl.min(tl.where(gain == most, count, NODES), 0)
    best = tl.where(most > -tl.load(prices), best, 0)
    tl.debug_barrier()  # all threads have read what is overwritten
    tl.store(worth + i, (count <= best).to(tl.float32), mask=here)


@triton.jit(do_not_specialize=["pool_size", "stride", "NODES"])
def cut(pool_scores, pool_tokens, pool_parents, roots, numbers, trees, worth, prices, pool_size, stride, NODES,
        UP: tl.constexpr, NODES_UP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One tree: of all candidates the NODES best behind their root, in the order in which they were made.

    Scores as whole numbers in the same order; of these the largest that NODES candidates reach, bit by bit. Of those
    that are equal to it the first ones are taken.

    NODES_UP, if any: of these only as many keep their tokens as gain most beyond `prices`; `worth` is room to work in.
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
    if NODES_UP:
        own = worth + b * NODES + number - 1
        tl.store(own, tl.exp(scores), mask=kept)
        tl.debug_barrier()
        _mark_dear(worth + b * NODES, prices, NODES, NODES_UP)
        tl.debug_barrier()
        token = tl.where(tl.load(own, mask=kept, other=0.0) > 0.0, token, -1)
    tl.store(node, token, mask=kept)
    tl.store(node + stride, tl.where(above < 0, 0, parent).to(tl.int64), mask=kept)
    root = trees + b * (NODES + 1)
    tl.store(root, tl.load(roots + b).to(tl.int64))
    tl.store(root + stride, tl.full((), -1, tl.int64))


@triton.jit(do_not_specialize=["TREES", "STEPS"])
def append(hidden, into, sent, accepted, sources, TREES, STEPS, ROOM: tl.constexpr, WIDTH: tl.constexpr,
           UP: tl.constexpr):  # fmt: skip
    """Root or one node of an accepted path: its rows of all layers, side by side, to its sequence's next place."""
    b, s = tl.program_id(0), tl.program_id(1)
    first, seen = tl.load(sent + b), tl.load(sent + TREES + b)
    source = tl.load(sources + b * STEPS + s)
    kept = (first >= 0) & (s <= tl.load(accepted + b))
    row = into + (first + (seen + s) % ROOM) * (len(hidden) * WIDTH)
    for i in tl.static_range(len(hidden)):
        copy_row(hidden[i] + source * WIDTH, row + i * WIDTH, WIDTH, UP, kept)


@triton.jit
def bring_up(buffer, row, b, here, c, width):
    """Some columns of these rows to the buffer's start."""
    inside = here[:, None] & (c < width)[None, :]
    found = tl.load(buffer + row[:, None] * width + c[None, :], mask=inside, cache_modifier=".cg")
    tl.debug_barrier()  # one row's place may be where another still lies
    tl.store(buffer + b[:, None] * width + c[None, :], found, mask=inside)


@triton.jit(do_not_specialize=["B"])
def pick(x, queries, lifts, rows, B, x_width, query_width, B_UP: tl.constexpr, COLUMNS: tl.constexpr,
         PDL: tl.constexpr):  # fmt: skip
    """Some columns of all rows that the head reads next: of the residual stream and of the queries; and the lifts."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, c = tl.arange(0, B_UP), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    here = b < B
    row = tl.load(rows + b, mask=here, other=0)
    bring_up(x, row, b, here, c, x_width)
    bring_up(queries, row, b, here, c, query_width)
    if tl.program_id(0) == 0:
        lift = tl.load(lifts + row, mask=here, cache_modifier=".cg")
        tl.debug_barrier()
        tl.store(lifts + b, lift, mask=here)


@triton.jit(
    do_not_specialize=[
        "sent_at", "last_at", "level_at", "level_size", "ancestors_at", "caught_at", "caught", "unread_rows",
        "last_rows", "level_rows", "B", "BEHIND", "WIDTH", "DEPTH", "GROUP", "STEPS",
    ]
)  # fmt: skip
def plan(ints, accepted, path, first_at, sent_at, last_at, level_at, level_size, ancestors_at, caught_at, caught,
         unread_rows, last_rows, level_rows, B, BEHIND, WIDTH, DEPTH, GROUP, STEPS, ROOM: tl.constexpr,
         BEHIND_UP: tl.constexpr, WIDTH_UP: tl.constexpr):  # fmt: skip
    """One sequence: its unread rows and the last of them, or one of its levels."""
    b, part = tl.program_id(0), tl.program_id(1)
    sent = ints + sent_at + b
    first, known, pages = tl.load(sent), tl.load(sent + B), tl.load(sent + 3 * B)
    follows = tl.load(sent + 5 * B)  # its tree in the last round; -1 = the host has read that round
    tree = tl.maximum(follows, 0)
    added = tl.where(follows < 0, known, tl.load(accepted + tree).to(tl.int32) + 1)
    fresh = tl.minimum(added, BEHIND)
    skipped = added - fresh  # of a deeper tree: read by another draft
    first += skipped
    if part == 0:
        unread = ints + sent_at + 6 * B + b * BEHIND
        _catch_up(ints, b, sent, unread, path + tree * STEPS + skipped, follows, first, fresh, pages, ints + first_at,
                  ints + last_at, unread_rows, last_rows, B, BEHIND, ROOM, BEHIND_UP)  # fmt: skip
        end, g = first + fresh, tl.arange(0, BEHIND_UP)  # unread rows of one sequence share what they see
        write_group(ints + caught_at + (b * caught + g) * FIELDS, 0, split_at(end - 1) + 1, b * BEHIND + g * GROUP,
                    tl.minimum(GROUP, BEHIND - g * GROUP), end, 0, pages, g < caught)  # fmt: skip
    else:
        level = part - 1
        ways = ancestors_at + level_rows * (level * (level + 1) // 2)
        _level(ints, b, level, first + fresh, pages, ints + level_at + level * level_size, ways, level_rows, WIDTH,
               DEPTH, GROUP, WIDTH_UP)  # fmt: skip


@triton.jit
def _catch_up(ints, b, sent, unread, path, follows, first, fresh, pages, rows, lasts, unread_rows, last_rows, B,
              BEHIND, ROOM: tl.constexpr, BEHIND_UP: tl.constexpr):  # fmt: skip
    """[tokens | positions | slots | sources] of the unread rows, pads written nowhere; then the last row."""
    s, end = tl.arange(0, BEHIND_UP), first + fresh
    here, inside = s < BEHIND, s < fresh
    given = tl.load(unread + s, mask=here, other=0)
    decided = tl.load(path + s, mask=here, other=0).to(tl.int32)
    token = tl.where(follows < 0, given, decided)
    root = tl.where(follows < 0, tl.load(sent + 4 * B), tl.sum(tl.where(s == fresh - 1, token, 0), 0))
    at = tl.where(inside, first + s, 0)
    slot = tl.load(ints + pages + at // PAGE, mask=here, other=0) * PAGE + at % PAGE
    row = rows + b * BEHIND + s
    tl.store(row, tl.where(inside, token, 0), mask=here)
    tl.store(row + unread_rows, at, mask=here)
    tl.store(row + 2 * unread_rows, tl.where(inside, slot, -1), mask=here)
    tl.store(row + 3 * unread_rows, tl.load(sent + 2 * B) + at % ROOM, mask=here)
    tl.store(lasts + b, root)
    tl.store(lasts + last_rows + b, b * BEHIND + fresh - 1)
    tl.store(lasts + 2 * last_rows + b, end - 1)
    group = lasts + 3 * last_rows + b * FIELDS
    write_group(group, 0, split_at(end - 1) + 1, b, 1, end, 0, pages, None)


@triton.jit
def _level(ints, b, level, end, pages, own, ways, level_rows, WIDTH, DEPTH, GROUP, WIDTH_UP: tl.constexpr):
    """[tokens | positions | slots | groups] of a level that starts behind `end` rows; tokens come later."""
    n = tl.arange(0, WIDTH_UP)
    here, node, place = n < WIDTH, b * WIDTH + n, end + level * WIDTH + n
    slot = tl.load(ints + pages + place // PAGE, mask=here, other=0) * PAGE + place % PAGE
    tl.store(own + node, 0, mask=here)
    tl.store(own + level_rows + node, end + level, mask=here)
    tl.store(own + 2 * level_rows + node, slot, mask=here)
    start, behind = split_at(end), split_at(end + DEPTH) + 1
    shared, branches = (WIDTH + GROUP - 1) // GROUP, WIDTH > 1
    each = shared + tl.where(branches, WIDTH, 0)
    groups = own + 3 * level_rows + (b * each + n) * FIELDS
    write_group(groups, 0, tl.where(branches, start, behind), b * WIDTH + n * GROUP,
                tl.minimum(GROUP, WIDTH - n * GROUP), end, 0, pages, n < shared)  # fmt: skip
    write_group(groups + shared * FIELDS, start, behind, node, 1, end, ways + node * (level + 1), pages,
                here & branches)  # fmt: skip


CHUNK = 4096  # logits of one program


@triton.jit
def _place(ints, at, start, real):
    """The slot of a position in the pages that start there; -1 = none."""
    slot = tl.load(ints + start + at // PAGE, mask=real > 0, other=0) * PAGE + at % PAGE
    return tl.where(real > 0, slot, -1)


@triton.jit(do_not_specialize=["sent", "rows", "groups_at", "B", "STEPS", "vocab", "MOST"])
def begin(ints, accepted, path, roots, lanes, tokens_at, sent, rows, groups_at, B, STEPS, vocab, MOST,
          UNREAD: tl.constexpr):  # fmt: skip
    """One sequence: the rows of its root and of the token before that, if it was not read; where the chain goes."""
    b = tl.program_id(0)
    known = ints + sent + b
    root_at, root, before = tl.load(known), tl.load(known + B), tl.load(known + 2 * B)
    start, follows, deep = tl.load(known + 3 * B), tl.load(known + 4 * B), tl.load(known + 5 * B)
    if follows >= 0:  # the round before was not read: root and length are what it decided
        count = tl.load(accepted + follows).to(tl.int32)
        root = tl.load(path + follows * STEPS + count).to(tl.int32)
        end = tl.load(path + follows * STEPS + tl.maximum(count - 1, 0)).to(tl.int32)
        before = tl.where(count == deep, end, -1)
        root_at += count + 1
    tl.store(roots + b, root.to(tl.int64))
    for i in tl.static_range(UNREAD):
        token = root if i == 0 else before
        real = ((start > 0) & ((i == 0) | (token >= 0))).to(tl.int32)
        at, row = (root_at - i) * real, i * B + b
        tl.store(ints + tokens_at + row, tl.minimum(tl.maximum(token, 0), vocab - 1))
        tl.store(ints + tokens_at + rows + row, at)
        tl.store(ints + tokens_at + 2 * rows + row, _place(ints, at, start, real))
        write_group(ints + groups_at + row * FIELDS, 0, real * (split_at(at) + 1), real * row, real, real * at, 0,
                    real * start, True)  # fmt: skip
    tl.store(lanes + b, root_at * (start > 0).to(tl.int32))
    tl.store(lanes + MOST + b, start)
    tl.store(lanes + 2 * MOST + b, 0)
    tl.store(lanes + 3 * MOST + b, tl.load(known + 6 * B))


@triton.jit(do_not_specialize=["stride", "vocab", "MOST"])
def look(logits, lanes, noise, highs, spots, stride, vocab, MOST, CHUNK: tl.constexpr, NOISE: tl.constexpr):
    """The likeliest token of a stretch behind one row, or the one that shared noise draws."""
    b, c = tl.program_id(0), tl.program_id(1)
    n = c * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + b.to(tl.int64) * stride + n, mask=n < vocab, other=float("-inf"))
    if NOISE:  # noqa: SIM102  (it is known when this is compiled)
        if tl.load(noise + 2 * MOST + b) > 0:
            factor = tl.load(noise + MOST + b).to(tl.float64, bitcast=True).to(tl.float32)
            at = tl.load(lanes + b) + 1 + tl.load(lanes + 2 * MOST + b) + tl.load(lanes + 3 * MOST + b)
            values = values * factor - log_exponential(tl.load(noise + b), at.to(tl.int64), n)
    best = tl.max(values, 0)
    tl.store(highs + b * tl.num_programs(1) + c, best)
    tl.store(spots + b * tl.num_programs(1) + c, tl.min(tl.where(values == best, n, vocab - 1), 0))


@triton.jit(do_not_specialize=["wide", "B", "MOST"])
def choose(ints, highs, spots, lanes, drafted, tokens, now, wide, B, MOST, C: tl.constexpr, C_UP: tl.constexpr):
    """One sequence: its token, and the row that the next pass reads it in."""
    b, k = tl.program_id(0), tl.arange(0, C_UP)
    high = tl.load(highs + b * C + k, mask=k < C, other=float("-inf"))
    first = tl.min(tl.where((k < C) & (high == tl.max(high, 0)), k, C - 1), 0)
    token = tl.load(spots + b * C + first)
    start, count = tl.load(lanes + MOST + b), tl.load(lanes + 2 * MOST + b)
    real = (start > 0).to(tl.int32)
    at = (tl.load(lanes + b) + 1 + count) * real
    tl.store(drafted + count * MOST + b, token.to(tl.int64))
    tl.store(tokens + b, token)
    tl.store(now + b, at)
    tl.store(now + wide + b, _place(ints, at, start, real))
    write_group(now + 2 * wide + b * FIELDS, 0, real * (split_at(at) + 1), real * b, real, real * at, 0, real * start,
                True)  # fmt: skip
    tl.store(lanes + 2 * MOST + b, count + 1)


@triton.jit(do_not_specialize=["DEPTH", "MOST", "stride"])
def lay_out(roots, drafted, trees, DEPTH, MOST, stride, UP: tl.constexpr):
    """One chain, as a tree: its tokens and their parents."""
    b, n = tl.program_id(0), tl.arange(0, UP)
    token = tl.load(drafted + (n - 1) * MOST + b, mask=(n > 0) & (n <= DEPTH), other=0)
    node = trees + b * (DEPTH + 1) + n
    tl.store(node, tl.where(n == 0, tl.load(roots + b), token), mask=n <= DEPTH)
    tl.store(node + stride, (n - 1).to(tl.int64), mask=n <= DEPTH)
