"""Plain rounds that start before the last one was read: the same texts, and nothing written too early stays."""

import random
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Needs, Prompts, Request, Round, TreeBatch, Verdict
from forerun.engine import engine as engine_module
from forerun.engine.engine import Engine
from forerun.engine.scheduler import PrefillRows
from forerun.models.base import ON_GPU
from forerun.models.cuda.plain_rounds import PlainResults
from forerun.models.cuda.target import CudaDecoder
from forerun.testing import FakeSeq, Fault
from tests.gpu.heads import settled
from tests.gpu.tiny import DEVICES, VOCAB, make_target, need_cuda

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
rng = random.Random(1)
PROMPTS = [tuple(rng.randrange(VOCAB) for _ in range(n)) for n in (3, 70, 9, 130, 5, 1, 40)]


def _target(device: str, **more: Any) -> CudaDecoder:
    need_cuda(device)
    return make_target("llama", device, torch.float32 if device == "cpu" else torch.bfloat16, **more)


def _engine(
    target: CudaDecoder,
    drafter: str = "none",
    batch: int = 4,
    stops: frozenset[int] = frozenset(),
    *,
    follows: bool = True,
    rows: int = 30,
) -> Engine:
    speculative = SpeculativeConfig(drafter=drafter, controller="fixed", budget=3)
    engine = make_engine(target, stops, speculative, EngineConfig(max_batch=batch))
    engine.prefill_rows = PrefillRows(ON_GPU.prefill, rows, fixed=rows)
    engine.timeline.depth, engine.scheduler.reads_early = 2 * follows, follows
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
    """Texts of different lengths, so that rows leave one by one; prompts are read each time."""
    return [Request(p, replace(params, max_tokens=14 + 5 * i), cache_salt=None) for i, p in enumerate(PROMPTS)]


def _short_requests() -> list[Request]:
    """For faults that come in one of the first rounds: what is written long after them says nothing more."""
    return [replace(one, params=replace(one.params, max_tokens=8 + 2 * i)) for i, one in enumerate(_requests())]


@cache
def _short_texts() -> list[list[int]]:
    """Of a CPU, one pass after the other."""
    return _write(_engine(_target("cpu"), follows=False), _short_requests(), 0)


class Beside:
    """Counts rounds by whether they follow an unread one and whether prompts are read in them."""

    def __init__(self, engine: Engine) -> None:
        self.counts, score = dict[tuple[bool, bool], int](), engine._score

        def counted(seqs: Any, trees: TreeBatch, readers: Any, rows: int) -> Any:
            scores = score(seqs, trees, readers, rows)
            reads = scores.read is not None and scores.read[0].nodes > 0
            kind = trees.follows is not None, reads
            self.counts[kind] = self.counts.get(kind, 0) + 1
            return scores

        engine._score = counted  # type: ignore[method-assign]

    @property
    def share(self) -> float:
        """Of all rounds, those that followed."""
        followed = sum(count for (follows, _), count in self.counts.items() if follows)
        return followed / sum(self.counts.values())


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("apart", [0, 1, 3, 9])
def test_texts_are_those_of_one_pass_after_the_other(device: str, apart: int) -> None:
    target = _target(device)
    wanted = _write(_engine(target, follows=False), _requests(), apart)
    assert target.plain.followed == 0
    engine = _engine(target)
    beside = Beside(engine)
    assert _write(engine, _requests(), apart) == wanted
    assert target.plain.followed > 20
    assert beside.share > 0.7
    assert beside.counts[True, True] > 2, "with prompts in the same pass, too"


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=["T=0", "T=1"])
def test_prompts_in_nearly_every_round_keep_no_round_from_following(device: str, params: dict[str, Any]) -> None:
    """Many short texts: in each round somebody ends, somebody joins, and a prompt is read."""
    target, draw = _target(device), random.Random(4)
    some = [
        Request(
            tuple(draw.randrange(VOCAB) for _ in range(draw.randrange(1, 60))),
            SamplingParams(max_tokens=draw.randrange(1, 14), ignore_eos=True, seed=i, **params),
            cache_salt=None,
        )
        for i in range(60)
    ]
    wanted = _write(_engine(target, batch=1, follows=False), some, 0)
    engine = _engine(target, batch=8, rows=40)
    beside = Beside(engine)
    assert _write(engine, some, 0) == wanted
    assert beside.share > 0.9
    assert beside.counts[True, True] > 2 * beside.counts.get((True, False), 0)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_stop_token_ends_a_text_that_was_ahead(device: str) -> None:
    target = _target(device)
    texts = _write(_engine(target, follows=False), _requests())
    stops = frozenset({texts[0][6], texts[3][11], texts[4][20]})
    requests = [replace(one, params=replace(one.params, ignore_eos=False)) for one in _requests()]
    wanted = _write(_engine(target, stops=stops, follows=False), requests)
    assert wanted != texts
    assert _write(_engine(target, stops=stops), requests) == wanted
    assert target.plain.followed > 10


@pytest.mark.parametrize("device", DEVICES)
def test_slots_of_a_text_that_ended_serve_the_next(device: str) -> None:
    """Room for two at a time: every newcomer gets slots that a pass ahead may just have written."""
    target = _target(device, kv_slots=1000)
    wanted = _write(_engine(target, follows=False), _requests(), 0)
    assert _write(_engine(target), _requests(), 0) == wanted
    assert target.plain.followed > 20


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_whoever_is_sent_back_for_want_of_room_writes_the_same(device: str) -> None:
    """Long texts that do not fit together: the youngest are sent back, and read again."""
    target = _target(device, kv_slots=448)
    long = [Request(prompt, replace(GREEDY, max_tokens=150)) for prompt in PROMPTS[:4]]
    wanted = [_write(_engine(target, batch=1, follows=False), [one], 0)[0] for one in long]
    engine = _engine(target)
    assert _write(engine, long, 0) == wanted
    assert engine.stats.preemptions > 0
    assert target.plain.followed > 100


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("when", [1, 2, 3, 5, 8])
def test_whoever_is_aborted_leaves_the_others_as_they_are(device: str, when: int) -> None:
    target = _target(device)
    wanted = _write(_engine(target, follows=False), _requests(), 0)
    engine = _engine(target)
    ids = {engine.submit(request): list[int]() for request in _requests()}
    dropped = [*ids][1::3]
    for step in range(400):
        for event in engine.step():
            ids[event.seq_id] += event.tokens
        if step % when == 0 and dropped:
            engine.abort(dropped.pop())
    assert not engine.busy
    for i, (text, whole) in enumerate(zip(ids.values(), wanted, strict=True)):
        assert text == (whole[: len(text)] if i % 3 == 1 else whole)
    assert target.used_slots == 0
    assert target.plain.followed > 10


@pytest.mark.slow
def test_a_wrong_root_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a row follows its neighbour, or the token of the round before the last."""
    target = _target("cpu")
    wanted = _write(_engine(target, follows=False), _requests(), 1)
    real = PlainResults.follow
    for change in (lambda tokens: tokens.clamp_(min=-1), lambda tokens: tokens.clamp_(min=0)):

        def follow(self: PlainResults, tokens: torch.Tensor, step: Any, change: Any = change) -> None:
            change(tokens)
            real(self, tokens, step)

        monkeypatch.setattr(PlainResults, "follow", follow)
        assert _write(_engine(target), _requests(), 1) != wanted


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_second_turn_finds_the_pages_of_a_first_that_was_ahead(device: str) -> None:
    """What a pass ahead wrote behind the end of a text is not part of what others find."""
    engine = _engine(_target(device))
    first = Request(PROMPTS[3], replace(GREEDY, max_tokens=70))
    (text,) = _write(engine, [first], 0)
    turns = [Request((*PROMPTS[3], *text[:end], *PROMPTS[2]), GREEDY) for end in (70, 61)]
    again = _write(engine, [first, *turns], 5)
    assert engine.target.plain.followed > 40  # type: ignore[attr-defined]
    alone = [_write(_engine(_target(device)), [turn], 0)[0] for turn in turns]
    assert again == [text, *alone]


@pytest.mark.slow
def test_nothing_is_launched_where_the_host_decides() -> None:
    target = _target("cpu")
    _write(_engine(target), _requests(replace(GREEDY, temperature=0.8, seed=4, repetition_penalty=1.2)))
    _write(_engine(target), _requests(replace(GREEDY, repetition_penalty=1.2)))
    assert target.plain.followed == 0


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


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("verifier", ["coupled", "exact"])
def test_sampled_texts_are_the_hosts_and_go_ahead_too(device: str, verifier: str) -> None:
    """Seeded texts, greedy ones among them: by the host's verifiers, then by the device, in other company."""
    by_host, target = _target(device, samples=False), _target(device)
    wanted = [_write(_engine(by_host, batch=1), [one], 0)[0] for one in _mixed(verifier)]
    assert by_host.plain.followed <= len(wanted[3])  # the greedy one
    assert _write(_engine(target), _mixed(verifier)) == wanted
    assert target.plain.followed > 20
    other = [replace(one, params=replace(one.params, seed=7)) for one in _mixed(verifier)]
    changed = [a != b for a, b in zip(_write(_engine(target), other), wanted, strict=True)]
    assert changed == [bool(SAMPLED[i % len(SAMPLED)]) for i in range(len(changed))]


@pytest.mark.slow
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
    """They are computed behind it, and nobody is read first: logits stay for one pass only."""
    target, found = _target("cpu"), []
    some = [
        replace(one, params=replace(one.params, logprobs=2 if i == 1 else None)) for i, one in enumerate(_requests())
    ]
    for follows in (False, True):
        engine = _engine(target, follows=follows)
        seqs = [engine.find(engine.submit(one)) for one in some]
        while engine.busy:
            engine.step()
        found.append([(seq.tokens, [one for e in seq.events for one in e.logprobs]) for seq in seqs if seq])
    assert target.plain.followed > 20
    for (tokens, plain), (same, ahead) in zip(*found, strict=True):
        assert tokens == same
        assert [one.logprob for one in plain] == pytest.approx([one.logprob for one in ahead], abs=1e-5)


class Standing:
    """A controller whose plans stand for a few rounds, plain ones too."""

    def __init__(self, seed: int) -> None:
        self.rng, self.drafted, self.followed = random.Random(seed), 0, 0

    def plan(self, seqs: Sequence[Any]) -> list[Budget]:
        nodes = self.rng.choice((0, 0, 3))
        return [Budget(nodes, nodes, repeats=self.rng.randint(0, 5))] * len(seqs)

    def observe(self, outcome: Round) -> None:
        self.drafted += sum(outcome.drafted)
        self.followed += outcome.followed
        assert not (outcome.followed and sum(outcome.drafted)), "n-gram drafts are made by the host"

    def forget(self, seq: Any) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_plain_rounds_follow_as_long_as_their_plan_stands(seed: int) -> None:
    target = _target("cpu")
    repeating = [Request(one * 3, replace(GREEDY, max_tokens=40)) for one in PROMPTS]
    wanted = _write(_engine(target, follows=False), repeating)
    engine = _engine(target, drafter="ngram")
    controller = engine.controller = Standing(seed)
    assert _write(engine, repeating) == wanted
    assert controller.drafted > 0
    assert controller.followed > 10


def test_rounds_that_may_draft_are_read_first() -> None:
    """What n-gram finds depends on the last token."""
    target = _target("cpu")
    _write(_engine(target, drafter="ngram"), _requests())
    assert target.plain.followed == 0


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("at", range(2, 12))
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_round_that_fails_with_a_pass_under_way(
    at: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = _target("cpu", kv_slots=1300)
    engine = _engine(target)
    requests, wanted = _short_requests()[4:], _short_texts()[4:]
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


PLACES = ["roots", "run", "send", "next", "read", "commit", "observe", "outcome", "prompts"]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
def test_a_failure_leaves_texts_as_they_are(
    place: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anywhere in a round that follows, or in the one before it, with prompts beside both."""
    target = _target("cpu", kv_slots=1300)
    for at in (1, 3):
        engine, left = _engine(target), [at]
        plain = target.plain
        owner, name = {
            "roots": (target.placing, "roots"), "run": (plain, "_run"), "send": (plain.results, "send"),
            "next": (plain, "next_roots"), "read": (plain.results, "read"), "commit": (target, "commit"),
            "observe": (engine.drafters, "observe"), "outcome": (engine_module, "outcome_of"),
            "prompts": (engine, "_observe_prompts"),
        }[place]  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, _failing(getattr(owner, name), left, error))
            assert _write_through(engine, _short_requests()) == _short_texts()
        assert left[0] < 0, "it has failed"
        assert target.used_slots == 0


def _failing(real: Any, left: list[int], error: type[BaseException]) -> Any:
    def call(*args: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise error("injected")
        return real(*args, **more)

    return call


def _write_through(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    found = {engine.submit(request): list[int]() for request in requests}
    while engine.busy:
        with suppress(KeyboardInterrupt):
            for event in engine.step():
                found[event.seq_id] += event.tokens
    return list(found.values())


@pytest.mark.slow
def test_a_fault_anywhere_while_a_pass_is_launched_ahead() -> None:
    """At many points of a round, in turn with each error: the same texts, and no slot is lost."""
    target = _target("cpu", kv_slots=900)
    engine, errors = _engine(target), (MemoryError, KeyboardInterrupt)
    requests = [Request(prompt, replace(GREEDY, max_tokens=9)) for prompt in (PROMPTS[0], PROMPTS[2])]
    wanted = _write(engine, requests, 0)

    def play(at: int | None, error: type[BaseException]) -> Fault:
        ids = {engine.submit(request): list[int]() for request in requests}
        engine.timeline.depth, followed = 2, target.plain.followed
        fault = Fault(at, error, ("forerun.models",))
        for step in range(100):
            with suppress(*errors), fault if step == 5 else nullcontext():
                for event in engine.step():
                    ids[event.seq_id] += event.tokens
            if step == 4:
                assert target.plain.followed > followed
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
def test_rows_behind_an_unread_pass_are_those_of_a_new_one(device: str) -> None:
    """All of them, some of them, and in another order, with one that joins and a prompt beside them."""
    target, other, needs = _target(device), _target(device), Needs((1,))
    atol = 1e-4 if device == "cpu" else 0.0
    seqs = [FakeSeq(i, list(p), max_length=400) for i, p in enumerate(PROMPTS[:4])]
    joins, reads = FakeSeq(20, [7, 8, 9], max_length=400), FakeSeq(21, list(PROMPTS[6]), max_length=400)
    target.prefill([*seqs, joins], needs)
    _advance(target, seqs, 2, needs)
    for some in ([0, 1, 2, 3], [2, 0], [3]):
        roots = TreeBatch.chains([seq.tokens[-1:] for seq in seqs])
        first = target.score(seqs, roots, needs)
        assert first.greedy is not None
        assert first.greedy.next_roots is not None
        going = [*((seqs[b], b) for b in some), (joins, -1)]
        trees = first.greedy.next_roots(going)
        assert trees is not None
        second = target.score([seq for seq, _ in going], trees, needs, Prompts([reads], 20))
        logits, hidden = second.required_logits.clone(), second.hidden[1]
        verdict = settled(first)
        target.commit(seqs, roots, verdict)
        for seq, token in zip(seqs, verdict.to_host()[1], strict=True):
            seq.tokens.append(token)
        next_tokens = settled(second).to_host()[1]
        assert trees.to_host()[0] == [seq.tokens[-1] for seq, _ in going], "roots are known with the verdict"
        wanted = _fresh(other, [seq for seq, _ in going], needs)
        assert next_tokens == wanted[0].argmax(-1).tolist()
        torch.testing.assert_close(logits, wanted[0], atol=atol, rtol=0.0)
        torch.testing.assert_close(hidden, wanted[1], atol=atol, rtol=0.0)
        assert target.cached_tokens(reads) in (20, 39)


def test_only_the_last_pass_is_followed() -> None:
    target = _target("cpu")
    seqs = [FakeSeq(0, [3, 4, 5], max_length=50), FakeSeq(1, [3, 4], max_length=50)]
    target.prefill(seqs, Needs())
    scores = [target.score([seq], TreeBatch.chains([seq.tokens[-1:]]), Needs()) for seq in seqs]
    made = [one.greedy.next_roots([(seq, 0)]) for one, seq in zip(scores, seqs, strict=True)]  # type: ignore[union-attr, misc]
    assert [one is None for one in made] == [True, False]


def test_a_verdict_is_read_once() -> None:
    target = _target("cpu")
    seq = FakeSeq(0, [3, 4, 5], max_length=50)
    target.prefill([seq], Needs())
    scores = target.score([seq], TreeBatch.chains([[5]]), Needs())
    first = settled(scores)
    assert isinstance(first, Verdict)
    assert settled(scores) is first
