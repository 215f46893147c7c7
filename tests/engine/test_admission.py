"""Several waiting prompts are prefilled together, and nobody's text can tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.build import make_engine
from forerun.engine import engine as loop
from forerun.engine.engine import Engine
from forerun.errors import InvalidInput
from forerun.models.base import Target
from forerun.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.testing import TableLM
from forerun.types import Request
from tests.exactness.harness import engine_for, run
from tests.models.tiny_checkpoints import make_decoder, make_reference, save

ENDLESS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [(5, 6, 7, 8) * 5, (9,), (1, 2, 3) * 12, (4, 4), (11, 12, 13, 14, 11, 12), (3,), (2, 1) * 9]


def make(target: Target, drafter: str = "ngram", **config: int) -> Engine:
    speculative = SpeculativeConfig(drafter=drafter, controller="fixed", budget=4)
    return make_engine(target, frozenset({0}), speculative, EngineConfig(**config))  # type: ignore[arg-type]


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids of every group that is prefilled from now on."""
    groups: list[list[int]] = []
    prefill: Callable[..., Any] = engine.target.prefill

    def note(seqs: Sequence[Any], needs: Any) -> Any:
        groups.append([seq.id for seq in seqs])
        return prefill(seqs, needs)

    monkeypatch.setattr(type(engine.target), "prefill", lambda _, seqs, needs: note(seqs, needs))
    return groups


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PROMPT_ROWS", 0)


@pytest.fixture(params=["torch", "cuda"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    """Our decoders in fp32; the GPU's with plain steps."""
    if request.param == "torch":
        return make_decoder(*save(make_reference("smollm2"), tmp_path))
    from tests.gpu.tiny import make_target

    return make_target("llama", "cpu")


@pytest.mark.parametrize("params", [ENDLESS, replace(ENDLESS, temperature=0.9, seed=7)])
def test_texts_are_those_of_admission_one_by_one(
    params: SamplingParams, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        Request(prompt, params, drafter=name)
        for prompt, name in zip(PROMPTS, ["ngram", "none"] * 4, strict=False)
    ]
    engine = make(target)
    with monkeypatch.context() as patch:
        groups = watch(engine, patch)
        together = run(engine, requests)
        assert [len(group) for group in groups] == [len(PROMPTS)]
    with monkeypatch.context() as patch:
        one_by_one(patch)
        groups = watch(engine, patch)
        assert run(engine, requests) == together
        assert [len(group) for group in groups] == [1] * len(PROMPTS)
    assert target.used_slots == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("drafter", ["draft_model", "eagle", "eagle3", "medusa", "hydra"])
def test_drafters_learn_the_same(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the text, which no drafter can change: what was drafted and what stood."""

    def stats() -> list[tuple[object, ...]]:
        engine = engine_for(drafter, "exact", "tree", 16, frozenset())
        ids = [engine.submit(Request(prompt, ENDLESS)) for prompt in PROMPTS]
        seqs = [engine.find(seq_id) for seq_id in ids]
        while engine.busy:
            engine.step()
        return [(s.tokens, s.stats.rounds, s.stats.drafted, s.stats.accepted) for s in seqs if s is not None]

    together = stats()
    one_by_one(monkeypatch)
    assert stats() == together
    assert any(drafted for *_, drafted, _ in together)


def test_a_group_ends_with_the_batch_and_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PROMPT_ROWS", 10)
    engine = make(TableLM(vocab_size=16), max_batch=3)
    groups = watch(engine, monkeypatch)
    for length in [4, 6, 1, 30, 2, 2, 2, 2]:  # 10 rows fill a group; 30 go alone; three are a batch
        engine.submit(Request((1,) * length, replace(ENDLESS, max_tokens=1)))
    while engine.busy:
        engine.step()
    assert groups == [[0, 1], [2], [3], [4, 5, 6], [7]]


def test_a_group_is_what_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 272 slots in a row; where two fit, a group has two, and prefill is never refused."""
    target = make_decoder(*save(make_reference("smollm2"), tmp_path), kv_slots=700)
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


def test_one_that_can_never_fit_is_told_when_its_turn_comes() -> None:
    engine = make(TableLM(vocab_size=16, slots=40))
    first, never, last = (
        engine.find(engine.submit(Request((1, 2, 3), replace(ENDLESS, max_tokens=count))))
        for count in (12, 100, 12)
    )
    assert first is not None
    assert never is not None
    assert last is not None
    while not first.finished:
        engine.step()
    (event,) = engine.step()
    assert (event.seq_id, event.finished, event.tokens) == (never.id, "error", ())
    assert isinstance(event.error, InvalidInput)
    assert "103 tokens" in str(event.error)
    assert "kv_slots" in str(event.error)
    assert list(engine.waiting) == [last]
    while engine.busy:
        engine.step()
    assert (first.finished, never.finished, last.finished) == ("length", "error", "length")
