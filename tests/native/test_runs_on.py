"""Plain passes run on past matches that are not worth drafting, and while a head rests: same texts, rows and drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.control.base import Controller
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Needs, Request, Round, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.heads.eagle_head import write_head
from forerun.drafters.lookup.ngram import GOES_ON, NgramDrafter
from forerun.engine.engine import Engine
from forerun.models.native import library as native_library
from forerun.models.native import pass_rows
from forerun.models.native.target import NativeDecoder
from forerun.testing import FakeSeq
from tests.drafters.tiny_heads import eagle_config, eagle_weights
from tests.models.tiny_checkpoints import VOCAB
from tests.native.blocks import needs_native
from tests.native.test_plain_run import (
    PROMPTS,
    Checkpoint,
    Letters,
    _patient,  # noqa: F401 - a fixture
    checkpoint,  # noqa: F401 - a fixture
    count_calls,
    started,
    target_of,
    written,
)

pytestmark = [needs_native, pytest.mark.skipif(not native_library.available(), reason="no native kernels that draft")]
LAYERS = (0, 1)
REST = Budget(0, 0, source="free", repeats=5)
DRAFT = Budget(3, 3, source="costly")
COPY = Budget(3, 3, source="free")


class Scripted:
    """Rests, and in every seventh round drafts; or what a test says. Keeps the rounds that it saw."""

    def __init__(self, rest: Budget = REST, draft: Budget = DRAFT, every: int = 7) -> None:
        self.rest, self.draft, self.every, self.seen = rest, draft, every, list[Round]()

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        known = bool(self.seen) and self.seen[-1].ahead > 0 and self.seen[-1].seqs[0].id == seqs[0].id
        drafts = not known and len(seqs[0].tokens) % self.every == 0
        return [self.draft if drafts else self.rest] * len(seqs)

    def observe(self, outcome: Round) -> None:
        self.seen.append(outcome)

    def forget(self, seq: Seq) -> None: ...


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint) -> Path:  # noqa: F811
    folder = tmp_path_factory.mktemp("head")
    config = replace(eagle_config("eagle3", VOCAB, width=checkpoint[0]["hidden_size"]), layers=LAYERS)
    write_head(folder, config, eagle_weights(config, seed=3))
    return folder


def engine_of(target: NativeDecoder, drafter: str, head: Path, controller: Controller | None = None) -> Engine:
    settings = SpeculativeConfig(drafter=drafter, draft_model=str(head))
    engine = make_engine(target, frozenset({17}), settings, EngineConfig(max_batch=2), tokenizer=Letters())
    if controller is not None:
        engine.controller = controller
    return engine


def told(found: list[tuple[list, list, list]]) -> list[tuple]:  # type: ignore[type-arg]
    """Of each text what users see: tokens, text, log-probabilities and why it ended, whatever rounds these came in."""
    return [
        (
            [token for event in events for token in event.tokens],
            "".join(event.text for event in events),
            [one for event in events for one in event.logprobs],
            [event.finished for event in events if event.finished],
            tokens,
        )
        for events, _, tokens in found
    ]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("drafter", ["eagle3", "ngram+eagle3"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=60),
        SamplingParams(max_tokens=40, logprobs=2),
        SamplingParams(max_tokens=30, stop=("zz", "8")),
        SamplingParams(max_tokens=20, temperature=0.8, seed=3),
        SamplingParams(max_tokens=20, repetition_penalty=1.3),
    ],
)
def test_a_head_that_rests_changes_no_round(
    checkpoint: Checkpoint, head: Path, drafter: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    target = target_of(checkpoint)
    passes = count_calls(monkeypatch, target)
    got = written(engine_of(target, drafter, head, Scripted()), PROMPTS, params)
    monkeypatch.setattr(pass_rows, "MOST", 0)
    single = target_of(checkpoint)
    ones = count_calls(monkeypatch, single)
    wanted = written(engine_of(single, drafter, head, Scripted()), PROMPTS, params)
    assert told(got) == told(wanted)
    assert set(ones) == {1}
    alike = params.temperature == 0.0 and params.repetition_penalty == 1.0 and not params.stop
    assert (max(passes) > 1) == alike
    assert target.used_slots == 0


def test_what_a_head_drafts_behind_a_run_is_what_it_drafts_behind_single_passes(
    checkpoint: Checkpoint, head: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Its drafts follow from the hidden rows of all passes before them: so these were the right ones."""
    drafts = []
    for most in (3, 0):
        monkeypatch.setattr(pass_rows, "MOST", most)
        engine = engine_of(target_of(checkpoint), "eagle3", head)
        # nothing is known ahead where it drafts: both then draft at the same places
        engine.controller = Scripted(Budget(0, 0, source="free", repeats=3), DRAFT, every=5)
        trees = list[list[int]]()
        propose = engine.drafters.propose

        def kept(seqs, budgets, propose=propose, trees=trees):  # type: ignore[no-untyped-def]
            found = propose(seqs, budgets)
            if found.nodes > len(seqs):
                trees.append([len(seqs[0].tokens), *found.to_host()[0]])
            return found

        monkeypatch.setattr(engine.drafters, "propose", kept)
        texts = [tokens for _, _, tokens in written(engine, PROMPTS, SamplingParams(max_tokens=48))]
        drafts.append((texts, {tree[0]: tree for tree in trees}))
    (texts, ahead), (same, single) = drafts
    assert texts == same
    both = ahead.keys() & single.keys()
    assert len(both) > 4
    assert [ahead[at] for at in both] == [single[at] for at in both]


def test_hidden_rows_of_a_run_have_the_bits_of_passes_alone(checkpoint: Checkpoint) -> None:  # noqa: F811
    (seq, target), (other, single) = started(checkpoint), started(checkpoint)
    rests, asked, seen = Needs(LAYERS, match_length=0, rests=2), Needs(LAYERS), list[int]()
    for _ in range(9):
        got, wanted = score(target, seq, rests), score(single, other, asked)
        assert torch.equal(got.required_logits, wanted.required_logits)
        assert set(got.hidden) == set(LAYERS)
        for layer in LAYERS:
            assert torch.equal(got.hidden[layer], wanted.hidden[layer])
        seen.append(got.ahead)
        for one, of, scores in ((seq, target, got), (other, single, wanted)):
            of.make_room([one], [4])
            token = int(scores.required_logits[0].argmax())
            of.commit([one], TreeBatch.chains([one.tokens[-1:]]), Verdict.of([[]], [token], "cpu"))
            one.tokens.append(token)
    assert seen == [2, -1, -1] * 3, "no further than it rests"
    slots = target.kv.extent(0).slots(62, 70)
    for layer in LAYERS:
        assert torch.equal(target.kv.hidden[layer][slots], single.kv.hidden[layer][slots])


@pytest.mark.parametrize(
    "needs", [Needs(LAYERS, match_length=0, may_run=True), Needs(LAYERS), Needs((0, 3), match_length=0)]
)
def test_no_pass_is_run_for_a_head_that_may_draft_or_that_reads_the_last_layer(
    checkpoint: Checkpoint, needs: Needs  # noqa: F811
) -> None:  # fmt: skip
    seq, target = started(checkpoint)
    assert target.config.layers == 3
    assert score(target, seq, needs).ahead == 0


def test_rows_that_were_not_kept_are_computed(checkpoint: Checkpoint) -> None:  # noqa: F811
    """A run for one drafter does not answer another that reads other layers."""
    seq, target = started(checkpoint)
    first = score(target, seq, Needs((0,), match_length=0))
    assert first.ahead == pass_rows.MOST
    token = int(first.required_logits[0].argmax())
    target.commit([seq], TreeBatch.chains([seq.tokens[-1:]]), Verdict.of([[]], [token], "cpu"))
    seq.tokens.append(token)
    again = score(target, seq, Needs(LAYERS))
    assert again.ahead == 0
    assert set(again.hidden) == set(LAYERS)


def score(target: NativeDecoder, seq: FakeSeq, needs: Needs) -> Scores:
    return target.score([seq], TreeBatch.chains([seq.tokens[-1:]]), needs)


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=70), SamplingParams(max_tokens=30, logprobs=1)])
def test_texts_are_the_same_where_runs_go_past_matches(
    checkpoint: Checkpoint, head: Path, params: SamplingParams, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """A controller that refuses matches for most of the time: calls then go on behind them."""
    refuses = Scripted(Budget(0, 0, source="free"), COPY, every=9)
    target = target_of(checkpoint)
    passes = count_calls(monkeypatch, target)
    engine = engine_of(target, "ngram", head, refuses)
    offer = engine.drafters.offer
    plan = refuses.plan

    def asked(seqs: Sequence[Seq]) -> list[Budget]:
        for seq in seqs:
            offer(seq)  # type: ignore[arg-type]
        return plan(seqs)

    monkeypatch.setattr(refuses, "plan", asked)
    got = written(engine, PROMPTS, params)
    drafter = engine.drafters.get("ngram")
    assert isinstance(drafter, NgramDrafter)
    assert (drafter.needs.match_length or 0) > 1
    monkeypatch.setattr(pass_rows, "MOST", 0)
    wanted = written(engine_of(target_of(checkpoint), "none", head), PROMPTS, params)
    assert told(got) == told(wanted)
    assert sum(passes_of_a_call >= 4 for passes_of_a_call in passes) > 3
    assert any(one.drafted[0] for one in refuses.seen)
    assert [one.ahead for one in refuses.seen if one.ahead]
    assert target.used_slots == 0


@pytest.mark.parametrize("drafter", ["ngram", "eagle3", "ngram+eagle3"])
def test_the_adaptive_controller_writes_the_plain_text(
    checkpoint: Checkpoint, head: Path, drafter: str, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    params = SamplingParams(max_tokens=80)
    got = written(engine_of(target_of(checkpoint), drafter, head), PROMPTS, params)
    monkeypatch.setattr(pass_rows, "MOST", 0)
    assert told(got) == told(written(engine_of(target_of(checkpoint), "none", head), PROMPTS, params))


def test_a_failed_call_of_a_resting_head_is_repeated(
    checkpoint: Checkpoint, head: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    params = SamplingParams(max_tokens=30)
    wanted = written(engine_of(target_of(checkpoint), "none", head), PROMPTS[:2], params)
    target = target_of(checkpoint)
    real, calls = target._plain_run._decode, list[int]()

    def fails(*given: object) -> int:
        calls.append(1)
        return 1 if len(calls) in (2, 5) else int(real(*given))

    monkeypatch.setattr(target._plain_run, "_decode", fails)
    got = written(engine_of(target, "ngram+eagle3", head, Scripted()), PROMPTS[:2], params)
    assert len(calls) > 5
    assert [one[2] for one in got] == [one[2] for one in wanted]
    assert target.used_slots == 0


def test_a_request_that_joins_and_one_that_leaves_find_the_state_of_their_round(
    checkpoint: Checkpoint, head: Path  # noqa: F811
) -> None:  # fmt: skip
    params = SamplingParams(max_tokens=24)
    alone = [tokens for _, _, tokens in written(engine_of(target_of(checkpoint), "none", head), PROMPTS[:2], params)]
    target = target_of(checkpoint)
    engine, texts = engine_of(target, "ngram+eagle3", head, Scripted()), dict[int, list[int]]()
    first = engine.submit(Request(PROMPTS[0], params))
    for _ in range(3):
        engine.step()
    second = engine.submit(Request(PROMPTS[1], params))
    for at in range(60):
        for event in engine.step():
            texts.setdefault(event.seq_id, []).extend(event.tokens)
        if at == 9:
            engine.abort(first)
    assert texts[second] == alone[1][len(PROMPTS[1]) :]
    assert target.used_slots == 0


def test_a_refused_match_is_run_past_until_one_as_short_is_drafted() -> None:
    drafter, seq = NgramDrafter(), FakeSeq(0, [5, 6, 7, 8, 9, 1, 2, 3, 5, 6])

    def ask(budget: Budget) -> int | None:
        drafter.offer(seq)
        drafter.propose([seq], [budget])
        return drafter.needs.match_length

    refused = Budget(0, 0, source="free")
    assert drafter.needs.match_length == 1
    assert ask(refused) == 3, "one of two tokens was"
    assert ask(Budget(0, 0)) == 3
    seq.tokens.append(4)  # nothing matches
    assert ask(refused) == 3
    seq.tokens.append(9)  # a match of one token
    assert ask(refused) == 3
    assert ask(Budget(2, 2, source="free")) == 1


def test_a_long_match_that_is_refused_is_run_past_while_it_grows() -> None:
    drafter, seq = NgramDrafter(), FakeSeq(0, [*range(5, 25), *range(5, 11)])
    drafter.offer(seq)
    drafter.propose([seq], [Budget(0, 0, source="free")])
    assert drafter.needs.match_length == 6 + GOES_ON
    seq.tokens += range(11, 15)
    drafter.offer(seq)
    drafter.propose([seq], [Budget(0, 0, source="free")])
    assert drafter.needs.match_length == 0, "longer ones are not told apart: whatever comes"
    seq.tokens.append(99)  # it has ended
    drafter.offer(seq)
    drafter.propose([seq], [Budget(0, 0, source="free")])
    assert drafter.needs.match_length == 1, "others as long may be worth drafting"


def test_a_match_beside_which_another_drafter_drafts_is_not_refused() -> None:
    drafter, seq = NgramDrafter(), FakeSeq(0, [5, 6, 7, 8, 5, 6])
    drafter.offer(seq)
    drafter.propose([seq], [Budget(0, 0)])  # as HybridDrafter asks where the head drafts
    assert drafter.needs.match_length == 1
