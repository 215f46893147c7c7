"""Prompt chunks in the passes of the GPU decoder: the same bits however a prompt was cut, and beside whatever trees."""

import random

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Needs, Prompts, Request, TreeBatch
from forerun.engine.scheduler import PrefillRows
from forerun.models.base import ON_GPU
from forerun.models.cuda.target import CudaDecoder
from forerun.testing import FakeSeq, random_tree
from tests.gpu.heads import both_drafters
from tests.gpu.tiny import DEVICES, VOCAB, make_target, need_cuda


def _made(device: str, name: str) -> tuple[CudaDecoder, float]:
    need_cuda(device)
    on_cpu = device == "cpu"
    return make_target(name, device, torch.float32 if on_cpu else torch.bfloat16), 1e-4 if on_cpu else 0.0


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("llama", "cpu"),
        ("qwen3", "cpu"),
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ("llama", "qwen3", "large")),
    ],
)
def test_logits_do_not_depend_on_how_a_prompt_was_cut(name: str, device: str) -> None:
    target, atol = _made(device, name)
    rng = random.Random(4)
    prompt = FakeSeq(0, [rng.randrange(VOCAB) for _ in range(300)], max_length=400)
    other = FakeSeq(1, [rng.randrange(VOCAB) for _ in range(40)], max_length=400)
    target.prefill([prompt, other], Needs())
    tree = TreeBatch.trees([random_tree(rng, seq.tokens[-1], VOCAB, 20) for seq in (prompt, other)])
    wanted = target.score([prompt, other], tree, Needs()).required_logits.clone()
    for rows in (299, 128, 90, 33) if device == "cpu" else (299, 256, 128, 90, 64, 33, 7, 1):
        target.release(prompt)
        while target.cached_tokens(prompt) < 299:
            alone = tree.select([1])
            found = target.score([other], alone, Needs(), Prompts([prompt], rows)).required_logits
            torch.testing.assert_close(found, wanted[tree.starts[1] :], atol=atol, rtol=0.0)
        found = target.score([prompt, other], tree, Needs()).required_logits
        torch.testing.assert_close(found, wanted, atol=atol, rtol=0.0)


@pytest.mark.parametrize("device", DEVICES)
def test_texts_drafted_on_the_device_do_not_depend_on_who_joins(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = _made(device, "llama")
    drafter = both_drafters(target, borrows=True)[0]
    engine = make_engine(target, frozenset(), SpeculativeConfig(drafter="none", controller="fixed"))
    engine.drafters.add("device", drafter)
    engine.prefill_rows = PrefillRows(ON_GPU.prefill, 60, fixed=60)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    shared = list[int]()  # rows of prompts in passes over trees that the device grew
    real = target._score_grown

    def noted(*given: object) -> object:
        shared.append(sum(len(span.tokens) for span in given[-1]))  # type: ignore[attr-defined]
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "_score_grown", noted)
    texts = {}
    for name in ("none", "device"):
        found: dict[int, list[int]] = {}
        for prompt in ((3, 4, 5, 6), tuple(range(2, 190)), (9, 8, 7), (5,)):
            found[engine.submit(Request(prompt, params, drafter=name, budget=Budget(6, 3, 2)))] = []
            for _ in range(2):
                for event in engine.step():
                    found[event.seq_id] += event.tokens
        while engine.busy:
            for event in engine.step():
                found[event.seq_id] += event.tokens
        texts[name] = list(found.values())
    assert not drafter._failed
    assert not engine.drafters._failed
    assert texts["device"] == texts["none"]
    assert shared.count(60) >= 2
    assert target.used_slots == drafter.draft.rows.held == 0
