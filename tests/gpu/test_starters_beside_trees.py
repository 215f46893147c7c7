"""Requests that start in place of padding, beside trees grown on the device: same texts and drafts, booked as plain."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.params import SamplingParams
from forerun.core.types import Form, Needs, Prompts, Request, Round, Scores, TreeBatch, TreeForm
from forerun.drafters.device.features import FeatureRows
from forerun.engine import engine as engine_module
from forerun.engine.engine import Engine
from forerun.engine.scheduler import PrefillRows, Scheduler
from forerun.models.base import ON_CPU
from forerun.models.cuda.target import CudaDecoder
from forerun.testing import FakeSeq
from tests.gpu.heads import settled
from tests.gpu.test_following import (
    CHAIN,
    TREE,
    WIDE,
    Forms,
    Watched,
    dtype_on,
    make,
    plain_texts,
    sampled,
    willing_target,
    write,
)
from tests.gpu.test_starters import apart, texts_of
from tests.gpu.tiny import DEVICES, VOCAB, make_target, need_cuda

NEEDS = Needs((1,))


class Started:
    """Counts those that start beside grown trees, by whether the round follows one that was not read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched = self.following = 0
        self._real = engine_module.with_starters
        monkeypatch.setattr(engine_module, "with_starters", self._count)

    def _count(self, trees: TreeBatch, form: TreeForm, roots: Sequence[int]) -> TreeBatch:
        self.launched += len(roots) * (trees.follows is None)
        self.following += len(roots) * (trees.follows is not None)
        return self._real(trees, form, roots)


class Observed(Forms):
    """Remembers the rounds."""

    def __init__(self, forms: Sequence[Form | None], repeats: int, seed: int = 0) -> None:
        super().__init__(forms, repeats, seed)
        self.rounds: list[Round] = []

    def observe(self, outcome: Round) -> None:
        self.rounds.append(outcome)


def engine_of(target: CudaDecoder, forms: Forms, follows: bool = True, rows: int = 256, **more: Any) -> Engine:
    """Whole prompts are read beside trees."""
    engine = make(target, forms, follows=follows, batch=8, **more)
    engine.prefill_rows = PrefillRows(ON_CPU.prefill, target.pass_rows, rows)
    return engine


def some_requests(count: int = 12, draw: int = 3, **params: object) -> list[Request]:
    """Prompts that are put off by a head, and short ones, which are not; the first texts are long."""
    rng, made = random.Random(draw), list[Request]()
    for i in range(count):
        prompt = [rng.randrange(2, VOCAB) for _ in range((70, 9, 30, 2, 120, 1)[i % 6])]
        more = SamplingParams(max_tokens=30 if i < 3 else rng.randint(1, 20), **params)
        made.append(Request(prompt, more, drafter="device"))
    return made


def together(target: CudaDecoder) -> tuple[list[FakeSeq], TreeBatch, Scores]:
    """Three of a form's eight trees are real: of one that runs, and of two that start with the pass."""
    running, one, alike, _, _, long = texts_of()
    target.prefill([running], NEEDS)
    seqs, form = [running, one, alike], TreeForm(8, 4, 2)
    tokens = torch.tensor([running.tokens[-1], 5, 6, 7])
    drafted = TreeBatch(tokens, torch.tensor([-1, 0, 0, 1]), (0, 4), form=form)
    trees = engine_module.with_starters(drafted, form, [seq.tokens[-1] for seq in seqs[1:]])
    return seqs, trees, target.score(seqs, trees, NEEDS, Prompts([one, alike, long], 400))


def roots_of(trees: TreeBatch, rows: Tensor) -> Tensor:
    return rows[torch.tensor(trees.starts[:-1])]


def test_scores_are_those_behind_a_prompt_that_was_read() -> None:
    target = make_target("llama", "cpu")
    seqs, trees, scores = together(target)
    logits, hidden = apart(seqs)
    torch.testing.assert_close(roots_of(trees, scores.required_logits), logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(roots_of(trees, scores.hidden[1]), hidden, atol=1e-4, rtol=1e-4)
    assert [target.cached_tokens(seq) for seq in seqs] == [len(seq.tokens) - 1 for seq in seqs]
    verdict = settled(scores)
    target.commit(seqs, trees, verdict)
    for seq, path, last in zip(seqs, *verdict.to_host(), strict=True):
        assert not path, "none of 5, 6 and 7 is said"
        seq.tokens.append(last)
    following = target.score(seqs, TreeBatch.chains([seq.tokens[-1:] for seq in seqs]), NEEDS)
    torch.testing.assert_close(following.required_logits, apart(seqs)[0], atol=1e-4, rtol=1e-4)


def test_negative_control_trees_that_do_not_lie_behind_their_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("llama", "cpu")
    real = target.placing.places

    def wrong(seqs: Sequence[FakeSeq], follows: Sequence[int] | None, form: TreeForm) -> object:
        for seq in seqs:
            target.kv.extent(seq.id).coming = 0
        return real(seqs, follows, form)

    monkeypatch.setattr(target.placing, "places", wrong)
    seqs, trees, scores = together(target)
    assert not torch.allclose(roots_of(trees, scores.required_logits), apart(seqs)[0], atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("forms", [[CHAIN], [WIDE], [CHAIN, TREE, None]])
@pytest.mark.parametrize("coupled", [False, True])
def test_texts_are_those_of_plain_decoding(
    device: str, forms: list[Form | None], coupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_cuda(device)
    target = willing_target(device, dtype=dtype_on(device))
    target.model.head[1] = 0.0  # texts go on
    some = some_requests()
    if coupled:
        params = [one.params for one in sampled(len(some), 3, "coupled")]
        some = [
            replace(one, params=replace(law, max_tokens=one.params.max_tokens), verifier="coupled")
            for one, law in zip(some, params, strict=True)
        ]
    wanted, started = plain_texts(target, some), Started(monkeypatch)
    for follows in (False, True):
        engine = engine_of(target, Forms(forms, 9), follows)
        for seed in (5, 6):
            assert write(engine, some, seed)[0] == wanted
        assert (engine.timeline.depth > 1) == follows, "nothing has failed"
    assert started.launched > 0
    assert started.following > 0


def request(length: int, draw: int) -> Request:
    rng = random.Random(draw)
    prompt = [rng.randrange(2, VOCAB) for _ in range(length)]
    return Request(prompt, SamplingParams(max_tokens=40), drafter="device", shows_rejected=True)


@pytest.mark.slow
@pytest.mark.parametrize("follows", [False, True])
def test_a_first_token_comes_with_a_drafted_pass_and_is_booked_as_plain(follows: bool) -> None:
    """And the round behind it follows unread, whether its prompt is put off by the head or not."""
    for length in (9, 70):
        target, controller = willing_target(), Observed([WIDE], 60)
        target.model.head[1] = 0.0  # texts go on
        engine = engine_of(target, controller, follows)
        for draw in range(3):
            engine.submit(request(20, draw))
        while len(controller.rounds) < 4:
            engine.step()
        late, before = engine.find(engine.submit(request(length, 4))), len(controller.rounds)
        assert late is not None
        while not late.events:
            engine.step()
        first = next(one for one in controller.rounds[before:] if late in one.seqs)
        assert first.prompt_rows == length - 1, "its pass has read the prompt"
        assert first.undrafted == 1
        assert first.drafted[:3] == (WIDE.nodes,) * 3
        accepted = late.events[0].accepted
        assert (first.drafted[3], first.depths[3], first.accepted[3]) == (accepted,) * 3
        assert late.rounds[0][:4] == (accepted + 1, accepted, accepted, accepted)
        assert not late.events[0].rejected
        assert not follows or engine.timeline.first is not None, "the round behind it is under way"
        while late.finished is None:
            engine.step()
        assert late.rounds[1].drafted == WIDE.nodes
        assert any(event.rejected for event in late.events[1:])


def accepted_at(engine: Engine, some: Sequence[Request]) -> tuple[list[list[int]], dict[tuple[int, int], int]]:
    """Texts; and what was accepted behind every token of a text that a round began with, but the first and the last."""
    texts, rounds = write(engine, some, 6)
    found = dict[tuple[int, int], int]()
    for i, counts in enumerate(rounds):
        place = 0
        for j, count in enumerate(counts):
            if 0 < j < len(counts) - 1:
                found[i, place] = count
            place += 1 + count
    return texts, found


@pytest.mark.slow
@pytest.mark.parametrize(("form", "layers"), [(CHAIN, 1), (WIDE, 1), (WIDE, 2)])
def test_drafts_behind_it_are_those_of_requests_that_waited(
    form: Form, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is drafted depends on the text alone, if the head has read the prompt and the first round's rows."""
    target = willing_target(words=5)
    target.model.head[1] = 0.0  # texts go on
    some = [one for one in some_requests() if len(one.prompt) > 1]
    started, watched = Started(monkeypatch), Watched(monkeypatch)
    found = []
    for starts in (False, True):
        with monkeypatch.context() as patch:
            if not starts:
                patch.setattr(Scheduler, "starters", lambda *_: [])
            engine = engine_of(target, Forms([form], 60), layers=layers)
            found.append(accepted_at(engine, some))
    assert found[0][0] == found[1][0]
    both = found[0][1].keys() & found[1][1].keys()
    assert len(both) > 20
    assert {key: found[0][1][key] for key in both} == {key: found[1][1][key] for key in both}
    assert sum(found[1][1].values()) > 10, "something is accepted"
    assert started.following > 3
    assert watched.followed > 20


@pytest.mark.slow
def test_negative_control_a_head_that_does_not_read_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    target = willing_target(words=5)
    target.model.head[1] = 0.0
    some = [one for one in some_requests() if len(one.prompt) > 1]
    right = accepted_at(engine_of(target, Forms([WIDE], 60)), some)
    read = FeatureRows.read_ahead

    def skipped(rows: FeatureRows, states: Sequence[Any], most: int) -> None:
        if most:
            read(rows, states, most)

    monkeypatch.setattr(FeatureRows, "read_ahead", skipped)
    wrong = accepted_at(engine_of(target, Forms([WIDE], 60)), some)
    assert right[0] == wrong[0], "texts never depend on drafts"
    both = right[1].keys() & wrong[1].keys()
    assert {key: right[1][key] for key in both} != {key: wrong[1][key] for key in both}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("case", ["", "full", "other drafter", "bias", "a draft that follows its own alone"])
def test_whoever_cannot_start_waits_a_round(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a form has no padding, or the round behind could not follow for it."""
    target, started = willing_target(), Started(monkeypatch)
    target.model.head[1] = 0.0
    engine = engine_of(target, Forms([TREE], 60))
    if case == "a draft that follows its own alone":
        monkeypatch.setattr(engine.drafters.get("device").draft.menu, "switches", False)

    for draw in range(4 if case == "full" else 3):
        engine.submit(request(30, draw))
    for _ in range(4):
        engine.step()
    one = request(30, 4)
    if case == "other drafter":
        one = replace(one, drafter="none")
    elif case == "bias":
        one = replace(one, params=replace(one.params, logit_bias={1: -9.0}))
    late = engine.find(engine.submit(one))
    while engine.busy:
        engine.step()
    assert late is not None
    assert late.finished == "length"
    assert started.launched + started.following == (0 if case else 1), "the first case is the control"
