"""Prompts that are read while no place is free: they start as soon as one is, and nobody's text changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.engine import scheduler as scheduler_module
from forerun.engine.engine import Engine
from forerun.engine.scheduler import PrefillRows
from forerun.models.base import ON_CPU
from forerun.testing import TableLM

PLACES, PROMPT = 8, 21
GREEDY = SamplingParams(max_tokens=9, ignore_eos=True)


def full_engine(first_ends_after: int) -> Engine:
    """All places are taken; the first of those that write ends soon, the others do not."""
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(TableLM(30), frozenset(), speculative, EngineConfig(max_batch=PLACES))
    engine.prefill_rows, engine.scheduler.reads_early = PrefillRows(ON_CPU.prefill, 512, 64), True
    for i in range(PLACES):
        tokens = first_ends_after if i == 0 else 200
        engine.submit(Request((3, 4 + i), replace(GREEDY, max_tokens=tokens)))
    engine.step()
    assert len(engine.running) == PLACES
    return engine


def rounds_until_first(engine: Engine, count: int = 3) -> list[int]:
    """Rounds from now on until each of so many requests has its first token."""
    late = [engine.submit(Request(tuple(range(1, PROMPT + i)), GREEDY)) for i in range(count)]
    found, rounds = dict[int, int](), 0
    while len(found) < 1:
        rounds += 1
        events = engine.step()
        found |= {event.seq_id: rounds for event in events if event.seq_id in late}
        assert len(engine.running) <= PLACES
    return [found.get(number, -1) for number in late]


def test_a_prompt_is_read_before_a_place_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ends in the fourth round: whoever waited writes in the fifth."""
    assert rounds_until_first(full_engine(5)) == [5, -1, -1]
    monkeypatch.setattr(scheduler_module, "EARLY", 1 << 30)
    assert rounds_until_first(full_engine(5)) == [6, -1, -1], "the negative control"


def test_few_are_read_early_and_none_twice() -> None:
    engine = full_engine(90)
    ids = [engine.submit(Request(tuple(range(1, PROMPT)), GREEDY)) for _ in range(5)]
    for _ in range(4):
        engine.step()
    assert [seq.id for seq in engine.reading] == ids[: PLACES // scheduler_module.EARLY]
    assert [seq.id for seq in engine.waiting] == ids[PLACES // scheduler_module.EARLY :]
    assert engine.stats.read == 2 * PLACES + PROMPT - 1, "prompts of those that write, and one more"
    engine.abort(ids[0])
    engine.step()
    assert [seq.id for seq in engine.reading] == ids[1:2], "its turn is the next one's"


def test_texts_are_those_of_a_batch_of_one() -> None:
    prompts = [tuple(1 + (i + j) % 29 for j in range(3 + 3 * i)) for i in range(30)]
    requests = [Request(one, replace(GREEDY, max_tokens=2 + i % 7)) for i, one in enumerate(prompts)]

    def texts(places: int) -> list[list[int]]:
        speculative = SpeculativeConfig(drafter="none", controller="fixed")
        engine = make_engine(TableLM(30), frozenset(), speculative, EngineConfig(max_batch=places))
        engine.prefill_rows, engine.scheduler.reads_early = PrefillRows(ON_CPU.prefill, 512, 16), True
        found = {engine.submit(one): list[int]() for one in requests}
        while engine.busy:
            for event in engine.step():
                found[event.seq_id] += event.tokens
        assert engine.target.used_slots == 0
        return [*found.values()]

    assert texts(PLACES) == texts(1)
