"""Passes are timed where they run: on the device, without waiting, and around the pass alone."""

from __future__ import annotations

from time import perf_counter, sleep
from typing import Any

import pytest
import torch

from forerun.core.types import Needs, TreeBatch
from forerun.models.cuda.graphs import LAST, PassClock
from forerun.models.cuda.target import PromptPace
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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_host_is_one_pass_over_prompts_ahead(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[str]()

    class Event:
        def __init__(self) -> None:
            self.number = sum(line.startswith("record") for line in done)

        def record(self) -> None:
            done.append(f"record {self.number}")

        def synchronize(self) -> None:
            done.append(f"wait for {self.number}")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    pace = PromptPace(torch.device(device))
    for _ in range(3):
        pace.launched()
    waits = ["record 0", "record 1", "wait for 0", "record 2", "wait for 1"]
    assert done == (waits if device == "cuda" else [])


@pytest.mark.gpu
def test_a_prompt_keeps_its_pace() -> None:
    """Behind many passes over a prompt, all but the last are done when the call returns."""
    need_cuda()
    target = make_target("large", "cuda", torch.bfloat16)
    seq, ends = FakeSeq(0, [1 + i % 90 for i in range(1500)], max_length=1800), list[Any]()
    while target.cached_tokens(seq) < len(seq.tokens) - 1:
        ends.append(target._prompt_pace._last)
        target.prefill([seq], Needs(), 64)
        assert all(end is None or end.query() for end in ends)
    assert len(ends) > 10
