"""Triton: trees that were grown on the device: one kernel before their pass and one after it.

In torch these are forty small operations (grown.py has them, and the tests compare both), which would take 2% of a
round of a large model. Sizes of forms are no constants of the kernels: there are many forms, and one would be compiled
for each.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["positions_at", "ancestors_at", "lengths_at", "N", "DEPTH"])
def place(
    tree_ints,
    ints,
    tokens_at,
    positions_at,
    ancestors_at,
    lengths_at,
    stride,
    N,
    DEPTH,
):
    """One node: its token, its position, and the nodes from the root down to itself, by depth."""
    b, i = tl.program_id(0), tl.program_id(1)
    row = b * N + i
    parents = tree_ints + stride + b * N
    node, depth = i, i * 0
    for _ in range(DEPTH):
        up = tl.load(parents + node).to(tl.int32)
        depth += (up >= 0).to(tl.int32)
        node = tl.maximum(up, 0)  # above the root is the root, whose parent is -1 again
    tl.store(ints + tokens_at + row, tl.load(tree_ints + row).to(tl.int32))
    tl.store(ints + positions_at + row, tl.load(ints + lengths_at + b) + depth)
    ancestors = ints + ancestors_at + row * (DEPTH + 1)
    node = i
    for j in range(DEPTH + 1):
        inside = j <= depth
        tl.store(ancestors + tl.where(inside, depth - j, j), tl.where(inside, node, i))
        node = tl.maximum(tl.load(parents + node).to(tl.int32), 0)


@triton.jit(do_not_specialize=["slots_at", "rows", "N", "DEPTH"])
def record(tree_ints, ints, outcome, moves, slots_at, stride, move_stride, rows, N, DEPTH,
           N_UP: tl.constexpr, STEPS_UP: tl.constexpr):  # fmt: skip
    """One tree whose path is decided: the tree beside its path, for the host, and where the path's slots go.

    Padding, whose root has no slot, does what the first tree does: writing the same twice changes nothing.
    """
    b = tl.program_id(0)
    n, s = tl.arange(0, N_UP), tl.arange(0, STEPS_UP)
    here, below = n < N, (s > 0) & (s <= DEPTH)
    tl.store(outcome + b * N + n, tl.load(tree_ints + b * N + n, mask=here, other=0), mask=here)
    tl.store(
        outcome + rows + b * N + n,
        tl.load(tree_ints + stride + b * N + n, mask=here, other=0),
        mask=here,
    )
    moved = tl.where(tl.load(ints + slots_at + b * N) < 0, 0, b)
    path = tl.load(outcome + 2 * rows + moved * DEPTH + s - 1, mask=below, other=-1)
    slots = ints + slots_at + moved * N
    move, step = moves + b * DEPTH + s - 1, tl.minimum(s, N - 1)
    real = tl.load(slots) >= 0  # not even the first tree, where a form is captured
    source = tl.load(slots + tl.where(path < 0, step, path), mask=below, other=0).to(tl.int64)
    place = tl.load(slots + step, mask=below, other=0).to(tl.int64)
    tl.store(move, tl.where(real, source, 0), mask=below)
    tl.store(move + move_stride, tl.where(real, place, 0), mask=below)
