"""Pages on the GPU: bits do not depend on where pages lie, nor on what of a text was found in the prefix cache.

On the card: python -m pytest -q tests/gpu/test_pages.py tests/gpu/test_bits.py tests/gpu/test_grown.py
"""

from __future__ import annotations

import random
from hashlib import sha256
from typing import Any

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.engine.engine import Engine
from forerun.engine.sequence import SequenceState
from tests.engine.test_prefix import logits_of, scatter, written
from tests.engine.test_prefix import play as play_requests
from tests.gpu.heads import both_drafters
from tests.gpu.tiny import DEVICES, VOCAB, make_target, need_cuda

LENGTHS = {"cuda": [2, 63, 64, 65, 127, 128, 129, 300, 700], "cpu": [2, 64, 129]}


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def target_on(device: str, kv_slots: int = 20_000) -> Any:
    need_cuda(device)
    return make_target("llama", device, torch.float32 if device == "cpu" else torch.bfloat16, kv_slots=kv_slots)


def hash_of(rows: tuple[Any, ...]) -> list[str]:
    return [sha256(part.float().cpu().numpy().tobytes()).hexdigest() for part in rows[:3]]


@pytest.mark.parametrize("rows", [1, 63, 64, 100, None])
@pytest.mark.parametrize("device", DEVICES)
def test_bits_with_and_without_hits_in_any_order_of_pages(device: str, rows: int | None) -> None:
    if device == "cpu" and rows != 63:
        pytest.skip("one size is enough on a CPU: tests/engine/test_prefix.py has more")
    target, whole = target_on(device), text(1, 700)
    wanted = {n: logits_of(target, whole[:n], None, None, n) for n in LENGTHS[device]}
    scatter(target, 3)
    known = max(LENGTHS[device]) // 2
    logits_of(target, whole[:known], "", rows if rows != 1 else 50, 5000)
    for n in LENGTHS[device]:
        got = logits_of(target, whole[:n], "", rows if rows != 1 or n < 200 else 97, 6000 + n)
        assert got[3] >= min(n - 1, known - 1)
        if device == "cuda":
            assert hash_of(got) == hash_of(wanted[n]), n
        else:  # torch's products depend on the number of rows
            for one, other in zip(got[:3], wanted[n][:3], strict=True):
                torch.testing.assert_close(one, other, atol=2e-4, rtol=0)


def play_sent_back(engine: Engine, requests: list[Request]) -> list[SequenceState]:
    """Every fifth step one of those that run gives its pages back."""
    ids = [engine.submit(request) for request in requests]
    seqs, steps = [seq for seq in map(engine.find, ids) if seq is not None], 0
    while engine.busy:
        engine.step()
        steps += 1
        if steps % 5 == 0:
            engine.settle()
            for seq in engine.running[-1:]:
                engine._preempt(seq)
                engine.timeline.change = None
    assert engine.stats.preemptions > 0
    assert engine.target.used_slots == 0
    return seqs


@pytest.mark.slow
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_texts_of_heads_after_hits_and_preemption(device: str, seeded: bool) -> None:
    """A head that drafts on the device: the same texts whatever is found, and where memory runs out."""
    params = SamplingParams(
        max_tokens=60 if device == "cuda" else 20,
        ignore_eos=True,
        temperature=0.8 if seeded else 0.0,
        seed=4 if seeded else None,
    )
    start = text(2, 150)
    requests = [
        Request((*start[: 40 + 20 * i], i, 7), params, drafter="device") for i in range(6 if device == "cuda" else 4)
    ]
    texts = []
    for slots, salt in ((20_000, None), (20_000, ""), (320, "")):
        target = target_on(device, slots)
        drafter = both_drafters(target, borrows=True)[0]
        speculative = SpeculativeConfig(drafter="none", controller="fixed", budget=8)
        engine = make_engine(target, frozenset(), speculative, EngineConfig(max_batch=6))
        engine.drafters.add("device", drafter)
        asked = [Request(r.prompt, r.params, drafter="device", cache_salt=salt) for r in requests]
        texts.append(written(play_requests(engine, asked)))
        again = play_requests(engine, asked) if slots > 320 else play_sent_back(engine, asked)
        texts.append(written(again))
        assert (sum(seq.cached_tokens for seq in again) > 0) == (salt == "")
        assert all(seq.drafting == "device" for seq in again)
    assert all(one == texts[0] for one in texts)
