"""The kernels of recurrent layers: what a node finds, and that its bits depend on its own path alone.

Runs on a GPU, or on a CPU in Triton's interpreter:
TRITON_INTERPRET=1 python -m pytest tests/gpu/test_recurrent_kernels.py
"""

import random

import pytest
import torch
from torch import Tensor

from forerun.core.tree import chain_of, topology_of
from forerun.models.attention import Span
from forerun.testing import random_tree
from tests.gpu.tiny import where_kernels_run

pytestmark = pytest.mark.gpu
HEADS, KEYS, VALUES, NODES = 3, 12, 40, 9


def step(before: Tensor, row: Tensor, skip: Tensor | None) -> tuple[Tensor, Tensor]:
    """One node, by the formulas, in float64."""
    sizes = [HEADS * KEYS, HEADS * KEYS, HEADS * VALUES, HEADS, HEADS]
    query, key, value, strength, left = torch.split(row.double(), sizes)
    query, key, value = query.view(HEADS, KEYS), key.view(HEADS, KEYS), value.view(HEADS, VALUES)
    memory = before.double() * left[:, None, None]
    written = value - torch.einsum("hk,hkv->hv", key, memory) if skip is None else value
    memory = memory + torch.einsum("hk,hv->hkv", key, written * strength[:, None])
    read = torch.einsum("hk,hkv->hv", query, memory)
    return memory, (read if skip is None else read + skip.double()[:, None] * value).flatten()


@pytest.mark.parametrize("rule", ["delta", "mamba"])
def test_nodes_find_what_the_formulas_say_and_have_the_bits_of_their_path(rule: str) -> None:
    device, rng = where_kernels_run(), random.Random(1)
    from forerun.models.cuda.steps.recurrent import scan

    draws = torch.Generator().manual_seed(3)
    wide = HEADS * (2 * KEYS + VALUES + 2)
    prepared = torch.randn(NODES, wide, generator=draws) * 0.3
    prepared[:, -2 * HEADS :] = prepared[:, -2 * HEADS :].sigmoid()
    start = torch.randn(HEADS, KEYS, VALUES, generator=draws).to(device)
    prepared = prepared.to(device)
    skip = None if rule == "delta" else torch.rand(HEADS, generator=draws).to(device)
    parents = random_tree(rng, 1, 50, NODES)[1]
    while parents == list(range(-1, NODES - 1)):
        parents = random_tree(rng, 1, 50, NODES)[1]
    found = prepared.new_empty(len(parents), HEADS * VALUES)
    memories = scan(start, prepared, found, 0, parents, range(len(parents)), skip)
    wanted = dict[int, Tensor]()
    for node, parent in enumerate(parents):
        wanted[node], read = step(start if parent < 0 else wanted[parent], prepared[node], skip)
        torch.testing.assert_close(found[node].double(), read, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(memories[node].double(), wanted[node], atol=1e-4, rtol=1e-4)
    for node in range(len(parents)):  # the same nodes as chains, in two pieces
        path = list(topology_of(tuple(parents)).paths[node])
        rows, alone, memory = prepared[path], prepared.new_empty(len(path), HEADS * VALUES), start
        for first, end in ((0, len(path) // 2), (len(path) // 2, len(path))):
            if first < end:
                last = end - first - 1
                memory = scan(memory, rows, alone, first, range(-1, last), [last], skip)[last]
        assert torch.equal(alone[-1], found[node])
        assert torch.equal(memory, memories[node])


@pytest.mark.parametrize("wider", [0, 8])
def test_attention_of_trees_has_the_bits_of_chains_and_sees_the_path(wider: int) -> None:
    """Also where a row of the cache is wider than this layer's keys."""
    device, length, heads, kv_heads, dim = where_kernels_run(), 70, 4, 2, 20
    from forerun.models.cuda.steps.recurrent import attend

    cache = torch.randn(2, 64 * 5, kv_heads * dim + wider, generator=torch.Generator().manual_seed(1)).to(device)
    data = torch.unflatten(cache[:, :, : kv_heads * dim], -1, (kv_heads, dim)).transpose(1, 2)
    tokens, parents = random_tree(random.Random(5), 1, 50, 7)
    tree = Span(2, 2 + len(tokens), [3, 1], length, topology_of(tuple(parents)))
    queries = torch.randn(2 + len(tokens), heads, dim, generator=torch.Generator().manual_seed(2)).to(device)
    found = torch.empty_like(queries)
    attend(data, tree, queries, 0.3, found)
    context, slots = [3 * 64 + i for i in range(64)] + [64 + i for i in range(6)], tree.slots
    for node in range(len(tokens)):
        path = list(tree.shape.paths[node])
        seen = data[:, :, context + [slots[i] for i in path]]
        keys, values = (one.repeat_interleave(heads // kv_heads, 0) for one in seen)
        weights = (torch.einsum("hd,hnd->hn", queries[2 + node], keys) * 0.3).softmax(-1)
        wanted = torch.einsum("hn,hnd->hd", weights, values)
        torch.testing.assert_close(found[2 + node], wanted, atol=1e-5, rtol=1e-4)
        chained, moved = data.clone(), [64 + 6 + i for i in range(len(path))]
        chained[:, :, moved] = data[:, :, [slots[i] for i in path]]
        alone = torch.empty(len(path), heads, dim, device=device)
        rows = queries[[2 + i for i in path]].contiguous()
        attend(chained, Span(0, len(path), [3, 1], length, chain_of(len(path))), rows, 0.3, alone)
        assert torch.equal(alone[-1], found[2 + node])
