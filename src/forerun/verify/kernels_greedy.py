"""Triton: the greedy rule for all trees of a round in one kernel. `greedy.py` says what it computes."""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl


def walk_by_kernel(trees, ancestors, argmax, paths, accepted, bonus) -> None:
    """The same as `greedy.walk_by_torch`."""
    _, count, nodes = trees.shape
    depth = paths.shape[1]
    follow[(count,)](
        trees[0], trees[1], ancestors, argmax, paths, accepted, bonus, nodes, depth,
        N_UP=1 << max(2, (nodes - 1).bit_length()), STEPS_UP=1 << max(2, depth.bit_length()), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["N", "DEPTH"])
def follow(tokens, parents, ancestors, argmax, paths, accepted, bonus, N, DEPTH,
           N_UP: tl.constexpr, STEPS_UP: tl.constexpr):  # fmt: skip
    """One tree: the deepest node that is accepted with all its ancestors, and the path to it."""
    b = tl.program_id(0)
    n, s = tl.arange(0, N_UP), tl.arange(0, STEPS_UP)
    here = n < N
    inside = here[:, None] & (s <= DEPTH)[None, :]
    first = b * N
    above_to = tl.load(ancestors + (first + n)[:, None] * (DEPTH + 1) + s[None, :], mask=inside, other=0)
    above = tl.load(parents + first + above_to, mask=inside, other=-1)
    said = tl.load(argmax + first + tl.maximum(above, 0), mask=inside, other=0)
    right = (tl.load(tokens + first + above_to, mask=inside, other=0) == said) | (above < 0)
    fits = tl.min(right.to(tl.int32), 1) > 0
    depth = tl.sum(((above_to != n[:, None]) & inside).to(tl.int32), 1)
    reach = tl.where(fits & here, depth, -1)
    length = tl.max(reach, 0)
    last = tl.min(tl.where(reach == length, n, N - 1), 0)
    step = tl.load(ancestors + (first + last) * (DEPTH + 1) + s, mask=s <= DEPTH, other=0)
    below = (s > 0) & (s <= DEPTH)
    tl.store(paths + b * DEPTH + s - 1, tl.where(s <= length, step, -1).to(tl.int64), mask=below)
    tl.store(accepted + b, length.to(tl.int64))
    tl.store(bonus + b, tl.load(argmax + first + last))
