"""The kernels between two passes of a drafted round do what their torch twins do, to the last integer.

They run on a GPU, or on a CPU in Triton's interpreter: TRITON_INTERPRET=1 python -m pytest tests/gpu/test_draft_kernels.py
"""

import random

import numpy as np
import pytest
import torch

from forerun.drafters.eagle.cuda.draft_completion import complete
from forerun.drafters.eagle.cuda.draft_plan import BUCKETS, Lane, plan_draft
from forerun.models.cuda.last_round import STEPS, LastRound
from forerun.models.cuda.plan import MAX_ROWS
from forerun.offers import Form
from tests.gpu.tiny import where_kernels_run

SHAPES = [Form(1, 1, 1), Form(5, 5, 1), Form(16, 16, 1), Form(8, 3, 3), Form(59, 6, 10), Form(20, 2, 17)]


def _lanes(rng: random.Random, count: int, pads: int, behind: int) -> list[Lane]:
    """Sequences that were read, some that were not, and padding, which is one sequence of one row."""
    found = []
    for b in range(count - pads):
        first = rng.choice([0, 1, 61, 127, 1020, 4090, rng.randrange(6000)])
        pages = np.array(rng.sample(range(1, 1 << 20), (first + 400) // 64), dtype=np.int32)
        tokens = [rng.randrange(1 << 17) for _ in range(rng.randint(1, behind))]
        follows = rng.choice([-1, rng.randrange(MAX_ROWS // behind)])
        if follows >= 0:
            tokens = []
        found.append(Lane(rng.randrange(1 << 17), tokens, pages, first, 24 * b, follows))
    padding = Lane(0, (0,), np.array([3, 4, 5, 6, 7], dtype=np.int32), 0, 24 * 128)
    return [*found, *[padding] * pads]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("count", "pads"), [(1, 0), (2, 1), (4, 0), (12, 3)])
@pytest.mark.parametrize("group_nodes", [4, 16])
def test_the_plan_of_a_draft(shape: Form, count: int, pads: int, group_nodes: int) -> None:
    device = where_kernels_run()
    assert count in BUCKETS
    rng = random.Random(f"{shape} {count}")
    last = LastRound(device)
    last.accepted.copy_(torch.tensor([rng.randrange(shape.depth + 1) for _ in range(MAX_ROWS)]))
    last.tokens.copy_(torch.tensor([rng.randrange(1 << 17) for _ in range(MAX_ROWS * STEPS)]).view(-1, STEPS))
    form, sent = plan_draft(_lanes(rng, count, pads, shape.depth + 1), shape, group_nodes)
    at = MAX_ROWS + form.sent_at(group_nodes)
    start = torch.zeros(at + len(sent), dtype=torch.int32, device=device)
    start[at:] = torch.from_numpy(sent)
    plain, by_kernel = start.clone(), start.clone()
    for _ in range(2):  # a replay: nothing may add up
        complete(plain, form, group_nodes, last, fused=False)
        complete(by_kernel, form, group_nodes, last, fused=True)
        differs = (plain != by_kernel).nonzero().flatten().tolist()
        assert not differs, differs[:10]
    last.accepted.add_(1).remainder_(shape.depth + 1)
    complete(by_kernel, form, group_nodes, last, fused=True)
    follows = sent[5 * count : 6 * count]
    assert torch.equal(plain, by_kernel) == bool((follows < 0).all()), "another path is another plan"
