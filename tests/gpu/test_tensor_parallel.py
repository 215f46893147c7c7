"""Tensor parallel on a GPU: NCCL with one rank, two ranks that share a card through gloo, and two cards if there are.

NCCL refuses two ranks on one card, so with one card its collectives run in a group of one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from forerun import LLM
from forerun.core.params import EngineConfig
from forerun.core.types import Needs
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.parallel.decoder import Backend, ParallelTarget
from forerun.models.parallel.launch import load_parallel
from forerun.testing import check_target
from tests.models.tiny_checkpoints import VOCAB
from tests.models.tiny_folder import make_tiny_folder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def target(folder: str, request: pytest.FixtureRequest) -> Iterator[ParallelTarget]:
    size, backend = request.param
    settings = EngineConfig(tensor_parallel_size=size, dtype="float32")
    made = load_parallel(open_checkpoint(folder), settings, torch.device("cuda"), backend)
    yield made
    made.close()


CASES: list[tuple[int, Backend]] = [(1, "nccl"), (2, "gloo")]


@pytest.mark.parametrize("target", CASES, indirect=True, ids=["nccl-1", "gloo-2"])
def test_computes_what_one_process_computes(target: ParallelTarget, folder: str) -> None:
    checkpoint = open_checkpoint(folder)
    config = DecoderConfig.from_hf(checkpoint.config)
    plain = Decoder(config, checkpoint.weights, dtype=torch.float32, device="cuda", kv_slots=None)
    targets = iter([target, plain])
    check_target(lambda: next(targets), vocab_size=VOCAB, needs=Needs((-1, 1)), rounds=4, atol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_texts_on_two_cards(folder: str) -> None:
    prompts = ["abc abc abc ab", "hello world, hello w", "x"]
    one = LLM(folder, dtype="float32", device="cuda:0", drafter="ngram")
    wanted = [text.token_ids for text in one.generate(prompts, max_tokens=30, temperature=0)]
    with LLM(folder, dtype="float32", device="cuda", drafter="ngram", tensor_parallel_size=2) as two:
        assert [text.token_ids for text in two.generate(prompts, max_tokens=30, temperature=0)] == wanted
