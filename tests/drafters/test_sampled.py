"""Trees drawn from a head's own law, tested against it: the text keeps the target's law."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.core.errors import InvalidInput
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Budget
from forerun.drafters.heads.base import wants_sampling
from forerun.drafters.heads.eagle import Eagle3Drafter
from forerun.drafters.heads.growth import TreeShape, best_shape
from forerun.models.base import Abilities
from forerun.testing import FakeSeq, TableLM
from forerun.testing.conformance import check_trees
from tests.drafters.rounds import observe_prompts
from tests.drafters.test_heads import make
from tests.exactness.harness import SETTINGS, chi_square_p, engine_for, joint_law, sample_texts, table

TEXTS = 1000


@pytest.mark.slow
@pytest.mark.parametrize(("verifier", "shape"), [("exact", "chain"), ("block", "chain"), ("exact", "tree")])
def test_the_law_of_the_text_is_the_targets(verifier: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.drafters.heads.eagle.wants_sampling", lambda speculative, device: True)
    vocab, length, prompt = 6, 3, (1, 2, 3, 1, 2, 3, 1, 2)
    params = replace(SETTINGS["T=0.8"], max_tokens=length)
    engine = engine_for("eagle3", verifier, shape, vocab, frozenset())
    assert isinstance(engine.drafters.get("eagle3"), Eagle3Drafter)
    counts = sample_texts(engine, prompt, params, TEXTS)
    assert chi_square_p(counts, joint_law(table(vocab), prompt, params, length)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_negative_control_a_draft_whose_numbers_are_stuck(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not drawn from the law it names, yet is tested with p/q, goes through the same check and must fail."""
    monkeypatch.setattr("forerun.drafters.heads.growth.uniform", lambda *_: 0.0)
    vocab, length, prompt = 6, 3, (1, 2, 3, 1, 2, 3, 1, 2)
    params = replace(SETTINGS["T=0.8"], max_tokens=length)
    engine = engine_for("eagle3", "exact", shape, vocab, frozenset())
    counts = sample_texts(engine, prompt, params, TEXTS)
    assert chi_square_p(counts, joint_law(table(vocab), prompt, params, length)) < 1e-9


def test_drawn_nodes_carry_the_law_they_came_from(tmp_path: Path) -> None:
    """In the target's ids, under the request's own temperature and truncation, nothing outside the draft vocabulary."""
    drafter = make("eagle3", tmp_path, how="sampled")
    assert isinstance(drafter, Eagle3Drafter)
    seq = FakeSeq(0, [1, 2, 3, 4], params=SamplingParams(temperature=0.7, top_k=5), seed=9)
    observe_prompts(drafter, TableLM(13), [seq])
    trees = drafter.propose([seq], [Budget(3, 3)])
    draws = trees.drawn_from
    assert draws is not None
    assert draws.rows.tolist() == [-1, 0, 1, 2]
    assert [int((law > 0).sum()) for law in draws.laws] == [5, 5, 5]
    known = set(drafter.head.vocabulary.ids.tolist())
    for law, token in zip(draws.laws, trees.tokens[1:].tolist(), strict=True):
        assert set(law.nonzero()[:, 0].tolist()) <= known
        assert float(law[token]) > 0
    torch.testing.assert_close(draws.laws.sum(-1), torch.ones(3))


def test_siblings_are_drawn_without_replacement_from_one_law(tmp_path: Path) -> None:
    drafter = make("eagle3", tmp_path, how="sampled")
    hot = SamplingParams(temperature=1.0)
    seqs = [FakeSeq(0, [1, 2, 3, 4], params=hot, seed=5), FakeSeq(1, [2, 2, 5], seed=6)]
    observe_prompts(drafter, TableLM(13), seqs)
    budgets = [Budget(9, 3, 3), Budget(6, 2, 2)]
    trees = drafter.propose(seqs, budgets)
    check_trees(trees, seqs, budgets, 13)
    assert trees.sizes() == [10, 7]
    draws = trees.drawn_from
    assert draws is not None
    assert set(draws.rows[10:].tolist()) == {-1}, "a greedy text's nodes are chosen"
    families: dict[int, list[int]] = {}
    for node in range(1, 10):
        families.setdefault(int(trees.parents[node]), []).append(node)
    assert len(families) > 2
    assert any(len(siblings) == 3 for siblings in families.values())
    for siblings in families.values():
        assert len({int(draws.rows[node]) for node in siblings}) == 1
        assert len({int(trees.tokens[node]) for node in siblings}) == len(siblings)
    assert len({int(draws.rows[siblings[0]]) for siblings in families.values()}) == len(families)


def test_a_small_support_is_drawn_once(tmp_path: Path) -> None:
    drafter = make("eagle3", tmp_path, how="sampled")
    seq = FakeSeq(0, [1, 2, 3, 4], params=SamplingParams(temperature=1.0, top_k=2), seed=9)
    observe_prompts(drafter, TableLM(13), [seq])
    trees = drafter.propose([seq], [Budget(12, 2, 6)])
    for parent in set(trees.parents.tolist()):
        tokens = [int(t) for t, p in zip(trees.tokens[1:], trees.parents[1:], strict=True) if int(p) == parent]
        assert len(tokens) <= 2
        assert len(set(tokens)) == len(tokens)


def test_shapes_are_the_best_of_their_size() -> None:
    def size(shape: TreeShape) -> int:
        return sum(1 + size(child) for child in shape)

    def depth(shape: TreeShape) -> int:
        return max((1 + depth(child) for child in shape), default=0)

    assert best_shape(3, 3, 1) == ((((),),),), "a chain"
    assert best_shape(0, 0, 1) == ()
    for nodes, deepest, width in ((9, 3, 3), (60, 7, 10), (20, 2, 4)):
        shape = best_shape(nodes, deepest, width)
        assert size(shape) <= nodes
        assert depth(shape) <= deepest
        assert len(shape) <= width
        assert [size(child) for child in shape] == sorted((size(c) for c in shape), reverse=True)
    assert size(best_shape(60, 7, 10)) == 60


def test_the_setting_is_vllms() -> None:
    cpu, gpu = (Abilities.of(torch.device(kind)) for kind in ("cpu", "cuda"))
    assert wants_sampling(SpeculativeConfig(), cpu)
    assert not wants_sampling(SpeculativeConfig(), gpu)
    for device in (cpu, gpu):
        assert wants_sampling(SpeculativeConfig(draft_sample_method="probabilistic"), device)
        assert not wants_sampling(SpeculativeConfig(draft_sample_method="greedy"), device)

    with pytest.raises(InvalidInput, match="probabilistic"):
        SpeculativeConfig(draft_sample_method="magic")  # type: ignore[arg-type]
