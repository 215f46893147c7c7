"""Growing trees from a head's laws: budgets, prices and fixed shapes, each sequence for itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.params import SamplingParams
from forerun.core.request import best_count
from forerun.core.types import Budget
from forerun.drafters.heads import growth as tree_growth
from forerun.drafters.heads.base import Calibration
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.drafters.heads.growth import (
    LogitRanks,
    Steps,
    Tree,
    best_shape,
    grow_ranked,
    lay_out,
    sample_trees,
    worth_deepening,
)
from forerun.testing import FakeSeq
from forerun.testing.conformance import check_trees

VOCAB = 12
WHOLE = DraftVocabulary.whole(VOCAB)
FLAT = tuple(1.0 + 0.001 * n for n in range(20))


def grow_trees(
    steps: Steps, seqs: Any, budgets: Any, vocabulary: Any, calibration: Any, rates: Any = None
) -> list[Tree]:
    """From a head's logits."""
    return grow_ranked(LogitRanks(steps, seqs, vocabulary), seqs, budgets, calibration, rates)[0]


class Told:
    """A head that says the same law after every node, and counts how it is asked."""

    def __init__(self, seqs: Sequence[FakeSeq], laws: Sequence[Sequence[float]]) -> None:
        self.logits = torch.tensor(laws).log()  # [B, V]
        self.asked: list[int] = []

    def first(self) -> Tensor:
        return self.logits

    def after(self, parents: Tensor, tokens: Tensor) -> Tensor:
        self.asked.append(tokens.shape[1])
        return self.logits[:, None].expand(-1, tokens.shape[1], -1)


def law(*tops: float) -> list[float]:
    """The first tokens have these probabilities; the others share the rest."""
    rest = (1.0 - sum(tops)) / (VOCAB - len(tops))
    return [*tops, *[rest] * (VOCAB - len(tops))]


def seqs_of(count: int, **more: object) -> list[FakeSeq]:
    return [FakeSeq(i, [5], seed=i, **more) for i in range(count)]  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [Budget(5, 5), Budget(7, 2, 3), Budget(1, 4, 4), Budget(12, 3, 12)])
def test_trees_keep_within_their_budgets(budget: Budget) -> None:
    seqs = seqs_of(2)
    other = Budget(3, 3)
    steps = Told(seqs, [law(0.5, 0.3), law(0.4, 0.2)])
    trees = grow_trees(steps, seqs, [budget, other], WHOLE, Calibration())
    check_trees(lay_out(trees), seqs, [budget, other], VOCAB)
    alone = grow_trees(Told(seqs[:1], [law(0.5, 0.3)]), seqs[:1], [budget], WHOLE, Calibration())
    assert trees[0] == alone[0]  # whoever is beside it


def test_the_best_nodes_are_kept() -> None:
    seqs = seqs_of(1)
    (tree,) = grow_trees(Told(seqs, [law(0.6, 0.3)]), seqs, [Budget(4, 4, 2)], WHOLE, Calibration())
    # 0.6, 0.36, 0.3, 0.216: the chain of the likeliest, and the second child of the root
    tokens, parents = tree
    assert sorted(zip(tokens[1:], parents[1:], strict=True)) == [(0, 0), (0, 1), (0, 3), (1, 0)]


def test_a_price_stops_the_growth_and_says_what_to_expect() -> None:
    seqs = seqs_of(1)
    steps = Told(seqs, [law(0.6, 0.1)])
    price = tuple(1.0 + 0.3 * n for n in range(10))
    ranks = LogitRanks(steps, seqs, WHOLE)
    trees, found = grow_ranked(ranks, seqs, [Budget(9, 9, 1, price)], Calibration())
    assert len(trees[0][0]) == 1 + 2  # 0.6 and 0.36 are worth 0.3 each, 0.216 is not
    assert found[0] == pytest.approx(0.96)
    assert len(steps.asked) < 9


def test_the_price_of_a_level_stops_it_sooner() -> None:
    seqs, asked = seqs_of(1), []
    for level in (0.0, 0.3, 2.0):
        steps = Told(seqs, [law(0.7, 0.1)])
        grow_trees(steps, seqs, [Budget(12, 8, 1, FLAT, level)], WHOLE, Calibration())
        asked.append(len(steps.asked))
    assert asked[0] == 7  # every level of the budget
    assert asked[0] > asked[1] > asked[2] == 0


class Varied(Told):
    """A head whose law depends on the path, so that trees have every shape."""

    def __init__(self, seed: int) -> None:
        self.seed, self.asked, self._rows = seed, [], [1]

    def _logits(self, keys: list[int]) -> Tensor:
        self._rows = keys
        laws = [torch.randn(VOCAB, generator=torch.Generator().manual_seed(key)) * 2.5 for key in keys]
        return torch.stack(laws)[None]

    def first(self) -> Tensor:
        return self._logits([self.seed + 1])[:, 0]

    def after(self, parents: Tensor, tokens: Tensor) -> Tensor:
        self.asked.append(tokens.shape[1])
        pairs = zip(parents[0].tolist(), tokens[0].tolist(), strict=True)
        return self._logits([(31 * self._rows[parent] + 7 * token) % 100_003 for parent, token in pairs])


def test_nodes_below_which_nothing_could_pay_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same trees, from fewer rows of the head; where levels cost, from fewer still."""
    price, seqs = tuple(1.0 + 0.07 * n for n in range(20)), seqs_of(1)
    rows = dict.fromkeys(("all", "free", "costly"), 0)
    for seed in range(0, 3000, 30):
        trees = {}
        for name, level in (("free", 0.0), ("all", 0.0), ("costly", 0.1)):
            with monkeypatch.context() as patch:
                if name == "all":
                    patch.setattr(
                        tree_growth, "worth_deepening",
                        lambda *given: [*range(len(given[0]))] if worth_deepening(*given) else [],
                    )  # fmt: skip
                head, budget = Varied(seed), Budget(15, 5, 6, price, level)
                trees[name] = grow_trees(head, seqs, [budget], WHOLE, Calibration())
                rows[name] += sum(head.asked)
        assert trees["free"] == trees["all"]
    assert 0 < rows["costly"] < rows["free"] < 0.6 * rows["all"]


def test_a_calibration_that_doubts_the_head_draws_smaller_trees() -> None:
    seqs = seqs_of(1)
    price = tuple(1.0 + 0.3 * n for n in range(10))

    def nodes(calibration: Calibration) -> int:
        (tree,) = grow_trees(Told(seqs, [law(0.6)]), seqs, [Budget(9, 9, 1, price)], WHOLE, calibration)
        return len(tree[0]) - 1

    assert nodes(Calibration()) == 2
    assert nodes(Calibration(scale=0.7)) == 1
    assert nodes(Calibration(scale=0.4)) == 0


def test_measured_rates_fix_the_shape_whatever_the_head_says() -> None:
    seqs = seqs_of(2)
    rates = ((0.6, 0.3), (0.5, 0.1))
    steps = Told(seqs, [law(0.9, 0.05), law(0.2, 0.15)])
    trees = grow_trees(steps, seqs, [Budget(4, 8, 2)] * 2, WHOLE, Calibration(), rates)
    assert trees[0][1] == trees[1][1]
    assert len(trees[0][0]) == 5
    assert len(steps.asked) == 1  # two levels of rates


def test_a_reduced_vocabulary_is_told_in_the_targets_ids() -> None:
    seqs, some = seqs_of(1), DraftVocabulary(torch.tensor([3, 7, 9]), VOCAB)
    steps = Told(seqs, [[0.1, 0.7, 0.2]])
    (tree,) = grow_trees(steps, seqs, [Budget(3, 3)], some, Calibration())
    assert tree == ([5, 7, 7, 7], [-1, 0, 1, 2])


def test_drawn_trees_have_the_shape_that_was_fixed_before() -> None:
    seqs = seqs_of(6, params=SamplingParams(temperature=1.0))
    budget = Budget(6, 3, 2)
    steps = Told(seqs, [law(0.4, 0.3)] * 6)
    trees, rows, laws = sample_trees(steps, seqs, [budget] * 6, WHOLE)
    check_trees(lay_out(trees, rows, laws), seqs, [budget] * 6, VOCAB)
    assert len({tuple(parents) for _, parents in trees}) == 1
    assert len({tuple(tokens) for tokens, _ in trees}) > 3
    assert all(torch.allclose(one, torch.tensor(law(0.4, 0.3)), atol=1e-6) for one in laws)


def test_a_drawn_token_follows_its_law() -> None:
    seqs = [FakeSeq(0, [5], seed=seed, params=SamplingParams(temperature=1.0)) for seed in range(600)]
    trees, _, _ = sample_trees(Told(seqs, [law(0.5, 0.25)] * 600), seqs, [Budget(1, 1)] * 600, WHOLE)
    share = sum(tokens[1] == 0 for tokens, _ in trees) / 600
    assert abs(share - 0.5) < 4 * math.sqrt(0.25 / 600)
    again, _, _ = sample_trees(Told(seqs, [law(0.5, 0.25)] * 600), seqs, [Budget(1, 1)] * 600, WHOLE)
    assert again == trees  # a function of the seed


def test_shapes_of_nothing() -> None:
    assert best_shape(0, 3, 2) == best_shape(3, 0, 2) == ()
    assert best_shape(2, 2, 1) == (((),),)


def test_gains_beyond_a_price() -> None:
    price = (1.0, 1.2, 1.4, 1.6)
    assert best_count([0.6, 0.3, 0.1], price) == 2
    assert best_count([0.1], price) == 0
    assert best_count([0.6, 0.3, 0.1], None) == 3
