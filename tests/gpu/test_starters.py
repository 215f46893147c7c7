"""Requests that start with the pass that reads the rest of their prompts: scores are those of a pass of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Needs, Prompts, Request, Scores, TreeBatch, Verdict
from forerun.engine.engine import Engine
from forerun.models.cuda.plan import MAX_ROWS, beside_trees
from forerun.models.cuda.target import CudaDecoder
from forerun.testing import FakeSeq
from tests.gpu.tiny import DEVICES, VOCAB, make_target, need_cuda

NEEDS = Needs((1,))


def words(count: int, seed: int) -> list[int]:
    rng = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(2, VOCAB, (count,), generator=rng).tolist()
    return found


def roots(seqs: Sequence[FakeSeq]) -> TreeBatch:
    return TreeBatch.chains([seq.tokens[-1:] for seq in seqs])


def texts_of() -> list[FakeSeq]:
    """One that runs; prompts of several lengths, two that start alike, one of one token, and a long one."""
    first = words(150, 1)
    prompts = [words(20, 0), first, [*first[:130], *words(9, 2)], words(1, 3), words(40, 4), words(900, 5)]
    return [FakeSeq(i, tokens, cache_salt="") for i, tokens in enumerate(prompts)]


def apart(seqs: Sequence[FakeSeq]) -> tuple[Tensor, Tensor]:
    """Logits and hidden rows of roots, each alone behind a prompt that was read before."""
    target, logits, hidden = make_target("llama", "cpu"), list[Tensor](), list[Tensor]()
    for seq in seqs:
        target.prefill([seq], NEEDS)
        scores = target.score([seq], roots([seq]), NEEDS)
        logits.append(scores.required_logits.clone())
        hidden.append(scores.hidden[1].clone())
    return torch.cat(logits), torch.cat(hidden)


def together(target: CudaDecoder) -> tuple[list[FakeSeq], Scores]:
    """The first runs; the next four start with its pass, which also reads some of the long one."""
    running, one, alike, short, other, long = texts_of()
    target.prefill([running], NEEDS)
    target.prefill([one], NEEDS)
    target.release(one)  # its pages are found by those that start alike
    seqs, prompts = [running, one, alike, short, other], [one, alike, short, other, long]
    return seqs, target.score(seqs, roots(seqs), NEEDS, Prompts(prompts, 400))


@pytest.mark.parametrize("many", [False, True])
def test_scores_are_those_behind_a_prompt_that_was_read(many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`many`: more roots than the pass of plain rounds takes go through the one of any trees."""
    target = make_target("llama", "cpu")
    if many:
        monkeypatch.setattr("forerun.models.cuda.plain_rounds.MOST_ROWS", 2)
    seqs, scores = together(target)
    logits, hidden = apart(seqs)
    torch.testing.assert_close(scores.required_logits, logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scores.hidden[1], hidden, atol=1e-4, rtol=1e-4)
    assert [target.cached_tokens(seq) for seq in seqs] == [len(seq.tokens) - 1 for seq in seqs]
    assert target.reused_tokens(seqs[2]) > 0
    assert scores.read is not None
    chains, rows = scores.read
    assert chains.sizes()[:4] == [149, 138, 0, 39]
    assert 0 < chains.sizes()[4] < 899, "some of the long one"
    assert len(rows.hidden[1]) == chains.nodes
    said = logits.argmax(-1).tolist()
    target.commit(seqs, roots(seqs), Verdict.of([[] for _ in seqs], said, "cpu"))
    for seq, token in zip(seqs, said, strict=True):
        seq.tokens.append(token)
    following = target.score(seqs, roots(seqs), NEEDS)
    torch.testing.assert_close(following.required_logits, apart(seqs)[0], atol=1e-4, rtol=1e-4)


def test_negative_control_roots_that_do_not_lie_behind_their_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("llama", "cpu")
    real = target.placing.roots

    def wrong(seqs: Sequence[FakeSeq], tokens: Sequence[int], follows: Sequence[int]) -> object:
        for seq in seqs:
            target.kv.extent(seq.id).coming = 0
        return real(seqs, tokens, follows)

    monkeypatch.setattr(target.placing, "roots", wrong)
    seqs, scores = together(target)
    assert not torch.allclose(scores.required_logits, apart(seqs)[0], atol=1e-2)


def test_those_that_start_are_read_to_their_end_and_fit_the_pass() -> None:
    fresh, plain = [words(300, 1), words(100, 2), words(700, 3)], TreeBatch.chains([[1]] * 40)
    taken = beside_trees(fresh, plain, 256, least=400)
    assert list(map(len, taken)) == [300, 100, 0]
    with pytest.raises(AssertionError, match="fit"):
        beside_trees(fresh, plain, 256, least=MAX_ROWS - 39)
    with pytest.raises(AssertionError, match="fit"):
        beside_trees(fresh, TreeBatch.chains([[1, 2]]), 256, least=1)


def make(target: CudaDecoder, follows: bool, batch: int = 6) -> Engine:
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(target, frozenset(), speculative, EngineConfig(max_batch=batch))
    engine.timeline.depth = 2 * follows
    return engine


def requests() -> list[Request]:
    """Greedy and sampled ones, of one token and of several, some that the host must decide about."""
    made = []
    for i, length in enumerate((30, 1, 200, 45, 7, 120, 64, 65, 20)):
        params = SamplingParams(max_tokens=(1, 12, 5)[i % 3], ignore_eos=True)
        if i % 2:
            params = replace(params, temperature=0.9, seed=i, top_p=0.95)
        if i == 6:
            params = replace(params, logprobs=2, presence_penalty=0.5)
        made.append(Request(tuple(words(length, i)), params, cache_salt=""))
    return made


def write(engine: Engine, some: Sequence[Request], every: int) -> list[list[int]]:
    """A request every few steps; the tokens of each."""
    waiting, found, steps = list(some), dict[int, list[int]](), 0
    while waiting or engine.busy:
        if waiting and (steps % every == 0 or not engine.busy):
            found[engine.submit(waiting.pop(0))] = []
        for event in engine.step():
            assert event.error is None
            found[event.seq_id] += event.tokens
        steps += 1
    return [found[key] for key in sorted(found)]


def starts_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many start at once, from now on."""
    started, start = list[int](), engine.scheduler.start
    monkeypatch.setattr(engine.scheduler, "start", lambda seqs: (started.append(len(seqs)), start(seqs))[1])
    return started


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("follows", [False, True])
def test_texts_are_those_of_requests_that_are_read_first(
    device: str, follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_cuda(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    alone = make(make_target("llama", device, dtype), follows=False, batch=1)
    monkeypatch.setattr(alone.scheduler, "starters", lambda *_: [])
    wanted = write(alone, requests(), 1)
    for every in (1, 2):
        engine = make(make_target("llama", device, dtype), follows)
        started = starts_of(engine, monkeypatch)
        assert write(engine, requests(), every) == wanted
        assert sum(started) >= len(wanted)
        assert engine.target.used_slots == 0
        assert not follows or (engine.timeline.depth > 1), "nothing has failed"


def passes_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes from now on, by what was asked for."""
    asked = list[str]()
    for name in ("prefill", "score"):
        real = getattr(engine.target, name)
        monkeypatch.setattr(
            engine.target, name, lambda *more, real=real, name=name: (asked.append(name), real(*more))[1]
        )
    return asked


def test_a_first_token_comes_with_the_pass_that_reads_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(make_target("llama", "cpu"), follows=False)
    passes = passes_of(engine, monkeypatch)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    first = engine.submit(Request(tuple(words(30, 1)), params))
    assert [len(event.tokens) for event in engine.step()] == [1]
    assert passes == ["score"], "nobody ran"
    second = engine.submit(Request(tuple(words(20, 2)), params))
    assert {event.seq_id for event in engine.step()} == {first, second}, "beside one that runs"
    assert passes == ["score"] * 2
    while engine.busy:
        engine.step()
    assert passes == ["score"] * 4
    engine.submit(Request(tuple(words(MAX_ROWS + 300, 3)), params))
    assert not engine.step()
    assert len(engine.step()) == 1
    assert passes[4:] == ["prefill", "score"], "one that needs two passes starts with the second"


def test_a_full_batch_reads_early_and_starts_later() -> None:
    """Places are for those that run: the third is read beside them and starts when one has ended."""
    engine = make(make_target("llama", "cpu"), follows=False, batch=2)
    engine.scheduler.reads_early, engine.scheduler.max_batch = True, 2
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for i in range(3):
        engine.submit(Request(tuple(words(20 + i, i)), params))
    engine.step()
    assert len(engine.running) == 2
    seqs = engine.scheduler.starters(list(engine.waiting), 2, 256)
    assert seqs == []
    while engine.busy:
        engine.step()
    assert engine.target.used_slots == 0
