"""Encoder-decoders as targets: equal to transformers' generate, true to the contract of targets, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.errors import PromptTooLong, UnsupportedModel
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.request import LawRules
from forerun.core.types import Needs, PlainSeq, Request, TreeBatch
from forerun.engine.engine import Engine
from forerun.models.encoder_decoder.config import EncoderDecoderConfig
from forerun.models.encoder_decoder.target import EncoderDecoder, SequenceCache
from forerun.models.native import library as native
from forerun.testing import check_target
from forerun.testing.faults import Fault
from tests.encoder_decoder.tiny_models import NAMES, PAD, VOCAB, eos_of, make_model, make_target, reference, sources

TOKENS = 24


def engine_for(target: EncoderDecoder, name: str, drafter: str = "none", **options: object) -> Engine:
    speculative = SpeculativeConfig(drafter=drafter, controller="fixed", **options)  # type: ignore[arg-type]
    return make_engine(target, frozenset({eos_of(name)}), speculative, EngineConfig(max_batch=4))


def write(engine: Engine, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> list[list[int]]:
    seqs = [engine.submit(Request(prompt, params)) for prompt in prompts]
    texts: dict[int, list[int]] = {seq: [] for seq in seqs}
    while engine.busy:
        for event in engine.step():
            assert event.error is None, event.error
            texts[event.seq_id] += event.tokens
    assert engine.scheduler.limit is None, "a round failed and was repeated"
    return [texts[seq] for seq in seqs]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("drafter", ["recycling", "none", "ngram"])  # the first draws trees
def test_a_batch_of_mixed_sources_is_written_as_transformers_writes_each(name: str, drafter: str) -> None:
    prompts = sources(9)
    wanted = [reference(name, prompt, TOKENS) for prompt in prompts]
    assert len({token for text in wanted for token in text}) > 15, "texts of two tokens would prove little"
    engine = engine_for(make_target(name), name, drafter, budget=5)
    assert write(engine, prompts, SamplingParams(max_tokens=TOKENS)) == wanted
    if drafter != "none":
        assert engine.stats.drafted > 0, "nothing was drafted: nothing was shown"
    assert engine.target.used_slots == 0


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str) -> None:
    """Also where scale and bias would not change which token is the likeliest."""
    source, tokens = sources(1)[0], [make_target(name).source_rules.start, 7, 9, 11]
    with torch.no_grad():
        ids = torch.tensor([source])
        wanted = make_model(name)(input_ids=ids, decoder_input_ids=torch.tensor([tokens])).logits[0]
    target, seq = make_target(name), PlainSeq(0, tokens[:1], source=source)
    target.prefill([seq], Needs())
    got = target.score([seq], TreeBatch.chains([tokens]), Needs()).required_logits
    assert torch.allclose(got, wanted, atol=2e-4), float((got - wanted).abs().max())


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", NAMES)
def test_torch_alone_writes_the_same(name: str) -> None:
    prompts = sources(4, seed=1)
    texts = write(engine_for(make_target(name, in_torch=True), name), prompts, SamplingParams(max_tokens=TOKENS))
    assert texts == [reference(name, prompt, TOKENS) for prompt in prompts]


@pytest.mark.slow
def test_penalties_count_the_decoders_tokens_as_transformers_does() -> None:
    prompts, params = (sources(4, seed=2), SamplingParams(max_tokens=TOKENS, repetition_penalty=1.7, min_tokens=6))
    for name in ("t5", "marian"):
        rules = {"repetition_penalty": 1.7, "min_new_tokens": 6}
        wanted = [reference(name, prompt, TOKENS, **rules) for prompt in prompts]
        assert wanted != [reference(name, prompt, TOKENS) for prompt in prompts]
        assert write(engine_for(make_target(name), name, "ngram", budget=4), prompts, params) == wanted


def test_marians_own_rules_change_the_law() -> None:
    """Bad words and the forced end: with them equal to transformers, and without them not."""
    prompts, params = sources(6, seed=3), SamplingParams(max_tokens=7)
    wanted = [reference("marian", prompt, 7) for prompt in prompts]
    assert any(len(text) == 7 for text in wanted)
    assert all(text[-1] == 0 for text in wanted), "the last token is forced"
    target = make_target("marian")
    assert write(engine_for(target, "marian", "ngram", budget=6), prompts, params) == wanted
    for laws in (None, LawRules(bad_words=((PAD,), (5, 6))), LawRules(last=0)):
        target.source_rules = replace(target.source_rules, laws=laws)
        assert write(engine_for(target, "marian"), prompts, params) != wanted


def test_a_forced_first_token_is_written_first() -> None:
    target = make_target("marian")
    laws = LawRules(bad_words=((PAD,),), first=17, last=0)
    target.source_rules = replace(target.source_rules, laws=laws)
    prompts = sources(3)
    options = {"forced_bos_token_id": 17, "bad_words_ids": [[PAD]]}
    wanted = [reference("marian", prompt, 9, **options) for prompt in prompts]
    assert write(engine_for(target, "marian", "ngram", budget=4), prompts, SamplingParams(max_tokens=9)) == wanted
    assert all(text[0] == 17 for text in wanted)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", NAMES)
def test_it_keeps_the_contract_of_targets_bit_by_bit(name: str) -> None:
    near = 2e-2  # in torch; residual rows of a random T5 are in the hundreds
    for in_torch, atol in ((True, near), (False, 0.0 if native.available() else near)):
        check_target(
            lambda in_torch=in_torch: make_target(name, in_torch=in_torch),  # type: ignore[misc]
            vocab_size=VOCAB, needs=Needs((-1, 0, 2)), seed=len(name), atol=atol,
        )  # fmt: skip


def test_the_source_decides_the_logits() -> None:
    """The negative control of the contract: another source, other logits."""
    target = make_target("t5")
    one, other = PlainSeq(0, [0], source=(4, 5, 1)), PlainSeq(1, [0], source=(4, 6, 1))
    roots = TreeBatch.chains([[0], [0]])
    target.prefill([one, other], Needs())
    logits = target.score([one, other], roots, Needs()).required_logits
    assert not torch.allclose(logits[0], logits[1], atol=1e-3)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", NAMES)
def test_sampled_texts_are_those_of_the_seed_with_any_drafter(name: str) -> None:
    prompts = sources(5, seed=4)
    temperature = {"t5": 0.05, "t5-gated": 0.3, "marian": 0.6}[name]  # as wide as their logits are
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, top_p=0.95, seed=11)
    plain = write(engine_for(make_target(name), name), prompts, params)
    for drafter in ("ngram", "recycling"):
        engine = engine_for(make_target(name), name, drafter, budget=6)
        assert write(engine, prompts, params) == plain
        assert engine.stats.accepted > 0
    other = write(engine_for(make_target(name), name), prompts, replace(params, seed=12))
    assert other != plain


@pytest.mark.slow
def test_a_round_that_fails_is_repeated_from_the_source() -> None:
    prompts, params = sources(3, seed=5), SamplingParams(max_tokens=12)
    wanted = [reference("marian", prompt, 12) for prompt in prompts]
    for at in range(5, 2000, 83):
        target = make_target("marian")
        engine = engine_for(target, "marian", "ngram", budget=4)
        seqs = [engine.submit(Request(prompt, params)) for prompt in prompts]
        texts: dict[int, list[int]] = {seq: [] for seq in seqs}
        with Fault(at, MemoryError, ("forerun.models",)), suppress(MemoryError):
            for event in engine.step():
                texts[event.seq_id] += event.tokens
        while engine.busy:
            for event in engine.step():
                assert event.error is None
                texts[event.seq_id] += event.tokens
        assert [texts[seq] for seq in seqs] == wanted, at
        assert target.used_slots == 0


def test_accepted_nodes_move_behind_each_other() -> None:
    cache = SequenceCache(torch.zeros(1, 2, 1, 3, 1), torch.zeros(3, 1))
    cache.reserve(5)
    cache.data[..., :5, 0] = torch.arange(5.0)
    cache.keep([2, 4])
    assert cache.length == 3
    assert (cache.data[..., :3, 0] == torch.tensor([0.0, 2.0, 4.0])).all()


def test_a_full_cache_sends_sequences_back_and_changes_no_text() -> None:
    prompts = sources(5, seed=6)
    target = make_target("t5", kv_slots=2 * TOKENS)
    engine = engine_for(target, "t5", "ngram", budget=3)
    texts = write(engine, prompts, SamplingParams(max_tokens=TOKENS))
    assert texts == [reference("t5", prompt, TOKENS) for prompt in prompts]


def test_a_source_longer_than_the_encoder_reads_is_refused() -> None:
    engine = engine_for(make_target("marian"), "marian")
    engine.submit(Request((3,) * 128, SamplingParams(max_tokens=4)))
    with pytest.raises(PromptTooLong, match="129"):
        engine.submit(Request((3,) * 129, SamplingParams(max_tokens=4)))


def test_an_output_ends_at_the_decoders_own_limit() -> None:
    engine = engine_for(make_target("marian"), "marian")
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    text = write(engine, [(3,) * 100], params)[0]
    assert len(text) == 127, "128 positions, of which the start token has one"


def test_a_config_that_cannot_be_run_is_refused() -> None:
    config = {"model_type": "t5", "num_layers": 1, "num_heads": 1, "d_model": 8, "vocab_size": 9, "d_ff": 8, "d_kv": 8}
    config["pad_token_id"] = 0
    assert EncoderDecoderConfig.from_hf(config, {}).source_rules.start == 0
    with pytest.raises(UnsupportedModel, match="tanh"):
        EncoderDecoderConfig.from_hf({**config, "feed_forward_proj": "tanh"}, {})
    with pytest.raises(UnsupportedModel, match="d_kv"):
        EncoderDecoderConfig.from_hf({key: value for key, value in config.items() if key != "d_kv"}, {})
