"""Triton: layers of experts. A router picks experts by row, rows are sorted by expert, and each expert is read once.

The grid of the products has a place for as many blocks of pairs as there could be, whatever is picked; those behind the
last block end at once. So the sizes of all launches follow from the number of rows of a pass, and a pass can be
captured as a graph. A row's bits depend on that row alone: a program of the router sees one row, the
sums of a product run along the depth in one order, and a row's experts are added up from the likeliest to the last.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

from forerun.models.cuda.kernels import mxfp4


@triton.jit
def route(x, norm, router, before, bias, normed, logits, eps, OUTPUTS: tl.constexpr, OUTPUTS_UP: tl.constexpr,
          WIDTH: tl.constexpr, UP: tl.constexpr, EB: tl.constexpr, BIASES: tl.constexpr,
          PDL: tl.constexpr):  # fmt: skip
    """The norm of one row, and EB of the router's outputs for it.

    BIASES: `before` is what attention adds to every row, which `combine` writes into the residual stream.
    """
    m, first = tl.program_id(0), tl.program_id(1) * EB
    n, e = tl.arange(0, UP), first + tl.arange(0, EB)
    inside = n < WIDTH
    weight = tl.load(norm + n, mask=inside, other=0.0).to(tl.float32)
    there = (e < OUTPUTS)[:, None] & inside[None, :]
    weights = tl.load(router + e[:, None] * WIDTH + n[None, :], mask=there, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(x + m * WIDTH + n, mask=inside, other=0.0, cache_modifier=".cg")
    if BIASES:
        row += tl.load(before + n, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)
    given = (row * scale * weight).to(normed.dtype.element_ty)
    if first == 0:
        tl.store(normed + m * WIDTH + n, given, mask=inside)
    found = tl.sum(weights.to(tl.float32) * given.to(tl.float32)[None, :], 1)
    if BIASES:
        found += tl.load(bias + e, mask=e < OUTPUTS, other=0.0)
    tl.store(logits + m * OUTPUTS_UP + e, found, mask=e < OUTPUTS)


@triton.jit
def _of_best_groups(scores, e, E: tl.constexpr, E_UP: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
                    SIGMOID: tl.constexpr):  # fmt: skip
    """Minus infinity for all experts but those of the best groups, the first on a tie.

    A group counts for its best expert, or for the sum of its best two where scores are sigmoids.
    """
    own, worth = e // (E // GROUPS), scores
    for group in tl.static_range(GROUPS):
        mine = tl.where(own == group, scores, float("-inf"))
        best = tl.max(mine, 0)
        value = best
        if SIGMOID:
            place = tl.min(tl.where(mine == best, e, E_UP), 0)
            value = best + tl.max(tl.where(e == place, float("-inf"), mine), 0)
        worth = tl.where(own == group, value, worth)
    kept = e < 0
    for _ in tl.static_range(KEPT):
        left = tl.where(kept, float("-inf"), worth)
        best = tl.min(tl.where(left == tl.max(left, 0), own, E_UP), 0)
        kept = kept | (own == best)
    return tl.where(kept & (e < E), scores, float("-inf"))


@triton.jit
def pick(logits, slots, correction, picked, weights, gates, scale, E: tl.constexpr, E_UP: tl.constexpr,
         OUTPUTS_UP: tl.constexpr, EACH: tl.constexpr, EACH_UP: tl.constexpr, RENORMALISE: tl.constexpr,
         SIGMOID: tl.constexpr, SHARED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
         PDL: tl.constexpr):  # fmt: skip
    """The likeliest experts of one row, the first on a tie; padding picks expert E, which is none.

    SIGMOID: an expert's law is a sigmoid, and `correction` is added to it for the choice. SHARED: the router's last
    output opens the shared expert. GROUPS > 1: only experts of the KEPT best groups are picked.
    """
    m, e, rank = tl.program_id(0), tl.arange(0, E_UP), tl.arange(0, EACH_UP)
    live = tl.load(slots + m) >= 0
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(logits + m * OUTPUTS_UP + e, mask=e < E, other=float("-inf"), cache_modifier=".cg")
    if SIGMOID:
        law = 1.0 / (1.0 + tl.exp(-row))
        score = law + tl.load(correction + e, mask=e < E, other=0.0)
    else:
        law = tl.exp(row - tl.max(row, 0))
        law = law / tl.sum(law, 0)
        score = law
    left = tl.where(e < E, score, float("-inf"))
    if GROUPS > 1:
        left = _of_best_groups(left, e, E, E_UP, GROUPS, KEPT, SIGMOID)
    chosen, shares = rank * 0, rank * 0.0
    for i in tl.static_range(EACH):
        most = tl.max(left, 0)
        best = tl.minimum(tl.min(tl.where(left == most, e, E_UP), 0), E - 1)  # NaN equals nothing: the last
        chosen = tl.where(rank == i, best, chosen)
        shares = tl.where(rank == i, tl.sum(tl.where(e == best, law, 0.0), 0) if SIGMOID else most, shares)
        left = tl.where(e == best, float("-inf"), left)
    if RENORMALISE:
        shares = shares / (tl.sum(shares, 0) + (1e-20 if SIGMOID else 0.0))
    shares = shares * scale
    tl.store(picked + m * EACH + rank, tl.where(live, chosen, E), mask=rank < EACH)
    tl.store(weights + m * EACH + rank, shares, mask=rank < EACH)
    if SHARED:
        opened = tl.load(logits + m * OUTPUTS_UP + E, cache_modifier=".cg")
        tl.store(gates + m, 1.0 / (1.0 + tl.exp(-opened)))


@triton.jit(do_not_specialize=["pairs", "size", "spread"])
def sort_pairs(picked, order, found, blocks, pairs, size, spread, E: tl.constexpr, BLOCK: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
    """The pairs (row and rank) that picked one expert, in order, in blocks of `size`; `found` [E] says how many.

    `blocks` [1 + .., 2]: how many places there are; of each its expert and its pairs, which are in `order` [.., size].
    Places follow from what is before them: of as many pairs (`spread` 0), or of as many whole blocks and experts. So
    experts need not ask each other how many blocks they have, and some places have no pairs.
    """
    expert, at = tl.program_id(0), tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    before, own = expert * 0, expert * 0
    for first in range(0, pairs, BLOCK):
        chosen = tl.load(picked + first + at, mask=first + at < pairs, other=E, cache_modifier=".cg")
        before += tl.sum((chosen < expert).to(tl.int32), 0)
        own += tl.sum((chosen == expert).to(tl.int32), 0)
    tl.store(found + expert, own)
    place, behind = before, before + own
    if spread > 0:
        place, behind = before // size + expert, (before + own) // size + expert + 1
    for i in range(behind - place):
        tl.store(blocks + 2 * (1 + place + i), expert)
        tl.store(blocks + 2 * (1 + place + i) + 1, tl.minimum(tl.maximum(own - i * size, 0), size))
    if expert == E - 1:
        tl.store(blocks, behind)
    if own > 0:
        line = order + place * size - 1
        for first in range(0, pairs, BLOCK):
            chosen = tl.load(picked + first + at, mask=first + at < pairs, other=E, cache_modifier=".cg")
            mine = (chosen == expert).to(tl.int32)
            tl.store(line + tl.cumsum(mine, 0), first + at, mask=mine > 0)
            line += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["count"])
def grouped(rows, w, scales, bias, order, blocks, out, count, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
            BK: tl.constexpr, MT: tl.constexpr, EACH: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
            ALPHA: tl.constexpr, W8: tl.constexpr, W4: tl.constexpr, BIASES: tl.constexpr,
            PDL: tl.constexpr):  # fmt: skip
    """A tile of one expert's outputs for a block of its pairs; pair p reads row p // EACH and writes row p.

    GATED: outputs are gate and up in turn, and leave as silu(gate) * up; with a LIMIT as gate * sigmoid(ALPHA * gate) *
    (up + 1), both limited first. What is not a number stays so. EACH 0: one expert, for each of `count` rows.
    """
    block, tile = tl.program_id(0), tl.program_id(1)
    expert, own, place = block * 0, count - block * MT, tl.arange(0, MT)
    pair = (block * MT + place).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if EACH > 0:
        filled = tl.load(blocks, cache_modifier=".cg")
        expert = tl.load(blocks + 2 * (1 + block), cache_modifier=".cg")
        own = tl.load(blocks + 2 * (1 + block) + 1, cache_modifier=".cg")
        own = tl.where(block < filled, own, 0)
        pair = tl.load(order + block * MT + place, cache_modifier=".cg").to(tl.int64)
    if own > 0:
        live = place < own
        n, ks = tl.arange(0, BN), tl.arange(0, BK)
        source = rows + (pair // max(1, EACH)) * K
        acc = tl.zeros((BN, MT), dtype=tl.float32)
        if W4:
            acc = mxfp4.multiply(acc, w, scales, source, live, expert, tile * BN, N, K, BN)
        else:
            weight = w + (expert.to(tl.int64) * N + tile * BN) * K + n[:, None] * K + ks[None, :]
            given = source[:, None] + ks[None, :]
            for k in range(0, K, BK):
                left = tl.load(weight + k, eviction_policy="evict_first")
                right = tl.load(given + k, mask=live[:, None], other=0.0, cache_modifier=".cg")
                acc = tl.dot(left.to(right.dtype), tl.trans(right), acc)
        if W8:
            acc = acc * tl.load(scales + expert * N + tile * BN + n)[:, None]
        if BIASES:
            acc = acc + tl.load(bias + expert * N + tile * BN + n)[:, None]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (BN // 2, 2, MT)), (0, 2, 1)))
            half = tile * (BN // 2) + tl.arange(0, BN // 2)
            if LIMIT > 0:
                gate = tl.where(gate > LIMIT, LIMIT, gate)
                up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
                inner = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
            else:
                inner = gate / (1.0 + tl.exp(-gate)) * up
            into = out + pair[None, :] * (N // 2) + half[:, None]
            tl.store(into, inner.to(out.dtype.element_ty), mask=live[None, :])
        else:
            tl.store(out + pair[None, :] * N + (tile * BN + n)[:, None], acc, mask=live[None, :])


@triton.jit
def combine(found, weights, shared, gates, before, slots, x, out, squares, inverses, norm, eps, WIDTH: tl.constexpr,
            UP: tl.constexpr, BN: tl.constexpr, TILES_UP: tl.constexpr, EACH: tl.constexpr, SHARED: tl.constexpr,
            BIASES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Add one row's experts to the residual stream, and leave what the next norm needs, in both ways."""
    m, n = tl.program_id(0), tl.arange(0, UP)
    inside = n < WIDTH
    live = inside & (tl.load(slots + m) >= 0)  # padding: nobody wrote its experts' outputs
    weight = tl.load(norm + n, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(x + m * WIDTH + n, mask=inside, other=0.0, cache_modifier=".cg")
    total = tl.zeros((UP,), dtype=tl.float32)
    for i in tl.static_range(EACH):
        pair = (m * EACH + i).to(tl.int64)
        share = tl.load(weights + pair, cache_modifier=".cg")
        total += share * tl.load(found + pair * WIDTH + n, mask=live, other=0.0, cache_modifier=".cg")
    if SHARED:
        share = tl.load(gates + m, cache_modifier=".cg")
        total += share * tl.load(shared + m * WIDTH + n, mask=live, other=0.0, cache_modifier=".cg")
    if BIASES:  # in the order of `route`: attention's, then what the experts found
        row += tl.load(before + n, mask=live, other=0.0)
    tl.debug_barrier()  # threads share the columns of a narrow row: all must have read them before one writes
    row += tl.where(live, total, 0.0)
    tl.store(x + m * WIDTH + n, row, mask=inside)
    scaled = row * weight
    tl.store(out + m * WIDTH + n, scaled.to(out.dtype.element_ty), mask=inside)
    wide, tile = row.to(tl.float64), tl.arange(0, UP // BN)
    sums = tl.sum(tl.reshape(wide * wide, (UP // BN, BN)), axis=1)
    tl.store(squares + m * TILES_UP + tile, sums, mask=tile < WIDTH // BN)
    tl.store(inverses + m, tl.rsqrt(tl.sum(wide * wide, 0).to(tl.float32) / WIDTH + eps))
