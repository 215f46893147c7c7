"""Drafts in one native call, against the same head run level by level: same trees, same claims, same offers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from forerun.core.params import SamplingParams
from forerun.core.types import Budget, Verdict
from forerun.drafters.heads.base import Calibration
from forerun.drafters.heads.eagle import Eagle3Drafter, EagleDrafter
from forerun.drafters.heads.eagle_native import NativeHead, NativeRunner
from forerun.models.native import head_library
from forerun.models.native import library as native_library
from forerun.testing import FakeSeq, TableLM
from forerun.testing.doubles import extend, random_verdict
from tests.drafters.rounds import as_lists, observe_prompts
from tests.drafters.tiny_heads import eagle_config, eagle_weights

pytestmark = pytest.mark.skipif(not native_library.available(), reason="no native kernels that draft")

VOCAB = 61


class ByLevels(NativeRunner):
    """The same without the one call."""

    def draft(self, *given: object) -> None:
        """As where noise is shared."""


def drafters_of(calibration: Calibration, draft_vocab: int | None) -> list[EagleDrafter]:
    depth = 1 if draft_vocab is None else 2
    window = {"window": 4, "windowed": (True, False)} if depth > 1 else {}
    config = eagle_config("eagle3", VOCAB, draft_vocab=draft_vocab, depth=depth, **window)
    config = replace(config, calibration=calibration)
    heads = [NativeHead(config, eagle_weights(config, seed=8), None) for _ in range(2)]
    whole, stepwise = (Eagle3Drafter(head) for head in heads)
    stepwise._runner = ByLevels(heads[1])
    return [whole, stepwise]


def some_budget(rng: random.Random) -> Budget:
    nodes, depth, width = rng.randint(1, 14), rng.randint(1, 6), rng.randint(1, 6)
    if rng.random() < 0.3:
        return Budget(nodes, depth, width)
    price = [1.0]
    for _ in range(nodes):
        price.append(price[-1] + rng.choice([0.0, 0.02, 0.1, 0.5]) * rng.random())
    return Budget(nodes, depth, width, tuple(price), level=rng.choice([0.0, 0.02, 0.1, 0.4]))


@pytest.mark.parametrize("draft_vocab", [None, 23])
@pytest.mark.parametrize("calibration", [Calibration(), Calibration(1.3, 0.6)])
@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_trees_and_claims_are_those_of_levels(
    draft_vocab: int | None, calibration: Calibration, temperature: float
) -> None:
    drafters, rng, shapes = drafters_of(calibration, draft_vocab), random.Random(5), set[int]()
    params, target = SamplingParams(temperature=temperature), TableLM(VOCAB)
    seq = FakeSeq(0, [3, 1, 4, 1, 5], params=params, seed=1)
    chains, scores = target.prefill([seq], drafters[0].needs)
    for drafter in drafters:
        drafter.observe([seq], chains, scores, Verdict.whole_chain(chains, seq.tokens[-1:]))
    for _ in range(40):
        budget = some_budget(rng)
        # rounds that one of them sits out
        asked = rng.sample(drafters, 1) if rng.random() < 0.2 else drafters
        trees = [drafter.propose([seq], [budget]) for drafter in asked]
        found = [as_lists(one) for one in trees]
        assert found[0] == found[-1]
        claims = [drafter.offer(seq).expected for drafter in asked]
        assert claims[0] == pytest.approx(claims[-1])
        shapes.add(len(found[0][0][0]))
        scores, verdict = (target.score([seq], trees[0], drafters[0].needs), random_verdict(rng, trees[0], VOCAB))
        target.commit([seq], trees[0], verdict)
        for drafter in drafters:
            drafter.observe([seq], trees[0], scores, verdict)
        extend([seq], trees[0], verdict)
    assert len(shapes) > 5  # trees of many sizes, some of them nothing but the root


def test_what_levels_cost_decides_how_deep_it_goes() -> None:
    """A negative control for the comparison above: prices and levels do change trees."""
    cheap, dear = tuple(1.0 + 0.01 * n for n in range(15)), tuple(1.0 + 2.0 * n for n in range(15))
    depths = list[int]()
    for price, level in ((cheap, 0.0), (cheap, 5.0), (dear, 0.0)):
        drafter = drafters_of(Calibration(1.0, 0.2), None)[0]
        seq = FakeSeq(0, [3, 1, 4, 1, 5])
        observe_prompts(drafter, TableLM(VOCAB), [seq])
        trees = drafter.propose([seq], [Budget(14, 6, 3, price, level=level)])
        depths.append(max(trees.host_depths()))
    assert depths[0] > depths[1] == 1
    assert depths[2] == 0


def test_it_is_the_call_that_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence without noise takes the call; several, or one under noise, do not."""
    (drafter, _), calls = drafters_of(Calibration(), None), list[int]()
    plain = head_library.draft_tree

    def counted(*given: object) -> None:
        calls.append(1)
        plain(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("forerun.drafters.heads.eagle_native.draft_tree", counted)
    noisy = SamplingParams(temperature=1.0)
    seqs = [FakeSeq(0, [1, 2, 3]), FakeSeq(1, [4, 5, 6]), FakeSeq(2, [7, 8], params=noisy, shares_noise=True)]
    observe_prompts(drafter, TableLM(VOCAB), seqs)
    drafter.propose(seqs[2:], [Budget(3, 3)])
    assert not calls
    drafter.propose(seqs[:1], [Budget(3, 3)])
    assert len(calls) == 1
    drafter.propose(seqs[:2], [Budget(3, 3)] * 2)
    assert len(calls) == 1
    assert torch.isfinite(torch.tensor(drafter.offer(seqs[0]).seconds)).all()
