"""The greedy rule, once: from the root, follow the child that equals the argmax, until no child does.

Where the law is a point mass, every exact verifier comes to this one verdict. The host form walks one tree at a time;
the device form walks all trees of a round at once, for targets that score trees grown on the device: by torch anywhere,
by one Triton kernel on a GPU (kernels.py). `build` passes the device form to such targets, and the tests compare
all three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from forerun.core.tree import ONE_NODE
from forerun.core.types import Greedy, GreedyWalk, TreeBatch, Verdict


def greedy_verdict(trees: TreeBatch, known: Greedy) -> Verdict:
    """The verdict on trees whose laws are all greedy, from what their pass already knows."""
    if known.verdict is not None:
        return known.verdict()
    assert known.argmax is not None, "a Greedy holds an argmax or a verdict"
    return greedy_walks(trees, known.argmax)


def greedy_walks(trees: TreeBatch, argmax: Sequence[int]) -> Verdict:
    """The verdict on trees by the target's token after each of their nodes [M]."""
    if trees.starts == ONE_NODE or trees.is_plain():
        return Verdict.of([()] * len(argmax), argmax, trees.device)
    paths: list[list[int]] = []
    bonus: list[int] = []
    tokens = trees.to_host()[0]
    for first, shape in zip(trees.starts, trees.topology(), strict=False):
        end = first + len(shape)
        path, token = walk_argmax(tokens[first:end], shape.children, argmax[first:end])
        paths.append(path)
        bonus.append(token)
    return Verdict.of(paths, bonus, trees.device)


def walk_argmax(
    tokens: Sequence[int], children: Sequence[Sequence[int]], argmax: Sequence[int]
) -> tuple[list[int], int]:
    """One tree on the host: the accepted nodes below its root, and the bonus."""
    return follow(tokens, children, lambda node, depth: argmax[node])


def follow(
    tokens: Sequence[int], children: Sequence[Sequence[int]], sample: Callable[[int, int], int]
) -> tuple[list[int], int]:
    """From the root, step to the child that equals the target's token at (node, depth), until none does."""
    path: list[int] = []
    node = 0
    while True:
        token = sample(node, len(path))
        for child in children[node]:
            if tokens[child] == token:
                path.append(child)
                node = child
                break
        else:
            return path, token


def device_walk(device: torch.device) -> GreedyWalk:
    """The device form of the rule for tensors on this device."""
    if device.type != "cuda" or find_spec("triton") is None:
        return walk_by_torch
    from forerun.verify.kernels import walk_by_kernel

    return walk_by_kernel


def walk_by_torch(
    trees: Tensor, ancestors: Tensor, argmax: Tensor, paths: Tensor, accepted: Tensor, bonus: Tensor
) -> None:
    """All trees at once, on any device; see `GreedyWalk` for what goes in and out.

    A node is accepted where it and all its ancestors equal the argmax after their parents; the deepest ends the path.
    """
    tokens, parents = trees
    ancestors = ancestors.long()
    right = (tokens == argmax.gather(1, parents.clamp(min=0))) | (parents < 0)
    fits = right.gather(1, ancestors.flatten(1)).view_as(ancestors).all(-1)  # [B, N] is it accepted?
    own = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
    depths = (ancestors != own).sum(-1)  # [B, N]
    last = torch.where(fits, depths, -1).argmax(1, keepdim=True)  # [B, 1]
    length = depths.gather(1, last)
    path = ancestors.gather(1, last[..., None].expand(-1, -1, ancestors.shape[-1]))[:, 0, 1:]
    places = torch.arange(path.shape[1], device=path.device)
    paths.copy_(torch.where(places < length, path, -1))
    accepted.copy_(length[:, 0])
    bonus.copy_(argmax.gather(1, last)[:, 0])
