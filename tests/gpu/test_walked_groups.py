"""Attention in which one program takes all splits of a group: the bits of splits that went through memory.

Runs on a GPU, or on a CPU in Triton's interpreter: TRITON_INTERPRET=1 python -m pytest tests/gpu/test_walked_groups.py
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.core.tree import Topology, chain_of, topology_of
from forerun.models.cuda.plan import Plan, Size, Span, plan_pass, split_of
from forerun.models.cuda.steps.tiles import Sharing, shared_out, sharing_for
from forerun.models.pages import slots_of
from forerun.testing import random_tree
from tests.gpu.test_attention import HEADS, KV_HEADS, PAGE, WALKED, attend, found_by_hand, random_numbers
from tests.gpu.tiny import where_kernels_run

ALL = Sharing(programs=1, walked=256, stages=3, narrow=True)
NONE = Sharing(programs=2, walked=0, stages=1)
HOPPER = 4, 8, 128, 132  # queries of a key-value head, such heads, their width, multiprocessors


def test_programs_walk_whole_groups_where_there_are_many() -> None:
    few, prompts = Size(8, 8, 8), Size(1024, 128, 8)
    assert sharing_for(few, *HOPPER) == shared_out(few, *HOPPER[1:])
    assert shared_out(prompts, *HOPPER[1:]).walked == 0
    for size in (prompts, replace(prompts, splits=256), Size(256, 32, 8)):
        how = sharing_for(size, *HOPPER)
        assert (how.programs, how.walked) == (1, size.splits)
    for roots in (Size(32, 32, 8), Size(96, 128, 8)):
        how = sharing_for(roots, *HOPPER)
        assert how.walked >= roots.splits
        assert how.narrow


def test_other_gpus_and_wide_heads_have_no_such_programs() -> None:
    prompts = Size(1024, 128, 32)
    assert sharing_for(prompts, *HOPPER, hopper=False) == shared_out(prompts, *HOPPER[1:])
    assert sharing_for(prompts, 4, 8, 256, 132) == shared_out(prompts, 8, 256, 132)
    assert shared_out(prompts, 8, 256, 132).stages == 1  # more would not fit the shared memory of some


def test_a_long_context_among_short_ones_is_shared_out() -> None:
    for size in (Size(128, 128, 32), Size(512, 128, 32), Size(256, 32, 32)):
        how = sharing_for(size, *HOPPER)
        assert how.programs > 1
        assert 0 < how.walked < size.splits


def test_trees_that_branch_are_shared_out() -> None:
    grown, from_host, beside_prompts = Size(512, 64 * 9, 8, 64, 8), Size(64, 128, 8), Size(512, 512, 8)
    for size in (grown, from_host, beside_prompts):
        assert sharing_for(size, *HOPPER) == shared_out(size, *HOPPER[1:])


@pytest.mark.gpu
def test_chains_of_one_form_are_walked_tree_by_tree() -> None:
    """Such passes say how many trees they have: read as groups of each, programs took groups that are none."""
    spans = _on_pages([(chain_of(4), length) for length in (90, 140, 200, 310)])
    plan = plan_pass(spans, 64 // (HEADS // KV_HEADS))
    queries, kv = random_numbers(32, slots=256 * PAGE)
    wanted = attend(plan, queries, kv, 0, NONE)[: plan.rows]
    trees = replace(plan.size, groups=4, trees=4)
    assert torch.equal(attend(plan, queries, kv, 0, ALL, trees)[: plan.rows], wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 150])
@pytest.mark.parametrize(
    ("length", "dim"), [(100, 32), (130, 32), (1100, 128), (4200, 32)]
)  # splits of 128, 256 and 1,024 positions
def test_a_program_that_walks_a_group_finds_the_same(length: int, dim: int, window: int) -> None:
    """In chunks of two groups, the second not full; a short chain; and a lone root."""
    spans = _on_pages([(chain_of(20), length), (chain_of(3), length + 40), (chain_of(1), length - 60)])
    plan = plan_pass(spans, 64 // (HEADS // KV_HEADS))
    queries, kv = random_numbers(dim, slots=256 * PAGE)
    wanted = attend(plan, queries, kv, window, NONE)[: plan.rows]
    by_hand = found_by_hand(spans, queries, kv, window)
    torch.testing.assert_close(wanted.float(), by_hand, atol=2e-2, rtol=2e-2)
    splits = split_of(length + 42) + 1
    for how in (ALL, replace(ALL, programs=3, walked=splits - 1, narrow=False)):
        assert torch.equal(attend(plan, queries, kv, window, how)[: plan.rows], wanted)
    if window == 0 and wanted.dtype == torch.float32:  # sums in another order would show
        assert not torch.equal(wanted, by_hand)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 6])  # 6: three queries of a key-value head, and room for a fourth
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("length", [0, 100, 1100, 4200])
def test_what_the_copy_engine_fetches_has_the_same_bits(
    length: int, dim: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that nobody wrote hold what is no number, also behind the last position of a page."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr("forerun.models.cuda.plan.SHORT", 0)
    monkeypatch.setattr("tests.gpu.test_attention.HEADS", heads)
    spans = _on_pages([(chain_of(77), length), (chain_of(3), length + 40), (chain_of(1), length + 63)])
    plan = plan_pass(spans, 16, tiled_nodes=32)
    queries, kv = random_numbers(dim, slots=256 * PAGE)
    written = torch.zeros(256 * PAGE, dtype=torch.bool, device=kv.device)
    for span in spans:
        written[slots_of(span.pages, 0, span.length + len(span.tokens))] = True
    kv[:, :, ~written] = torch.nan
    wanted = attend(plan, queries, kv, 0, WALKED)[: plan.rows]
    assert bool(wanted.isfinite().all())
    assert torch.equal(attend(plan, queries, kv, 0, replace(WALKED, copied=True))[: plan.rows], wanted)
    kv[1, :, slots_of(spans[0].pages, 0, 1)] += 1  # the first value of one text
    assert not torch.equal(attend(plan, queries, kv, 0, replace(WALKED, copied=True))[: plan.rows], wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 70])
def test_trees_leave_parts_beside_chunks_that_are_walked(window: int) -> None:
    spans = _beside_trees()
    plan = plan_pass(spans, 64 // (HEADS // KV_HEADS))
    queries, kv = random_numbers(32)
    wanted = attend(plan, queries, kv, window, NONE)[: plan.rows]
    torch.testing.assert_close(wanted.float(), found_by_hand(spans, queries, kv, window), atol=2e-2, rtol=2e-2)
    for how in (ALL, replace(ALL, programs=2, narrow=False), replace(ALL, walked=3), replace(NONE, narrow=True)):
        assert torch.equal(attend(plan, queries, kv, window, how)[: plan.rows], wanted)


@pytest.mark.gpu
def test_rows_of_trees_are_found_by_adding_up_parts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above would show a row that nobody finished, and one that was added up from parts without need."""
    where_kernels_run()
    from forerun.models.cuda.steps.attention import Attention

    monkeypatch.setattr(Attention, "_combine", lambda *given: None)
    spans = _beside_trees()
    plan = plan_pass(spans, 64 // (HEADS // KV_HEADS))
    found = attend(plan, *random_numbers(32), 0, ALL)[: plan.rows]
    assert _rows_without_numbers(found) == _rows_of(plan, spans, branching=True)


def _rows_without_numbers(found: Tensor) -> list[int]:
    return found.isnan().flatten(1).all(1).nonzero()[:, 0].tolist()


def _rows_of(plan: Plan, spans: list[Span], branching: bool) -> list[int]:
    """Of trees that start behind the first split: the others' nodes have groups with all of their splits."""
    rows, found = 0, list[int]()
    for span in spans:
        if (not span.shape.is_chain and split_of(span.length) > 0) == branching:
            found += range(rows, rows + len(span.tokens))
        rows += len(span.tokens)
    assert rows == plan.rows
    return found


def _beside_trees() -> list[Span]:
    """Lone roots, trees in the first split and behind it, chunks of prompts in it and behind it."""
    rng = random.Random(4)
    trees = [topology_of(tuple(random_tree(rng, 1, 50, nodes)[1])) for nodes in (9, 6)]
    assert not any(tree.is_chain for tree in trees)
    return _on_pages([(chain_of(1), 300), (trees[0], 430), (trees[1], 60), (chain_of(20), 370), (chain_of(17), 0)])


def _on_pages(shapes: list[tuple[Topology, int]]) -> list[Span]:
    """Trees behind so many tokens each, on pages that do not follow each other."""
    rng, spans = random.Random(9), list[Span]()
    counts = [(length + len(shape.depths)) // PAGE + 1 for shape, length in shapes]
    pages = [*range(1, 1 + sum(counts))]
    rng.shuffle(pages)
    for (shape, length), count in zip(shapes, counts, strict=True):
        spans.append(Span([0] * len(shape.depths), shape, [pages.pop() for _ in range(count)], length))
    return spans
