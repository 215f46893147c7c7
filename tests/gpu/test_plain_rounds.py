"""Plain rounds that are launched before the last one was read: the same texts, and nothing written too early stays."""

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from forerun.build import make_engine
from forerun.engine.engine import Engine
from forerun.engine.prompt_rows import PromptRows
from forerun.models.cuda.plain_rounds import FIRST, LONGEST_WAIT, PlainRounds
from forerun.models.cuda.target import CudaDecoder
from forerun.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.testing import FakeSeq, Fault
from forerun.types import Budget, Needs, Request, Round, TreeBatch, Verdict
from tests.gpu.heads import settled
from tests.gpu.tiny import DEVICES, VOCAB, make_target, need_cuda

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
rng = random.Random(1)
PROMPTS = [tuple(rng.randrange(VOCAB) for _ in range(n)) for n in (3, 70, 9, 130, 5, 1, 40)]


def _target(device: str, **more: Any) -> CudaDecoder:
    need_cuda(device)
    return make_target("llama", device, torch.float32 if device == "cpu" else torch.bfloat16, **more)


def _engine(
    target: CudaDecoder, drafter: str = "none", batch: int = 4, stops: frozenset[int] = frozenset()
) -> Engine:
    speculative = SpeculativeConfig(drafter=drafter, controller="fixed", budget=3)
    engine = make_engine(target, stops, speculative, EngineConfig(max_batch=batch))
    engine.prompt_rows = PromptRows("cuda", 30, fixed=30)
    return engine


def _write(engine: Engine, requests: Sequence[Request], apart: int = 3) -> list[list[int]]:
    """Texts of requests that come a few steps after each other."""
    found: dict[int, list[int]] = {}
    for request in requests:
        found[engine.submit(request)] = []
        for _ in range(apart):
            for event in engine.step():
                found[event.seq_id] += event.tokens
    while engine.busy:
        for event in engine.step():
            found[event.seq_id] += event.tokens
    assert engine.target.used_slots == 0
    return list(found.values())


def _requests(params: SamplingParams = GREEDY) -> list[Request]:
    """Texts of different lengths, so that rows leave one by one."""
    return [Request(p, replace(params, max_tokens=14 + 5 * i)) for i, p in enumerate(PROMPTS)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("apart", [0, 3, 9])
def test_texts_are_those_of_one_pass_after_the_other(device: str, apart: int) -> None:
    target = _target(device)
    engine = _engine(target)
    target.plain.looks_ahead = False
    wanted = _write(engine, _requests(), apart)
    assert target.plain.launched == 0
    target.plain.looks_ahead = True
    assert _write(engine, _requests(), apart) == wanted
    assert target.plain.used > 20
    assert target.plain.launched - target.plain.used <= 2 + len(PROMPTS)


@pytest.mark.parametrize("device", DEVICES)
def test_a_stop_token_ends_a_text_that_was_ahead(device: str) -> None:
    target = _target(device)
    engine = _engine(target)
    target.plain.looks_ahead = False
    texts = _write(engine, _requests())
    stops = frozenset({texts[0][6], texts[3][11], texts[4][20]})
    engine = _engine(target, stops=stops)
    requests = [replace(one, params=replace(one.params, ignore_eos=False)) for one in _requests()]
    wanted = _write(engine, requests)
    assert wanted != texts
    target.plain.looks_ahead = True
    assert _write(engine, requests) == wanted
    assert target.plain.used > 10


@pytest.mark.parametrize("device", DEVICES)
def test_slots_of_a_text_that_ended_serve_the_next(device: str) -> None:
    """Room for two at a time: every newcomer gets slots that a pass ahead may just have written."""
    target = _target(device, kv_slots=1000)
    engine = _engine(target)
    target.plain.looks_ahead = False
    wanted = _write(engine, _requests(), 0)
    target.plain.looks_ahead = True
    assert _write(engine, _requests(), 0) == wanted
    assert target.plain.used > 20


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_turn_finds_the_pages_of_a_first_that_was_ahead(device: str) -> None:
    """What a pass ahead wrote behind the end of a text is not part of what others find."""
    engine = _engine(_target(device))
    first = Request(PROMPTS[3], replace(GREEDY, max_tokens=70))
    (text,) = _write(engine, [first], 0)
    turns = [Request((*PROMPTS[3], *text[:end], *PROMPTS[2]), GREEDY) for end in (70, 61)]
    again = _write(engine, [first, *turns], 5)
    assert engine.target.plain.used > 40  # type: ignore[attr-defined]
    alone = [_write(_engine(_target(device)), [turn], 0)[0] for turn in turns]
    assert again == [text, *alone]


def test_nothing_is_launched_where_the_host_decides() -> None:
    target = _target("cpu")
    _write(_engine(target), _requests(replace(GREEDY, temperature=0.8, seed=4, repetition_penalty=1.2)))
    _write(_engine(target), _requests(replace(GREEDY, repetition_penalty=1.2)))
    assert target.plain.launched == 0


SAMPLED = [
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.01},
    {},
]


def _mixed(verifier: str) -> list[Request]:
    made = []
    for i, request in enumerate(_requests()):
        more = SAMPLED[i % len(SAMPLED)]
        params = replace(request.params, seed=90 + i if more else None, **more)
        made.append(replace(request, params=params, verifier=verifier))
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("verifier", ["coupled", "exact"])
def test_sampled_texts_are_the_hosts_and_go_ahead_too(device: str, verifier: str) -> None:
    """Seeded texts, greedy ones among them: by the host's verifiers, then by the device, in other company."""
    by_host, target = _target(device, samples=False), _target(device)
    wanted = [_write(_engine(by_host, batch=1), [one], 0)[0] for one in _mixed(verifier)]
    assert by_host.plain.launched <= len(wanted[3])  # the greedy one
    assert _write(_engine(target), _mixed(verifier)) == wanted
    assert target.plain.used > 20
    other = [replace(one, params=replace(one.params, seed=7)) for one in _mixed(verifier)]
    changed = [a != b for a, b in zip(_write(_engine(target), other), wanted, strict=True)]
    assert changed == [bool(SAMPLED[i % len(SAMPLED)]) for i in range(len(changed))]


def test_logprobs_of_sampled_texts_are_the_hosts() -> None:
    def logprobs(target: CudaDecoder) -> list[list[tuple[int, float]]]:
        engine = _engine(target)
        params = replace(GREEDY, temperature=0.8, top_k=30, seed=4, logprobs=2)
        seqs = [engine.find(engine.submit(one)) for one in _requests(params)]
        while engine.busy:
            engine.step()
        events = [[one for event in seq.events for one in event.logprobs] for seq in seqs if seq is not None]
        return [[(one.token, round(one.logprob, 4)) for one in some] for some in events]

    assert logprobs(_target("cpu")) == logprobs(_target("cpu", samples=False))


def test_log_probabilities_are_those_of_their_own_pass() -> None:
    """They are read after the next pass was launched."""
    target, found = _target("cpu"), []
    for looks_ahead in (False, True):
        target.plain.looks_ahead = looks_ahead
        engine = _engine(target)
        engine.submit(Request(PROMPTS[0], replace(GREEDY, logprobs=2)))
        events = []
        while engine.busy:
            events += engine.step()
        found.append([(event.tokens, event.logprobs) for event in events])
    assert target.plain.used > 15
    for (tokens, plain), (same, ahead) in zip(*found, strict=True):
        assert tokens == same
        assert [one.logprob for one in plain] == pytest.approx([one.logprob for one in ahead], abs=1e-5)


def test_rounds_that_draft_now_and_then_waste_little() -> None:
    """A chain every fifth round: what was launched in vain makes the next attempt wait longer."""
    target = _target("cpu")
    engine = _engine(target, drafter="ngram")
    budgets: Iterator[int] = iter(range(10_000))

    def plan(seqs: Sequence[Any]) -> list[Budget]:
        drafts = next(budgets) % 5 == 4
        return [Budget(3, 3) if drafts else Budget(0, 0) for _ in seqs]

    delayed, booked = list[bool](), list[float]()

    def observe(outcome: Round) -> None:
        delayed.append(outcome.delayed)
        booked.append(outcome.seconds["pass"])
        assert outcome.tells_times == (not outcome.delayed)

    engine.controller.plan, engine.controller.observe = plan, observe  # type: ignore[method-assign]
    repeating = [Request((5, 6, 7, 5, 6, 7, 5), replace(GREEDY, max_tokens=300))]
    _write(engine, repeating)
    plain = target.plain
    assert 0 < plain.launched - plain.used <= 8, "in vain: after 2, 4, 8, ... rounds"
    assert delayed.count(True) == plain.launched - plain.used, "a controller is told which rounds had to wait"
    assert all(seconds > 0.0 for seconds in booked)
    assert plain._wait <= LONGEST_WAIT


@pytest.mark.parametrize("at", range(2, 12))
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_round_that_fails_with_a_pass_under_way(
    at: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = _target("cpu", kv_slots=1300)
    engine = _engine(target)
    requests = _requests()[:3]
    wanted = _write(engine, requests, 0)
    commit, calls = target.commit, iter(range(1000))

    def failing(*given: Any) -> None:
        commit(*given)
        if next(calls) == at:
            raise error("stopped")

    monkeypatch.setattr(target, "commit", failing)
    ids = {engine.submit(request): list[int]() for request in requests}
    while engine.busy:
        try:
            for event in engine.step():
                ids[event.seq_id] += event.tokens
        except KeyboardInterrupt:
            continue
    assert list(ids.values()) == wanted
    assert target.used_slots == 0


@pytest.mark.slow
def test_a_fault_anywhere_while_a_pass_is_launched_ahead() -> None:
    """At many points of a round, in turn with each error: the same texts, and no slot is lost."""
    target = _target("cpu", kv_slots=900)
    engine, errors = _engine(target), (MemoryError, KeyboardInterrupt)
    requests = [Request(prompt, replace(GREEDY, max_tokens=9)) for prompt in (PROMPTS[0], PROMPTS[2])]
    wanted = _write(engine, requests, 0)

    def play(at: int | None, error: type[BaseException]) -> Fault:
        ids = {engine.submit(request): list[int]() for request in requests}
        target.plain.looks_ahead, target.plain._wait, launched = True, FIRST, target.plain.launched
        fault = Fault(at, error, ("forerun.models",))
        for step in range(100):
            with suppress(*errors), fault if step == 5 else nullcontext():
                for event in engine.step():
                    ids[event.seq_id] += event.tokens
            if step == 4:
                assert target.plain.launched > launched
        assert not engine.busy
        assert list(ids.values()) == wanted, f"point {at}: {fault.fired}"
        assert target.used_slots == 0, f"point {at}: {fault.fired}"
        return fault

    points = play(None, RuntimeError).seen
    assert points > 200
    for i, at in enumerate(range(0, points, points // 25)):
        assert play(at, errors[i % 2]).fired


def _advance(target: CudaDecoder, seqs: Sequence[FakeSeq], rounds: int, needs: Needs) -> None:
    for _ in range(rounds):
        roots = TreeBatch.chains([seq.tokens[-1:] for seq in seqs])
        verdict = settled(target.score(seqs, roots, needs))
        target.commit(seqs, roots, verdict)
        for seq, token in zip(seqs, verdict.to_host()[1], strict=True):
            seq.tokens.append(token)


def _fresh(target: CudaDecoder, seqs: Sequence[FakeSeq], needs: Needs) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and hidden rows of the roots, by new sequences."""
    twins = [FakeSeq(1000 + seq.id, list(seq.tokens), max_length=400) for seq in seqs]
    target.prefill(twins, needs)
    scores = target.score(twins, TreeBatch.chains([seq.tokens[-1:] for seq in twins]), needs)
    for twin in twins:
        target.release(twin)
    return scores.required_logits.clone(), scores.hidden[1]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_pass_under_way_are_those_of_a_new_one(device: str) -> None:
    """All of them, some of them, and in another order."""
    target, other, needs = _target(device), _target(device), Needs((1,))
    atol = 1e-4 if device == "cpu" else 0.0
    seqs = [FakeSeq(i, list(p), max_length=400) for i, p in enumerate(PROMPTS[:4])]
    target.prefill(seqs, needs)
    _advance(target, seqs, 4, needs)
    for some in (seqs, [seqs[2], seqs[0]], [seqs[0]]):
        used = target.plain.used
        scores = target.score(some, TreeBatch.chains([seq.tokens[-1:] for seq in some]), needs)
        assert target.plain.used == used + 1
        logits, hidden, roots = scores.required_logits.clone(), scores.hidden[1].clone(), len(some)
        verdict = settled(scores)
        torch.testing.assert_close(scores.required_logits, logits, atol=0.0, rtol=0.0)
        for seq, token in zip(some, verdict.to_host()[1], strict=True):
            seq.tokens.append(token)
        target.commit(some, TreeBatch.chains([[0]] * roots), verdict)
        wanted = _fresh(other, [FakeSeq(seq.id, seq.tokens[:-1]) for seq in some], needs)
        torch.testing.assert_close(logits, wanted[0], atol=atol, rtol=0.0)
        torch.testing.assert_close(hidden, wanted[1], atol=atol, rtol=0.0)


def _after(target: CudaDecoder, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores after something happened to a sequence for which a pass was under way, and as they should be."""
    seqs = [FakeSeq(i, list(p), max_length=400) for i, p in enumerate(PROMPTS[:2])]
    target.prefill(seqs, Needs((1,)))
    _advance(target, seqs, 4, Needs((1,)))
    assert target.plain._ahead is not None
    last = seqs[0].tokens[-1]
    if what == "released":  # and read again, elsewhere
        blocks = FakeSeq(50, [1, 2], max_length=200)
        target.release(seqs[0])
        target.prefill([blocks], Needs((1,)))
        target.prefill([seqs[0]], Needs((1,)))
        target.plain._streak, target.plain._decided = 5, True
    elif what == "rewritten":  # to the same length and the same last token
        length = len(seqs[0].tokens)
        target.truncate(seqs[0], length - 4)
        seqs[0].tokens[length - 4 :] = [1, 2, 3, last]
        ahead = target.plain._ahead
        target.prefill([seqs[0]], Needs((1,)))
        target.plain._ahead = ahead
    elif what == "not committed":
        roots = TreeBatch.chains([seq.tokens[-1:] for seq in seqs])
        settled(target.score(seqs, roots, Needs((1,))))
    _advance(target, seqs, 1, Needs((1,)))
    scores = target.score(seqs, TreeBatch.chains([seq.tokens[-1:] for seq in seqs]), Needs((1,)))
    logits = scores.required_logits.clone()
    return logits, _fresh(target, seqs, Needs((1,)))[0]


@pytest.mark.parametrize("what", ["released", "rewritten", "not committed"])
def test_what_happens_to_a_sequence_drops_what_was_ahead(what: str) -> None:
    got, wanted = _after(_target("cpu"), what)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0.0)


def test_a_pass_that_should_have_been_dropped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a sequence was cut and written anew, and what was ahead still counts for it."""
    monkeypatch.setattr(PlainRounds, "forget", lambda self, seq_id: None)
    got, wanted = _after(_target("cpu"), "rewritten")
    assert float((got - wanted).abs().max()) > 1e-2


def test_what_cannot_be_launched_ahead_is_launched_later(monkeypatch: pytest.MonkeyPatch) -> None:
    target = _target("cpu")
    engine = _engine(target)
    wanted = _write(engine, _requests())
    run = target.plain._run

    def failing(plan: Any, hidden: Any, step: Any) -> None:
        if step.follows:
            raise RuntimeError("no graph")
        run(plan, hidden, step)

    monkeypatch.setattr(target.plain, "_run", failing)
    assert _write(engine, _requests()) == wanted
    assert not target.plain.looks_ahead


def test_a_verdict_is_read_once() -> None:
    target = _target("cpu")
    seq = FakeSeq(0, [3, 4, 5], max_length=50)
    target.prefill([seq], Needs())
    scores = target.score([seq], TreeBatch.chains([[5]]), Needs())
    first = settled(scores)
    assert isinstance(first, Verdict)
    assert settled(scores) is first
