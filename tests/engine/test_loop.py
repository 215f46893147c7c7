"""The loop's edges: joining and leaving, limits, errors, logprobs, counting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.errors import InvalidInput, PromptTooLong, UnknownName
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Request
from forerun.engine.engine import Engine
from forerun.testing import TableLM
from tests.exactness.harness import Letters, run
from tests.models.tiny_checkpoints import make_decoder, make_reference, save


def make(target: TableLM | None = None, drafter: str = "ngram", **config: int) -> Engine:
    speculative = SpeculativeConfig(drafter=drafter, controller="fixed", budget=4)
    engine_config = EngineConfig(**config)  # type: ignore[arg-type]
    return make_engine(target or TableLM(vocab_size=12), frozenset({0}), speculative, engine_config, Letters())


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        (Request(()), InvalidInput, "empty"),
        (Request((1,) * 50), PromptTooLong, "50 tokens"),
        (Request((1, 99)), InvalidInput, "vocabulary of 12"),
        (Request((1,), SamplingParams(logit_bias={77: 1.0})), InvalidInput, "logit_bias"),
        (Request((1,), drafter="ngrams"), UnknownName, "did you mean 'ngram'"),
        (Request((1,), drafter="draft_model"), InvalidInput, "draft_model=NAME"),
        (Request((1,), verifier="exactly"), UnknownName, "exact"),
    ],
)
def test_bad_requests_are_refused_at_once(request_: Request, error: type[Exception], says: str) -> None:
    engine = make(TableLM(vocab_size=12, max_length=50))
    with pytest.raises(error, match=says) as caught:
        engine.submit(request_)
    assert "\n" not in str(caught.value)
    assert not engine.busy


def test_stop_strings_need_a_tokenizer() -> None:
    engine = make_engine(TableLM(vocab_size=4), frozenset(), SpeculativeConfig(drafter="none"))
    with pytest.raises(InvalidInput, match="stop_token_ids"):
        engine.submit(Request((1,), SamplingParams(stop="x")))


def test_the_context_ends_the_text() -> None:
    target = TableLM(vocab_size=12, max_length=20)
    tokens, _ = run(make(target), [Request((1, 2, 3) * 3, SamplingParams(max_tokens=100, ignore_eos=True))])
    assert len(tokens[0]) == 20 - 9
    assert target.used_slots == 0


def test_max_tokens_inside_an_accepted_path() -> None:
    for limit in range(1, 9):
        engine = make(drafter="ngram")
        tokens, _ = run(engine, [Request((1, 2) * 4, SamplingParams(max_tokens=limit, ignore_eos=True))])
        assert len(tokens[0]) == limit


def test_what_is_cut_off_is_not_counted_as_accepted() -> None:
    """A path that the end of the text cuts short: no event claims more accepted tokens than it has."""
    cut = 0
    for stop in range(12):
        target, draft = TableLM(vocab_size=12), TableLM(vocab_size=12)  # a perfect drafter: whole paths stand
        speculative = SpeculativeConfig(drafter="draft_model", controller="fixed", budget=4)
        engine = make_engine(target, frozenset({stop}), speculative, draft_target=draft)
        engine.submit(Request((1, 2, 3), SamplingParams(max_tokens=30)))
        while engine.busy:
            for event in engine.step():
                assert event.accepted <= len(event.tokens)
                cut += event.accepted == len(event.tokens)
    assert cut  # some texts did end inside a path


def test_requests_wait_for_room_on_our_own_decoder(tmp_path: Path) -> None:
    """Every sequence reserves room for a tree on top of its length: a small store holds one at a time."""
    config, weights = save(make_reference("smollm2"), tmp_path)
    for slots in (300, 700):
        target = make_decoder(config, weights, slots)
        speculative = SpeculativeConfig(controller="adaptive", budget=4)  # its cost probe must fit as well
        engine = make_engine(target, frozenset(), speculative, EngineConfig(max_batch=4))
        tokens, _ = run(engine, [Request((1, 2, 3), SamplingParams(max_tokens=8)) for _ in range(4)])
        assert [len(row) for row in tokens] == [8] * 4
        assert target.used_slots == 0


def test_requests_wait_for_room_and_all_come_through() -> None:
    target = TableLM(vocab_size=12, slots=40)
    engine = make(target, max_batch=3)
    requests = [Request((1, 2, 3), SamplingParams(max_tokens=12, ignore_eos=True)) for _ in range(7)]
    tokens, _ = run(engine, requests)
    assert all(len(row) == 12 for row in tokens)
    assert target.used_slots == 0


def test_a_request_that_can_never_be_read_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TableLM, "has_room", lambda *_: False)
    engine = make(TableLM(vocab_size=12))
    engine.submit(Request((1, 2, 3), SamplingParams(max_tokens=100)))
    (event,) = engine.step()
    assert isinstance(event.error, InvalidInput)
    assert "kv_slots" in str(event.error)
    assert not engine.busy


def test_abort_frees_everything() -> None:
    target = TableLM(vocab_size=12)
    engine = make(target, max_batch=1)
    running, waiting = (engine.submit(Request((1, 2), SamplingParams(max_tokens=50))) for _ in range(2))
    queued = engine.waiting[0] if engine.waiting[0].id == waiting else engine.waiting[1]
    engine.step()
    engine.abort(running)
    engine.abort(waiting)
    engine.abort(12345)
    assert not engine.busy
    assert target.used_slots == 0
    assert queued.finished == "aborted"


def test_logprobs_are_those_of_the_law() -> None:
    target = TableLM(vocab_size=12)
    engine = make(target)
    params = SamplingParams(max_tokens=15, temperature=0.7, logprobs=3, seed=3, ignore_eos=True)
    engine.submit(Request((1, 2, 3, 1, 2, 3), params))
    context = [1, 2, 3, 1, 2, 3]
    while engine.busy:
        for event in engine.step():
            assert [entry.token for entry in event.logprobs] == list(event.tokens)
            for entry in event.logprobs:
                law = (target.logits(context) / 0.7).log_softmax(-1)
                assert entry.logprob == pytest.approx(float(law[entry.token]), abs=1e-5)
                values, tokens = torch.topk(law, 3)
                assert [one.token for one in entry.top] == tokens.tolist()
                assert [one.logprob for one in entry.top] == pytest.approx(values.tolist(), abs=1e-5)
                context.append(entry.token)


def test_counts_add_up() -> None:
    engine = make()
    seq_id = engine.submit(Request((1, 2, 3) * 4, SamplingParams(max_tokens=30, ignore_eos=True)))
    seq = engine.find(seq_id)
    assert seq is not None
    events = []
    while engine.busy:
        events += engine.step()
    stats = seq.stats
    assert stats.tokens == 30 == sum(len(event.tokens) for event in events)
    assert stats.rounds == len(events) == engine.stats.rounds
    assert stats.accepted == sum(event.accepted for event in events)
    assert stats.tokens_per_round == pytest.approx(30 / stats.rounds)
    assert events[-1].finished == "length"
    assert set(engine.stats.seconds) == {"prompt", "draft", "pass", "verdict", "host"}


def test_a_requests_own_budget_wins_over_the_controller() -> None:
    engine = make()
    prompt = (1, 2, 3) * 6
    seq_id = engine.submit(Request(prompt, SamplingParams(max_tokens=10), budget=Budget(0, 0)))
    seq = engine.find(seq_id)
    assert seq is not None
    while engine.busy:
        engine.step()
    assert seq.stats.drafted == 0
