"""Which prompts are read next, and which sequences start with the pass that completes their prompt."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.core.params import SamplingParams
from forerun.core.types import Request, RoundPlan, TreeBatch, TreeForm
from forerun.engine.engine import Engine
from forerun.engine.sequence import SequenceState
from lab.host import make

LENGTHS = (11, 21, 31, 41)
TEXTS = [(tuple(range(100 * i, 100 * i + length)), [1, 2, 3, 4, 5]) for i, length in enumerate(LENGTHS, start=1)]


def engine_of(batch: int) -> tuple[Engine, list[SequenceState]]:
    """An engine over the simulated device, and a sequence of each prompt, which has been queued."""
    engine = make("none", TEXTS, batch)
    seqs = [engine.prepare(Request(prompt, SamplingParams(max_tokens=5))) for prompt, _ in TEXTS]
    for seq in seqs:
        engine.enqueue(seq)
    return engine, seqs


def note_cached(engine: Engine, monkeypatch: pytest.MonkeyPatch, cached: dict[int, int]) -> None:
    monkeypatch.setattr(type(engine.target), "cached_tokens", lambda target, seq: cached.get(seq.id, 0))


def test_as_many_are_read_next_as_rows_and_places_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seqs = engine_of(8)
    scheduler = engine.scheduler
    assert scheduler.next_readers(0) == []
    assert scheduler.next_readers(10) == seqs[:1], "ten rows: the first prompt less its last token"
    assert scheduler.next_readers(31) == seqs[:3]
    scheduler.begin(seqs[:2])
    assert [*scheduler.waiting] == seqs[2:]
    note_cached(engine, monkeypatch, {seqs[0].id: 10, seqs[1].id: 5})
    assert scheduler.next_readers(15) == seqs[1:2], "one is read, and the other takes all rows"
    assert scheduler.next_readers(16) == seqs[1:3]
    scheduler.max_batch = 3
    assert scheduler.next_readers(1000) == seqs[1:3]
    scheduler.running = [seqs[3]]
    assert scheduler.next_readers(1000) == seqs[1:2], "no place is free"
    scheduler.limit = 4
    assert scheduler.next_readers(1000) == seqs[1:3]


def test_prompts_are_read_before_a_place_is_free_only_where_the_target_can(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seqs = engine_of(8)
    scheduler = engine.scheduler
    scheduler.running = [seqs[0]] * 8
    for early, wanted in ((False, []), (True, seqs[:1])):
        scheduler.reads_early = early
        assert scheduler.next_readers(1000) == wanted, "one for every eight places"


def test_those_that_are_read_start_as_far_as_there_are_places(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seqs = engine_of(2)
    scheduler = engine.scheduler
    scheduler.reading = list(seqs)
    note_cached(engine, monkeypatch, {seq.id: len(seq.tokens) - 1 - (seq is seqs[0]) for seq in seqs})
    scheduler.start_those_read()
    assert (scheduler.running, scheduler.reading) == (seqs[1:3], [seqs[0], seqs[3]])
    scheduler.start(seqs[1:2])
    assert scheduler.running == seqs[1:3], "once"


def test_readers_start_with_the_pass_that_reads_the_rest_of_their_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seqs = engine_of(4)
    scheduler, asked = engine.scheduler, list[tuple[int, int, int]]()

    def rows_of(target: Any, nodes: int, rows: int, waiting: int) -> int:
        asked.append((nodes, rows, waiting))
        return rows

    monkeypatch.setattr(type(engine.target), "prompt_rows", rows_of)
    assert [scheduler.starters(seqs, 7, rows) for rows in (9, 10, 29, 30, 60)] == [
        [], seqs[:1], seqs[:1], seqs[:2], seqs[:3]
    ]  # fmt: skip
    assert asked[0] == (7, 9, 10 + 20 + 30 + 40)
    note_cached(engine, monkeypatch, {seqs[1].id: 15})
    assert scheduler.starters(seqs, 7, 15) == seqs[:2], "of the second five rows are left"
    scheduler.running = seqs[2:] + seqs[3:]
    assert scheduler.starters(seqs, 7, 1000) == seqs[:1], "one place is free"
    assert scheduler.starters([], 7, 1000) == []


def test_starters_take_the_place_of_padding_where_there_is_room_and_the_device_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, seqs = engine_of(8)
    form = TreeForm(3, 4, 3, 1)
    trees = TreeBatch(torch.zeros(4).long(), torch.tensor([-1, 0, 1, 2]), form.starts(1), form=form)
    device = SimpleNamespace(menu=SimpleNamespace(switches=True))
    engine.drafters.device = lambda some: device  # type: ignore[method-assign,assignment,return-value]
    rooms, room = list[Sequence[int]](), True

    def has_room(target: Any, *lengths: int) -> bool:
        rooms.append(lengths)
        return room

    monkeypatch.setattr(type(engine.target), "has_room", has_room)

    def started(readers: list[SequenceState], sampled: bool = True) -> list[SequenceState]:
        starters, all_trees = engine._in_padding(seqs[:1], trees, readers, 1000, sampled)
        assert len(all_trees) == 1 + len(starters)
        return starters

    assert started(seqs[1:]) == seqs[1:3], "two trees of the form are padding"
    assert rooms == [(21 + 4, 31 + 4)]
    other = engine.prepare(Request(TEXTS[0][0], SamplingParams(presence_penalty=0.1)))
    assert started([other]) == [], "the host decides about it"
    assert started([]) == []
    room = False
    assert started(seqs[1:]) == []
    room, device.menu.switches = True, False
    assert started(seqs[1:]) == [], "a draft model has not read the root"


def test_nobody_starts_beside_trees_from_the_host_and_beside_roots_a_starter_is_one_more() -> None:
    engine, seqs = engine_of(8)
    trees = TreeBatch.chains([[7, 8, 9]])
    assert engine._with_starters(seqs[:1], trees, seqs[1:], 1000) == (seqs[:1], trees)
    assert engine.running == []
    some, roots = engine._with_starters(seqs[:1], TreeBatch.chains([[7]]), seqs[1:], 1000)
    assert (some, engine.running) == (seqs, seqs[1:])
    assert roots.to_host()[0] == [seq.tokens[-1] for seq in seqs]


def test_what_prompts_add_to_a_round_is_learnt_only_where_running_sequences_waited() -> None:
    engine = make("none", TEXTS, 8)
    noted = list[int]()
    engine.prefill_rows.observe = lambda seconds, rows, before: noted.append(rows)  # type: ignore[method-assign]
    engine.submit(Request(TEXTS[0][0], SamplingParams(max_tokens=5)))
    while not noted:
        engine.step()
    assert noted == [0], "the round that its own prompt shared says nothing"
    engine.submit(Request(TEXTS[1][0], SamplingParams(max_tokens=5)))
    while engine.busy:
        engine.step()
    assert [rows for rows in noted if rows] == [20]


def test_a_round_of_starters_alone_is_planned_by_nobody_and_drafts_nothing() -> None:
    engine, seqs = engine_of(8)
    engine.controller.plan = None  # type: ignore[method-assign,assignment]
    engine._open()
    first = engine.timeline.first
    assert first is not None
    assert (first.seqs, first.readers, first.plan) == (seqs, seqs, RoundPlan("plain"))


def test_whoever_the_host_decides_about_does_not_start_in_a_round_behind_an_unread_one() -> None:
    engine = make("none", TEXTS, 8)
    rounds, score = list[tuple[bool, list[int]]](), engine._score

    def noted(some: Sequence[SequenceState], trees: TreeBatch, *rest: Any) -> Any:
        rounds.append((trees.follows is not None, [seq.id for seq in some]))
        return score(some, trees, *rest)

    engine._score = noted  # type: ignore[method-assign]
    engine.submit(Request(TEXTS[0][0], SamplingParams(max_tokens=5)))
    other = None
    while engine.busy:
        engine.step()
        if other is None and rounds[-1][0]:
            other = engine.submit(Request(TEXTS[1][0], SamplingParams(max_tokens=2, presence_penalty=0.1)))
    assert other is not None
    assert {follows for follows, ids in rounds if other in ids} == {False}
