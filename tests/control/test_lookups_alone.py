"""Look-ups alone where plain rounds follow each other, at batch 1, in counted time: never slower than plain."""

from __future__ import annotations

import random

import pytest

from forerun.control import prices
from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.control.overlap import Overlap
from forerun.control.prices import Allowance
from forerun.core.types import PlainSeq, Round, RoundPlan
from forerun.drafters.base import LookupDrafter, NoDrafter
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.drafters.lookup.suffix import SuffixDrafter
from tests.control.lookup_texts import COPYING, TEXTS
from tests.control.simulate.follow import FollowHistory, FollowSimulation, Host
from tests.control.simulate.history import Text
from tests.control.test_waiting import LARGE

SMALL = CostModel({1: 1.69e-3, 16: 1.66e-3, 32: 1.8e-3, 64: 2.25e-3, 128: 3.2e-3})  # 1.5B on an H200
LOOKUPS: list[type[LookupDrafter]] = [NgramDrafter, SuffixDrafter]
HOST = Host(3e-4, drafts=1e-4)


def run(
    cost: CostModel, texts: list[Text], make: type[LookupDrafter] = NgramDrafter, rounds: int = 500
) -> tuple[FollowHistory, FollowHistory]:
    """With look-ups, and the same tokens by plain decoding."""
    both = FollowSimulation(cost, None, texts, HOST, lookup=make()).run(rounds)
    return both, FollowSimulation(cost, None, texts, HOST, looks_up=False).run(both.tokens[-1] + 1)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("make", LOOKUPS)
@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("cost", [SMALL, LARGE], ids=["1.5B", "8B"])
def test_never_slower_than_plain(cost: CostModel, texts: str, make: type[LookupDrafter]) -> None:
    both, plain = run(cost, TEXTS[texts], make)
    assert both.least_speed(plain, 200) >= 0.985, "over any 200 tokens, gaps included"
    if texts != "recorded":
        followed = both.kinds.count("followed") / len(both.kinds)
        assert followed >= plain.kinds.count("followed") / len(plain.kinds) - 0.05
    else:
        assert both.speed(plain) > 1.04


def test_whoever_reads_every_round_first_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: what was measured on a GPU, 0.8 to 0.9 of plain decoding."""
    monkeypatch.setattr(Overlap, "waits", lambda self, chooser, head, offers: True)
    both, plain = run(SMALL, TEXTS["wrong matches"])
    assert both.least_speed(plain, 200) < 0.95


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("make", LOOKUPS)
@pytest.mark.parametrize("cost", [SMALL, LARGE], ids=["1.5B", "8B"])
def test_what_is_copied_is_drafted_round_after_round(cost: CostModel, make: type[LookupDrafter]) -> None:
    both, plain = run(cost, COPYING, make, rounds=150)
    assert both.speed(plain) > 5.0
    assert both.kinds.count("look-up") > 0.8 * len(both.kinds)


def test_look_ups_return_after_they_were_wrong_for_long() -> None:
    both, plain = run(SMALL, [*TEXTS["wrong matches"], *COPYING], rounds=1700)
    assert both.speed(plain, last=96 * 16) >= 0.985
    assert both.speed(plain, first=96 * 17, last=96 * 30) > 4.0


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("patience", [1, 2, 4])
def test_what_an_adversary_can_take_is_bounded(patience: int) -> None:
    """Text that is copied until a few rounds in a row were looked up, and then is another."""
    rng = random.Random(patience)
    book = [rng.randrange(50000) for _ in range(2000)]
    text = (book, [rng.randrange(50000) for _ in range(3000)])
    both = FollowSimulation(SMALL, None, [text], HOST)
    whole, seq = both.texts.whole[both.seq.id], both.seq
    while len(seq.tokens) < len(whole) - 100 and len(both.history.kinds) < 600:
        recent, at = both.history.kinds[-patience:], len(seq.tokens)
        copies = recent.count("look-up") < patience
        for i in range(at, min(at + 40, len(whole))):
            whole[i] = book[(i * 7) % 1500 // 300 * 300 + i % 300] if copies else rng.randrange(50000)
        both._step()
    plain = FollowSimulation(SMALL, None, [(book, whole[2000:])], HOST, looks_up=False)
    assert both.history.least_speed(plain.run(both.history.tokens[-1]), 200) >= 0.97


def lost_in_vain(allowance: Allowance) -> float:
    """Plain rounds that drafts lose of which nothing is accepted, over 200 rounds."""
    lost, worst = 0.0, 0.4
    for _ in range(200):
        spent = worst if allowance.covers_stake(worst, 3.0) else 0.0
        allowance.book(spent)
        lost += spent
    return lost


def test_plain_rounds_save_nothing_up_that_could_be_lost_at_once() -> None:
    """1.5% of 200 rounds, whatever came before; what was gained may be lost again."""
    fresh, rested, resting, gained = [Allowance(**prices.LOOKUPS) for _ in range(4)]
    for _ in range(400):
        rested.book(0.0)
    resting.rest(400)
    gained.book(-5.0)
    assert lost_in_vain(fresh) == lost_in_vain(rested) == lost_in_vain(resting) <= 3.0
    assert 3.0 < lost_in_vain(gained) <= 3.0 + 2.2


def play(controller: AdaptiveController, rounds: int, asks: bool) -> None:
    """Plain rounds of a text without copies; `asks`: the engine asks whether the next will be plain too."""
    seq = PlainSeq(1, [*range(10)], 10)
    for _ in range(rounds):
        controller.plan([seq])
        assert not asks or controller.follow([seq], RoundPlan("plain"), bool)
        seq.tokens.append(len(seq.tokens))
        controller.observe(Round((seq,), (0,), (0,), (0,), {"draft": 1e-5, "pass": 1.7e-3, "host": 3e-4}))


@pytest.mark.parametrize("asks", [True, False])
def test_where_no_plain_round_follows_look_ups_are_planned_as_elsewhere(asks: bool) -> None:
    """As for texts with penalties, which the host decides about: there is no gap that they could save."""
    controller = AdaptiveController(
        CostModel(SMALL.seconds), 60, 10, NgramDrafter().offer, lambda seq: True, follows=True
    )
    play(controller, 8, asks)
    assert bool(controller._planned.decisions) == asks, "the gate plans where nothing follows"


def test_who_can_never_draft_stays_plain() -> None:
    controller = AdaptiveController(CostModel(SMALL.seconds), 60, 10, NoDrafter().offer)
    seq = PlainSeq(1, [1, 2, 3], 3)
    controller.plan([seq])
    assert controller.follow([seq], RoundPlan("plain"), bool) == RoundPlan("plain", -1)
