"""Trees grown on a device: the plain torch form against brute force, and the integers that a draft is told with."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.drafters.eagle.cuda.draft_plan import (
    SHAPES,
    CapturedShapes,
    aligned,
    best_draft_shape,
    expected,
    extent_of,
    plan_draft,
)
from forerun.drafters.eagle.cuda.tree_growth import Frontier, HeadOutput, Pool, cut_trees, grow_level
from forerun.models.cuda.plan import FIELDS, MAX_ROWS

VOCAB, WIDTH, DEPTH = 11, 3, 3
IDS = torch.arange(VOCAB) * 2 + 5  # the target's ids of a draft vocabulary
CPU = torch.device("cpu")
Path = tuple[int, ...]


def logits_after(tree: int, path: Path) -> Tensor:
    """[Vd] what a head would say there: any function of tree and path."""
    seed = hash((tree, path)) % (1 << 31)
    return 2.0 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def grow(trees: int, nodes: int, width: int = WIDTH, output: HeadOutput | None = None) -> Tensor:
    """[2, B, nodes + 1] drafted level by level, as the device does it."""
    output = output or HeadOutput(IDS)
    pool, frontier = Pool(trees, width, width, DEPTH, CPU), Frontier.of_roots(trees, CPU)
    paths: list[list[Path]] = [[()] for _ in range(trees)]
    for level in range(DEPTH):
        rows = [logits_after(b, path) for b in range(trees) for path in paths[b]]
        into = None
        if level + 1 < DEPTH:
            into = (
                torch.empty(trees * width, dtype=torch.long),
                torch.empty(trees * width * (level + 1), dtype=torch.long),
            )
        wide = frontier.log_survivals.shape[1]
        frontier = grow_level(pool, frontier, torch.stack(rows), output, into)
        above = frontier.parents.view(trees, -1) - torch.arange(trees)[:, None] * wide
        tokens = frontier.tokens.tolist()
        paths = [
            [(*paths[b][parent], token) for parent, token in zip(above[b].tolist(), tokens[b], strict=True)]
            for b in range(trees)
        ]
        if into is not None:
            assert into[0].tolist() == frontier.tokens.flatten().tolist()
            assert into[1].tolist() == frontier.ancestors.flatten().tolist()
    return cut_trees(pool, torch.arange(trees), nodes)


def brute_force(
    tree: int, nodes: int, width: int = WIDTH, power: float = 1.0, scale: float = 0.0
) -> set[Path]:
    """The paths of the best nodes, of all that frontiers of this width put forward."""
    frontier: list[tuple[float, Path]] = [(0.0, ())]
    found: list[tuple[float, Path]] = []
    for _ in range(DEPTH):
        level = []
        for score, path in frontier:
            law = logits_after(tree, path).log_softmax(-1)
            for token in law.topk(width).indices.tolist():
                gain = min(float(law[token]) * power + scale, 0.0)
                level.append((score + gain, (*path, int(IDS[token]))))
        found += level
        frontier = sorted(level, reverse=True)[:width]
    return {path for _, path in sorted(found, reverse=True)[:nodes]}


def paths_of(tokens: list[int], parents: list[int]) -> set[Path]:
    paths: list[Path] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


@pytest.mark.parametrize("nodes", [1, 4, 9, 15])
def test_trees_are_those_of_brute_force(nodes: int) -> None:
    both = grow(3, nodes)
    for b in range(3):
        tokens, parents = both[0, b].tolist(), both[1, b].tolist()
        assert tokens[0] == b
        assert parents[0] == -1
        assert all(0 <= parent < i for i, parent in enumerate(parents) if i)
        assert paths_of(tokens, parents) == brute_force(b, nodes)


def test_a_chain_is_cut_from_its_start() -> None:
    tokens, parents = grow(2, 2, width=1)
    assert parents.tolist() == [[-1, 0, 1]] * 2
    for b in range(2):
        assert paths_of(tokens[b].tolist(), parents[b].tolist()) == brute_force(b, 2, width=1)


def test_calibrated_confidences_choose_other_nodes() -> None:
    sharp = HeadOutput(IDS, log_scale=math.log(0.5), power=0.3)
    tokens, parents = grow(1, 8, output=sharp)
    found = paths_of(tokens[0].tolist(), parents[0].tolist())
    assert found == brute_force(0, 8, power=0.3, scale=math.log(0.5))
    assert found != brute_force(0, 8)
    assert HeadOutput(IDS).log_confidence(torch.tensor([0.3, -1.0])).tolist() == [0.0, -1.0]


def test_ancestors_lead_from_the_first_level_to_the_node() -> None:
    pool, frontier = Pool(1, WIDTH, WIDTH, DEPTH, CPU), Frontier.of_roots(1, CPU)
    first = grow_level(pool, frontier, logits_after(0, ())[None], HeadOutput(IDS))
    assert first.ancestors.tolist() == [[[0], [1], [2]]]
    rows = torch.stack([logits_after(0, (token,)) for token in first.tokens[0].tolist()])
    second = grow_level(pool, first, rows, HeadOutput(IDS))
    for node, (above, own) in enumerate(second.ancestors[0].tolist()):
        assert above == int(second.parents[node])
        assert own == WIDTH + node


PLACES, FRESH, ROOTS = [(100, 7), (300, 2)], [[4, 5], [6]], [11, 12]


@pytest.mark.parametrize("shape", [(4, 4, 1), (8, 3, 3), (1, 1, 1)])
def test_the_integers_of_a_draft(shape: tuple[int, int, int]) -> None:
    form, ints = plan_draft(PLACES, FRESH, ROOTS, shape, group_nodes=16)
    nodes, depth, width = shape
    assert (form.sequences, form.nodes, form.depth, form.width) == (2, nodes, depth, width)
    assert form.behind == max(depth + 1, 2)
    rows = aligned(2 * form.behind)
    tokens, positions, slots = ints[: 3 * rows].reshape(3, rows)[:, : 2 * form.behind]
    mine = slice(0, 2)
    assert tokens[mine].tolist() == [4, 5]
    assert positions[mine].tolist() == [7, 8]
    assert slots[mine].tolist() == [107, 108]
    other = form.behind
    assert (tokens[other], positions[other], slots[other]) == (6, 2, 302)
    pads = [slot for b, new in enumerate(FRESH) for slot in slots[b * other + len(new) : (b + 1) * other]]
    assert set(pads) <= {-1}  # nothing is written there
    roots, ends = ints[form.roots_at : form.roots_at + 2 * aligned(2)].reshape(2, -1)[:, :2].tolist()
    assert roots == ROOTS
    assert ends == [1, form.behind]
    for level in range(depth - 1):
        first = form.level_at(level)
        drafted = ints[first : first + extent_of(form.level)]
        rows = aligned(form.level.rows)
        at, into = drafted[rows : rows + 2 * width], drafted[2 * rows : 2 * rows + 2 * width]
        assert at.tolist() == [9 + level] * width + [3 + level] * width
        behind = [109 + level * width + i for i in range(width)] + [
            303 + level * width + i for i in range(width)
        ]
        assert into.tolist() == behind


def test_drafts_that_agree_in_form_are_replays_of_one_graph() -> None:
    one, ints = plan_draft(PLACES, FRESH, ROOTS, (8, 3, 3), 16)
    other, others = plan_draft([(500, 20), (40, 9)], [[1], [2, 3]], [5, 6], (8, 3, 3), 16)
    assert one == other
    assert ints.shape == others.shape
    assert not np.array_equal(ints, others)
    assert plan_draft(PLACES, FRESH, ROOTS, (8, 4, 3), 16)[0] != one


def test_levels_do_not_overlap() -> None:
    form, ints = plan_draft(PLACES, FRESH, ROOTS, (24, 5, 6), 16)
    starts = [form.level_at(level) for level in range(form.depth - 1)]
    sizes = {later - earlier for earlier, later in itertools.pairwise(starts)}
    assert sizes == {3 * aligned(form.level.rows) + FIELDS * form.level.groups}
    ancestors = [form.ancestors_at(level) for level in range(form.depth - 1)]
    assert ancestors[0] == starts[-1] + extent_of(form.level)
    room = [later - earlier for earlier, later in itertools.pairwise(ancestors)]
    assert room == [aligned(form.level.rows) * (level + 1) for level in range(form.depth - 2)]
    assert all(value % 4 == 0 for value in (*starts, *ancestors))
    assert len(ints) <= form.ancestors_at(form.depth - 1)
    assert len(ints) + MAX_ROWS < 1 << 17


@pytest.mark.parametrize("level", [0.0, 0.1, 0.5])
def test_the_menu_gives_what_gains_most(level: float) -> None:
    rates, price = ((0.7, 0.1, 0.05), (0.6, 0.1, 0.05)), [1.0 + 0.02 * n for n in range(61)]

    def gain(shape: tuple[int, int, int]) -> float:
        return expected(rates, shape) - price[shape[0]] - level * shape[1]

    assert best_draft_shape(rates, (60, 16, 16), price, level) == max(SHAPES, key=gain)


def test_batches_of_other_sizes_share_no_graphs() -> None:
    menu = CapturedShapes()
    assert menu.choose(1, (4, 4, 1)) == (4, 4, 1)
    assert menu.choose(2, (8, 3, 3)) == (8, 3, 3)
    assert menu.choose(1, (8, 3, 3)) is None  # not worth a graph yet
    assert menu.choose(2, (2, 2, 1), ends=True) == (8, 3, 3)
    assert menu.known == {1: {(4, 4, 1)}, 2: {(8, 3, 3)}}
