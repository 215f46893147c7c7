"""Log-probabilities of prompts are those of transformers, and no text can tell that they were asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.errors import InvalidInput
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.engine.engine import SCORED_ROWS, Engine
from forerun.engine.sequence import SequenceState
from tests.engine.test_prefix import KINDS, VOCAB, llama, make_target, text

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, prompt_logprobs=3, logprobs=0)
PROMPTS = [text(1, 2 * SCORED_ROWS + 40), text(2, SCORED_ROWS + 1), [5], [5, 6], text(1, 80)]
EXACT = [kind for kind in KINDS if "int8" not in str(kind)]  # a cache of 8 bits has a law of its own


def engine_of(target: Any, drafter: str = "ngram", max_batch: int = 4) -> Engine:
    speculative = SpeculativeConfig(drafter=drafter, budget=4)
    return make_engine(target, frozenset(), speculative, EngineConfig(max_batch=max_batch))


def run(engine: Engine, requests: list[Request]) -> list[SequenceState]:
    seqs = [engine.prepare(request) for request in requests]
    for seq in seqs:
        engine.enqueue(seq)
    while engine.busy:
        engine.step()
    assert not engine._scored
    assert engine.target.used_slots == 0
    return seqs


def wanted(prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return llama()(torch.tensor([prompt])).logits[0].float().log_softmax(-1)


def check(seq: SequenceState, prompt: list[int]) -> None:
    law, found = wanted(prompt), seq.prompt_logprobs
    assert found is not None
    assert found[0] is None
    assert len(found) == len(prompt)
    for row, token, entry in zip(law, prompt[1:], found[1:], strict=False):
        assert entry is not None
        assert entry.token == token
        assert abs(entry.logprob - float(row[token])) < 2e-4
        best = row.topk(3).values.tolist()
        assert max(abs(one.logprob - value) for one, value in zip(entry.top, best, strict=True)) < 2e-4
        assert all(abs(one.logprob - float(row[one.token])) < 2e-4 for one in entry.top)


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("kind", EXACT)
def test_prompts_of_a_batch_against_transformers(kind: str, drafter: str, tmp_path: Path) -> None:
    """In several passes, beside others that do not ask, and behind prompts that the prefix cache knows."""
    engine = engine_of(make_target(kind, tmp_path), drafter)
    plain = run(engine, [Request(tuple(prompt), replace(PARAMS, prompt_logprobs=None)) for prompt in PROMPTS])
    asked = [Request(tuple(prompt), PARAMS) for prompt in PROMPTS]
    others = [replace(request, params=replace(PARAMS, prompt_logprobs=None)) for request in asked]
    mixed = run(engine, [one for pair in zip(asked, others, strict=True) for one in pair])
    for seq, beside, before, prompt in zip(mixed[::2], mixed[1::2], plain, PROMPTS, strict=True):
        assert (seq.finished, beside.finished) == ("length", "length"), (seq.error, beside.error)
        assert seq.tokens == beside.tokens == before.tokens
        assert (seq.cached_tokens, beside.prompt_logprobs) == (0, None)
        check(seq, prompt)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind", EXACT)
def test_a_full_cache_sends_them_back_and_they_are_read_again(kind: str, tmp_path: Path) -> None:
    target = make_target(kind, tmp_path, kv_slots=1400 if kind == "cuda" else 1024)
    engine = engine_of(target, "none", max_batch=8)
    long = replace(PARAMS, max_tokens=250)
    prompts = [text(i, SCORED_ROWS + 60) for i in range(8)]
    seqs = run(engine, [Request(tuple(prompt), long) for prompt in prompts])
    alone = run(engine, [Request(tuple(prompts[3]), replace(long, prompt_logprobs=None))])
    assert engine.stats.preemptions > 0
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert seq.finished == "length", seq.error
        check(seq, prompt)
    assert seqs[3].tokens == alone[0].tokens


def test_a_pass_that_fails_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("torch", tmp_path)
    engine, score, calls = engine_of(target), target.score, []

    def fails_once(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise RuntimeError("planted")
        return score(*given)

    monkeypatch.setattr(target, "score", fails_once)
    (seq,) = run(engine, [Request(tuple(PROMPTS[0]), PARAMS)])
    assert seq.finished == "length", seq.error
    check(seq, PROMPTS[0])


def test_one_that_leaves_while_it_is_read_leaves_nothing(tmp_path: Path) -> None:
    engine = engine_of(make_target("torch", tmp_path))
    seq = engine.prepare(Request(tuple(PROMPTS[0]), PARAMS))
    engine.enqueue(seq)
    engine.step()
    assert 0 < engine.target.cached_tokens(seq) < len(PROMPTS[0]) - 1
    engine.abort(seq.id)
    assert not engine._scored
    assert not engine.busy
    assert engine.target.used_slots == 0


@pytest.mark.parametrize("value", [-1, 21, 1.5, "many"])
def test_the_limit_is_named(value: Any) -> None:
    with pytest.raises(InvalidInput, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=value)


def test_no_more_than_the_vocabulary(tmp_path: Path) -> None:
    engine = engine_of(make_target("torch", tmp_path))
    (seq,) = run(engine, [Request((1, 2, 3), replace(PARAMS, prompt_logprobs=20))])
    assert seq.prompt_logprobs is not None
    assert [len(entry.top) for entry in seq.prompt_logprobs if entry is not None] == [min(20, VOCAB)] * 2
