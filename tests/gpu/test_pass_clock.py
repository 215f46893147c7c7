"""Passes are timed where they run: on the device, without waiting, and around the pass alone."""

from __future__ import annotations

from time import perf_counter, sleep

import pytest
import torch

from forerun.core.types import Needs, TreeBatch
from forerun.models.cuda.graphs import LAST, PassClock
from forerun.testing import FakeSeq
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
