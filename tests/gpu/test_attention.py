"""The attention kernels: what a node finds, and that it changes no bit how many programs share the splits.

Runs on a GPU, or on a CPU in Triton's interpreter: TRITON_INTERPRET=1 python -m pytest tests/gpu/test_attention.py
"""

import math
import random
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from forerun.core.tree import chain_of, topology_of
from forerun.models.config import DecoderConfig
from forerun.models.cuda.graphs import PROMPT_ROWS, menu, prompt_rows_for
from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import DEEPEST, MAX_ROWS, Need, Plan, Size, Span, plan_pass, split_of, split_start
from forerun.models.cuda.steps.tiles import Sharing, programs_for, tiled_sharing
from forerun.models.pages import slots_of
from forerun.testing import random_tree
from tests.gpu.tiny import where_kernels_run

HEADS, KV_HEADS, PAGE, SLOTS = 8, 2, 64, 2048


def test_few_groups_have_a_program_for_every_split_and_many_have_four() -> None:
    assert programs_for(Size(1, 1, 256), 8, 132) == 256
    assert programs_for(Size(64, 64, 8), 8, 132) == 8  # a tree of 59 nodes
    assert programs_for(Size(64, 64, 32), 8, 132) == 8
    assert programs_for(Size(256, 512, 8), 8, 132) == 4
    assert programs_for(Size(4, 512, 1), 8, 132) == 1  # never more than there are splits
    assert programs_for(Size(64, 64, 32, trees=1, lone=60), 8, 132) == 32  # lone nodes have one each
    assert programs_for(Size(64, 64, 8, trees=1, lone=64), 8, 132) == 8


def test_two_lone_nodes_share_a_program() -> None:
    assert Size(64, 64, 8).attending(programs=4) == 64 * 4
    assert Size(64, 26, 8, trees=2, lone=11).attending(programs=4) == 4 * 4 + 2 * 6


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 150])
def test_what_is_found_does_not_depend_on_the_number_of_programs(window: int) -> None:
    rng = random.Random(3)
    spans = [span(rng, length, nodes, first) for length, nodes, first in ((430, 13, 1), (100, 1, 9), (63, 5, 12))]
    plan = plan_pass(spans, 64 // (HEADS // KV_HEADS))
    queries, kv = random_numbers(32)
    alone = attend(plan, queries, kv, window, how=plan.size.splits)
    wanted = found_by_hand(spans, queries, kv, window)
    torch.testing.assert_close(alone[: plan.rows].float(), wanted, atol=2e-2, rtol=2e-2)
    for programs in (1, 2, 3):
        assert torch.equal(attend(plan, queries, kv, window, programs)[: plan.rows], alone[: plan.rows])


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize(("window", "cap", "sinks"), [(0, 1.5, False), (70, 0.0, True), (0, 2.0, True)])
def test_scores_have_caps_and_heads_have_sinks(window: int, cap: float, sinks: bool, dim: int) -> None:
    """The same bits by programs that leave parts and by programs that take whole groups; without either, others."""
    rng = random.Random(8)
    spans = [span(rng, 150, 6, 1), Span([1, 2, 3], chain_of(3), [9, 10, 11], 129)]
    plan = plan_pass(spans, 64 // (HEADS // KV_HEADS))
    queries, kv = random_numbers(dim)
    queries *= 3  # scores that a cap changes much
    extra = Extra(cap, torch.randn(HEADS, device=queries.device) * 3 if sinks else None)
    found = attend(plan, queries, kv, window, how=2, extra=extra)[: plan.rows]
    wanted = found_by_hand(spans, queries, kv, window, extra)
    torch.testing.assert_close(found.float(), wanted, atol=2e-2, rtol=2e-2)
    without = found_by_hand(spans, queries, kv, window)
    assert (without - wanted).abs().max() > 0.2, "neither would be missed"
    walked = Sharing(programs=1, walked=256, stages=1, narrow=True)
    must_agree(attend(plan, queries, kv, window, walked, extra=extra)[: plan.rows], found)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("nodes", [21, 16])  # an odd number leaves one without another
@pytest.mark.parametrize(
    "lengths", [(430,), (255, 447, 1100), (3, 15, 63, 112), (128, 1015)]
)  # paths cross from one block, tile or split to the next, or begin with one
def test_lone_nodes_that_share_a_program_find_the_same(lengths: tuple[int, ...], nodes: int, window: int) -> None:
    plan, exact = lone_nodes(lengths, nodes, reach=5)
    queries, kv = random_numbers(32)
    wanted = attend(plan, queries, kv, window, how=4)
    for programs in (1, 3, plan.size.splits):
        found = attend(plan, queries, kv, window, programs, exact)
        must_agree(found[: plan.rows], wanted[: plan.rows])


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [32, 128])
@pytest.mark.parametrize("length", [431, 447, 511])  # the last position of a block, a tile, a split
def test_the_deepest_tree_whose_nodes_share_programs_fits_their_columns(length: int, dim: int) -> None:
    plan, exact = lone_nodes((length,), DEEPEST + 3, reach=1)
    assert max(plan.ints[plan.size.rows : plan.size.rows + plan.rows]) == length + DEEPEST
    queries, kv = random_numbers(dim)
    wanted = attend(plan, queries, kv, 0, how=4)
    must_agree(attend(plan, queries, kv, 0, 2, exact)[: plan.rows], wanted[: plan.rows])


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [32, 512])
def test_heads_that_lie_side_by_side_in_a_slot_find_the_same(dim: int) -> None:
    """In slots that are wider than they are, and of layers whose heads are as wide as two of another layer."""
    plan, exact = lone_nodes((255, 447), 9, reach=5)
    queries, kv = random_numbers(dim)
    slots = torch.full((2, kv.shape[2], KV_HEADS + 1, dim), math.nan, dtype=kv.dtype, device=kv.device)
    slots[:, :, :KV_HEADS] = kv.transpose(1, 2)
    how, beside = Sharing(3, walked=0, stages=1, warps=4 if dim < 512 else 8), slots[:, :, :KV_HEADS].transpose(1, 2)
    wanted = attend(plan, queries, kv, 0, how)[: plan.rows]
    for size in (None, exact):
        must_agree(attend(plan, queries, beside, 0, how, size)[: plan.rows], wanted)
    other = attend(plan, queries, beside.flip(1).flip(1)[:, [1, 0]], 0, how)[: plan.rows]
    assert not torch.equal(other, wanted), "it does not matter which head is read"


TREES = [(430,), (255, 447, 1100), (3, 15, 63, 112), (128, 1015), (64, 4095)]
# paths cross from one block, tile or split to the next, or begin with one
SMALL = Sharing(3, walked=0, stages=1, rows=16)
LARGE = Sharing(2, walked=0, stages=2, rows=128, warps=8, narrow=True)
WALKED = Sharing(1, walked=256, stages=2, rows=128, warps=8, narrow=True)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("lengths", TREES)
def test_tiled_passes_find_what_others_find(
    lengths: tuple[int, ...], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: in groups of any size, beside other trees and chains, by programs of any number of rows."""
    rng, spans = random.Random(5), list[Span]()
    for i, length in enumerate(lengths):
        nodes = 21 if i == 0 else 9
        parents = (-1, *(rng.randrange(max(0, node - 5), node) for node in range(1, nodes - 2)), 0, 0)
        pages = [*range(1 + 70 * i, 2 + 70 * i + (length + nodes) // PAGE)]
        spans.append(Span([*range(nodes)], topology_of(parents) if i < 2 else chain_of(nodes), pages, length))
    queries, kv = random_numbers(32, slots=300 * PAGE)
    other = plan_pass(spans, 16)
    wanted = attend(other, queries, kv, window, how=4)[: other.rows]
    torch.testing.assert_close(wanted.float(), found_by_hand(spans, queries, kv, window), atol=2e-2, rtol=2e-2)
    monkeypatch.setattr("forerun.models.cuda.plan.SHORT", 0)
    for nodes, how in ((32, SMALL), (2, SMALL), (8, LARGE), (32, LARGE), (32, WALKED)):
        plan = plan_pass(spans, 16, tiled_nodes=nodes)
        assert plan.size.tiled
        must_agree(attend(plan, queries, kv, window, how)[: plan.rows], wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(("cap", "sinks"), [(1.5, False), (0.0, True), (2.0, True)])
def test_tiled_passes_have_caps_and_sinks(cap: float, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(8)
    spans = [span(rng, 150, 6, 1), Span([1, 2, 3], chain_of(3), [9, 10, 11], 129)]
    queries, kv = random_numbers(64)
    queries *= 3
    extra = Extra(cap, torch.randn(HEADS, device=queries.device) * 3 if sinks else None)
    wanted = attend(plan_pass(spans, 16), queries, kv, 0, how=2, extra=extra)[:10]
    monkeypatch.setattr("forerun.models.cuda.plan.SHORT", 0)
    plan = plan_pass(spans, 16, tiled_nodes=32)
    for how in (LARGE, WALKED):
        must_agree(attend(plan, queries, kv, 0, how, extra=extra)[: plan.rows], wanted[: plan.rows])


@pytest.mark.gpu
def test_a_tree_deeper_than_a_tile_finds_the_same_in_a_tiled_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    span = Span([*range(142)], topology_of((-1, *range(139), 3, 0)), [*range(1, 9)], 250)
    queries, kv = random_numbers(32)
    wanted = attend(plan_pass([span], 16), queries, kv, 0, how=3)[:142]
    monkeypatch.setattr("forerun.models.cuda.plan.SHORT", 0)
    must_agree(attend(plan_pass([span], 16, tiled_nodes=32), queries, kv, 0, LARGE)[:142], wanted)


@pytest.mark.parametrize(
    ("size", "rows"),
    [(Size(1, 1, 96, tiled=True), 16), (Size(16, 1, 96, tiled=True), 64), (Size(64, 2, 96, tiled=True), 128),
     (Size(64, 66, 96, lone=64, tiled=True), 128), (Size(16, 17, 96, lone=16, tiled=True), 64),
     (Size(64, 64, 96, tiled=True), 64), (Size(1024, 128, 256, tiled=True), 128)],
)  # fmt: skip
def test_programs_of_tiled_passes_have_as_many_rows_as_groups_have_queries(size: Size, rows: int) -> None:
    assert tiled_sharing(size, 4, 8, 128, 132).rows == rows
    assert tiled_sharing(size, 4, 8, 256, 132).rows == min(rows, 64)
    walked = tiled_sharing(size, 4, 8, 128, 132).walked
    assert walked == (size.splits if size.rows == 1024 else 0), "one program has a whole group of a prompt"


def _first_fitting(sizes: list[Size], need: Need) -> Size:
    return next(size for size in sizes if need.fits(size))


def test_passes_over_prompts_are_tiled_where_the_copy_engine_takes_them_whatever_they_reach() -> None:
    def copied(rows: int, each: int, heads: int, in_bytes: bool = False) -> bool:
        return tiled_sharing(
            Size(rows, rows // 8, 32, tiled=True), each, heads, 128, 132, kept_in_bytes=in_bytes
        ).copied

    assert [rows for rows in PROMPT_ROWS if copied(rows, 8, 2)] == [1024], "the 1.5B"
    assert [rows for rows in PROMPT_ROWS if copied(rows, 4, 8)] == [512, 768, 1024], "the 8B"
    assert not copied(1024, 4, 8, in_bytes=True)
    span = Span([1] * 600, chain_of(600), [*range(40)], 1500)
    for prompts in (False, True):
        jobs = [*menu(4096, 32, 512 if prompts else MAX_ROWS + 1)]
        sizes = [size for size, scored in jobs if not scored]
        plan = plan_pass([span], 16, partial(_first_fitting, sizes), tiled_nodes=32, prompts=prompts)
        assert (plan.size.tiled, plan.size.rows, plan.size.splits) == (prompts, 768, 32)
        assert [size.rows for size, scored in jobs if size.tiled] == ([512, 768, 1024] if prompts else [])
    assert not plan_pass([replace(span, length=0)], 16, tiled_nodes=32, prompts=True).size.tiled, "a short one"


@pytest.mark.parametrize(
    ("each", "tiled_from"), [(4, 512), (8, 256), (8, 512), (16, 256), (16, MAX_ROWS + 1), (32, MAX_ROWS + 1)]
)
def test_whatever_prompts_make_up_a_pass_its_size_was_captured(each: int, tiled_from: int) -> None:
    """Of many sequences, or of some whose rows do not fill their groups."""
    rng, few, many = random.Random(each), 64 // each, 128 // each
    sizes = [size for size, scored in menu(9000, many, tiled_from, few) if not scored]
    for _ in range(300):
        count, rows = rng.choice((2, 3, 8, 40)), rng.randrange(20, MAX_ROWS * 3 // 4)
        ends = [0, *sorted(rng.sample(range(1, rows), min(count, rows) - 1)), rows]
        spans = [Span([1] * (b - a), chain_of(b - a), [*range(160)], 1500) for a, b in pairwise(ends)]
        tiled = prompt_rows_for(spans, few) >= tiled_from
        plan = plan_pass(spans, few, partial(_first_fitting, sizes), tiled_nodes=many, prompts=tiled)
        assert plan.size in sizes


def test_keys_and_values_of_8_bits_are_read_by_single_warps_where_there_are_enough_and_spread_for_prompts() -> None:
    def how(size: Size, dim: int = 128, in_bytes: bool = True) -> tuple[int, int, bool]:
        found = tiled_sharing(size, 4, 8, dim, 132, kept_in_bytes=in_bytes)
        return found.warps, found.rows, found.spread

    root, prompt = Size(1, 1, 256, tiled=True), Size(1024, 128, 256, tiled=True)
    assert how(root) == (1, 8, False)
    assert how(Size(4, 1, 256, tiled=True)) == (1, 16, False)
    assert how(Size(8, 8, 48, tiled=True)) == (1, 8, False), "as many programs, of eight texts"
    for size in (Size(1, 1, 96, tiled=True), Size(8, 1, 256, tiled=True)):
        assert how(size)[0] == 4, "few programs, or many queries"
    assert how(root, dim=256)[0] == how(root, dim=16)[0] == how(root, in_bytes=False)[0] == 4
    assert how(prompt)[2]
    assert not how(prompt, in_bytes=False)[2]


def must_agree(found: Tensor, wanted: Tensor) -> None:
    """To the last bit on a GPU; the interpreter's products add up in an order of their own."""
    if found.device.type == "cpu":
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    else:
        assert torch.equal(found, wanted)


def lone_nodes(lengths: tuple[int, ...], nodes: int, reach: int) -> tuple[Plan, Size]:
    """Trees of so many nodes, whose last two are leaves of the root; and a size that says which groups are lone."""
    rng, spans = random.Random(5), list[Span]()
    for i, length in enumerate(lengths):
        parents = (-1, *(rng.randrange(max(0, node - reach), node) for node in range(1, nodes - 2)), 0, 0)
        pages = [*range(1 + 20 * i, 2 + 20 * i + (length + nodes) // PAGE)]
        spans.append(Span([*range(nodes)], topology_of(parents), pages, length))
    plan, (shared,) = plan_pass(spans, 16), {-(-nodes // 16) if split_of(length) else 0 for length in lengths}
    exact = replace(plan.size, groups=(shared + nodes) * len(spans), trees=len(spans), lone=nodes)
    assert sum(map(bool, Run.of(plan.size, _ints(plan)).groups[:, 3])) == exact.groups
    return plan, exact


def random_numbers(dim: int, slots: int = 2 * SLOTS) -> tuple[Tensor, Tensor]:
    device = where_kernels_run()
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    queries = torch.randn(MAX_ROWS, HEADS, dim, device=device).to(dtype)
    return queries, torch.randn(2, KV_HEADS, slots, dim, device=device).to(dtype)


def _ints(plan: Plan) -> Tensor:
    return torch.cat((torch.arange(MAX_ROWS, dtype=torch.int32), torch.from_numpy(plan.ints)))


def span(rng: random.Random, length: int, nodes: int, first_page: int) -> Span:
    tokens, parents = random_tree(rng, 1, 50, nodes)
    pages = [*range(first_page, first_page + (length + len(tokens)) // PAGE + 1)]
    rng.shuffle(pages)
    return Span(tokens, topology_of(tuple(parents)), pages, length)


@dataclass(frozen=True)
class Extra:
    """What attention of some models has beside."""

    cap: float = 0.0
    sinks: Tensor | None = None  # [H]


NOTHING = Extra()


def attend(
    plan: Plan,
    queries: Tensor,
    kv: Tensor,
    window: int,
    how: int | Sharing,
    exact: Size | None = None,
    extra: Extra = NOTHING,
    scales: Tensor | None = None,
) -> Tensor:
    """`how` many programs share the splits of a group; `exact`: of which groups it is known that they are lone."""
    from forerun.models.cuda.steps.attention import Attention

    device, reach = queries.device, split_start(plan.size.splits) - MAX_ROWS - 1
    config = DecoderConfig.from_hf(
        {
            "model_type": "llama", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": queries.shape[-1],
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 1e4,
        }
    )  # fmt: skip
    config = replace(config, attention_softcap=extra.cap or None)
    attention = Attention(config, reach, device, room=0, pdl=False)
    for numbers in (attention.parts, attention.tops, attention.sums):
        numbers.fill_(math.nan)  # what nobody wrote shows
    run, out = Run.of(plan.size, _ints(plan).to(device)), torch.full_like(queries, math.nan)
    how = Sharing(how, walked=0, stages=1) if isinstance(how, int) else how
    attention.attend(replace(run, size=exact or plan.size), queries, kv, out, window, extra.sinks, how, scales)
    return out


def found_by_hand(spans: list[Span], queries: Tensor, kv: Tensor, window: int, extra: Extra = NOTHING) -> Tensor:
    """Softmax over what every node sees, in float32."""
    found, row = [], 0
    for span in spans:
        slots = slots_of(span.pages, 0, span.length + len(span.tokens))
        for path in span.shape.paths:
            seen = [*slots[: span.length], *(slots[span.length + node] for node in path)]
            seen = seen[-window:] if window else seen
            keys, values = kv[:, :, seen].float().repeat_interleave(HEADS // KV_HEADS, 1)
            scores = (keys @ queries[row].float()[:, :, None])[..., 0] * queries.shape[-1] ** -0.5
            if extra.cap:
                scores = extra.cap * torch.tanh(scores / extra.cap)
            if extra.sinks is not None:
                scores = torch.cat((scores, extra.sinks[:, None]), -1)
            law = torch.softmax(scores, -1)[:, : len(seen)]
            found.append((law[:, None] @ values)[:, 0])
            row += 1
    return torch.stack(found)
