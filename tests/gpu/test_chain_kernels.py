"""The kernels between the passes of a draft model's chain do what their torch twins do.

They run on a GPU, or on a CPU in Triton's interpreter:
TRITON_INTERPRET=1 python -m pytest tests/gpu/test_chain_kernels.py
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from forerun.core.noise import mixed_seed
from forerun.core.types import Needs
from forerun.drafters.device.model_graphs import PADDING, ChainGraphs, Lane
from forerun.models.cuda.device_trees import LastRound
from forerun.models.cuda.target import CudaDecoder
from forerun.models.pages import PAGE
from forerun.testing import FakeSeq
from tests.gpu.test_following import dtype_on
from tests.gpu.tiny import VOCAB, fused_on_a_cpu, make_target, where_kernels_run

pytestmark = pytest.mark.gpu
LENGTHS, DEPTH = (70, 3, 125, 64), 4


def _lanes(model: CudaDecoder, rng: random.Random) -> list[Lane]:
    """With one unread token, with two, behind a round that was not read, and padding."""
    lanes = []
    for i, length in enumerate(LENGTHS):
        seq = FakeSeq(i, [rng.randrange(VOCAB) for _ in range(length + 2)], max_length=400)
        model.prefill([seq], Needs())
        pages = model.kv.grow(seq.id, length + 40).pages
        unread = seq.tokens[-2:] if i == 1 else seq.tokens[-1:]
        behind = (2, DEPTH) if i == 2 else (-1, 0)
        lanes.append(Lane(unread, pages, length + 2 - len(unread), *behind))
    return [*lanes, PADDING, PADDING, PADDING, PADDING]


def _drafted(fused: bool, noise: bool, accepted: int, is_target: bool = False) -> tuple[Tensor, Tensor]:
    """Trees, and the keys and values that drafting them wrote."""
    device = where_kernels_run()
    model, rng = make_target("llama", device.type, dtype_on(device.type)), random.Random(7)
    last = LastRound(device)
    last.accepted[2] = accepted
    last.tokens[2, : DEPTH + 1] = torch.tensor([9, 8, VOCAB + 7 if accepted < 2 else 7, 6, 5], device=device)
    last.tokens[2, accepted] = VOCAB + 50 if accepted == 1 else 11
    graphs = ChainGraphs(model, VOCAB - 3, last, fused, is_target)
    graphs.noise.fused = True  # the twin's too, as on a GPU: both add the same numbers
    lanes = _lanes(model, rng)
    if is_target:  # the root alone is unread, and the first pages are left out
        lanes = [lane._replace(tokens=lane.tokens[-1:], first=lane.root_at) for lane in lanes]
        lanes[2] = lanes[2]._replace(pages=lanes[2].pages[1:], first=lanes[2].first - PAGE, skipped=PAGE)
    model.kv.data.zero_()
    settings = [(mixed_seed(5), 0.8), None, (mixed_seed(-1), 1.3), (mixed_seed(9), 1.0)] if noise else []
    graphs.draft(lanes, DEPTH, settings)
    return graphs.trees[:, : len(lanes) * (DEPTH + 1)].clone(), model.kv.data.clone()


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("accepted", [0, 1, DEPTH])
@pytest.mark.parametrize("is_target", [False, True])
def test_chains_of_kernels_are_those_of_torch(is_target: bool, noise: bool, accepted: int) -> None:
    found, kept = _drafted(True, noise, accepted, is_target)
    wanted, written = _drafted(False, noise, accepted, is_target)
    assert torch.equal(found, wanted)
    assert torch.equal(kept, written)
    assert written.any()
    assert int(found[0, 2 * (DEPTH + 1)]) == (VOCAB + 50 if accepted == 1 else 11)


def test_noise_changes_what_is_drafted() -> None:
    plain, noisy = (_drafted(True, noise, 0)[0].view(2, -1, DEPTH + 1) for noise in (False, True))
    assert torch.equal(plain[:, 1], noisy[:, 1])  # the one that has none
    assert not torch.equal(plain[:, 0], noisy[:, 0])


def test_levels_of_kernels_are_rotated_behind_pages_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole levels of the target itself, whose chains are those of the plain steps; and are not without rotations."""
    device, chains = where_kernels_run(), list[list[int]]()
    for fused, skipped in ((False, 2 * PAGE), (True, 2 * PAGE), (True, 0)):
        model = make_target("wide-heads", device.type, dtype_on(device.type))
        seq = FakeSeq(0, [7 * i % 190 for i in range(4 * PAGE + 9)], max_length=400)
        model.prefill([seq], Needs())
        pages, length = model.kv.grow(0, 5 * PAGE).pages, len(seq.tokens) - 1
        if fused and device.type == "cpu":
            fused_on_a_cpu(model, monkeypatch)
        graphs = ChainGraphs(model, VOCAB, LastRound(device), fused, is_target=True)
        lane = Lane(seq.tokens[-1:], pages[:1] + pages[3:], length - 2 * PAGE, skipped=skipped)
        graphs.draft([lane], DEPTH)
        chains.append(graphs.trees[0, 1 : DEPTH + 1].tolist())
    assert chains[0] == chains[1] != chains[2]
