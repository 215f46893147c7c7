"""Whole texts of a full batch, with a head loaded: the same as alone, whichever kernels a large pass takes.

Kernels that pass every test of their own once wrote wrong texts together: attention of a head's chains took groups that
were none, and wrote over whatever lay there, the target's weights too.
"""

from __future__ import annotations

import random

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Request
from forerun.engine.engine import Engine
from forerun.models.cuda.target import CudaDecoder
from tests.gpu.heads import both_drafters
from tests.gpu.tiny import DEVICES, VOCAB, make_target, need_cuda

FORMS = {"chain": Budget(3, 3), "tree": Budget(7, 3, 3), "none": None}
LENGTH = 400


def _engine(target: CudaDecoder, batch: int) -> Engine:
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(target, frozenset(), speculative, EngineConfig(max_batch=batch, max_length=LENGTH))
    engine.drafters.add("head", both_drafters(target, borrows=True)[0])
    return engine


def _texts(engine: Engine, prompts: list[tuple[int, ...]], form: str, batch: int) -> list[list[int]]:
    engine.max_batch = batch
    found = dict[int, list[int]]()
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=20 + i % 9, ignore_eos=True)
        drafter = "none" if form == "none" else "head"
        found[engine.submit(Request(prompt, params, drafter=drafter, budget=FORMS[form]))] = []
    while engine.busy:
        for event in engine.step():
            assert event.error is None
            found[event.seq_id] += event.tokens
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_texts_of_a_full_batch_are_those_of_batch_1(device: str) -> None:
    need_cuda(device)
    on_gpu, rng = device == "cuda", random.Random(12)
    batch, count = (48, 72) if on_gpu else (6, 8)
    target = make_target("wide-kv", device, torch.bfloat16 if on_gpu else torch.float32, kv_slots=60_000)
    engine = _engine(target, batch)
    prompts = [tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(4, 300))) for _ in range(count)]
    wanted = _texts(engine, prompts, "none", 1)
    for form in FORMS:
        assert _texts(engine, prompts, form, batch) == wanted, form
    assert _texts(engine, prompts, "none", 1) == wanted, "what was written before it is no more"
