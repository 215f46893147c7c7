"""Captured drafts, with captures emulated: the same drafts, and what a capture takes is not what a draft takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from forerun.core.params import SamplingParams
from forerun.core.types import Budget
from forerun.drafters.heads.base import UNMEASURED, Meter
from forerun.drafters.heads.block import FEWEST, READ_AT_ONCE, RESERVED, BlockRunner, DFlashDrafter, GraphRunner
from forerun.drafters.heads.block_config import BlockKind
from forerun.drafters.heads.block_head import BlockHead
from forerun.drafters.heads.medusa import WIDTHS, Family, HeadSet, HydraDrafter, MedusaDrafter
from forerun.models.cuda import graphs as captured
from forerun.testing import FakeSeq, TableLM
from tests.drafters.rounds import as_lists, observe_prompts
from tests.drafters.tiny_heads import block_config, block_weights, heads_config, heads_weights

VOCAB = 12
CAPTURE, REPLAY = 0.5, 0.002  # seconds that they take on the emulated device
BUDGETS = [Budget(4, 4), Budget(9, 3, 2), Budget(20, 4, 4), Budget(1, 1), Budget(30, 2, 8)]


class EmulatedGraph:
    """Does the same work again, from the same inputs."""

    def __init__(self, work: Callable[[], None], clock: list[float]) -> None:
        self._work, self._clock = work, clock
        work()
        clock[0] += CAPTURE

    def replay(self) -> None:
        self._clock[0] += REPLAY
        self._work()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]

    monkeypatch.setattr(captured, "capture", lambda work, *_: EmulatedGraph(work, now))
    for room in ("drafter", "block"):
        monkeypatch.setattr(f"forerun.drafters.heads.{room}.Meter", lambda _: Meter(lambda: now[0]))
    return now


def last_row_drafter(family: Family, own: bool = False) -> MedusaDrafter | HydraDrafter:
    config = heads_config(family, VOCAB)
    heads = HeadSet(config, heads_weights(config, own=own), None)
    return MedusaDrafter(heads) if family == "medusa" else HydraDrafter(heads)


def block_drafter(kind: BlockKind = "dflash") -> DFlashDrafter:
    config = block_config(kind, VOCAB)
    drafter = DFlashDrafter(BlockHead(config, block_weights(config), None))
    drafter._runner = GraphRunner(drafter.head)
    return drafter


@pytest.mark.parametrize(("family", "own"), [("medusa", False), ("medusa", True), ("hydra", False)])
def test_captured_heads_on_the_last_row_draft_the_same(family: Family, own: bool, clock: list[float]) -> None:
    """Alone and in a batch, from other rows than those at the capture."""
    ours, theirs = last_row_drafter(family, own), last_row_drafter(family, own)
    ours.capture(ours.usual_budgets())
    at_load = ours.captures
    seqs = [FakeSeq(b, [1 + b, 2, 3 + 2 * b]) for b in range(3)]
    for drafter in (ours, theirs):
        observe_prompts(drafter, TableLM(VOCAB), seqs)
    seen = set()
    for some in (seqs[:1], seqs[1:2], seqs):
        for budget in BUDGETS:
            grown, wanted = (as_lists(one.propose(some, [budget] * len(some))) for one in (ours, theirs))
            assert grown == wanted
            seen |= {tuple(tokens) for tokens, _ in grown}
        assert (ours.captures == at_load) == (len(some) == 1), "all usual drafts of one are captured at load"
    assert len(seen) > len(BUDGETS), "sequences must differ in their drafts"


@pytest.mark.parametrize("shares_noise", [True, False])
@pytest.mark.parametrize("family", ["medusa", "hydra"])
def test_drafts_under_noise_are_captured_and_others_above_zero_are_not(
    family: Family, shares_noise: bool, clock: list[float]
) -> None:
    """Alone, and beside a greedy sequence; noise differs from seed to seed and from position to position."""
    ours, theirs = last_row_drafter(family), last_row_drafter(family)
    ours.capture(ours.usual_budgets())
    hot = SamplingParams(temperature=4.0)
    seqs = [FakeSeq(b, [1, 2, 3], params=hot, seed=5 + b, shares_noise=shares_noise) for b in range(6)]
    seqs.append(FakeSeq(6, [1, 2, 3], params=SamplingParams(temperature=0.0)))
    for drafter in (ours, theirs):
        observe_prompts(drafter, TableLM(VOCAB), seqs)
    for some in (seqs[:1], seqs):
        at_first = clock[0]
        grown, wanted = (as_lists(one.propose(some, [Budget(4, 4)] * len(some))) for one in (ours, theirs))
        assert grown == wanted
        assert (clock[0] > at_first) == shares_noise
    assert (len({tuple(tokens) for tokens, _ in grown}) > 2) == shares_noise


@pytest.mark.parametrize("family", ["medusa", "hydra"])
def test_what_captures_take_is_not_what_drafts_take(family: Family, clock: list[float]) -> None:
    drafter, target = last_row_drafter(family), TableLM(VOCAB)
    drafter.capture(drafter.usual_budgets())
    assert clock[0] > CAPTURE * drafter.captures > 0
    seqs = [FakeSeq(b, [1 + b, 2, 3]) for b in range(3)]
    observe_prompts(drafter, target, seqs)
    offered = drafter.offer(seqs[0]).until(4)
    assert 0.9 * REPLAY < offered < 4.1 * REPLAY
    drafter.propose(seqs, [Budget(8, 4, 2)] * 3)  # another number of sequences: captured in mid-text
    assert drafter.offer(seqs[0]).until(4) == offered


def test_a_block_drafter_is_not_judged_by_its_captures(clock: list[float]) -> None:
    """A new number of sequences, of slots, and a cache that had to grow: none of them makes drafts seem slow."""
    drafter, target = block_drafter(), TableLM(VOCAB)
    assert drafter.offer(FakeSeq(0, [1, 2])).until(1) >= UNMEASURED
    drafter.warm_up()
    captures = drafter._runner.captures
    assert captures == 2 * (RESERVED // FEWEST).bit_length() + len(READ_AT_ONCE)  # with noise, and without
    assert clock[0] > CAPTURE * captures
    assert drafter._reading <= REPLAY, "nor is its reading"
    seqs = [FakeSeq(b, [b + i % 5 for i in range(n)]) for b, n in enumerate((9, FEWEST, RESERVED + 9))]
    observe_prompts(drafter, target, seqs)
    for some, more in ((seqs[:1], 0), (seqs[1:2], 0), (seqs[:2], 1), (seqs[2:], 1), (seqs[:1], 1)):
        before = drafter._runner.captures
        with torch.inference_mode():  # whatever mode the caller is in
            drafter.propose(some, [Budget(5, 5)] * len(some))
        assert drafter._runner.captures == before + more
        assert REPLAY <= drafter._first.seconds <= 2 * REPLAY  # a graph that reads rows, and one that drafts
    assert drafter._reading == 0.0, "on this device reading takes no time"


@pytest.mark.parametrize("shares_noise", [True, False])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_block_drafts_under_noise_are_captured_and_others_above_zero_are_not(
    kind: BlockKind, shares_noise: bool, clock: list[float]
) -> None:
    """Alone, where three rows are padded to four, and beside a greedy sequence; many rows are read by no graph."""
    ours, theirs = block_drafter(kind), block_drafter(kind)
    theirs._runner = BlockRunner(theirs.head)
    ours.warm_up()
    at_load, hot = ours._runner.captures, SamplingParams(temperature=4.0)
    seqs = [FakeSeq(b, [1, 2, 3, 1], params=hot, seed=5 + b, shares_noise=shares_noise) for b in range(6)]
    seqs.append(FakeSeq(6, [1 + i % 7 for i in range(140)], params=SamplingParams(temperature=0.0)))
    seen = set()
    for some in (seqs[:1], seqs[:1], seqs):
        for drafter in (ours, theirs):
            observe_prompts(drafter, TableLM(VOCAB), some)
        at_first = clock[0]
        grown, wanted = (as_lists(one.propose(some, [Budget(4, 4)] * len(some))) for one in (ours, theirs))
        assert grown == wanted
        assert (clock[0] > at_first + 1.5 * REPLAY) == shares_noise
        assert len(some) > 1 or ours._runner.captures == at_load
        seen |= {tuple(tokens) for tokens, _ in grown}
        for seq in some:
            ours.forget(seq)
            theirs.forget(seq)
    assert (len(seen) > 3) == shares_noise


def test_block_drafts_are_captured_whatever_mode_texts_are_written_in(clock: list[float]) -> None:
    with torch.inference_mode():
        drafter = block_drafter()
        drafter.warm_up()
        seqs = [FakeSeq(0, [i % 5 for i in range(RESERVED + 9)]), FakeSeq(1, [1, 2, 3])]
        observe_prompts(drafter, TableLM(VOCAB), seqs)
        before = drafter._runner.captures
        drafter.propose(seqs[:1], [Budget(5, 5)])  # the cache grows
        drafter.propose(seqs[1:], [Budget(5, 5)])  # a graph that is captured anew reads into it
    assert drafter._runner.captures == before + 3


@pytest.mark.parametrize("family", ["medusa", "hydra"])
def test_where_nothing_can_be_captured_drafts_go_on_without(
    family: Family, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(captured, "capture", refuse)
    ours, theirs, seq = last_row_drafter(family), last_row_drafter(family), FakeSeq(0, [1, 2, 3])
    ours.capture(ours.usual_budgets())
    assert "operation by operation: RuntimeError: no memory" in caplog.text
    assert not ours._sequences
    for drafter in (ours, theirs):
        observe_prompts(drafter, TableLM(VOCAB), [seq])
    assert as_lists(ours.propose([seq], [BUDGETS[2]])) == as_lists(theirs.propose([seq], [BUDGETS[2]]))
    block = block_drafter()
    caplog.clear()
    block.warm_up()
    assert "no memory" in caplog.text
    observe_prompts(block, TableLM(VOCAB), [seq])
    assert len(as_lists(block.propose([seq], [Budget(5, 5)]))[0][0]) == 6


def test_widths_are_what_kernels_take() -> None:
    assert max(WIDTHS) <= 16
    assert min(WIDTHS) == 1


def test_graphs_keep_their_inputs_apart(clock: list[float]) -> None:
    calls = captured.Replays(torch.device("cpu"), capture=True)
    double = lambda rows: (2 * rows,)  # noqa: E731
    with torch.inference_mode():  # in mid-text
        assert calls.call(1, double, torch.tensor([1.0]))[0].tolist() == [2.0]
    assert calls.call(2, double, torch.tensor([1.0, 5.0]))[0].tolist() == [2.0, 10.0]
    assert calls.call(1, double, torch.tensor([4.0]))[0].tolist() == [8.0]
    assert calls.captured == 2
    calls.clear()
    calls.call(1, double, torch.tensor([4.0]))
    assert calls.captured == 3
