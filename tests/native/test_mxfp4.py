"""gpt-oss with MXFP4 experts kept packed: bits in any company, prefix hits, preemption, drafts, sizes, every path."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.build.engine import held_as, load_target, make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Needs, Prompts, Request, TreeBatch
from forerun.models import decoder as decoder_module
from forerun.models.config import DecoderConfig
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.native import library as native_library
from forerun.models.native.target import NativeDecoder
from forerun.testing import FakeSeq, path_to, random_tree, tree_of
from tests.exactness.harness import run
from tests.models.test_gpt_oss import write_mxfp4
from tests.models.tiny_checkpoints import VOCAB, score_chain
from tests.native.blocks import needs_native
from tests.native.test_experts import _hash, _root

pytestmark = needs_native
PATHS = [name for name, has in native_library.paths().items() if has]
LENGTH = 80


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mxfp4")
    write_mxfp4(path)
    return path


def _load(folder: Path, kv_slots: int | None = None) -> NativeDecoder:
    target = load_target(open_checkpoint(str(folder)), EngineConfig(device="cpu", kv_slots=kv_slots))
    assert isinstance(target, NativeDecoder)
    assert target.mode == "gguf"
    return target


def _text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.mark.parametrize("path", PATHS)
def test_a_row_has_its_bits_in_any_company(path: str, folder: Path) -> None:
    best = native_library.isa()
    assert native_library.library().fr_choose(path.encode()) == 0
    try:
        target, alone, rng = _load(folder), _load(folder), random.Random(3)
        seqs = [FakeSeq(b, _text(b, n), max_length=LENGTH) for b, n in enumerate((12, 5, 33))]
        target.prefill(seqs, Needs())
        for nodes, beside in ((1, 0), (8, 17), (40, 0)):
            trees = TreeBatch.trees([random_tree(rng, seq.tokens[-1], VOCAB, nodes) for seq in seqs])
            prompt = FakeSeq(50 + nodes, _text(nodes, beside + 1), max_length=LENGTH)
            logits = target.score(seqs, trees, Needs(), Prompts([prompt], beside) if beside else None).required_logits
            for b, seq in enumerate(seqs):
                tokens, parents = tree_of(trees, b)
                for i in rng.sample(range(len(tokens)), min(3, len(tokens))):
                    path_of = [tokens[j] for j in path_to(parents, i)]
                    assert _root(alone, seq.tokens + path_of) == _hash(logits[trees.starts[b] + i])
                    assert _root(alone, [*seq.tokens, *path_of, 1]) != _hash(logits[trees.starts[b] + i])
    finally:
        native_library.library().fr_choose(best.encode())


def test_chunks_of_a_prompt_change_no_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set[str]()
    for chunk in (512, 33, 7, 1):
        monkeypatch.setattr(decoder_module, "CHUNK", chunk)
        _, scores = _load(folder).prefill([FakeSeq(0, _text(4, 70), max_length=LENGTH)], Needs((-1,)))
        found.add(_hash(scores.hidden[-1]))
    assert len(found) == 1


def test_a_prefix_hit_changes_no_bits(folder: Path) -> None:
    fresh, target = _load(folder), _load(folder)
    text = _text(5, 150)
    first = FakeSeq(1, [*text[:130], 5], max_length=200, cache_salt="")
    target.prefill([first], Needs())
    target.release(first)
    results = []
    for one in (fresh, target):
        seq = FakeSeq(2, list(text), max_length=200, cache_salt="")
        one.prefill([seq], Needs())
        results.append(one.score([seq], TreeBatch.chains([text[-1:]]), Needs()).required_logits)
    assert target.reused_tokens(seq) >= 128
    assert torch.equal(*results)


@pytest.mark.parametrize("drafter", ["none", "ngram", "recycling"])
def test_texts_are_the_same_in_a_batch_with_drafts_and_after_preemption(drafter: str, folder: Path) -> None:
    params = SamplingParams(max_tokens=50, temperature=0.8, seed=3)
    requests = [Request(tuple(_text(20 + i, 30 + 7 * i)), params) for i in range(4)]
    plain = make_engine(_load(folder), frozenset(), SpeculativeConfig("none"))
    wanted = [run(plain, [request])[0][0] for request in requests]  # each alone
    chosen = SpeculativeConfig(drafter, budget=8, width=3, controller="fixed")
    engine = make_engine(_load(folder), frozenset(), chosen, EngineConfig(max_batch=4))
    seqs = [engine.find(engine.submit(replace(request, cache_salt=None))) for request in requests]
    sent_back = 0
    while engine.busy:
        engine.step()
        if engine.stats.rounds % 5 == 0 and engine.running and sent_back < 6:
            engine._preempt(engine.running[0])  # it is read again
            engine.timeline.change = None
            sent_back += 1
    assert sent_back == 6
    assert [seq.tokens[seq.prompt_length :] for seq in seqs if seq is not None] == wanted


def test_packed_experts_come_near_widened_ones(folder: Path) -> None:
    opened = open_checkpoint(str(folder))
    config, text = DecoderConfig.from_hf(opened.config), _text(1, 60)
    widened = NativeDecoder(config, opened.weights, mode="float32", kv_slots=None)
    wanted, found = (score_chain(target, text, 20, LENGTH) for target in (widened, _load(folder)))
    errors = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert 0 < float(errors.median()) < 0.05  # a row whose routing is a near-tie may pick another expert


def test_it_is_said_that_experts_stay_packed(folder: Path) -> None:
    opened, cpu = open_checkpoint(str(folder)), torch.device("cpu")
    config = DecoderConfig.from_hf(opened.config)
    assert held_as(opened, config, "auto", cpu) == "FP4 (mxfp4, groups of 32), kept packed"
    assert held_as(opened, config, "float32", cpu) == "FP4 (mxfp4, groups of 32), dequantised to float32"
