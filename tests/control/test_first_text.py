"""Look-ups in a first text: one slow round does not end them, and doubt leaves room."""

from __future__ import annotations

import random

import pytest

from forerun.control import cost
from forerun.control.cost import GAPS_KEPT, STALE_ROUNDS, RoundOverhead
from forerun.control.prices import LOOKUPS, Allowance
from forerun.core.types import PLAIN
from tests.control.lookup_texts import RECORDED
from tests.control.simulate.follow import FollowHistory, FollowSimulation
from tests.control.simulate.history import Text
from tests.control.test_lookups_alone import HOST, SMALL

SLOW = 5e-3  # seconds more, of the first plain round behind a look-up


def passages() -> list[Text]:
    """Answers that copy short passages of their prompts, with a few tokens of their own between two of them."""
    rng, texts = random.Random(3), list[Text]()
    for _ in range(12):
        prompt, answer = [rng.randrange(50000) for _ in range(300)], list[int]()
        while len(answer) < 96:
            at = rng.randrange(280)
            answer += prompt[at : at + rng.randint(8, 14)] + [rng.randrange(50000) for _ in range(4)]
        texts.append((prompt, answer[:96]))
    return texts


def first_texts(texts: list[Text], slow: float = 0.0) -> tuple[float, float]:
    """Each of these as the first that a controller sees: tokens per round, and the share of rounds that look up."""
    tokens, kinds = 0, list[str]()
    for text in texts:
        simulation = FollowSimulation(SMALL, None, [text], HOST)
        if slow:
            _slow_first_gap(simulation, slow)
        while simulation.seq.id == 0:
            simulation._step()
        history: FollowHistory = simulation.history
        tokens, kinds = tokens + history.tokens[-1], kinds + history.kinds
    return tokens / len(kinds), kinds.count("look-up") / len(kinds)


def _slow_first_gap(simulation: FollowSimulation, slow: float) -> None:
    """What a process does for the first time takes long."""
    seconds_of, history = simulation._seconds, simulation.history

    def seconds(by_head: bool, nodes: int, followed: bool) -> dict[str, float]:
        found = seconds_of(by_head, nodes, followed)
        if not nodes and history.kinds.count("look-up") == 1 and history.kinds[-1] == "look-up":
            return {**found, "host": found["host"] + slow}
        return found

    simulation._seconds = seconds  # type: ignore[method-assign]


@pytest.mark.slow
def test_one_slow_round_does_not_end_look_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the negative control: with the slowest gap in the median's place next to nothing is drafted."""
    even, slow = first_texts(passages()), first_texts(passages(), SLOW)
    assert slow[0] >= 0.97 * even[0]
    assert even[0] > 2.0
    monkeypatch.setattr(cost, "median_low", max)
    assert first_texts(passages(), SLOW)[0] < 0.75 * even[0]


def test_recorded_texts_gain_in_a_first_text_too() -> None:
    assert first_texts([*RECORDED])[0] > 1.08


def test_the_gap_is_the_median_and_at_first_no_more_than_presumed() -> None:
    seen = RoundOverhead()
    seen.observe(PLAIN, 1, 0.1, 0.0, followed=True)
    for slow in (9.0, 8.0):
        seen.observe(PLAIN, 1, 0.1 + slow, 0.0)
        assert seen.gap(1, presumed=0.4) == pytest.approx(0.4 if slow == 9.0 else 8.0)
    for _ in range(GAPS_KEPT):
        seen.observe(PLAIN, 1, 0.6, 0.0)
    assert seen.gap(1, presumed=0.1) == pytest.approx(0.5), "then by rounds alone"


def test_gaps_that_nobody_risks_any_more_are_forgotten() -> None:
    seen = RoundOverhead()
    seen.observe(PLAIN, 1, 0.0, 0.0, followed=True)
    for _ in range(3):
        seen.observe(PLAIN, 1, 9.0, 0.0)
    for _ in range(3 * STALE_ROUNDS - 1):
        seen.note_avoided_gap(1)
    assert seen.gap(1) == pytest.approx(9.0)
    seen.note_avoided_gap(1)
    assert seen.gap(1) == 0.0, "as before any was seen"
    seen.note_avoided_gap(1)  # where there is nothing to forget


def test_doubtful_drafts_leave_room_for_sure_ones() -> None:
    allowance = Allowance(**LOOKUPS)
    doubtful, sure, worst = 0.2, 5.0, 0.45
    while allowance.covers_stake(worst, doubtful):
        allowance.book(worst)
    assert allowance.covers_stake(worst + 0.3, sure), "a long match is worth it, the gap before it included"
    alone = Allowance(most=3.0, earned=0.006, floor=1.0)
    while alone.covers(worst):
        alone.book(worst)
    assert not alone.covers(worst + 0.3), "which nothing else would keep them from using up"
    allowance.level = allowance.most
    assert allowance.covers_stake(worst, doubtful), "while look-ups have gained, they may be tried"


def test_a_stake_is_never_more_than_is_left() -> None:
    allowance = Allowance(most=3.0, floor=1.0, level=-0.5)
    assert allowance.covers_stake(0.45, 100.0)
    assert not allowance.covers_stake(0.55, 100.0)
    assert not allowance.covers_stake(0.1, 0.0)
