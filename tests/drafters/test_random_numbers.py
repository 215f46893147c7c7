"""No random number is used twice: not by verifiers, not by drafters, not in a later round at the same position."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forerun.build.engine import make_engine
from forerun.core import noise
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Request
from forerun.drafters.heads import eagle as eagle_drafter
from forerun.drafters.heads import growth as tree_sampling
from forerun.drafters.model import draft_model
from forerun.testing import FakeSeq, TableLM
from tests.drafters.rounds import observe_prompts
from tests.drafters.test_heads import make
from tests.drafters.tiny_heads import save_head

Key = tuple[int, int, int, int]
VOCAB = 13


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Counter[Key]:
    """Every number that was asked for: seed, position, purpose, index."""
    asked: Counter[Key] = Counter()
    real = noise.uniform

    def counted(seed: int, position: int, purpose: int, index: int = 0) -> float:
        asked[seed, position, purpose, index] += 1
        return real(seed, position, purpose, index)

    for module in (noise, draft_model, tree_sampling):
        monkeypatch.setattr(module, "uniform", counted)
    return asked


def write(drafter: str, verifier: str, budget: Budget, **more: Any) -> Any:
    """A text of forty tokens at temperature 1, drafted badly, so that positions are drafted again and again."""
    engine = make_engine(
        TableLM(VOCAB),
        frozenset(),
        SpeculativeConfig(drafter=drafter, verifier=verifier, controller="fixed", **more),
        draft_target=TableLM(VOCAB, seed=3) if drafter == "draft_model" else None,
    )
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=11)
    seq = engine.find(engine.submit(Request((1, 2, 3), params, budget=budget)))
    while engine.busy:
        engine.step()
    assert seq is not None
    return seq


@pytest.mark.parametrize("verifier", ["exact", "block"])
@pytest.mark.parametrize("budget", [Budget(4, 4), Budget(3, 1, width=3)])
def test_a_draft_model_draws_each_number_once(verifier: str, budget: Budget, used: Counter[Key]) -> None:
    seq = write("draft_model", verifier, budget)
    assert 12 < seq.stats.rounds < 41
    drafted = [key for key in used if key[2] == noise.DRAFT]
    assert len(drafted) > 40
    assert max(used.values()) == 1, used.most_common(3)


@pytest.mark.parametrize("budget", [Budget(3, 3), Budget(6, 3, width=2)])
def test_a_drawn_head_draws_each_number_once(
    budget: Budget, used: Counter[Key], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle_drafter, "wants_sampling", lambda speculative, device: True)
    folder = save_head("eagle3", tmp_path, VOCAB)
    seq = write("eagle3", "exact", budget, draft_model=str(folder))
    assert 12 < seq.stats.rounds < 41
    assert len([key for key in used if key[2] == noise.DRAFT]) > 40
    assert max(used.values()) == 1, used.most_common(3)


def test_under_shared_noise_a_drawn_head_chooses(tmp_path: Path) -> None:
    """Coupled verification follows equal tokens, however they were drawn: a drawn tree would be wasted on it."""
    head, target = make("eagle3", tmp_path, how="sampled"), TableLM(VOCAB)
    hot = SamplingParams(temperature=1.0)
    for shares in (False, True):
        seq = FakeSeq(int(shares), [1, 2, 3, 4], params=hot, seed=5, shares_noise=shares)
        observe_prompts(head, target, [seq])
        trees = head.propose([seq], [Budget(4, 4)])
        assert trees.nodes > 1
        assert (trees.drawn_from is None) is shares


def test_a_draft_model_that_is_the_target_is_never_wrong_under_shared_noise() -> None:
    engine = make_engine(
        TableLM(30),
        frozenset(),
        SpeculativeConfig(drafter="draft_model", verifier="coupled", budget=4, controller="fixed"),
        draft_target=TableLM(30),
    )
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=4)
    seq = engine.find(engine.submit(Request((1, 2, 3), params)))
    while engine.busy:
        engine.step()
    assert seq is not None
    assert seq.stats.rounds == 4  # five tokens a round
