"""A head that reads one row (Medusa's, Hydra's) and rests: no pass keeps rows for it, but the one before it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forerun.core.params import SamplingParams
from forerun.core.types import Budget, Needs, Round, Seq
from forerun.drafters.heads.medusa import Family, write_heads
from forerun.models.native import target as native_target
from forerun.models.native.target import NativeDecoder
from tests.drafters.tiny_heads import heads_config, heads_weights
from tests.models.tiny_checkpoints import VOCAB
from tests.native.blocks import needs_native
from tests.native.test_plain_run import (
    PROMPTS,
    Checkpoint,
    _patient,  # noqa: F401 - a fixture
    checkpoint,  # noqa: F401 - a fixture
    count_calls,
    target_of,
    written,
)
from tests.native.test_runs_on import DRAFT, engine_of, told

pytestmark = needs_native
EVERY = 9


class InTurn:
    """Drafts in every ninth round of a text, and says before how long that is off."""

    def __init__(self, early: int = 0) -> None:
        self.early = early

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        left = EVERY - len(seqs[0].tokens) % EVERY  # rounds until it drafts
        if left == EVERY:
            return [DRAFT] * len(seqs)
        return [Budget(0, 0, source="free", repeats=left - 1 + self.early)] * len(seqs)

    def observe(self, outcome: Round) -> None: ...

    def forget(self, seq: Seq) -> None: ...


@pytest.fixture(params=["medusa", "hydra"])
def head(request: pytest.FixtureRequest, tmp_path: Path, checkpoint: Checkpoint) -> Path:  # noqa: F811
    family: Family = request.param
    config = heads_config(family, VOCAB, width=checkpoint[0]["hidden_size"])
    write_heads(tmp_path, config, heads_weights(config, 3, own=True))
    return tmp_path


def drafts_of(
    target: NativeDecoder, head: Path, controller: InTurn, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[list[int]]]:
    """What was written, and what was drafted."""
    family = "hydra" if list(head.glob("hydra*")) else "medusa"
    engine, trees = engine_of(target, family, head, controller), list[list[int]]()
    propose = engine.drafters.propose

    def kept(seqs: Any, budgets: Any) -> Any:
        found = propose(seqs, budgets)
        if found.nodes > len(seqs):
            trees.append([len(seqs[0].tokens), *found.to_host()[0]])
        return found

    monkeypatch.setattr(engine.drafters, "propose", kept)
    return told(written(engine, PROMPTS, SamplingParams(max_tokens=48))), trees


def test_texts_and_drafts_are_those_of_passes_that_all_keep_rows(
    checkpoint: Checkpoint, head: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    target, asked = target_of(checkpoint), list[Needs]()
    passes, short = count_calls(monkeypatch, target), native_target.without_rows
    monkeypatch.setattr(native_target, "without_rows", lambda needs: asked.append(needs) or short(needs))
    found = drafts_of(target, head, InTurn(), monkeypatch)
    assert max(passes) > 2, "passes are run ahead"
    assert asked
    monkeypatch.setattr(native_target, "without_rows", lambda needs: needs)
    wanted = drafts_of(target_of(checkpoint), head, InTurn(), monkeypatch)
    assert found == wanted
    assert len(wanted[1]) > 4


def test_a_draft_that_comes_too_early_is_none(
    checkpoint: Checkpoint, head: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Where the rest ends before it was said to: there is no row to draft from, and the round is plain."""
    found = drafts_of(target_of(checkpoint), head, InTurn(early=2), monkeypatch)
    monkeypatch.setattr(native_target, "without_rows", lambda needs: needs)
    wanted = drafts_of(target_of(checkpoint), head, InTurn(), monkeypatch)
    assert found[0] == wanted[0]
    assert len(found[1]) < len(wanted[1])
