"""Rounds that are launched before the events of the last are returned: same texts, whoever joins, leaves or fails."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.engine.engine import Engine
from forerun.testing import TableLM

STOP = frozenset({0})


def make(ahead: bool, batch: int = 3, drafter: str = "ngram") -> Engine:
    speculative = SpeculativeConfig(drafter=drafter, controller="fixed", budget=3)
    engine = make_engine(TableLM(30), STOP, speculative, EngineConfig(max_batch=batch))
    engine.timeline.depth = int(ahead)
    return engine


def requests(count: int, rng: random.Random) -> list[Request]:
    made = []
    for i in range(count):
        prompt = [rng.randrange(1, 30) for _ in range(rng.randrange(1, 60))]
        params = SamplingParams(max_tokens=rng.randrange(1, 14), temperature=float(i % 3 == 0), seed=i)
        made.append(Request(prompt, params))
    return made


def write(engine: Engine, some: Sequence[Request], rng: random.Random) -> list[list[int]]:
    waiting, texts = list(some), dict[int, list[int]]()
    while waiting or engine.busy:
        for _ in range(rng.choice((0, 1, 2)) if engine.busy else 1):
            if waiting:
                texts[engine.submit(waiting.pop(0))] = []
        for event in engine.step():
            assert event.error is None
            texts[event.seq_id] += event.tokens
    assert engine.timeline.is_idle
    return [texts[key] for key in sorted(texts)]


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_texts_are_the_same(drafter: str) -> None:
    some = requests(14, random.Random(1))
    alone = [write(make(False, drafter="none"), [one], random.Random(0))[0] for one in some]
    for ahead in (False, True):
        engine = make(ahead, drafter=drafter)
        assert write(engine, some, random.Random(2)) == alone
        assert engine.target.used_slots == 0


def test_the_next_round_is_launched_before_events_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = {False: list[int](), True: list[int]()}
    for ahead, counts in scored.items():
        engine, passes = make(ahead), list[int]()
        score = engine.target.score
        monkeypatch.setattr(engine.target, "score", lambda *a, s=score, p=passes: (p.append(1), s(*a))[1])
        engine.submit(Request([3, 4, 5], SamplingParams(max_tokens=4, ignore_eos=True), drafter="none"))
        while engine.busy:
            engine.step()
            counts.append(len(passes))
    assert scored == {False: [1, 2, 3, 4], True: [2, 3, 4, 4]}, "the last round has none behind it"


@pytest.mark.parametrize("when", range(4))
def test_whoever_is_aborted_while_a_round_is_under_way_leaves_nothing(when: int) -> None:
    some = requests(3, random.Random(5))
    alone = write(make(False), [some[1]], random.Random(0))[0]
    engine = make(True)
    ids = [engine.submit(one) for one in some]
    events = [event for _ in range(when) for event in engine.step()]
    engine.abort(ids[0])
    engine.abort(ids[2])
    while engine.busy:
        events += engine.step()
    assert [token for event in events if event.seq_id == ids[1] for token in event.tokens] == alone
    assert engine.target.used_slots == 0
    assert engine.timeline.is_idle


@pytest.mark.parametrize("place", ["score", "commit"])
def test_a_round_that_fails_does_not_take_back_the_one_before(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    some = requests(3, random.Random(7))
    alone = [write(make(False), [one], random.Random(0))[0] for one in some]
    engine, calls = make(True), list[int]()
    work: Any = getattr(engine.target, place)

    def fails_at_times(*given: Any) -> Any:
        calls.append(1)
        if len(calls) in (3, 8):
            raise MemoryError("injected")
        return work(*given)

    monkeypatch.setattr(engine.target, place, fails_at_times)
    assert write(engine, some, random.Random(1)) == alone
    assert len(calls) > 8


def test_settle_ends_what_is_under_way() -> None:
    engine = make(True)
    engine.submit(Request([3, 4, 5], SamplingParams(max_tokens=9, ignore_eos=True), drafter="none"))
    first = engine.step()
    assert engine.timeline.first is not None
    engine.settle()
    assert engine.timeline.first is None
    assert [len(engine.running[0].tokens), len(first)] == [5, 1], "two tokens are written, one was returned"
    assert len(engine.step()) == 2
