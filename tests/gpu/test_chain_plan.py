"""Drafts behind unread rounds are planned as those behind the same rounds once they were read."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from forerun.drafters.device.model_graphs import PADDING, Lane, complete, plan_chain
from forerun.models.cuda.device_trees import LastRound
from forerun.models.cuda.plan import MAX_ROWS

DEPTH, VOCAB = 4, 50
CPU = torch.device("cpu")


def _completed(lanes: list[Lane], last: LastRound, unread: int = 2) -> tuple[Tensor, Tensor]:
    """The roots, and all integers that passes read."""
    form, sent = plan_chain([*lanes, PADDING], DEPTH, 300, unread)
    ints = torch.full((MAX_ROWS + form.sent_at + len(sent),), -9, dtype=torch.int32)
    ints[MAX_ROWS + form.sent_at :] = torch.from_numpy(sent)
    roots = complete(ints, form, last, VOCAB)
    return roots, ints[MAX_ROWS : MAX_ROWS + form.sent_at]


@pytest.mark.parametrize("accepted", [[0, 2, 3], [DEPTH, 1, DEPTH]])
@pytest.mark.parametrize("unread", [1, 2])
def test_the_device_knows_what_the_host_would_have_read(unread: int, accepted: list[int]) -> None:
    rng, last = random.Random(sum(accepted)), LastRound(CPU)
    behind, read = list[Lane](), list[Lane]()
    for b, count in enumerate(accepted):
        tree = len(accepted) - 1 - b  # the order changed since
        path = [rng.randrange(VOCAB) for _ in range(count + 1)]  # and the bonus
        last.accepted[tree] = count
        last.tokens[tree, : count + 1] = torch.tensor(path)
        root_at, pages = 61 + b, [7 + b, 3, 12]  # the next page starts at 64
        behind.append(Lane((5,), pages, root_at, tree, DEPTH))
        fresh = path[-2:] if count == DEPTH and unread == 2 else path[-1:]
        read.append(Lane(fresh, pages, root_at + count + 2 - len(fresh)))
    roots, found = _completed(behind, last, unread)
    wanted_roots, wanted = _completed(read, last, unread)
    assert roots.tolist() == wanted_roots.tolist()
    assert torch.equal(found, wanted)


def test_a_root_beyond_the_vocabulary_stays_the_root_and_is_read_as_another_token() -> None:
    last = LastRound(CPU)
    last.tokens[0, 0] = VOCAB + 3
    roots, ints = _completed([Lane((5,), (1,), 9, 0, DEPTH)], last)
    assert roots[0] == VOCAB + 3
    assert ints[0] == VOCAB - 1
