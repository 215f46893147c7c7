"""A long prompt beside short ones: these are read ahead of it, and yet it is read. Counted in passes."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.engine import scheduler as scheduler_module
from forerun.engine.engine import Engine
from forerun.engine.scheduler import COMPANY, READ_TURN, PrefillRows
from forerun.models.base import ON_CPU
from forerun.testing import TableLM
from tests.exactness.harness import run

ROWS = 8
LONG = tuple(1 + i % 29 for i in range(801))
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


def make(reads: int = 1 << 30) -> Engine:
    """Somebody runs, and a pass has ROWS rows of prompts; the long one has begun."""
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(TableLM(30, pass_rows=4 * ROWS), frozenset(), speculative, EngineConfig(max_batch=8))
    engine.prefill_rows = PrefillRows(ON_CPU.prefill, ROWS, fixed=ROWS)
    if reads:
        engine.submit(Request((1, 2), replace(GREEDY, max_tokens=reads)))
        engine.step()
    engine.submit(Request(LONG, GREEDY))
    engine.step()
    assert [len(seq.tokens) for seq in engine.reading] == [len(LONG)]
    return engine


def passes_until(engine: Engine, seq_id: int, most: int) -> int:
    """Steps until a request has its first token."""
    for steps in range(1, most + 1):
        if any(event.seq_id == seq_id and event.tokens for event in engine.step()):
            return steps
    return most + 1


def short(number: int, length: int = 6) -> Request:
    return Request((3, 1 + number % 29, *(1 + i % 29 for i in range(length - 2))), GREEDY)


def test_a_short_prompt_is_read_ahead_of_a_long_one() -> None:
    engine = make()
    assert passes_until(engine, engine.submit(short(1)), 10) <= 2
    assert passes_until(engine, engine.submit(short(2, 30)), 10) <= 6, "two of its passes may be the long one's"
    assert len(engine.reading) == 1


def test_negative_control_without_scales_it_waits_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "_scale", lambda rows: 0)
    engine = make()
    assert passes_until(engine, engine.submit(short(1)), 50) > 50


def passes_of_the_long_one(engine: Engine, most: int) -> int:
    """Steps until it is read, while short prompts that fill every pass never end."""
    numbers = count()
    for steps in range(1, most + 1):
        while len(engine.waiting) < 4:
            engine.submit(replace(short(next(numbers)), params=replace(GREEDY, max_tokens=1)))
        engine.step()
        if all(len(seq.tokens) < len(LONG) for seq in engine.reading):
            return steps
    return most + 1


def test_the_long_one_has_its_turn_under_any_load(monkeypatch: pytest.MonkeyPatch) -> None:
    most = READ_TURN * (len(LONG) // ROWS + 2)
    assert passes_of_the_long_one(make(), most) <= most
    monkeypatch.setattr(scheduler_module, "READ_TURN", 1 << 30)
    assert passes_of_the_long_one(make(), most) > most, "the negative control"


def test_passes_of_its_own_are_smaller_once_a_prompt_was_overtaken() -> None:
    """Nobody runs: a request that comes waits for one pass at least. After a while nobody is expected any more."""
    engine = make(reads=0)
    (long,) = engine.reading
    read = [engine.target.cached_tokens(long)]

    def rows() -> int:
        engine.step()
        read.append(engine.target.cached_tokens(long))
        return read[-1] - read[-2]

    assert rows() == 4 * ROWS
    first = engine.submit(replace(short(1), params=replace(GREEDY, max_tokens=1)))
    assert passes_until(engine, first, 2) <= 2
    read[-1] = engine.target.cached_tokens(long)
    assert not engine.running
    assert rows() == ROWS
    assert engine.scheduler.company == COMPANY - 1
    engine.scheduler.company = 0
    assert rows() == 4 * ROWS


def test_more_urgent_prompts_are_not_overtaken() -> None:
    engine = make(reads=1 << 30)
    engine.abort(engine.reading[0].id)
    urgent = engine.submit(Request(LONG, GREEDY, priority=-1))
    engine.step()
    other = engine.submit(short(1))
    engine.step()
    assert [seq.id for seq in engine.reading][:1] == [urgent]
    assert passes_until(engine, other, 20) > READ_TURN, "it waits, but for the passes that are left over"


@pytest.mark.parametrize("reads", [0, 1 << 30])
def test_texts_are_those_of_each_alone(reads: int) -> None:
    engine = make(min(reads, 200))
    requests = [short(number, 6 + 11 * number) for number in range(5)]
    ids, texts = [engine.submit(one) for one in requests], dict[int, list[int]]()
    while engine.busy:
        for event in engine.step():
            texts.setdefault(event.seq_id, []).extend(event.tokens)
    alone = [run(make_engine(TableLM(30), frozenset(), SpeculativeConfig(drafter="none", controller="fixed"),
                             EngineConfig()), [one])[0][0] for one in (*requests, Request(LONG, GREEDY))]  # fmt: skip
    assert [texts[i] for i in (*ids, min(ids) - 1)] == alone
