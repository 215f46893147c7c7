"""Look-ups in a first text: one slow round does not end them, and doubt leaves room."""

from __future__ import annotations

import random

import pytest

from forerun.control import times
from forerun.core.types import Budget
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

    def seconds(budget: Budget, nodes: int, followed: bool) -> dict[str, float]:
        found = seconds_of(budget, nodes, followed)
        if not nodes and history.kinds.count("look-up") == 1 and history.kinds[-1] == "look-up":
            return {**found, "host": found["host"] + slow}
        return found

    simulation._seconds = seconds  # type: ignore[method-assign]


def test_one_slow_round_does_not_end_look_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the negative control: where the last round alone counts, a pause ends them."""
    even, slow = first_texts(passages()), first_texts(passages(), SLOW)
    assert slow[0] >= 0.97 * even[0]
    assert even[0] > 2.0
    for name, value in (("MOST_TIMES", 1e9), ("NEWEST", 1.0), ("PRIOR_ROUNDS", 0.0)):
        monkeypatch.setattr(times, name, value)
    assert first_texts(passages(), SLOW)[0] < 0.97 * even[0]


def test_recorded_texts_gain_in_a_first_text_too() -> None:
    assert first_texts([*RECORDED])[0] > 1.08
