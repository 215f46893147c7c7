"""Plain passes that are run ahead in one native call: the same texts, events and drafts, and nothing that is stale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Event, Needs, Request, TreeBatch, Verdict
from forerun.engine.engine import Engine
from forerun.models.config import DecoderConfig
from forerun.models.native import pass_rows
from forerun.models.native.pass_rows import MOST
from forerun.models.native.target import Mode, NativeDecoder
from forerun.testing import FakeSeq
from tests.models.tiny_checkpoints import VOCAB, make_reference, save
from tests.native.blocks import needs_native

pytestmark = needs_native

Checkpoint = tuple[dict[str, Any], dict[str, Tensor]]
AHEAD = Needs(match_length=0)
PROMPTS = [(5, 9, 2, 7), (1, 2, 3, 4, 5, 6, 1, 2, 3), (11,) * 5, tuple(range(3, 60))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    config, weights = save(make_reference("smollm2"), tmp_path_factory.mktemp("checkpoint"))
    return {**config, "max_position_embeddings": 512}, weights  # several pages


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that others use too must not shorten the runs."""
    monkeypatch.setattr(pass_rows, "SECONDS", 60.0)


def target_of(checkpoint: Checkpoint, mode: Mode = "float32") -> NativeDecoder:
    return NativeDecoder(DecoderConfig.from_hf(checkpoint[0]), checkpoint[1], mode=mode, kv_slots=None)


def engine_of(target: NativeDecoder, drafter: str = "none", stop_ids: frozenset[int] = frozenset()) -> Engine:
    """With three drafted tokens wherever there are so many."""
    settings = SpeculativeConfig(drafter=drafter, budget=3, controller="fixed")
    return make_engine(target, stop_ids, settings, EngineConfig(max_batch=2), tokenizer=Letters())


class Letters:
    """Token 65 is A."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def count_calls(monkeypatch: pytest.MonkeyPatch, target: NativeDecoder) -> list[int]:
    """How many passes each call has run; the first read the prompt."""
    passes: list[int] = []

    def counted(function: Callable[..., int], of: Callable[[], int]) -> Callable[..., int]:
        def call(*given: Any) -> int:
            failed = function(*given)
            passes.append(of())
            return failed

        return call

    ahead = target._plain_run
    monkeypatch.setattr(target, "_decode", counted(target._decode, lambda: 1))
    monkeypatch.setattr(ahead, "_decode", counted(ahead._decode, lambda: 1 + int(ahead._one.count)))
    return passes


def written(engine: Engine, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> list[Any]:
    """Of each text, one after the other: events, the counts of its rounds, and its tokens."""
    found = []
    for prompt in prompts:
        engine.submit(Request(prompt, params))
        events, seqs = list[Event](), list[Any]()
        while engine.busy:
            events += engine.step()
            seqs = engine.running[:] or seqs
        found.append((events, [one[:4] for one in seqs[0].rounds], list(seqs[0].tokens)))
    return found


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("mode", ["float32", "q8"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=70),
        SamplingParams(max_tokens=7, logprobs=2),
        SamplingParams(max_tokens=30, stop=("zz", "8")),
        SamplingParams(max_tokens=20, temperature=0.8, seed=3),
        SamplingParams(max_tokens=20, repetition_penalty=1.3),
        SamplingParams(max_tokens=20, min_tokens=9),
    ],
)
def test_texts_events_and_rounds_are_those_of_one_pass_at_a_time(
    checkpoint: Checkpoint, drafter: str, mode: Mode, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_ids = frozenset({17, 30})
    target = target_of(checkpoint, mode)
    passes = count_calls(monkeypatch, target)
    got = written(engine_of(target, drafter, stop_ids), PROMPTS, params)
    monkeypatch.setattr(pass_rows, "MOST", 0)
    single = target_of(checkpoint, mode)
    ones = count_calls(monkeypatch, single)
    wanted = written(engine_of(single, drafter, stop_ids), PROMPTS, params)
    assert got == wanted
    assert set(ones) == {1}
    assert sum(passes) == sum(ones), "no pass was run in vain"
    alike = params.temperature == 0.0 and params.repetition_penalty == 1.0
    assert (max(passes) > 1) == (alike and not params.stop and not params.min_tokens)
    assert target.used_slots == 0


@pytest.mark.slow
def test_long_texts_equal_those_of_transformers(checkpoint: Checkpoint) -> None:
    reference = make_reference("smollm2")
    engine = engine_of(target_of(checkpoint), "ngram")
    for prompt, (_, _, tokens) in zip(PROMPTS, written(engine, PROMPTS, SamplingParams(max_tokens=90)), strict=True):
        wanted = reference.generate(
            torch.tensor([prompt]), max_new_tokens=90, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert tokens == wanted[0].tolist()


def test_the_first_token_waits_for_no_other(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(checkpoint)
    passes, engine = count_calls(monkeypatch, target), engine_of(target)
    engine.submit(Request(PROMPTS[0], SamplingParams(max_tokens=2 + 2 * (1 + MOST))))
    assert len(engine.step()) == 1
    assert passes == [1, 1], "the prompt, and a token"
    while engine.busy:
        engine.step()
    assert passes == [1, 1, 1 + MOST, 1 + MOST, 1], "and behind the last token nothing is computed"


def test_slow_passes_are_run_one_by_one(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_rows, "SECONDS", 0.0)
    target = target_of(checkpoint)
    passes, engine = count_calls(monkeypatch, target), engine_of(target)
    written(engine, PROMPTS[:1], SamplingParams(max_tokens=10))
    assert passes == [1] * 11


def test_aborts_and_others_that_join_find_the_state_of_their_round(checkpoint: Checkpoint) -> None:
    """In the middle of a run another request comes, and later the first is dropped."""
    params = SamplingParams(max_tokens=24)
    alone = [tokens for _, _, tokens in written(engine_of(target_of(checkpoint)), PROMPTS[:2], params)]
    target = target_of(checkpoint)
    engine, texts = engine_of(target), dict[int, list[int]]()
    first = engine.submit(Request(PROMPTS[0], params))
    for _ in range(3):
        engine.step()
    second = engine.submit(Request(PROMPTS[1], params))
    for step in range(60):
        for event in engine.step():
            texts.setdefault(event.seq_id, []).extend(event.tokens)
        if step == 11:
            kept = list(next(seq for seq in engine.running if seq.id == first).tokens)
            engine.abort(first)
    assert kept == alone[0][: len(kept)]
    assert len(kept) > 4 + 12
    assert texts[second] == alone[1][len(PROMPTS[1]) :]
    assert target.used_slots == 0


def test_a_call_that_fails_is_repeated_and_the_text_is_the_same(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=24)
    wanted = written(engine_of(target_of(checkpoint)), PROMPTS[:1], params)
    target = target_of(checkpoint)
    real, calls = target._plain_run._decode, list[int]()

    def fails_twice(*given: Any) -> int:
        calls.append(1)
        if len(calls) in (2, 4):
            real(*given)  # what it has written must not be taken for anything
            return 1
        return int(real(*given))

    monkeypatch.setattr(target._plain_run, "_decode", fails_twice)
    got = written(engine_of(target), PROMPTS[:1], params)
    assert len(calls) > 4
    assert got[0][2] == wanted[0][2]
    assert target.used_slots == 0


def root(seq: FakeSeq, target: NativeDecoder, needs: Needs = AHEAD) -> tuple[Tensor, int, int]:
    """Score the last token: logits, where they are largest, and what is known of the rounds to come."""
    scores = target.score([seq], TreeBatch.chains([seq.tokens[-1:]]), needs)
    assert scores.greedy is not None
    assert scores.greedy.argmax is not None
    return scores.required_logits, scores.greedy.argmax[0], scores.ahead


def commit(seq: FakeSeq, target: NativeDecoder, token: int) -> None:
    target.commit([seq], TreeBatch.chains([seq.tokens[-1:]]), Verdict.of([[]], [token], "cpu"))
    seq.tokens.append(token)


def started(checkpoint: Checkpoint, ahead: bool = True) -> tuple[FakeSeq, NativeDecoder]:
    """A text of 62 tokens, two before the end of a page, of which one was written."""
    seq, target = (FakeSeq(0, [3 + i % 50 for i in range(62)], prompt_length=61, max_length=200), target_of(checkpoint))
    target.prefill([seq], AHEAD if ahead else Needs())
    target.make_room([seq], [8])
    return seq, target


def test_every_pass_of_a_run_has_the_bits_of_a_pass_alone(checkpoint: Checkpoint) -> None:
    (seq, target), (other, single) = started(checkpoint), started(checkpoint)
    seen = []
    for _ in range(2 * (1 + MOST)):
        (got, token, ahead), (wanted, same, none) = root(seq, target), root(other, single, Needs())
        assert torch.equal(got, wanted)
        assert (token, none) == (same, 0)
        assert got.shape == (1, VOCAB)
        seen.append(ahead)
        for one, of in ((seq, target), (other, single)):
            of.make_room([one], [2])
            commit(one, of, token)
    assert seen == [MOST, *[-1] * MOST] * 2
    slots = target.kv.extent(0).slots(0, 70)
    assert torch.equal(target.kv.data[:, :, :, slots], single.kv.data[:, :, :, slots])


@pytest.mark.parametrize("right", [0, 1, 2])
def test_passes_behind_a_draft_have_the_bits_of_a_pass_alone(checkpoint: Checkpoint, right: int) -> None:
    (seq, target), (other, single) = started(checkpoint), started(checkpoint)
    coming = list[tuple[Tensor, int]]()
    for _ in range(6):
        logits, token, _ = root(other, single, Needs())
        coming.append((logits, token))
        single.make_room([other], [2])
        commit(other, single, token)
    draft = [token if i < right else (token + 1) % VOCAB for i, (_, token) in enumerate(coming[:2])]
    trees = TreeBatch.chains([[seq.tokens[-1], *draft]])
    scores = target.score([seq], trees, AHEAD)
    assert scores.ahead == MOST
    assert 0.0 < scores.own < 1.0
    target.commit([seq], trees, Verdict.of([range(1, right + 1)], [coming[right][1]], "cpu"))
    seq.tokens += [token for _, token in coming[: right + 1]]
    for wanted, token in coming[right + 1 :][:3]:
        got, found, ahead = root(seq, target)
        assert torch.equal(got, wanted)
        assert (found, ahead) == (token, -1)
        commit(seq, target, token)


@pytest.mark.parametrize("change", ["another token", "a draft", "hidden rows", "truncate", "again", "a batch"])
def test_what_was_run_is_dropped_where_something_else_is_asked_for(checkpoint: Checkpoint, change: str) -> None:
    seq, target = started(checkpoint)
    _, token, ahead = root(seq, target)
    assert ahead == MOST
    commit(seq, target, (token + 1) % VOCAB if change == "another token" else token)
    if change == "a draft":
        target.score([seq], TreeBatch.chains([[seq.tokens[-1], 5]]), AHEAD)
    elif change == "hidden rows":
        assert set(target.score([seq], TreeBatch.chains([seq.tokens[-1:]]), Needs((1,))).hidden) == {1}
    elif change == "truncate":
        target.truncate(seq, 40)
        seq.tokens[40:] = [9, *seq.tokens[41:]]
        target.prefill([seq], AHEAD)
    elif change == "again":
        target.release(seq)
        seq.tokens[40] = 9
        target.prefill([seq], AHEAD)
    elif change == "a batch":
        beside = FakeSeq(1, [4, 5, 6], max_length=20)
        target.prefill([beside], Needs())
        target.score([seq, beside], TreeBatch.chains([seq.tokens[-1:], [6]]), AHEAD)
    got, _, ahead = root(seq, target)
    assert ahead >= 0, "it was run now"
    fresh = target_of(checkpoint)
    fresh.prefill([seq], Needs())
    assert torch.equal(got, root(seq, fresh, Needs())[0])


@pytest.mark.parametrize("match", [1, 2, 3])
def test_runs_end_where_a_look_up_would_find_something(checkpoint: Checkpoint, match: int) -> None:
    seq, target = started(checkpoint)
    needs, ends = Needs(match_length=match), 0
    for _ in range(40):
        target.make_room([seq], [8])
        _, token, ahead = root(seq, target, needs)
        commit(seq, target, token)
        last, text = seq.tokens[-match:], seq.tokens[:-1]
        found = any(text[i : i + match] == last for i in range(len(text) - match + 1))
        assert not (found and ahead > 0), "the run went on behind a match"
        if ahead == 0 and len(seq.tokens) % 64 > 4:
            assert found
            ends += 1
    assert ends


def test_every_token_is_a_round_and_every_round_has_its_share(checkpoint: Checkpoint) -> None:
    engine = engine_of(target_of(checkpoint))
    engine.submit(Request(PROMPTS[0], SamplingParams(max_tokens=1 + 5 * (1 + MOST))))
    ahead = []
    while engine.busy:
        assert len(engine.step()) == 1
        ahead.append(len(engine.stats._to_come))
    assert ahead == [0, *[*reversed(range(1 + MOST))] * 5]
    assert engine.stats.rounds == engine.stats.tokens == engine.stats.forms["plain"] == len(ahead)
