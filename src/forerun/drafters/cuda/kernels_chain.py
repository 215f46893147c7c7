"""Triton: what lies between the passes of a draft model's chain; chain_plan.py and chain_graphs.py have it in torch.

There it is fifty small operations before the first pass and eight behind each; here it is one kernel before the first
pass and two behind each: `look` finds the likeliest token of a stretch of logits, `choose` puts the stretches together
and writes what the next pass reads. What is drafted changes no text: the noise need not be the verifier's to the bit.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

from forerun.kernels_noise import log_exponential
from forerun.models.cuda.kernels_grown import split_at, write_group

PAGE = tl.constexpr(64)  # positions; models/pages.py
FIELDS = tl.constexpr(8)  # of a group; models/cuda/plan.py
CHUNK = 4096  # logits of one program


@triton.jit
def _place(ints, at, start, real):
    """The slot of a position in the pages that start there; -1 = none."""
    slot = tl.load(ints + start + at // PAGE, mask=real > 0, other=0) * PAGE + at % PAGE
    return tl.where(real > 0, slot, -1)


@triton.jit(do_not_specialize=["sent", "rows", "groups_at", "B", "STEPS", "vocab", "MOST"])
def begin(ints, accepted, path, roots, lanes, tokens_at, sent, rows, groups_at, B, STEPS, vocab, MOST):
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
    for i in tl.static_range(2):
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


@triton.jit(do_not_specialize=["stride", "vocab", "MOST"])
def look(logits, lanes, noise, highs, spots, stride, vocab, MOST, CHUNK: tl.constexpr, NOISE: tl.constexpr):
    """The likeliest token of a stretch behind one row, or the one that shared noise draws."""
    b, c = tl.program_id(0), tl.program_id(1)
    n = c * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + b.to(tl.int64) * stride + n, mask=n < vocab, other=float("-inf"))
    if NOISE:  # noqa: SIM102  (it is known when this is compiled)
        if tl.load(noise + 2 * MOST + b) > 0:
            factor = tl.load(noise + MOST + b).to(tl.float64, bitcast=True).to(tl.float32)
            at = (tl.load(lanes + b) + 1 + tl.load(lanes + 2 * MOST + b)).to(tl.int64)
            values = values * factor - log_exponential(tl.load(noise + b), at, n)
    best = tl.max(values, 0)
    tl.store(highs + b * tl.num_programs(1) + c, best)
    tl.store(spots + b * tl.num_programs(1) + c, tl.min(tl.where(values == best, n, vocab - 1), 0))


@triton.jit(do_not_specialize=["wide", "B", "MOST"])
def choose(
    ints, highs, spots, lanes, drafted, tokens, now, wide, B, MOST, C: tl.constexpr, C_UP: tl.constexpr
):
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
