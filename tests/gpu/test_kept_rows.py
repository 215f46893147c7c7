"""Feature rows of rounds that were followed unread: of prompts of one token, of passes that fail; and room for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from forerun.core.params import SamplingParams
from forerun.core.types import Form, Request
from forerun.drafters.device.drafter import OnDevice
from forerun.drafters.device.features import FeatureRows
from forerun.drafters.device.plan import ROOM
from forerun.engine.engine import Engine
from forerun.engine.round import LaunchedRound
from forerun.engine.scheduler import Scheduler
from forerun.models.cuda.target import CudaDecoder
from tests.gpu.test_following import TREE, Forms, make, willing_target, write
from tests.gpu.test_switching import Scheduled
from tests.gpu.tiny import VOCAB


class InTurn(Scheduled):
    """These forms, again and again."""

    def __init__(self, forms: Sequence[Form | None]) -> None:
        self.forms, self.rounds = [*forms] * 200, 0


def endless_target() -> CudaDecoder:
    target = willing_target(words=5)
    target.model.head[1] = 0.0  # texts go on
    return target


def request(rng: random.Random, length: int, tokens: int) -> Request:
    prompt = [rng.randrange(2, VOCAB) for _ in range(length)]
    return Request(prompt, SamplingParams(max_tokens=tokens), drafter="device")


def rows_of_one_that_joins(draw: int, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whenever rows of a prompt of one token that joins others count as kept: is there anything in its first place?"""
    rng, forms, found = random.Random(draw), (TREE, TREE, TREE, None), list[bool]()
    engine = make(endless_target(), InTurn(forms), follows=True, batch=8)  # type: ignore[arg-type]
    for _ in range(5):
        engine.submit(request(rng, 20, 60))
    for _ in range(9 + draw):
        engine.step()
    late, note = engine.submit(request(rng, 1, 40)), FeatureRows._note_kept

    def noting(rows: FeatureRows, *args: Any) -> None:
        note(rows, *args)
        state = rows.get(late)
        if state is not None and state.after:
            found.append(bool(rows.rows[state.place * ROOM].any()))

    with monkeypatch.context() as patch:
        patch.setattr(FeatureRows, "_note_kept", noting)
        while engine.busy:
            engine.step()
    return found


@pytest.mark.slow
def test_a_prompt_of_one_token_that_joins_has_rows_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [rows_of_one_that_joins(draw, monkeypatch) for draw in range(6)]
    assert all(map(len, found))
    assert all(map(all, found))


@pytest.mark.parametrize("drafted", [5, 6])
def test_after_a_failure_no_round_is_taken_for_one_whose_rows_were_kept(
    drafted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass behind an unread round fails, be it over trees or over lone roots: both rounds are undone."""
    target, noted = endless_target(), list[int]()
    engine = make(target, InTurn([TREE] * drafted + [None] * 200), follows=True)  # type: ignore[arg-type]
    rng, score, note = random.Random(1), target.score, FeatureRows._note_kept

    def failing(*args: Any) -> Any:
        if args[1].follows is not None and engine.controller.rounds == 4 and (engine.timeline.depth > 1):  # type: ignore[attr-defined]
            raise RuntimeError("no memory, say")
        return score(*args)

    def noting(rows: FeatureRows, *args: Any) -> None:
        noted.append(engine.timeline.depth > 1)
        note(rows, *args)

    monkeypatch.setattr(target, "score", failing)
    monkeypatch.setattr(FeatureRows, "_note_kept", noting)
    write(engine, [request(rng, 20, 40) for _ in range(4)], 0, at_once=True)
    assert not (engine.timeline.depth > 1), "a pass has failed"
    assert noted
    assert all(noted), "only rounds that were followed"
    drafter = engine.drafters.get("device")
    assert isinstance(drafter, OnDevice)
    assert drafter.draft.rows.held == 0


@pytest.mark.slow
def test_sequences_that_join_need_no_room_behind_trees_that_they_have_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool has as many pages as are asked for, and no more."""
    target = willing_target(kv_slots=64 * 40)
    real, pool, other = target.make_room, target.kv.pool, -77

    def just_enough(seqs: Any, rows: Any) -> bool:
        extents = target.kv.extents([seq.id for seq in seqs])
        lacking = [
            target.kv.lacking(one.id, one.length + more)
            for one, more in zip(extents, rows, strict=True)
            if one.length + more > one.writable
        ]
        pool.take(other, max(0, pool.available - sum(lacking)))
        return real(seqs, rows)

    next_round = Engine._next_round

    def with_a_full_pool(engine: Engine, last: LaunchedRound) -> LaunchedRound | None:
        monkeypatch.setattr(target, "make_room", just_enough)
        try:
            return next_round(engine, last)
        finally:
            monkeypatch.setattr(target, "make_room", real)
            pool.release(other)

    monkeypatch.setattr(Engine, "_next_round", with_a_full_pool)
    monkeypatch.setattr(Scheduler, "starters", lambda *_: [])
    for seed in range(2):
        rng = random.Random(seed)
        some = [request(rng, rng.choice((21, 22, 23, 24, 24, 30)), rng.randint(5, 60)) for _ in range(12)]
        engine = make(target, Forms([Form(40, 8, 8)], 30, seed), follows=True, batch=6)
        write(engine, some, seed)
        assert engine.timeline.depth > 1, "else a pass has failed"
