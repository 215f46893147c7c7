"""A head with look-ups beside it, at batch 1, in counted time: never slower than the head alone, and what both gain."""

from __future__ import annotations

import random

import pytest

from forerun.control import adaptive
from forerun.control.cost import CostModel, RoundOverhead, presumed_gap
from forerun.control.forms import FormChooser, Promise
from forerun.control.overlap import Overlap, level_rate, lookup_promise
from forerun.control.prices import Allowance
from forerun.core.types import PLAIN, Form, Offer
from lab.simulate.speeds import SimulatedMenu
from tests.control.lookup_texts import COPYING, RECORDED, TEXTS, random_texts
from tests.control.simulate.follow import FollowHistory, FollowSimulation, Host
from tests.control.simulate.history import Text
from tests.control.test_forms import FORMS

SMALL = CostModel({1: 1.56e-3, 16: 1.8e-3, 32: 1.9e-3, 64: 2.4e-3, 128: 3.2e-3})  # 1.5B on an H200
LARGE = CostModel({1: 4.4e-3, 32: 4.9e-3, 64: 5.3e-3, 128: 7.2e-3})  # 8B
TREE = SimulatedMenu(FORMS[-2:-1], 1.3e-4)  # one form, so that luck in choosing forms is no part of it


def run(
    cost: CostModel,
    texts: list[Text],
    gap: float,
    rate: float,
    *,
    looks_up: bool,
    menu: SimulatedMenu = TREE,
    rounds: int = 700,
) -> FollowHistory:
    return FollowSimulation(cost, menu, texts, Host(gap), lambda text, at: rate, looks_up=looks_up).run(rounds)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("rate", [0.6, 0.8])
@pytest.mark.parametrize("gap", [3e-4, 1e-3])
@pytest.mark.parametrize("cost", [SMALL, LARGE], ids=["1.5B", "8B"])
def test_never_slower_than_the_head_alone(cost: CostModel, gap: float, rate: float, texts: str) -> None:
    both, alone = (run(cost, TEXTS[texts], gap, rate, looks_up=looks_up) for looks_up in (True, False))
    assert both.speed(alone) >= 0.985
    assert both.least_speed(alone) >= 0.97  # over any 600 tokens, in which a few look-ups may be unlucky
    if texts != "recorded":
        lost = alone.kinds.count("followed") - both.kinds.count("followed")
        assert lost <= 0.01 * len(both.kinds), "matches that prove nothing do not keep rounds from following"


@pytest.mark.parametrize("cost", [SMALL, LARGE], ids=["1.5B", "8B"])
def test_whoever_waits_for_any_match_is_slower(cost: CostModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: what was measured on a GPU, 0.9 of the head alone."""
    monkeypatch.setattr(Overlap, "waits", lambda self, chooser, head, offers: any(one.free for one in offers))
    both, alone = (run(cost, RECORDED, 1e-3, 0.8, looks_up=looks_up) for looks_up in (True, False))
    assert both.speed(alone) < 0.985


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("rate", [0.6, 0.8])
@pytest.mark.parametrize("gap", [3e-4, 1e-3])
@pytest.mark.parametrize("cost", [SMALL, LARGE], ids=["1.5B", "8B"])
def test_what_is_copied_is_looked_up(cost: CostModel, gap: float, rate: float) -> None:
    both, alone = (run(cost, COPYING, gap, rate, looks_up=looks_up, rounds=300) for looks_up in (True, False))
    assert both.speed(alone) > 2.5


def test_look_ups_return_after_they_were_wrong_for_long() -> None:
    wrong = random_texts(40)
    texts = [*wrong, *COPYING]
    both, alone = (run(LARGE, texts, 1e-3, 0.6, looks_up=looks_up, rounds=900) for looks_up in (True, False))
    assert both.speed(alone, last=96 * 16) >= 0.985
    assert both.speed(alone, first=96 * 17, last=min(96 * 24, alone.tokens[-1])) > 2.0


def reads_first(gain: float, form: Form) -> bool:
    """Is a round read first for look-ups that write so many tokens more than this form does in their time?"""
    chooser = FormChooser(TREE, CostModel(SMALL.seconds), Allowance(), 60, 10)
    for known in (PLAIN, form):
        chooser.overhead.observe(known, 1, 2e-4, 2e-4, followed=True)
    head = Promise(form, 3.0 if form.nodes else 1.0, 2e-3)
    free, gap = lookup_promise(chooser, head, 8, 1, 0.0), presumed_gap(head.seconds)
    accepted = gain + head.rate * (free.seconds + gap) - free.tokens
    overlap = Overlap(lambda offers, batch: ([8], accepted))
    return overlap.waits(chooser, head, [Offer(free=(1.0,) * 12)])


def test_a_token_must_be_gained_on_a_head_and_on_plain_rounds_as_much_as_is_staked() -> None:
    assert [reads_first(gain, TREE.forms[0]) for gain in (-0.1, 0.9, 1.1, 4.0)] == [False, False, True, True]
    assert [reads_first(gain, PLAIN) for gain in (-0.1, 0.1, 0.9)] == [False, False, True]


class Parting:
    """Text that is copied until a few rounds in a row were looked up, and then is another."""

    def __init__(self, patience: int) -> None:
        self.patience, self.rng = patience, random.Random(1)

    def run(self, rounds: int) -> tuple[FollowHistory, FollowHistory]:
        """And the same texts, written by the head alone."""
        book = [self.rng.randrange(50000) for _ in range(2000)]
        text = (book, [self.rng.randrange(50000) for _ in range(4000)])
        both = FollowSimulation(SMALL, TREE, [text], Host(1e-3), lambda text, at: 0.6)
        whole, seq = both.texts.whole[both.seq.id], both.seq
        for _ in range(rounds):
            recent, at = both.history.kinds[-self.patience :], len(seq.tokens)
            copies = recent.count("look-up") < self.patience
            start = self.rng.randrange(1500) if not copies else (at * 7) % 1500 // 300 * 300
            for i in range(at, min(at + 40, len(whole))):
                whole[i] = book[start + i - at + at % 300] if copies else self.rng.randrange(50000)
            both._step()
        written = whole[len(book) : len(seq.tokens)]
        alone = FollowSimulation(
            SMALL, TREE, [(book, [*written, *written])], Host(1e-3), lambda text, at: 0.6, looks_up=False
        )
        return both.history, alone.run(rounds)


@pytest.mark.parametrize("patience", [1, 2])
def test_what_an_adversary_can_take_is_bounded(patience: int) -> None:
    both, alone = Parting(patience).run(400)
    assert both.least_speed(alone) >= 0.95


def test_the_gap_is_what_rounds_show() -> None:
    form, around = Form(24, 5, 6), RoundOverhead()
    around.observe(form, 1, 2.0, 1.0)  # read first, as nothing else is known
    assert around.gap(1) == 0.0
    for _ in range(20):
        around.observe(form, 1, 0.7, 1.0, followed=True)
        around.observe(form, 1, 1.5, 1.0)
    assert around.gap(1) == pytest.approx(0.8, abs=0.05)
    assert around.seconds(form, 1, 0.0) == pytest.approx(0.7, abs=0.05)
    around.observe(Form(8, 3, 3), 1, 1.2, 1.2)  # a trial of another form is read first: less the gap
    assert around.seconds(Form(8, 3, 3), 1, 0.0) == pytest.approx(0.4, abs=0.1)
    assert around.gap(8) == 0.0


def test_the_first_round_of_a_text_tells_no_gap() -> None:
    """Its head has a prompt to read, which takes long and is no reason to follow."""
    simulation = FollowSimulation(SMALL, TREE, RECORDED, Host(8e-4), lambda text, at: 0.6)
    seconds_of, seen = simulation._seconds, list[float]()

    def seconds(by_head: bool, nodes: int, followed: bool) -> dict[str, float]:
        first = len(simulation.seq.tokens) == simulation.seq.prompt_length
        found = seconds_of(by_head, nodes, followed)
        return {**found, "host": found["host"] + (5e-3 if first else 0.0)}

    simulation._seconds = seconds  # type: ignore[method-assign]
    for _ in range(300):
        simulation._step()
        (chooser,) = simulation.controller._choosers.values()
        seen.append(chooser.overhead.gap(1))
    assert simulation.texts.started > 5
    assert seen[-1] == pytest.approx(8e-4, rel=0.3)


def test_few_rounds_follow_the_end_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would keep the next prompt waiting for a whole round."""
    short: list[Text] = [(prompt, answer[:20]) for prompt, answer in RECORDED]
    dropped = run(SMALL, short, 8e-4, 0.7, looks_up=True).dropped
    monkeypatch.setattr(adaptive, "ends", lambda chooser, head, seqs: False)
    before = run(SMALL, short, 8e-4, 0.7, looks_up=True).dropped
    assert before > 40
    assert dropped <= 0.25 * before


@pytest.mark.parametrize("depth", [1, 5])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
def test_level_rate_is_what_gives_as_many_tokens(rate: float, depth: int) -> None:
    accepted = sum(rate**i for i in range(1, depth + 1))
    assert level_rate(accepted, depth) == pytest.approx(rate, abs=0.001)
