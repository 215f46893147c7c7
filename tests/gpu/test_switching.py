"""Another form, or none, behind a round that was not read: same texts, same trees, and hardly a round is read first."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from forerun.core.params import SamplingParams
from forerun.core.types import Budget, Form, Request, Round, RoundPlan, Seq
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.device.eagle import HeadDraft
from forerun.drafters.device.plan import DraftJob
from forerun.engine.engine import Engine
from forerun.engine.round import LaunchedRound
from forerun.engine.scheduler import Scheduler
from forerun.models.cuda import graphs
from forerun.models.cuda.device_trees import LastRound
from tests.gpu.test_following import (
    CHAIN,
    TREE,
    WIDE,
    Forms,
    dtype_on,
    make,
    plain_texts,
    requests,
    sampled,
    willing_target,
    write,
)
from tests.gpu.tiny import DEVICES, VOCAB, need_cuda

DEEP = Form(5, 5, 1)
SWITCHES = {"deeper", "shallower", "same depth", "shallower, plain", "same depth, plain", "deeper, behind plain"}
ALL = (CHAIN, TREE, WIDE, DEEP, None, None)


class Scheduled:
    """A controller that has a form for every round, whether the round before it was read or not."""

    def __init__(self, forms: Sequence[Form | None], seed: int = 1) -> None:
        self.forms, self.rounds = random.Random(seed).choices(forms, k=2000), 0

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        return [self._budget(self.rounds)] * len(seqs)

    def _budget(self, number: int) -> Budget:
        form = self.forms[number]
        return Budget(0, 0) if form is None else Budget(*form.sizes)

    def follow(self, seqs: Sequence[Seq], last: RoundPlan, switches: Callable[[], bool]) -> RoundPlan | None:
        form = self.forms[self.rounds + 1]
        return RoundPlan("plain" if form is None else "trees", form=form) if switches() else None

    def observe(self, outcome: Round) -> None:
        self.rounds += 1

    def forget(self, seq: Seq) -> None:
        pass


def counted(engine: Engine, kinds: Counter[str]) -> Engine:
    """Rounds that followed an unread one by how they differ from it; and those that were read first."""
    finish, last = engine._close, [0]

    def finished(launched: LaunchedRound) -> None:
        depth = 0 if launched.trees.form is None else launched.trees.form.depth
        kind = "same depth" if depth == last[0] else "deeper" if depth > last[0] else "shallower"
        kind = f"{kind}, plain" if not depth else f"{kind}, behind plain" if not last[0] else kind
        kinds["read first" if launched.trees.follows is None else kind] += 1
        last[0] = depth
        finish(launched)

    engine._close = finished  # type: ignore[method-assign]
    return engine


def captured_at_load(engine: Engine) -> None:
    """As a menu is: what is captured in mid-text is read first."""
    drafter = engine.drafters.get("device")
    assert isinstance(drafter, OnDevice)
    for form in {one for one in ALL if one is not None}:
        drafter.draft._rehearse(None, DraftJob(8, form, (256,)))


def long_texts(count: int = 6, tokens: int = 60, heat: float = 0.0) -> list[Request]:
    """That start together, and of which nobody waits for a place."""
    rng, made = random.Random(2), list[Request]()
    for i in range(count):
        prompt = [rng.randrange(2, VOCAB) for _ in range(rng.choice((3, 20, 70)))]
        params = SamplingParams(max_tokens=tokens, temperature=heat, seed=i)
        made.append(Request(prompt, params, drafter="device", verifier="coupled"))
    return made


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [1, 2])
def test_texts_are_those_of_plain_decoding_and_every_kind_of_switch_is_made(device: str, seed: int) -> None:
    need_cuda(device)
    target, some, kinds = (willing_target(device, dtype=dtype_on(device)), requests(16, 3 + seed), Counter[str]())
    engine = counted(make(target, Scheduled(ALL, seed), follows=True, batch=6), kinds)  # type: ignore[arg-type]
    captured_at_load(engine)
    assert write(engine, some, 5)[0] == plain_texts(target, some)
    assert {*kinds} >= SWITCHES
    assert kinds["read first"] < 0.15 * kinds.total()


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["coupled", "exact"])
def test_sampled_texts_are_those_of_the_host(verifier: str) -> None:
    some, kinds = sampled(12, 3, verifier), Counter[str]()
    wanted = write(make(willing_target(samples=False), Forms([None], 0), follows=False, batch=1), some, 0)[0]
    engine = counted(make(willing_target(), Scheduled(ALL), follows=True, batch=6), kinds)  # type: ignore[arg-type]
    assert write(engine, some, 5)[0] == wanted
    assert {*kinds} >= SWITCHES


def accepted_of(
    follows: bool,
    some: list[Request],
    monkeypatch: pytest.MonkeyPatch,
    layers: int = 1,
    forms: Sequence[Form | None] = ALL,
) -> tuple[list[list[int]], list[list[int]], Counter[str]]:
    """Texts, what was accepted in each round but a text's last, which is cut, and the kinds of rounds."""
    target, kinds = willing_target(words=5), Counter[str]()
    target.model.head[1] = 0.0  # texts go on
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "starters", lambda *_: [])  # else who has a plain round depends on company
        engine = make(target, Scheduled(forms), follows=follows, batch=8, layers=layers)  # type: ignore[arg-type]
        texts, accepted = write(counted(engine, kinds), some, 6, at_once=True)
    return texts, [one[:-2] for one in accepted], kinds


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "heat"), [(1, 0.0), (2, 0.0), (1, 1.0)])
def test_drafts_are_those_of_rounds_that_were_read(layers: int, heat: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head has read the same rows: of deeper trees than it drafts now, of plain rounds, of prompts."""
    some = long_texts(heat=heat)
    texts, accepted, _ = accepted_of(False, some, monkeypatch, layers)
    found = accepted_of(True, some, monkeypatch, layers)
    assert found[:2] == (texts, accepted)
    assert found[2]["read first"] <= 4
    assert found[2].total() > 20
    assert sum(map(sum, accepted)) > 20, "something is accepted"


def only_the_form(draft: HeadDraft, trees: Any, form: Form) -> tuple[Form, ...]:
    return (form,)


def nothing(*_: Any, **__: Any) -> None:
    pass


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("name", "mistake"), [("_forms_behind", only_the_form), ("_keep", nothing)], ids=["unread rows", "lost rows"]
)
def test_negative_control_rows_that_a_head_has_not_read(
    name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts stay as they are, but other tokens are drafted."""
    some, forms = long_texts(heat=1.0), (DEEP, Form(1, 1, 1))
    texts, accepted, _ = accepted_of(False, some, monkeypatch, forms=forms)
    assert accepted_of(True, some, monkeypatch, forms=forms)[:2] == (texts, accepted)
    monkeypatch.setattr(HeadDraft, name, mistake)
    found = accepted_of(True, some, monkeypatch, forms=forms)
    assert found[0] == texts
    assert found[1] != accepted


@pytest.mark.slow
def test_negative_control_roots_at_the_wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    some = long_texts()
    texts = accepted_of(False, some, monkeypatch)[0]
    real = graphs.complete_roots

    def misplaced(ints: Any, size: Any, rows: int, last: LastRound) -> None:
        accepted = last.accepted.clone()
        last.accepted.clamp_(max=0)  # as if nothing had been accepted
        real(ints, size, rows, last)
        last.accepted.copy_(accepted)

    monkeypatch.setattr(graphs, "complete_roots", misplaced)
    assert accepted_of(True, some, monkeypatch)[0] != texts


@pytest.mark.slow
def test_negative_control_what_a_plain_pass_does_not_hand_on(monkeypatch: pytest.MonkeyPatch) -> None:
    some = long_texts()
    texts = accepted_of(False, some, monkeypatch)[0]
    real = LastRound.note_roots
    monkeypatch.setattr(LastRound, "note_roots", lambda last, tokens: real(last, tokens.roll(1)))
    assert accepted_of(True, some, monkeypatch)[0] != texts
