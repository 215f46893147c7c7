"""The real default model in its own quantisation: drafting changes nothing, not one bit."""

import pytest
import torch

from forerun.api.llm import LLM
from forerun.build.engine import make_engine
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Needs, TreeBatch
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.load.catalog import known_models
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.models.native.target import NativeDecoder
from forerun.testing import FakeSeq
from tests.native.blocks import needs_native

PRESENT = any(model.name == "smollm2" and model.path for model in known_models())
pytestmark = [
    pytest.mark.model,
    needs_native,
    pytest.mark.skipif(not PRESENT, reason="the default model is absent; run: forerun models pull smollm2"),
]
PROMPT = "Count: one two three one two three one two"


@pytest.fixture(scope="module")
def loaded() -> tuple[Checkpoint, NativeDecoder]:
    opened = open_checkpoint("smollm2")
    config = DecoderConfig.from_hf(opened.config)
    return opened, NativeDecoder(config, opened.weights, mode="gguf", kv_slots=None)


@pytest.mark.slow
def test_drafting_does_not_change_the_text(loaded: tuple[Checkpoint, NativeDecoder]) -> None:
    opened, target = loaded
    tokenizer = opened.tokenizer()
    texts = []
    for drafter, width in (("none", 1), ("ngram", 1), ("ngram", 3)):
        settings = SpeculativeConfig(drafter=drafter, budget=6, width=width, controller="fixed")
        llm = LLM(make_engine(target, tokenizer.eos_ids, settings, tokenizer=tokenizer), tokenizer)
        params = SamplingParams(max_tokens=40, logprobs=0)
        done = llm.generate(PROMPT, params)
        texts.append((done.text, done.token_ids, [entry.logprob for entry in done.logprobs]))
        assert (done.accepted > 0) == (drafter == "ngram")
    assert texts[0] == texts[1] == texts[2]
    assert target.used_slots == 0


@pytest.mark.slow
def test_its_logits_are_near_float32(loaded: tuple[Checkpoint, NativeDecoder]) -> None:
    opened, target = loaded
    tokens = opened.tokenizer().encode("The capital of France is Paris, and the capital of Italy is Rome.")
    plain = Decoder(target.config, opened.weights, dtype=torch.float32, device="cpu", kv_slots=None)
    results = []
    for one in (target, plain):
        seq = FakeSeq(1, tokens[:1], max_length=64)
        one.prefill([seq], Needs())
        logits = one.score([seq], TreeBatch.chains([tokens]), Needs()).logits
        assert logits is not None
        results.append(logits)
        one.release(seq)
    law, wanted = (logits.log_softmax(-1) for logits in results)
    divergence = (wanted.exp() * (wanted - law)).sum(-1)
    assert float(divergence.mean()) < 0.02
    assert float((results[0].argmax(-1) == results[1].argmax(-1)).float().mean()) > 0.8
