"""Triton: trees that only the device knows, before their pass and behind it, one kernel each.

What torch does in forty small operations (grown.py has them, and the tests hold both against each other) would be two
hundredths of a round of a large model.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["positions_at", "ancestors_at", "lengths_at"])
def place(
    both,
    ints,
    tokens_at,
    positions_at,
    ancestors_at,
    lengths_at,
    stride,
    N: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One node: its token, its position, and the nodes from the root down to itself, by depth."""
    b, i = tl.program_id(0), tl.program_id(1)
    row = b * N + i
    parents = both + stride + b * N
    node, depth = i, i * 0
    for _ in range(DEPTH):
        up = tl.load(parents + node).to(tl.int32)
        depth += (up >= 0).to(tl.int32)
        node = tl.maximum(up, 0)  # above the root is the root, whose parent is -1 again
    tl.store(ints + tokens_at + row, tl.load(both + row).to(tl.int32))
    tl.store(ints + positions_at + row, tl.load(ints + lengths_at + b) + depth)
    ancestors = ints + ancestors_at + row * (DEPTH + 1)
    node = i
    for j in range(DEPTH + 1):
        inside = j <= depth
        tl.store(ancestors + tl.where(inside, depth - j, j), tl.where(inside, node, i))
        node = tl.maximum(tl.load(parents + node).to(tl.int32), 0)


@triton.jit(do_not_specialize=["positions_at", "slots_at", "ancestors_at", "lengths_at"])
def settle(both, ints, tops, outcome, moves, positions_at, slots_at, ancestors_at, lengths_at, stride, move_stride,
           TREES: tl.constexpr, N: tl.constexpr, N_UP: tl.constexpr, DEPTH: tl.constexpr,
           STEPS_UP: tl.constexpr):  # fmt: skip
    """One tree: the deepest node that stands with all above it, the path to it, and where its slots go."""
    b = tl.program_id(0)
    n, s = tl.arange(0, N_UP), tl.arange(0, STEPS_UP)
    here = n < N
    tokens, parents = both + b * N, both + stride + b * N
    inside = here[:, None] & (s <= DEPTH)[None, :]
    way = tl.load(ints + ancestors_at + (b * N + n)[:, None] * (DEPTH + 1) + s[None, :], mask=inside, other=0)
    above = tl.load(parents + way, mask=inside, other=-1)
    said = tl.load(tops + b * N + tl.maximum(above, 0), mask=inside, other=0)
    right = (tl.load(tokens + way, mask=inside, other=0) == said) | (above < 0)
    stands = tl.min(right.to(tl.int32), 1) > 0
    length = tl.load(ints + lengths_at + b)
    depth = tl.load(ints + positions_at + b * N + n, mask=here, other=0) - length
    reach = tl.where(stands & here, depth, -1)
    accepted = tl.max(reach, 0)
    last = tl.min(tl.where(reach == accepted, n, N - 1), 0)
    step = tl.load(ints + ancestors_at + (b * N + last) * (DEPTH + 1) + s, mask=s <= DEPTH, other=0)
    below = (s > 0) & (s <= DEPTH)
    kept = s <= accepted
    rows = TREES * N
    paths = outcome + 2 * rows + b * DEPTH
    tl.store(paths + s - 1, tl.where(kept, step, -1).to(tl.int64), mask=below)
    behind = outcome + 2 * rows + TREES * DEPTH
    tl.store(behind + b, accepted.to(tl.int64))
    tl.store(behind + TREES + b, tl.load(tops + b * N + last))
    tl.store(outcome + b * N + n, tl.load(tokens + n, mask=here, other=0), mask=here)
    tl.store(outcome + rows + b * N + n, tl.load(parents + n, mask=here, other=0), mask=here)
    root = tl.load(ints + slots_at + b * N).to(tl.int64)
    move = moves + b * DEPTH + s - 1
    tl.store(move, root + tl.where(kept, step, s).to(tl.int64), mask=below)
    tl.store(move + move_stride, root + s, mask=below)
