"""Who is read next: several prompts at once, as far as rows, batch and slots go; chunks are in test_chunks.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.build.engine import make_engine
from forerun.core.errors import PromptTooLong
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.engine.engine import Engine
from forerun.engine.scheduler import PrefillRows
from forerun.engine.sequence import SequenceState
from forerun.models.base import ON_CPU, Target
from forerun.testing import TableLM
from tests.exactness.harness import run
from tests.models.tiny_checkpoints import make_decoder, make_reference, save

ENDLESS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [(5, 6, 7, 8) * 5, (9,), (1, 2, 3) * 12, (4, 4), (11, 12, 13, 14, 11, 12), (3,), (2, 1) * 9]


def make(target: Target, drafter: str = "ngram", **config: int) -> Engine:
    speculative = SpeculativeConfig(drafter=drafter, controller="fixed", budget=4)
    return make_engine(target, frozenset({0}), speculative, EngineConfig(**config))  # type: ignore[arg-type]


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids of every group that is read from now on."""
    groups: list[list[int]] = []
    begin = engine.scheduler.begin

    def note(readers: Sequence[SequenceState], rows: int) -> None:
        if readers:
            groups.append([seq.id for seq in readers])
        begin(readers, rows)

    monkeypatch.setattr(engine.scheduler, "begin", note)
    return groups


def test_a_group_ends_with_the_batch_and_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(TableLM(vocab_size=16, pass_rows=8), max_batch=3)
    engine.prefill_rows = PrefillRows(ON_CPU.prefill, 8, fixed=8)
    groups = watch(engine, monkeypatch)
    # 8 rows fill a group, but one token needs none; 17 take three passes, short ones share the first; three
    # are a batch
    for length in [4, 6, 1, 18, 2, 2, 2, 2]:
        engine.submit(Request((1,) * length, replace(ENDLESS, max_tokens=1)))
    while engine.busy:
        engine.step()
    assert groups == [[0, 1, 2], [4, 5, 3], [3], [3, 6, 7]]


def test_a_group_is_what_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a page, and one for its trees; where two fit, a group has two, and prefill is never refused."""
    target = make_decoder(*save(make_reference("smollm2"), tmp_path), kv_slots=200)
    engine = make(target, max_batch=8)
    groups = watch(engine, monkeypatch)
    tokens, _ = run(engine, [Request((1, 2, 3), ENDLESS) for _ in range(5)])
    assert [len(row) for row in tokens] == [12] * 5
    assert groups[0] == [0, 1]
    assert max(map(len, groups)) == 2
    assert target.used_slots == 0


def test_a_prefill_that_fails_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody of the group gives its slots back, queues again in order, and writes the same text."""
    target = make_decoder(*save(make_reference("smollm2"), tmp_path))
    engine = make(target, max_batch=3)
    requests = [Request(prompt, ENDLESS) for prompt in PROMPTS]
    expected = run(engine, requests)
    ids = [engine.submit(request) for request in requests]

    def fail(*_: object) -> None:
        raise RuntimeError("half-way")

    with monkeypatch.context() as patch:
        patch.setattr(engine.drafters, "observe", fail)
        assert engine.step() == []
    assert target.used_slots == 0
    assert not engine.running
    assert [seq.id for seq in engine.waiting] == ids
    seqs = list(engine.waiting)
    while engine.busy:
        engine.step()
    assert [seq.tokens[seq.prompt_length :] for seq in seqs] == expected[0]
    assert target.used_slots == 0


def test_a_text_ends_where_the_kv_cache_does_and_nobody_waits_for_it() -> None:
    """A text longer than all slots would wait for room that never comes, and those behind it with it."""
    engine = make(TableLM(vocab_size=16, slots=40), max_batch=3)
    assert engine.max_length == 40
    seqs = [
        engine.find(engine.submit(Request((1, 2, 3), replace(ENDLESS, max_tokens=count)))) for count in (12, 100, 1)
    ]
    first, long, last = (seq for seq in seqs if seq is not None)
    while not last.finished:
        engine.step()
    assert first.finished is None, "the last one has waited until the others had ended"
    while engine.busy:
        engine.step()
    assert (first.finished, long.finished, last.finished) == ("length", "length", "length")
    assert len(long.tokens) == 40
    assert long.tokens[: len(first.tokens)] == first.tokens
    with pytest.raises(PromptTooLong, match="context of 40"):
        engine.submit(Request((1,) * 40))
