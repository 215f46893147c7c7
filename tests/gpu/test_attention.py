"""The attention kernels: what a node finds, and that it changes no bit how many programs share the splits.

Runs on a GPU, or on a CPU in Triton's interpreter: TRITON_INTERPRET=1 python -m pytest tests/gpu/test_attention.py
"""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import MAX_ROWS, Plan, Size, Span, plan_pass, programs_for
from forerun.models.paged import slots_of
from forerun.testing import random_tree
from forerun.topology import topology_of
from tests.gpu.tiny import where_kernels_run

HEADS, KV_HEADS, DIM, PAGE, SLOTS = 8, 2, 32, 64, 2048


def test_few_groups_have_a_program_for_every_split_and_many_have_four() -> None:
    assert programs_for(Size(1, 1, 256), 8, 132) == 256
    assert programs_for(Size(64, 64, 8), 8, 132) == 8  # a tree of 59 nodes
    assert programs_for(Size(64, 64, 32), 8, 132) == 8
    assert programs_for(Size(256, 512, 8), 8, 132) == 4
    assert programs_for(Size(4, 512, 1), 8, 132) == 1  # never more than there are splits
    assert programs_for(Size(64, 64, 32, trees=1, lone=60), 8, 132) == 32  # lone nodes have one each
    assert programs_for(Size(64, 64, 8, trees=1, lone=64), 8, 132) == 8


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 150])
def test_what_is_found_does_not_depend_on_the_number_of_programs(window: int) -> None:
    device, rng = where_kernels_run(), random.Random(3)
    spans = [
        _span(rng, length, nodes, first) for length, nodes, first in ((430, 13, 1), (100, 1, 9), (63, 5, 12))
    ]
    plan = plan_pass(spans, 64 // (HEADS // KV_HEADS))
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    queries = torch.randn(MAX_ROWS, HEADS, DIM, device=device).to(dtype)
    kv = torch.randn(2, KV_HEADS, SLOTS, DIM, device=device).to(dtype)
    alone = _attend(plan, queries, kv, window, programs=plan.size.splits)
    wanted = _by_hand(spans, queries, kv, window)
    torch.testing.assert_close(alone[: plan.rows].float(), wanted, atol=2e-2, rtol=2e-2)
    for programs in (1, 2, 3):
        assert torch.equal(_attend(plan, queries, kv, window, programs)[: plan.rows], alone[: plan.rows])


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(430,), (430, 255, 1100)])  # 255: paths cross from one split to the next
def test_lone_nodes_with_one_program_each_find_the_same(lengths: tuple[int, ...]) -> None:
    device, rng = where_kernels_run(), random.Random(5)
    nodes, spans = 21, list[Span]()
    for i, length in enumerate(lengths):
        parents = (-1, *(rng.randrange(max(0, node - 5), node) for node in range(1, nodes)))
        pages = [*range(1 + 20 * i, 2 + 20 * i + (length + nodes) // PAGE)]
        spans.append(Span([*range(nodes)], topology_of(parents), pages, length))
    plan, each = plan_pass(spans, 16), 2 + nodes  # two groups share what was committed
    wide = plan.size
    exact = replace(wide, groups=each * len(spans), trees=len(spans), lone=nodes)
    assert sum(map(bool, Run.of(wide, _ints(plan)).groups[:, 3])) == exact.groups
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    queries = torch.randn(MAX_ROWS, HEADS, DIM, device=device).to(dtype)
    kv = torch.randn(2, KV_HEADS, 2 * SLOTS, DIM, device=device).to(dtype)
    wanted = _attend(plan, queries, kv, 0, programs=4)
    for programs in (1, 3, wide.splits):
        found = _attend(plan, queries, kv, 0, programs, exact)
        assert torch.equal(found[: plan.rows], wanted[: plan.rows])


def _ints(plan: Plan) -> Tensor:
    return torch.cat((torch.arange(MAX_ROWS, dtype=torch.int32), torch.from_numpy(plan.ints)))


def _span(rng: random.Random, length: int, nodes: int, first_page: int) -> Span:
    tokens, parents = random_tree(rng, 1, 50, nodes)
    pages = [*range(first_page, first_page + (length + len(tokens)) // PAGE + 1)]
    rng.shuffle(pages)
    return Span(tokens, topology_of(tuple(parents)), pages, length)


def _attend(
    plan: Plan, queries: Tensor, kv: Tensor, window: int, programs: int, exact: Size | None = None
) -> Tensor:
    """`exact`: of which groups it is known that they are lone."""
    from forerun.models.cuda import kernels_attention as kernels

    size, device, stride = exact or plan.size, queries.device, MAX_ROWS * HEADS
    ints = _ints(plan).to(device)
    run = Run.of(plan.size, ints)
    parts = torch.full((size.splits * stride, DIM), math.nan, device=device)  # what nobody wrote shows
    tops, sums = torch.full((2, size.splits * stride), math.nan, device=device)
    out = torch.empty_like(queries)
    kernels.attend[(size.shared * programs + size.trees * size.lone, KV_HEADS)](
        queries, kv[0], kv[1], ints, run.groups, run.positions, parts, tops, sums, DIM**-0.5 / math.log(2),
        kv.stride(1), stride, size.groups // size.trees, size.lone, programs,
        H=HEADS, HKV=KV_HEADS, EACH=HEADS // KV_HEADS, D=DIM, WINDOW=window, PDL=False,
    )  # fmt: skip
    kernels.combine[(size.rows, HEADS // 4)](
        out, run.positions, parts, tops, sums, stride, H=HEADS, D=DIM, HEADS=4, WINDOW=window, STEP=8,
        ROOM=0, PDL=False,
    )  # fmt: skip
    return out


def _by_hand(spans: list[Span], queries: Tensor, kv: Tensor, window: int) -> Tensor:
    """Softmax over what every node sees, in float32."""
    found, row = [], 0
    for span in spans:
        slots = slots_of(span.pages, 0, span.length + len(span.tokens))
        for path in span.shape.paths:
            seen = [*slots[: span.length], *(slots[span.length + node] for node in path)]
            seen = seen[-window:] if window else seen
            keys, values = kv[:, :, seen].float().repeat_interleave(HEADS // KV_HEADS, 1)
            law = torch.softmax((keys @ queries[row].float()[:, :, None])[..., 0] * DIM**-0.5, -1)
            found.append((law[:, None] @ values)[:, 0])
            row += 1
    return torch.stack(found)
