"""Triton: what follows a pass: its hidden rows beside keys and values, and accepted paths to their places.

after_pass.py and models/paged.py have the same in torch, which takes two operations for every tensor; the tests compare
both.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl


@triton.jit
def copy_row(source, into, WIDTH: tl.constexpr, UP: tl.constexpr, mask):
    n = tl.arange(0, UP)
    tl.store(into + n, tl.load(source + n, mask=mask & (n < WIDTH)), mask=mask & (n < WIDTH))


@triton.jit(do_not_specialize=["slots_at"])
def keep(hidden, kept, ints, slots_at, WIDTH: tl.constexpr, UP: tl.constexpr):
    """One row of some layers to its slot; padding has none."""
    m = tl.program_id(0).to(tl.int64)
    slot = tl.load(ints + slots_at + m).to(tl.int64)
    for i in tl.static_range(len(hidden)):
        copy_row(hidden[i] + m * WIDTH, kept[i] + slot * WIDTH, WIDTH, UP, slot >= 0)


@triton.jit(do_not_specialize=["PLANES", "DEPTH"])
def move(tensors, moves, move_stride, plane_stride, row_stride, PLANES, DEPTH, SIZE: tl.constexpr,
         STEPS_UP: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """The path of one tree, in a few planes of each tensor: those of keys or values of one head, or parts of rows.

    A step's place may be where a later one still lies, so all are read before any is written. Padding is told to do
    what the first tree does; it does nothing, as it might read what was already written.
    """
    b, c = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    s = tl.arange(0, STEPS_UP)
    here = s < DEPTH
    source = tl.load(moves + b * DEPTH + s, mask=here, other=0)
    place = tl.load(moves + move_stride + b * DEPTH + s, mask=here, other=0)
    padding = (b > 0) & (tl.load(moves + move_stride) == tl.load(moves + move_stride + b * DEPTH))
    moves_on = (here & (source != place))[:, None] & (c < PLANES * SIZE)[None, :] & (padding == 0)
    columns = ((c // SIZE).to(tl.int64) * plane_stride + c % SIZE)[None, :]
    for i in tl.static_range(len(tensors)):
        found = tl.load(tensors[i] + source[:, None] * row_stride + columns, mask=moves_on)
        tl.debug_barrier()
        tl.store(tensors[i] + place[:, None] * row_stride + columns, found, mask=moves_on)
