"""Triton: rows that change their places in a drafted round. feature_copies.py has the same in torch."""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

from forerun.models.cuda.kernels_after import copy_row


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
