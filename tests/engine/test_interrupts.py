"""Interrupts at the worst moments of a round, and what a drafter that was switched off still holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from forerun.build.engine import make_engine
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Event, Request, Round
from forerun.engine.driver import Driver, Waiter
from forerun.engine.engine import Engine
from forerun.testing import TableLM

REQUESTS = [Request(prompt, SamplingParams(max_tokens=n)) for prompt, n in [((1, 2, 3), 9), ((4, 5), 6)]]


class Loose(TableLM):
    """A TableLM whose calls can be replaced."""


def make(drafter: str = "draft_model", draft: TableLM | None = None) -> Engine:
    speculative = SpeculativeConfig(drafter=drafter, controller="fixed", budget=3)
    return make_engine(Loose(12), frozenset(), speculative, draft_target=draft or TableLM(12, seed=3))


def finish(engine: Engine, events: Sequence[Event] = ()) -> list[list[int]]:
    """Tokens of the events, sequence by sequence."""
    every = list(events)
    while engine.busy:
        every += engine.step()
    assert engine.target.used_slots == 0  # type: ignore[attr-defined]
    return [[token for event in every if event.seq_id == i for token in event.tokens] for i in range(2)]


def wanted() -> list[list[int]]:
    engine = make("none")
    for request in REQUESTS:
        engine.submit(request)
    return finish(engine)


def once(call: Any, at: int) -> Any:
    """The same call, but that it is interrupted at this time."""
    calls = iter(range(10_000))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise KeyboardInterrupt
        return call(*args, **kwargs)

    return interrupted


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupt_while_a_round_is_undone(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one comes while the first is seen to: the next step sees to both."""
    engine = make()
    for request in REQUESTS:
        engine.submit(request)
    events = engine.step()
    monkeypatch.setattr(engine.target, "score", once(engine.target.score, 0))
    monkeypatch.setattr(engine.target, "release", once(engine.target.release, at))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert finish(engine, events) == wanted()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_interrupt_after_a_round_was_written_loses_no_event(at: int) -> None:
    engine = make()
    real, rounds = engine.controller.observe, iter(range(1000))

    def observe(outcome: Round) -> None:
        if next(rounds) == at:
            raise KeyboardInterrupt
        real(outcome)

    engine.controller.observe = observe  # type: ignore[method-assign]
    for request in REQUESTS:
        engine.submit(request)
    events: list[Event] = []
    for _ in range(at):
        events += engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert finish(engine, events) == wanted()


def test_a_call_that_is_interrupted_while_it_queues_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(make())
    wait = driver.wait

    def interrupted(waiter: Waiter, makes_rounds: bool = True) -> None:
        wait(waiter, makes_rounds)
        monkeypatch.setattr(driver, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        driver.submit(REQUESTS[0])
    assert not driver.engine.busy


def test_a_drafter_that_was_switched_off_gives_back_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Loose(12, seed=3)
    engine, score, calls = make(draft=draft), draft.score, iter(range(1000))

    def failing(*args: Any) -> Any:
        if next(calls) == 4:
            raise RuntimeError("out of order")
        return score(*args)

    monkeypatch.setattr(draft, "score", failing)
    for request in REQUESTS:
        engine.submit(request)
    assert finish(engine) == wanted()
    assert next(calls) == 5  # it was asked no more
    assert draft.used_slots == 0
