"""Priorities: the order of admission and of preemption, counted in admissions. No text depends on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from forerun.build.engine import make_engine
from forerun.core.errors import InvalidInput
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Request
from forerun.engine import scheduler as scheduler_module
from forerun.engine.engine import Engine
from forerun.engine.scheduler import find_room
from forerun.engine.sequence import TURN, SequenceState
from forerun.testing import TableLM
from tests.test_llm import make as make_llm

SHORT = SamplingParams(max_tokens=1, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.0, seed=5)


def make(max_batch: int = 1, **target: Any) -> Engine:
    speculative = SpeculativeConfig(drafter="ngram", controller="fixed", budget=4)
    return make_engine(TableLM(vocab_size=16, **target), frozenset(), speculative, EngineConfig(max_batch=max_batch))


def submit(engine: Engine, priority: int, params: SamplingParams = SHORT) -> SequenceState:
    found = engine.find(engine.submit(Request((1, 2, 3), params, priority=priority)))
    assert found is not None
    return found


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids of requests in the order in which they are admitted from now on."""
    order, begin = list[int](), engine.scheduler.begin

    def note(readers: Sequence[SequenceState], rows: int) -> None:
        order.extend(seq.id for seq in readers if seq.id not in order)
        begin(readers, rows)

    monkeypatch.setattr(engine.scheduler, "begin", note)
    return order


def finish(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def test_who_waits_is_admitted_by_priority_then_by_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    order = watch(engine, monkeypatch)
    for priority in (0, 3, -1, 0, 3, -1):
        submit(engine, priority)
    finish(engine)
    assert order == [2, 5, 0, 3, 1, 4]
    assert engine.scheduler.aged == 0


def wait_of_the_least_urgent(engine: Engine, order: list[int], most: int) -> int:
    """Admissions until one of priority 9 is admitted, while two of priority 0 wait at any time."""
    submit(engine, 0)
    engine.step()
    last = submit(engine, 9)
    while last.id not in order and len(order) < most:
        while sum(seq is not last for seq in engine.waiting) < 2:
            submit(engine, 0)
        engine.step()
    return len(order)


def test_the_least_urgent_is_admitted_in_turn_under_any_load(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    order = watch(engine, monkeypatch)
    assert wait_of_the_least_urgent(engine, order, 100) <= TURN + 2
    assert engine.scheduler.aged == 1


def test_negative_control_without_turns_it_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "TURN", 1 << 30)
    engine = make()
    order = watch(engine, monkeypatch)
    assert wait_of_the_least_urgent(engine, order, 100) == 100
    assert engine.scheduler.aged == 0


@pytest.mark.parametrize("max_batch", [1, 4])
def test_every_waiting_request_is_admitted_within_the_bound_that_is_documented(
    max_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(max_batch)
    order = watch(engine, monkeypatch)
    low = [submit(engine, priority) for priority in (9, 7, 8, 9, 1 << 53)]
    while not all(seq.id in order for seq in low) and len(order) < 500:
        while len(engine.waiting) < 16:
            submit(engine, -5)
        engine.step()
    for older, seq in enumerate(low):
        assert order.index(seq.id) < TURN * (older + 1), (older, order)
    assert order[:3] != [0, 1, 2], "yet the urgent ones come first"
    finish(engine)


def test_the_least_urgent_and_then_the_youngest_give_their_slots_to_others() -> None:
    engine, sent = make(8), list[SequenceState]()
    seqs = [submit(engine, priority) for priority in (5, 0, 5, 0)]

    class Full:
        def make_room(self, left: Sequence[SequenceState], rows: Sequence[int]) -> bool:
            return len(sent) == self.most

        most = 3

    target: Any = Full()
    left, _ = find_room(target, seqs[:3], [Budget(0, 0)] * 3, seqs[3:], sent.append)
    assert [seq.id for seq in sent] == [2, 0, 3], "a prompt under way of an urgent one is worth more"
    assert left == [seqs[1]]
    for _ in range(TURN):
        seqs[2].note_preemption()
    sent.clear()
    find_room(target, seqs[:3], [Budget(0, 0)] * 3, seqs[3:], sent.append)
    assert [seq.id for seq in sent] == [0, 3, 1], "one that was preempted often has aged"


def test_a_preempted_sequence_queues_by_its_priority() -> None:
    engine = make(1)
    low = submit(engine, 4, SEEDED)
    engine.step()
    urgent, same = submit(engine, 0), submit(engine, 4)
    engine.settle()
    engine._preempt(low)
    engine.timeline.change = None
    assert [*engine.waiting] == [urgent, low, same]
    low.note_failure()
    engine.scheduler.queue_again([low])
    assert [*engine.waiting] == [low, urgent, same], "who failed is tried first, alone if need be"
    finish(engine)


def test_texts_do_not_depend_on_priorities() -> None:
    def texts(priorities: Sequence[int], slots: int | None) -> list[list[int]]:
        engine = make(3, slots=slots)
        seqs = [submit(engine, each, replace(SEEDED, seed=i)) for i, each in enumerate(priorities)]
        finish(engine)
        return [list(seq.tokens) for seq in seqs]

    wanted = texts([0] * 12, None)
    for slots in (None, 30):
        assert texts([5, -1, 3, 0, 0, 7, -9, 2, 2, 1, 0, 4], slots) == wanted


def test_a_call_of_the_library_has_a_priority_and_junk_is_refused() -> None:
    llm = make_llm()
    assert llm.generate("abc", max_tokens=3, priority=-2).text == llm.generate("abc", max_tokens=3).text
    for junk in (None, 1.5, "1", True, 1 << 60):
        with pytest.raises(InvalidInput, match="priority"):
            llm.generate("abc", max_tokens=3, priority=junk)  # type: ignore[call-overload]
