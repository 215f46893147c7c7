"""Requests with other drafters in the same engine: what one drafter did last says nothing about another's texts.

The engine, controller and look-ups are real, the GPU is simulated (tests.simulate.recorded) and its clock has no
noise, so that a contender's rounds can be compared one by one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.params import SamplingParams
from forerun.core.types import NEVER as NEVER_DRAFTS
from forerun.core.types import Form, Offer, PlainSeq, Request, Round, RoundPlan
from forerun.drafters.lookup.suffix import SuffixDrafter
from lab.simulate.speeds import SimulatedMenu
from tests.simulate import recorded
from tests.simulate.recorded import BOTH, CHAINS, HEAD, NEVER, NGRAM, WIDTHS, RecordedText, make

SUFFIX, NONE = "suffix", "none"
LENGTH = 64
RIGHT = 0.75  # of the tokens, the head has right: far more than a draft costs
Rounds = list[tuple[int, int, bool]]  # nodes drafted, tokens written, and was it launched behind an unread one?


def texts(count: int, right: float) -> list[RecordedText]:
    """Tokens that no look-up finds; the head knows this share of them, wherever its tree starts."""
    rng, found = random.Random(3), list[RecordedText]()
    for i in range(count):
        known = [rng.random() < right for _ in range(LENGTH)]
        better = np.full((LENGTH, len(WIDTHS), CHAINS, CHAINS), NEVER, dtype=np.int16)
        for place in range(LENGTH):
            for level in range(CHAINS):
                if place + level >= LENGTH or not known[place + level]:
                    break
                better[place, :, level:, level] = level
        ids = [100 + i * 500 + j for j in range(40 + LENGTH)]
        found.append(RecordedText("own", ids[:40], ids[40:], better))
    return found


@pytest.fixture(autouse=True)
def noiseless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "NOISE", 0.0)
    monkeypatch.setattr(recorded, "SLOWER", 0.0)


def write(contenders: Sequence[Sequence[str]], right: float = RIGHT) -> list[list[Rounds]]:
    """The rounds of every text by each of its contenders, who write it one behind the other in one engine."""
    some = texts(len(contenders), right)
    engine, watched = make(some, seed=1)
    engine.drafters.add(SUFFIX, SuffixDrafter())
    engine.max_batch = 1
    rounds, observe = Rounds(), watched.observe

    def noted(outcome: Round) -> None:
        rounds.append((sum(outcome.drafted), 1 + sum(outcome.accepted), outcome.followed))
        observe(outcome)

    watched.observe = noted  # type: ignore[method-assign]
    found: list[list[Rounds]] = []
    for text, names in zip(some, contenders, strict=True):
        found.append([])
        for name in names:
            rounds.clear()
            params, written = SamplingParams(max_tokens=LENGTH, ignore_eos=True), list[int]()
            engine.submit(Request(tuple(text.prompt), params, drafter=name, cache_salt=None))
            while engine.busy:
                written += [token for event in engine.step() for token in event.tokens]
            assert written == text.answer
            found[-1].append([*rounds])
    return found


others_in_turn = pytest.mark.parametrize("others", [[NGRAM], [SUFFIX], [NONE], [NGRAM, SUFFIX], [SUFFIX, NONE, NGRAM]])


@pytest.mark.slow(keep=1)
@others_in_turn
@pytest.mark.parametrize("contender", [HEAD, BOTH])
def test_a_contender_drafts_in_company_as_it_does_alone(contender: str, others: list[str]) -> None:
    """Round by round, whoever wrote just before it."""
    alone = [text for (text,) in write([[contender]] * 8)]
    assert sum([nodes > 0 for text in alone for nodes, _, _ in text]) > 8 * 10
    for turn in range(len(others) + 1):
        names = [*others[turn:], contender, *others[:turn]]
        assert [text[names.index(contender)] for text in write([names] * 8)] == alone


@pytest.mark.slow(keep=1)
@others_in_turn
def test_a_head_that_is_never_right_loses_one_wait_a_text_in_company(others: list[str]) -> None:
    """Alone, its plain rounds go on from text to text; behind another's text the first one is read."""
    alone = [text for (text,) in write([[HEAD]] * 8, right=0.0)]
    company = [text[-1] for text in write([[*others, HEAD]] * 8, right=0.0)]
    for one, same in zip(company, alone, strict=True):
        assert abs(sum([nodes > 0 for nodes, _, _ in one]) - sum([nodes > 0 for nodes, _, _ in same])) <= 2
        assert sum([not followed for _, _, followed in one]) <= 3 + sum([not followed for _, _, followed in same])


@pytest.mark.parametrize("last", [NGRAM, SUFFIX, NONE])
def test_a_request_does_not_inherit_the_last_round_of_another(last: str) -> None:
    """Texts of the head alone, and one of another drafter before the last of them."""
    names = [[HEAD]] * 7
    without, behind = write([*names, [HEAD]]), write([*names, [last, HEAD]])
    assert behind[-1][1] == without[-1][0]
    assert max([nodes for nodes, _, _ in behind[-1][1]]) > 0


MENU, OTHER_MENU = SimulatedMenu((Form(4, 4, 1),), 0.5), SimulatedMenu((Form(3, 3, 1),), 0.5)
OFFERS = {
    "head": Offer(menu=MENU),
    "other head": Offer(menu=OTHER_MENU),
    "draft model": Offer((0.3,), chosen=False),
    "look-up": Offer(),
    "none": NEVER_DRAFTS,
}


def stays_plain(first: Sequence[str], then: Sequence[str]) -> bool:
    """Behind plain rounds of sequences of some drafters: do these stay plain? Names that are in both stay on."""
    names = [*first, *[name for name in then if name not in first]]
    kinds = [name.rstrip(" 2") for name in names]
    controller = AdaptiveController(
        CostModel({1: 1.0, 2: 1.9, 4: 3.8, 64: 60.0}), 60, 10,
        lambda seq: OFFERS[kinds[seq.id]], lambda seq: kinds[seq.id] == "look-up", follows=True,
    )  # fmt: skip
    seqs = {name: PlainSeq(i, [*range(9)], 2, max_length=500) for i, name in enumerate(names)}
    written = [seqs[name] for name in first]
    for _ in range(3):  # the first ones are insisted on
        assert not any(budget.nodes for budget in controller.plan(written))
        counts = (0,) * len(written)
        controller.observe(Round(tuple(written), counts, counts, counts, {"pass": 1.0, "host": 0.1}))
    assert not controller._planned.decisions[0].promise.is_trial, "there is a decision to inherit"
    return controller.follow([seqs[name] for name in then], RoundPlan("plain"), bool) is not None


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (["look-up"], ["head"]),
        (["look-up", "look-up 2"], ["look-up", "head"]),
        (["head"], ["other head"]),
        (["head"], ["draft model"]),
        (["head", "none"], ["head", "draft model"]),
        (["head", "head 2"], ["none", "look-up"]),
    ],
)
def test_a_decision_says_nothing_about_sequences_that_draft_otherwise(first: list[str], then: list[str]) -> None:
    assert not stays_plain(first, then)


@pytest.mark.parametrize("first", [["head"], ["head", "none"], ["head", "look-up"]])
@pytest.mark.parametrize("other", ["head", "head 2"])
def test_sequences_whose_drafts_cost_nothing_do_not_end_it(first: list[str], other: str) -> None:
    """Else every plain round of a mixed batch would be read first; another of the same head may come instead."""
    assert stays_plain(first, [other, *first[1:]])
