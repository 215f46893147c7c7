"""Depths, ancestors, paths and children of trees, against a walk from every node up to the root."""

import random

import pytest
import torch

from forerun.core.tree import chain_of, topology_of, trace
from forerun.core.types import TreeBatch
from forerun.testing import path_to


def _parents(seed: int, nodes: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return (-1, *(rng.randrange(i) for i in range(1, nodes)))


@pytest.mark.parametrize("seed", range(8))
def test_a_shape_is_what_a_walk_up_to_the_root_finds(seed: int) -> None:
    parents = _parents(seed, 1 + 3 * seed)
    shape = topology_of(parents)
    for node in range(len(parents)):
        path = [0, *path_to(parents, node)]
        assert list(shape.paths[node]) == path
        assert shape.depths[node] == len(path) - 1
        assert shape.ancestors[node].nonzero()[0].tolist() == sorted(path)
        assert list(shape.children[node]) == [i for i, parent in enumerate(parents) if parent == node]
    assert shape.deepest == max(shape.depths)


def test_a_chain_is_told_by_its_parents() -> None:
    assert topology_of((-1, 0, 1, 2)).is_chain
    assert not topology_of((-1, 0, 0)).is_chain
    chain, same = chain_of(4), topology_of((-1, 0, 1, 2))
    assert [list(path) for path in chain.paths] == [list(path) for path in same.paths]
    assert list(chain.depths) == [0, 1, 2, 3]
    assert chain.deepest == 3
    assert (chain.ancestors == same.ancestors).all()


def test_a_shape_is_worked_out_once() -> None:
    first, second = (TreeBatch.trees([([5, 6, 7], [-1, 0, 0])]) for _ in range(2))
    assert first.topology() is first.topology()
    assert first.topology()[0] is second.topology()[0], "the same parents in another round"
    assert first.topology()[0].paths is second.topology()[0].paths


@pytest.mark.parametrize("seed", range(4))
def test_a_device_traces_what_the_host_knows(seed: int) -> None:
    shapes = [topology_of(_parents(10 * seed + b, 12)) for b in range(3)]
    depth = max(shape.deepest for shape in shapes) + 1
    depths, ancestors = trace(torch.tensor([shape.parents for shape in shapes]), depth)
    for b, shape in enumerate(shapes):
        assert depths[b].tolist() == list(shape.depths)
        for node, path in enumerate(shape.paths):
            assert ancestors[b, node].tolist() == [*path, *[node] * (depth + 1 - len(path))]
