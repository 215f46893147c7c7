"""The topology of a tree: depths, ancestors, paths and children of its nodes, computed once per shape.

`topology_of(parents)` caches its results, because shapes recur round after round: chains of one length, the fixed trees
of Medusa. `trace` is the same for trees whose parents are only on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

Mask = np.ndarray[tuple[int, int], np.dtype[np.bool_]]


class Topology:
    """One tree of N nodes; parents precede children, the root comes first. To be read only."""

    def __init__(self, parents: tuple[int, ...]) -> None:
        self.parents = parents
        self.is_chain = parents == tuple(range(-1, len(parents) - 1))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> Sequence[int]:
        """[N] distance of every node from the root."""
        if self.is_chain:
            return range(len(self.parents))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    @cached_property
    def deepest(self) -> int:
        return max(self.depths, default=0)

    @cached_property
    def paths(self) -> Sequence[Sequence[int]]:
        """[N] the nodes from the root down to every node, itself included."""
        if self.is_chain:
            return [range(node + 1) for node in range(len(self.parents))]
        paths: list[list[int]] = []
        for node, parent in enumerate(self.parents):
            paths.append([node] if parent < 0 else [*paths[parent], node])
        return paths

    @cached_property
    def children(self) -> Sequence[Sequence[int]]:
        """[N] the children of every node, in index order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(node)
        return children

    @cached_property
    def ancestors(self) -> Mask:
        """[N, N] is column an ancestor of row, or row itself?"""
        if self.is_chain:
            return np.tri(len(self.parents), dtype=bool)
        seen = np.eye(len(self.parents), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        return seen


@lru_cache(maxsize=256)
def topology_of(parents: tuple[int, ...]) -> Topology:
    """The shape with these parents, each an index within the tree, -1 at the root."""
    return Topology(parents)


@lru_cache(maxsize=1024)
def chain_of(nodes: int) -> Topology:
    """A chain of so many nodes, the root included."""
    return Topology(tuple(range(-1, nodes - 1)))


def trace(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Of nodes [B, N] their depths, and [B, N, depth + 1] the ancestor at every depth, by torch alone.

    Beyond a node's own depth the entry is the node itself.
    """
    nodes = parents.shape[1]
    up = [torch.arange(nodes, device=parents.device).expand_as(parents)]
    for _ in range(depth):
        up.append(parents.gather(1, up[-1].clamp(min=0)))  # the root's parent, -1, leads to the root's again
    ancestors = torch.stack(up, -1)
    depths = (ancestors >= 0).sum(-1) - 1
    steps = torch.arange(depth + 1, device=parents.device)
    return depths, ancestors.gather(-1, (depths[..., None] - steps).clamp(min=0))
