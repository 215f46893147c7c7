"""Texts that outgrow the short factors of a longrope: equal to transformers' generate, in any company."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Event, Needs, Request, TreeBatch
from forerun.engine.engine import Engine
from forerun.engine.scheduler import PrefillRows
from forerun.engine.sequence import SequenceState
from forerun.models.config import DecoderConfig
from forerun.models.cuda.target import CudaDecoder
from forerun.models.decoder import Decoder
from forerun.models.native.target import NativeDecoder
from forerun.models.slots import SlotTarget
from forerun.testing import FakeSeq
from forerun.verify.greedy import device_walk
from tests.models.tiny_checkpoints import VOCAB, make_decoder, make_reference, reference_logits, save
from tests.native.blocks import needs_native

SWITCH = 24  # original_max_position_embeddings of the tiny model
RNG = random.Random(12)
# within the short half, across the switch (a plain text, one that repeats itself), at its edges, beyond it
PROMPTS = [RNG.choices(range(VOCAB), k=n) for n in (3, 9, 23, 24, 25, 40)] + [[4, 7, 9, 5] * 4]
NEW = (12, 40, 9, 9, 9, 20, 46)
KINDS = [pytest.param("native", marks=needs_native), "torch", "cuda"]  # the last: the GPU decoder, on a CPU


class Made:
    """transformers' model, and ours."""

    def __init__(self, folder: Path) -> None:
        self.model = make_reference("phi3-longrope")
        self.config, self.weights = save(self.model, folder)

    def target(self, kind: str, kv_slots: int | None = None) -> SlotTarget:
        if kind == "torch":
            return make_decoder(self.config, self.weights)
        config = DecoderConfig.from_hf(self.config)
        if kind == "cuda":
            walk = device_walk(torch.device("cpu"))
            slots = kv_slots or 4096
            return CudaDecoder(
                config, self.weights, dtype=torch.float32, device="cpu", kv_slots=slots, greedy_walk=walk
            )
        return NativeDecoder(config, self.weights, mode="float32", kv_slots=kv_slots)

    def written(self, prompt: list[int], new: int) -> list[int]:
        """By transformers, with its cache."""
        settings = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = self.model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **settings)
        return [int(token) for token in out[0, len(prompt) :]]


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU decoder's steps in torch take heads that its kernels do not."""
    monkeypatch.setattr("forerun.models.cuda.network.check_supported", lambda config: None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("longrope"))


@pytest.fixture(scope="module")
def wanted(made: Made) -> list[list[int]]:
    return [made.written(prompt, new) for prompt, new in zip(PROMPTS, NEW, strict=True)]


def engine_of(target: SlotTarget, drafter: str, **config: int) -> Engine:
    settings = SpeculativeConfig(drafter=drafter, budget=5, controller="fixed")
    return make_engine(target, frozenset(), settings, EngineConfig(**{"max_batch": 8, **config}))  # type: ignore[arg-type]


def play(engine: Engine, numbers: list[int], **params: Any) -> Iterator[SequenceState]:
    """Requests of these numbers, all at once; each after it has ended."""
    seqs = []
    for i in numbers:
        asked = SamplingParams(max_tokens=NEW[i], temperature=0.0, ignore_eos=True, **params)
        seqs.append(engine.prepare(Request(tuple(PROMPTS[i]), asked, cache_salt="")))
        engine.enqueue(seqs[-1])
    while engine.busy:
        engine.step()
    for seq in seqs:
        assert seq.error is None
        yield seq


def texts(engine: Engine, numbers: list[int]) -> list[list[int]]:
    return [seq.tokens[seq.prompt_length :] for seq in play(engine, numbers)]


ALL = list(range(len(PROMPTS)))


@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix"])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_equal_transformers(kind: str, drafter: str, made: Made, wanted: list[list[int]]) -> None:
    engine = engine_of(made.target(kind), drafter)
    assert texts(engine, ALL) == wanted
    assert texts(engine, ALL[::-1]) == wanted[::-1], "of prompts that are cached"
    for i in ALL:
        assert texts(engine, [i]) == [wanted[i]], "alone"
    if drafter != "none":
        assert engine.stats.accepted > 0


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_in_pieces(kind: str, made: Made, wanted: list[list[int]]) -> None:
    engine = engine_of(made.target(kind), "ngram")
    engine.prefill_rows = PrefillRows(engine.target.can.prefill, engine.target.pass_rows, 5)
    assert texts(engine, ALL) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_are_preempted(kind: str, made: Made, wanted: list[list[int]]) -> None:
    engine, rounds = engine_of(made.target(kind), "ngram"), random.Random(3)
    step = engine.step

    def step_and_preempt() -> list[Event]:
        events = step()
        if engine.running and rounds.random() < 0.3:
            engine._preempt(rounds.choice(engine.running))
            engine.timeline.change = None
        return events

    engine.step = step_and_preempt  # type: ignore[method-assign]
    assert texts(engine, ALL) == wanted
    assert engine.stats.preemptions > 5


@needs_native
def test_bits_do_not_depend_on_drafts(made: Made) -> None:
    """Log-probabilities of every token, with and without drafts, in company and alone."""
    found = []
    for drafter, numbers in (("none", [1, 6]), ("ngram", ALL), ("ngram", [6, 1])):
        seqs = {seq.request.prompt: seq for seq in play(engine_of(made.target("native"), drafter), numbers, logprobs=2)}
        both = [seqs[tuple(PROMPTS[i])] for i in (1, 6)]
        found.append([[one.logprob for event in seq.events for one in event.logprobs] for seq in both])
    assert found[0] == found[1] == found[2]
    assert [len(some) for some in found[0]] == [NEW[1], NEW[6]]


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_logprobs_are_those_of_one_pass(kind: str, made: Made) -> None:
    """transformers reads a prompt with the factors of its whole length."""
    for i in (3, 4, 5):
        (seq,) = play(engine_of(made.target(kind), "none"), [i], prompt_logprobs=0)
        laws = reference_logits(made.model, PROMPTS[i]).log_softmax(-1)
        expected = [float(laws[at, token]) for at, token in enumerate(PROMPTS[i][1:])]
        assert seq.prompt_logprobs is not None
        got = [one.logprob for one in seq.prompt_logprobs[1:] if one is not None]
        assert got == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_without_reading_anew_texts_differ(
    kind: str, made: Made, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: with the short factors' keys beyond the switch, and with trees that straddle it."""
    monkeypatch.setattr(SlotTarget, "reaches", lambda *_: None)
    got = texts(engine_of(made.target(kind), "none"), ALL)
    assert [got[i] == wanted[i] for i in (0, 4, 5)] == [True] * 3, "on one side"
    assert got[1] != wanted[1]
    assert got[6] != wanted[6]


@pytest.mark.parametrize("length", [SWITCH - 1, SWITCH, SWITCH + 1, 50])
def test_a_fresh_prefill_has_the_factors_of_its_length(made: Made, length: int) -> None:
    text = random.Random(length).choices(range(VOCAB), k=length)
    target = made.target("torch")
    assert isinstance(target, Decoder)
    seq = FakeSeq(0, text, max_length=90)
    target.prefill([seq], Needs())
    got = target.score([seq], TreeBatch.chains([text[-1:]]), Needs()).required_logits[0]
    torch.testing.assert_close(got, reference_logits(made.model, text)[-1], atol=1e-4, rtol=0)
    assert target.reaches([seq]) == [SWITCH if length <= SWITCH else target.max_length]
