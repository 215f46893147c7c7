"""The attention kernels: what a node finds, and that it changes no bit how many programs share the splits.

Runs on a GPU, or on a CPU in Triton's interpreter: TRITON_INTERPRET=1 python -m pytest tests/gpu/test_attention.py
"""

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from forerun.core.tree import chain_of, topology_of
from forerun.models.config import DecoderConfig
from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import MAX_ROWS, Plan, Size, Span, plan_pass, split_start
from forerun.models.cuda.steps.tiles import Sharing, programs_for, sharing_for
from forerun.models.paged import slots_of
from forerun.testing import random_tree
from tests.gpu.tiny import where_kernels_run

HEADS, KV_HEADS, PAGE, SLOTS = 8, 2, 64, 2048


def test_few_groups_have_a_program_for_every_split_and_many_have_four() -> None:
    assert programs_for(Size(1, 1, 256), 8, 132) == 256
    assert programs_for(Size(64, 64, 8), 8, 132) == 8
    assert programs_for(Size(64, 64, 32), 8, 132) == 8
    assert programs_for(Size(256, 512, 8), 8, 132) == 4
    assert programs_for(Size(4, 512, 1), 8, 132) == 1  # never more than there are splits
    assert programs_for(Size(64, 66, 32, branches=True), 8, 132) == 32  # single nodes have none


@pytest.mark.parametrize(
    ("size", "rows"),
    [(Size(1, 1, 32), 16), (Size(1, 1, 8), 64), (Size(16, 1, 32), 64), (Size(64, 2, 32), 128),
     (Size(64, 66, 96, True), 128), (Size(64, 64, 8), 64), (Size(1024, 128, 256), 128), (Size(16, 18, 32, True), 64)],
)  # fmt: skip
def test_programs_have_as_many_rows_as_groups_have_queries(size: Size, rows: int) -> None:
    assert sharing_for(size, 4, 8, 128, 132).rows == rows
    assert sharing_for(size, 4, 8, 256, 132).rows == min(rows, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 150])
def test_what_is_found_does_not_depend_on_the_number_of_programs(window: int) -> None:
    rng = random.Random(3)
    spans = [_span(rng, length, nodes, first) for length, nodes, first in ((430, 13, 1), (100, 1, 9), (63, 5, 12))]
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
    spans = [_span(rng, 150, 6, 1), Span([1, 2, 3], chain_of(3), [9, 10, 11], 129)]
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
    _must_agree(attend(plan, queries, kv, window, walked, extra=extra)[: plan.rows], found)


TREES = [(430,), (255, 447, 1100), (3, 15, 63, 112), (128, 1015), (64, 4095)]
# paths cross from one block, tile or split to the next, or begin with one


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("lengths", TREES)
def test_nodes_of_trees_find_what_they_find_alone(lengths: tuple[int, ...], window: int) -> None:
    """In groups of any size, beside other trees, and as the last node of a chain, alone in its pass."""
    rng, spans = random.Random(5), list[Span]()
    for i, length in enumerate(lengths):
        nodes = 21 if i == 0 else 9
        parents = (-1, *(rng.randrange(max(0, node - 5), node) for node in range(1, nodes - 2)), 0, 0)
        pages = [*range(1 + 70 * i, 2 + 70 * i + (length + nodes) // PAGE)]
        spans.append(Span([*range(nodes)], topology_of(parents), pages, length))
    queries, kv = random_numbers(32, slots=300 * PAGE)
    plan = plan_pass(spans, 32)
    found = attend(plan, queries, kv, window, how=4)[: plan.rows]
    torch.testing.assert_close(found.float(), found_by_hand(spans, queries, kv, window), atol=2e-2, rtol=2e-2)
    for nodes, how in ((32, SMALL), (2, SMALL), (8, LARGE), (32, LARGE)):
        _must_agree(attend(plan_pass(spans, nodes), queries, kv, window, how)[: plan.rows], found)
    for row in (0, 5, 18, 20):
        _must_agree(_found_alone(spans[0], row, queries, kv, window), found[row])


@pytest.mark.gpu
def test_a_tree_deeper_than_a_tile_finds_what_its_nodes_find_alone() -> None:
    parents = (-1, *range(139), 3, 0)
    span = Span([*range(142)], topology_of(parents), [*range(1, 9)], 250)
    queries, kv = random_numbers(32)
    plan = plan_pass([span], 32)
    found = attend(plan, queries, kv, 0, how=LARGE)
    torch.testing.assert_close(found[:142].float(), found_by_hand([span], queries, kv, 0), atol=2e-2, rtol=2e-2)
    for row in (70, 139, 140, 141):
        _must_agree(_found_alone(span, row, queries, kv, 0), found[row])


@pytest.mark.gpu
def test_another_order_of_sums_would_show() -> None:
    """A node of a tree whose committed tokens were one fewer has other splits and tiles: other bits."""
    queries, kv = random_numbers(32)
    kv[:, :, :PAGE] = kv[:, :, 1].unsqueeze(2)  # any position holds the same
    found = [attend(plan_pass([Span([1], chain_of(1), [0] * 12, length)], 32), queries, kv, 0, how=4)[0]
             for length in (640, 639)]  # fmt: skip
    torch.testing.assert_close(found[0], found[1], atol=2e-2, rtol=2e-2)
    spans = [Span([1, 2, 3], topology_of((-1, 0, 0)), [*range(1, 12)], 430)]
    plan = plan_pass(spans, 32)
    wanted = attend(plan, queries, kv, 0, how=4)[:3]
    assert not torch.equal(wanted.float(), found_by_hand(spans, queries, kv, 0).to(wanted.dtype).float())


SMALL = Sharing(3, walked=0, stages=1, rows=16)
LARGE = Sharing(2, walked=0, stages=2, rows=128, warps=8, narrow=True)


def _found_alone(span: Span, node: int, queries: Tensor, kv: Tensor, window: int) -> Tensor:
    """What a node finds behind its ancestors as behind committed tokens, in a pass of its own."""
    slots = slots_of(span.pages, 0, span.length + len(span.tokens))
    path = span.shape.paths[node]
    length = span.length + len(path) - 1
    seen = [*slots[: span.length], *(slots[span.length + at] for at in path)]
    copied = kv.clone()
    copied[:, :, PAGE : PAGE + len(seen)] = kv[:, :, seen]  # from page 1 on, in a row
    alone = Span([0], chain_of(1), [*range(1, 2 + length // PAGE)], length)
    return attend(plan_pass([alone], 1), queries[node:], copied, window, how=Sharing(2, 0, 1, rows=16))[0]


def _must_agree(found: Tensor, wanted: Tensor) -> None:
    """To the last bit on a GPU; the interpreter's products add up in an order of their own."""
    if found.device.type == "cpu":
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    else:
        assert torch.equal(found, wanted)


def random_numbers(dim: int, slots: int = 2 * SLOTS) -> tuple[Tensor, Tensor]:
    device = where_kernels_run()
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    queries = torch.randn(MAX_ROWS, HEADS, dim, device=device).to(dtype)
    return queries, torch.randn(2, KV_HEADS, slots, dim, device=device).to(dtype)


def _ints(plan: Plan) -> Tensor:
    return torch.cat((torch.arange(MAX_ROWS, dtype=torch.int32), torch.from_numpy(plan.ints)))


def _span(rng: random.Random, length: int, nodes: int, first_page: int) -> Span:
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


def attend(plan: Plan, queries: Tensor, kv: Tensor, window: int, how: int | Sharing, extra: Extra = NOTHING) -> Tensor:
    """`how` many programs share the splits of a group."""
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
    attention.attend(run, queries, kv, out, window, extra.sinks, how)
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
