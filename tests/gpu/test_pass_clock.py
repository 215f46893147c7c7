"""Passes are timed where they run: on the device, without waiting, and around the pass alone."""

from __future__ import annotations

from time import perf_counter, sleep
from typing import Any

import pytest
import torch

from forerun.bench.gpu.host_rounds import make, write
from forerun.drafters.eagle.cuda.draft_graphs import DeviceDraft
from forerun.drafters.eagle.cuda.menu import DraftMenu
from forerun.models.cuda.pass_clock import LAST, PassClock
from forerun.testing import FakeSeq
from forerun.types import Needs, TreeBatch
from tests.gpu.tiny import DEVICES, make_target, need_cuda


@pytest.mark.parametrize("device", DEVICES)
def test_scores_say_what_their_pass_took(device: str) -> None:
    need_cuda(device)
    target = make_target("llama", device)
    seq = FakeSeq(0, list(range(1, 40)), max_length=200)
    started = perf_counter()
    _, read = target.prefill([seq], Needs())
    scores = target.score([seq], TreeBatch.chains([[seq.tokens[-1], 5, 6]]), Needs())
    assert scores.logits is not None
    float(scores.logits[-1, -1])
    whole = perf_counter() - started
    assert read.seconds is not None
    assert scores.seconds is not None
    first, second = read.seconds(), scores.seconds()
    assert first is not None
    assert second is not None
    assert first > 0.0
    assert second > 0.0
    assert first + second <= whole


def test_host_work_before_a_pass_is_not_the_pass() -> None:
    clock = PassClock(torch.device("cpu"))
    sleep(0.02)
    clock.start()
    clock.stop()
    clock.start()
    clock.stop()
    taken = clock.taken()
    seconds = taken()
    assert seconds is not None
    assert seconds < 0.02
    assert clock.taken()() is None, "no pass since"
    for _ in range(LAST):
        clock.start()
        clock.stop()
        clock.taken()
    assert taken() is None, "its events were used again"


def test_a_draft_says_what_it_took_and_not_what_it_took_when_it_was_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, batch = list[float](), DeviceDraft._batch

    def noted(draft: DeviceDraft, *given: Any) -> TreeBatch:
        trees = batch(draft, *given)
        said.append(trees.drafting())
        return trees

    monkeypatch.setattr(DeviceDraft, "_batch", noted)
    monkeypatch.setattr(DraftMenu, "drafting", lambda menu, form, sequences: 1e3)
    write(make("chain", 3), 3, 30)
    assert len(said) > 5
    assert all(0.0 < one < 1e3 for one in said)
