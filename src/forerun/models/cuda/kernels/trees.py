"""Triton: trees that were grown on the device (before and after their pass), hidden rows and accepted paths.

In torch these are many small operations, which would take 2% of a round of a large model (device_trees.py,
after_pass.py and models/pages.py have them; the tests compare both). Sizes of forms are no constants of the kernels:
there are many forms, and one would be compiled for each.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

PAGE = tl.constexpr(64)  # positions; models/pages.py
FIELDS = tl.constexpr(8)  # of a group; models/cuda/plan.py


@triton.jit
def split_at(position):
    """models/cuda/plan.py: split_of."""
    far = tl.where(position < 4096, 8 + ((position - 1024) >> 8), 20 + ((position - 4096) >> 10))
    return tl.where(position < 1024, position >> 7, far)


@triton.jit
def write_group(group, low, high, row, count, length, ancestors, pages, mask, branches=0):
    """One group, or one per element; fields: models/cuda/plan.py."""
    tl.store(group, low, mask=mask)
    tl.store(group + 1, high, mask=mask)
    tl.store(group + 2, row, mask=mask)
    tl.store(group + 3, count, mask=mask)
    tl.store(group + 4, branches, mask=mask)
    tl.store(group + 5, length, mask=mask)
    tl.store(group + 6, ancestors, mask=mask)
    tl.store(group + 7, pages, mask=mask)


@triton.jit(
    do_not_specialize=[
        "positions_at", "slots_at", "groups_at", "ancestors_at", "lengths_at",
        "B", "N", "DEPTH", "GROUP", "GROUPS", "SHARED", "CHAIN",
    ]
)  # fmt: skip
def place(tree_ints, ints, accepted, tokens_at, positions_at, slots_at, groups_at, ancestors_at, lengths_at, stride,
          B, N, DEPTH, GROUP, GROUPS, SHARED, CHAIN, TILED: tl.constexpr):  # fmt: skip
    """One node: its token, position and slot, the nodes from the root down to itself, and its groups.

    A tree has GROUPS groups; TILED: and single nodes, which lie behind SHARED groups.
    """
    b, i = tl.program_id(0), tl.program_id(1)
    row = b * N + i
    parents = tree_ints + stride + b * N
    node, depth = i, i * 0
    for _ in range(DEPTH):
        up = tl.load(parents + node).to(tl.int32)
        depth += (up >= 0).to(tl.int32)
        node = tl.maximum(up, 0)  # above the root is the root, whose parent is -1 again
    follows = tl.load(ints + lengths_at + B + b)
    pages = tl.load(ints + lengths_at + 2 * B + b)
    real = (pages > 0).to(tl.int32)
    added = tl.load(accepted + tl.maximum(follows, 0)).to(tl.int32) + 1
    length = tl.load(ints + lengths_at + b) + tl.where(follows < 0, 0, added)
    written = length + i
    slot = tl.load(ints + pages + written // PAGE) * PAGE + written % PAGE
    token = tl.load(tree_ints + row).to(tl.int32)
    slot = tl.where(token < 0, -2 - slot, slot)  # a node that was cut
    tl.store(ints + tokens_at + row, tl.maximum(token, 0))
    tl.store(ints + positions_at + row, length + tl.where(token < 0, 0, depth))
    tl.store(ints + slots_at + row, tl.where(real > 0, slot, -1))
    ancestors = ints + ancestors_at + row * (DEPTH + 1)
    node = i
    for j in range(DEPTH + 1):
        inside = j <= depth
        tl.store(ancestors + tl.where(inside, depth - j, j), tl.where(inside, node, i))
        node = tl.maximum(tl.load(parents + node).to(tl.int32), 0)
    own, behind = split_at(length), split_at(length + DEPTH) + 1
    shared = (N + GROUP - 1) // GROUP
    groups = ints + groups_at + b * GROUPS * FIELDS
    high = tl.where(CHAIN > 0, behind, own)  # of shared groups: the node's number stands for one of them
    count = tl.minimum(GROUP, N - i * GROUP)
    if TILED:
        branches = (CHAIN == 0).to(tl.int32)
        write_group(groups + i * FIELDS, 0, real * (high + branches), real * (b * N + i * GROUP), real * count,
                    real * length, 0, pages, i < shared, real * branches)  # fmt: skip
        write_group(ints + groups_at + (SHARED + row) * FIELDS, 0, 0, real * row, real, real * length,
                    real * (ancestors_at + row * (DEPTH + 1)), pages, CHAIN == 0)  # fmt: skip
    else:
        write_group(groups + i * FIELDS, 0, real * high, real * (b * N + i * GROUP), real * count, real * length, 0,
                    pages, i < shared)  # fmt: skip
        write_group(groups + (shared + i) * FIELDS, real * own, real * behind, real * row, real, real * length,
                    real * (ancestors_at + row * (DEPTH + 1)), pages, CHAIN == 0)  # fmt: skip


@triton.jit(do_not_specialize=["slots_at", "rows", "N", "DEPTH", "STEPS"])
def record(tree_ints, ints, outcome, moves, last_accepted, last_tokens, last_rows, slots_at, stride, move_stride,
           rows, N, DEPTH, STEPS, N_UP: tl.constexpr, STEPS_UP: tl.constexpr):  # fmt: skip
    """One tree whose path is decided: the tree beside its path, for the host; where the path's slots go; and root,
    path and bonus for what follows before the host has read them.

    Padding, whose root has no slot, does what the first tree does: writing the same twice changes nothing.
    """
    b = tl.program_id(0)
    n, s = tl.arange(0, N_UP), tl.arange(0, STEPS_UP)
    here, below = n < N, (s > 0) & (s <= DEPTH)
    tl.store(outcome + b * N + n, tl.load(tree_ints + b * N + n, mask=here, other=0), mask=here)
    tl.store(outcome + rows + b * N + n, tl.load(tree_ints + stride + b * N + n, mask=here, other=0), mask=here)
    moved = tl.where(tl.load(ints + slots_at + b * N) < 0, 0, b)
    path = tl.load(outcome + 2 * rows + moved * DEPTH + s - 1, mask=below, other=-1)
    slots = ints + slots_at + moved * N
    move, step = moves + b * DEPTH + s - 1, tl.minimum(s, N - 1)
    real = tl.load(slots) >= 0  # not even the first tree, where a form is captured
    source = slot_of(tl.load(slots + tl.where(path < 0, step, path), mask=below, other=0).to(tl.int64))
    place = slot_of(tl.load(slots + step, mask=below, other=0).to(tl.int64))
    tl.store(move, tl.where(real, source, 0), mask=below)
    tl.store(move + move_stride, tl.where(real, place, 0), mask=below)
    if DEPTH < STEPS:
        trees = rows // N
        accepted = tl.load(outcome + 2 * rows + trees * DEPTH + b)
        bonus = tl.load(outcome + 2 * rows + trees * DEPTH + trees + b)
        own = tl.load(outcome + 2 * rows + b * DEPTH + s - 1, mask=below, other=0)
        child = tl.load(outcome + 2 * rows + b * DEPTH + s, mask=s < DEPTH, other=-1)
        token = tl.load(tree_ints + b * N + tl.maximum(child, 0))
        steps = s <= DEPTH
        tl.store(last_accepted + b, accepted)
        tl.store(last_tokens + b * STEPS + s, tl.where(s == accepted, bonus, token), mask=steps)
        tl.store(last_rows + b * STEPS + s, b * N + tl.maximum(own, 0), mask=steps)


@triton.jit
def slot_of(slot):
    """Also of a node that was cut: a path may move there."""
    return tl.where(slot < -1, -2 - slot, slot)


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
