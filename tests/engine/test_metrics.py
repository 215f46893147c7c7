"""What the engine counts over all rounds against what its sequences count: also of those that were dropped."""

from __future__ import annotations

import time

import pytest

from forerun.core.params import SamplingParams
from forerun.core.types import Budget, Request
from forerun.engine.sequence import SequenceState
from forerun.engine.stats import form_of
from tests.engine.test_loop import make


def test_the_engine_counts_what_its_sequences_count() -> None:
    engine = make(max_batch=2)
    seqs = list[SequenceState]()
    for budget in (None, Budget(0, 0), Budget(2, 2), None):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        seqs.append(engine.prepare(Request((1, 2, 3) * 4, params, budget=budget)))
        engine.enqueue(seqs[-1])
    while engine.busy:
        engine.step()
        if len(seqs[3].rounds) == 3:
            engine.abort(seqs[3].id)
    assert seqs[3].finished == "aborted"
    all_rounds = [one for seq in seqs for one in seq.rounds]
    stats = engine.stats
    assert sum(stats.forms.values()) == len(all_rounds) > stats.rounds
    assert stats.forms["plain"] == sum(not one.drafted for one in all_rounds) >= 20
    assert stats.forms["chain"] == len(all_rounds) - stats.forms["plain"] > 0
    assert stats.tokens == sum(seq.stats.tokens for seq in seqs)
    assert stats.drafted == sum(seq.stats.drafted for seq in seqs)
    assert stats.accepted == sum(seq.stats.accepted for seq in seqs) == sum(stats.kept)
    for depth in range(len(stats.reached)):
        assert stats.reached[depth] == sum(one.depth > depth for one in all_rounds)
        assert stats.kept[depth] == sum(one.accepted > depth for one in all_rounds)


@pytest.mark.parametrize(("drafted", "depth", "form"), [(0, 0, "plain"), (3, 3, "chain"), (4, 3, "tree")])
def test_forms(drafted: int, depth: int, form: str) -> None:
    assert form_of(drafted, depth) == form


def test_a_request_that_waits_counts_the_time() -> None:
    engine = make(max_batch=1)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    first, second = (engine.prepare(Request((1, 2, 3), params)) for _ in range(2))
    engine.enqueue(first)
    engine.enqueue(second)
    engine.step()
    assert second.queue_seconds is None, "it waits for its place"
    left = time.perf_counter()
    while engine.busy:
        engine.step()
    assert first.queue_seconds is not None
    assert second.queue_seconds is not None
    assert first.made + first.queue_seconds <= left <= second.made + second.queue_seconds
