"""Encoder-decoders on a GPU, in torch: the texts of transformers on a CPU, and the contract of targets."""

from __future__ import annotations

import pytest
import torch

from forerun.core.params import SamplingParams
from forerun.core.types import Needs
from forerun.testing import check_target
from tests.encoder_decoder.test_target import engine_for, write
from tests.encoder_decoder.tiny_models import NAMES, VOCAB, make_target, reference, sources

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_those_of_transformers(name: str) -> None:
    prompts = sources(6)
    engine = engine_for(make_target(name, in_torch=True, device="cuda"), name, "ngram", budget=5)
    texts = write(engine, prompts, SamplingParams(max_tokens=20))
    assert texts == [reference(name, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("name", NAMES)
def test_it_keeps_the_contract_of_targets(name: str) -> None:
    check_target(
        lambda: make_target(name, in_torch=True, device="cuda"),
        vocab_size=VOCAB,
        needs=Needs((-1, 0)),
        atol=5e-2,  # residual rows of a random T5 are in the hundreds
    )
