"""The real Gemma-3-270M on the C kernels: transformers' logits beyond its window, and drafted texts equal plain ones.

It needs that model's file, in a folder that FORERUN_MODELS names or in the cache; elsewhere these tests are skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.models.config import DecoderConfig
from forerun.models.load.catalog import cache_folder
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.native.target import NativeDecoder
from tests.models.tiny_checkpoints import reference_logits, score_chain
from tests.native.blocks import needs_native
from tests.readme.pages import ROOT

pytestmark = [pytest.mark.model, pytest.mark.slow, needs_native]
FILE = "gemma-3-270m-q4_k_m.gguf"
PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "one two three one two three one two", "Q: 2+2?\nA:"]


@pytest.fixture(scope="module")
def model() -> str:
    homes = [Path(os.environ.get("FORERUN_MODELS", cache_folder())).expanduser(), cache_folder() / "models"]
    found = next((path for home in homes for path in sorted(home.glob(f"**/{FILE}"))), None)
    if found is None:
        pytest.skip(f"{FILE} is not here; run: forerun models pull gemma-270m")
    return str(found)


def test_logits_beyond_the_window_equal_transformers(model: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    opened = open_checkpoint(model)
    settings = {key: value for key, value in opened.config.items() if key != "model_type"}
    reference = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gemma3_text", **settings), attn_implementation="eager"
    )
    missing = reference.float().eval().load_state_dict(dict(opened.weights), strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["lm_head.weight"], [])
    config, tokenizer = DecoderConfig.from_hf(opened.config), opened.tokenizer()
    ids = tokenizer.encode((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))[:600]
    assert ids[0] == tokenizer.bos_id
    assert len(ids) == 600 > max(filter(None, config.windows))
    target = NativeDecoder(config, opened.weights, mode="float32", kv_slots=None)
    got = score_chain(target, ids, 580, 640)
    torch.testing.assert_close(got, reference_logits(reference, ids)[580:], atol=1e-3, rtol=0)


def test_drafted_texts_equal_plain_texts(model: str) -> None:
    params = SamplingParams(max_tokens=64, temperature=0.0)
    texts = []
    for drafter in ("none", "ngram"):
        with LLM(model, drafter=drafter, device="cpu") as llm:
            together = [one.token_ids for one in llm.generate(PROMPTS, params)]
            alone = [llm.generate(prompt, params).token_ids for prompt in PROMPTS]
            assert alone == together
            texts.append(together)
    assert texts[0] == texts[1]
    assert all(len(text) == 64 for text in texts[0])
