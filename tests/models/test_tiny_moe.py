"""The tiny mixture that was trained here (python -m tools.tiny_moe), and its dense twin: real routing, real text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun.build.engine import make_engine
from forerun.control import cost
from forerun.control.cost import probe_text, scratch_sequences
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Needs, PlainSeq, Request, TreeBatch
from forerun.models.config import DecoderConfig
from forerun.models.load.weights import SafetensorsWeights
from forerun.models.native.target import NativeDecoder
from tests.exactness.harness import run
from tests.native.blocks import needs_native

pytestmark = needs_native

FOLDER = Path(__file__).with_name("tiny_moe")
NEW, CONTEXT = 60, 80


def _load(name: str, mode: Any = "float32") -> NativeDecoder:
    import json

    config = json.loads((FOLDER / name / "config.json").read_text())
    weights = SafetensorsWeights(FOLDER / name)
    return NativeDecoder(DecoderConfig.from_hf(config), weights, mode=mode, kv_slots=None)


def _text() -> list[int]:
    return list((FOLDER / "text.txt").read_bytes())


def _prompts() -> list[tuple[int, ...]]:
    text = _text()
    return [tuple(text[at : at + CONTEXT]) for at in (0, 300, 700)]


def _active(target: NativeDecoder, before: list[int], chain: list[int]) -> float:
    seq = PlainSeq(1, before, max_length=400)
    target.prefill([seq], Needs())
    target.score([seq], TreeBatch.chains([chain]), Needs())
    target.release(seq)
    return sum(target.active_experts) / len(target.active_experts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixture", "dense"])
def test_texts_are_those_of_generate_with_and_without_drafts(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32)
    wanted = []
    for prompt in _prompts():
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        wanted.append(out[0, CONTEXT:].tolist())
    requests = [Request(prompt, SamplingParams(max_tokens=NEW)) for prompt in _prompts()]
    for drafter in ("none", "ngram", "suffix"):
        chosen = SpeculativeConfig(drafter, budget=8, controller="fixed")
        engine = make_engine(_load(name), frozenset(), chosen)
        assert run(engine, requests)[0] == wanted, drafter


@pytest.mark.parametrize("mode", ["q8", "bfloat16"])
def test_a_seed_gives_one_text_whatever_drafts(mode: str) -> None:
    params = SamplingParams(max_tokens=NEW, temperature=0.8, seed=3)
    requests, texts = [Request(prompt, params) for prompt in _prompts()], []
    for drafter in ("none", "ngram", "recycling"):
        engine = make_engine(
            _load("mixture", mode), frozenset(), SpeculativeConfig(drafter, budget=8, controller="fixed")
        )
        texts.append(run(engine, requests)[0])
    assert texts[0] == texts[1] == texts[2]


def test_it_has_learnt_the_text_and_uses_its_experts() -> None:
    for name in ("mixture", "dense"):
        target, text = _load(name), _text()
        seq = PlainSeq(1, text[:1], max_length=500)
        target.prefill([seq], Needs())
        logits = target.score([seq], TreeBatch.chains([text[:250]]), Needs()).required_logits
        loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(text[1:250]))
        assert float(loss) < 2.6  # nats per byte of text that was held out; untrained: 5.5
    assert _active(_load("mixture"), text[:2], text[2:250]) >= 7


def test_passes_are_timed_on_tokens_that_wake_as_many_experts_as_text() -> None:
    """A token repeated, which is what lies, as the control."""
    target, text = _load("mixture"), _text()
    real = sum(_active(target, text[at : at + 60], text[at + 60 : at + 68]) for at in range(0, 1200, 100)) / 12
    probes = probe_text(target, 64)
    timed = []
    scratch = scratch_sequences(target, 8, probes)
    target.prefill(scratch, Needs())
    for repeat in range(8):
        cost.time_pass(target, scratch, 8, probes[8 * repeat :] + probes)
        timed.append(sum(target.active_experts) / len(target.active_experts))
    repeated = _active(target, [32] * 60, [32] * 8)
    assert abs(sum(timed) / 8 - real) < 0.2 * real
    assert repeated < 0.7 * real
