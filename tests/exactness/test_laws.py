"""Exactness by enumeration: the law of what is committed equals the target's, to rounding, with no sampling.

The negative controls are the mistakes that public code makes. They go through the same check and must fail.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from forerun.core.types import Draws, Laws, TreeBatch
from forerun.verify import exact, walk
from forerun.verify.base import Verifier
from forerun.verify.coupled import CoupledVerifier
from forerun.verify.exact import BlockVerifier, ExactVerifier
from forerun.verify.typical import TypicalVerifier
from tests.exactness.enumeration import (
    Branches,
    BranchNoise,
    Shape,
    accepted_tokens,
    committed_law,
    distance,
    table,
    worst,
)

EXACT = 1e-9
LONE, ONE, TWO, THREE = (-1,), (-1, 0), (-1, 0, 0), (-1, 0, 0, 0)
CHAIN2, CHAIN3 = (-1, 0, 1), (-1, 0, 1, 2)
TREE = (-1, 0, 0, 1, 2, 2)  # two children; the first has one child, the second two


@pytest.fixture(autouse=True)
def branching_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a walk draws a token, every token is a branch (forerun.core.noise.draw has its own tests)."""
    monkeypatch.setattr(walk, "draw", lambda law, coin: coin.noise.branches.choose(law.tolist()))


@pytest.mark.parametrize(
    ("seeds", "size", "parents", "how"),
    [
        (20, 5, LONE, "chosen"),
        (200, 5, ONE, "sampled"),
        (200, 4, ONE, "chosen"),
        (60, 4, TWO, "sampled"),
        (60, 4, TWO, "distinct"),
        (20, 4, THREE, "distinct"),
        (8, 3, THREE, "distinct"),  # as many siblings as tokens: the support is used up
        (200, 5, THREE, "chosen"),
        (20, 3, CHAIN2, "sampled"),
        (4, 3, CHAIN3, "sampled"),
        (4, 3, TREE, "distinct"),
        (4, 2, TREE, "sampled"),
        (60, 4, TREE, "chosen"),
    ],
)
@pytest.mark.parametrize("verifier", [ExactVerifier(), BlockVerifier()], ids=["exact", "block"])
def test_committed_tokens_have_the_targets_law(
    seeds: int, size: int, parents: Shape, how: str, verifier: Verifier, pytestconfig: pytest.Config
) -> None:
    if not pytestconfig.getoption("--all"):
        seeds = min(seeds, max(8, seeds // 6))
    is_sampled_chain = how == "sampled" and parents in (ONE, CHAIN2, CHAIN3)
    if isinstance(verifier, BlockVerifier) and not is_sampled_chain:
        seeds = 1  # the exact walk, which the other case covers
    assert worst(seeds, size, parents, how, verifier) < EXACT


def test_block_verification_never_accepts_fewer_tokens() -> None:
    gains = []
    for seed in range(12):
        p, q = table(("p", seed), 3), table(("q", seed), 3)
        block, chain = (accepted_tokens(p, q, CHAIN2, v) for v in (BlockVerifier(), ExactVerifier()))
        gains.append(block - chain)
    assert min(gains) > -1e-12
    assert max(gains) > 0.01


def test_a_drafter_equal_to_the_target_is_always_accepted() -> None:
    p = table("same", 3)
    for verifier in (ExactVerifier(), BlockVerifier()):
        assert accepted_tokens(p, p, CHAIN2, verifier) == pytest.approx(2.0, abs=1e-9)


def test_sampled_tokens_may_be_treated_as_chosen() -> None:
    spoil = {"spoil": lambda t: TreeBatch(t.tokens, t.parents, t.starts)}
    assert worst(40, 4, ONE, "sampled", ExactVerifier(), **spoil) < EXACT


def test_chosen_children_beside_sampled_ones_are_followed_exactly() -> None:
    def add_chosen(trees: TreeBatch) -> TreeBatch:
        draws = trees.drawn_from
        assert draws is not None
        mixed = Draws(draws.laws, torch.tensor([-1, 0, -1]), draws.replace)
        return TreeBatch.trees([([*trees.tokens.tolist(), 1], (-1, 0, 0))], mixed)

    assert worst(40, 4, ONE, "sampled", ExactVerifier(), spoil=add_chosen) < EXACT


# The mistakes, each through the same check.


def test_residual_replaced_by_the_target_law_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "residual", lambda p, q: p)
    assert worst(20, 4, ONE, "sampled", ExactVerifier()) > 0.05


def test_q_not_renormalised_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_TINY", 1.0)  # q / max(sum(q), 1): zeroed, and left as it is
    assert worst(20, 4, TWO, "distinct", ExactVerifier()) > 0.05


def test_draws_without_replacement_taken_for_independent_are_caught() -> None:
    def claim(trees: TreeBatch) -> TreeBatch:
        assert trees.drawn_from is not None
        draws = Draws(trees.drawn_from.laws, trees.drawn_from.rows, True)
        return TreeBatch(trees.tokens, trees.parents, trees.starts, draws)

    assert worst(20, 4, TWO, "distinct", ExactVerifier(), spoil=claim) > 0.05


def test_chosen_tokens_tested_by_ratio_are_caught() -> None:
    def claim(seed: int) -> float:
        p, q = table(("p", seed), 4), table(("q", seed), 4)

        def spoil(trees: TreeBatch) -> TreeBatch:
            draws = Draws(q(())[None], torch.tensor([-1, 0, 0]), False)
            return TreeBatch(trees.tokens, trees.parents, trees.starts, draws)

        law, length = committed_law(p, q, TWO, "chosen", ExactVerifier(), spoil)
        return distance(law, p, length)

    assert max(claim(seed) for seed in range(10)) > 0.1


def test_q_of_another_temperature_is_caught() -> None:
    def claim(trees: TreeBatch) -> TreeBatch:
        assert trees.drawn_from is not None
        cooler = (2 * trees.drawn_from.laws.log()).softmax(-1)
        draws = Draws(cooler, trees.drawn_from.rows, True)
        return TreeBatch(trees.tokens, trees.parents, trees.starts, draws)

    assert worst(20, 4, ONE, "sampled", ExactVerifier(), spoil=claim) > 0.05


def test_dropping_a_token_because_of_what_was_sampled_is_caught() -> None:
    def drop(trees: TreeBatch) -> TreeBatch:
        assert trees.drawn_from is not None
        unsure = trees.drawn_from.laws[0, trees.tokens[1]] < 0.4
        return TreeBatch.trees([([0], [-1])]) if unsure else trees

    assert worst(20, 4, ONE, "sampled", ExactVerifier(), spoil=drop) > 0.05


def test_block_verification_stopped_at_the_first_failure_is_caught() -> None:
    assert worst(10, 3, CHAIN2, "sampled", BlockVerifier(), stop_at_first_failure=True) > 0.05


class RowByRow:
    """Medusa's mistake: every root-to-leaf row draws for itself, and the longest match wins."""

    exact, shares_noise = True, False

    def verify(self, trees: TreeBatch, laws: Laws, noise: BranchNoise) -> object:
        def rows(view: walk.TreeView) -> tuple[list[int], int]:
            draws = {leaf: noise.branches.choose(view.law(0).tolist()) for leaf in view.children[0]}
            for leaf, token in draws.items():
                if view.tokens[leaf] == token:
                    return [leaf], noise.branches.choose(view.law(leaf).tolist())
            return [], next(iter(draws.values()))

        return walk.decide(trees, laws, noise, rows)  # type: ignore[arg-type]


def test_a_draw_per_row_is_caught() -> None:
    assert worst(10, 4, TWO, "chosen", RowByRow()) > 0.05  # type: ignore[arg-type]


def test_typical_acceptance_is_not_exact_and_says_so() -> None:
    assert not TypicalVerifier().exact
    assert worst(10, 4, TWO, "chosen", TypicalVerifier()) > 0.05


def test_the_verifiers_say_what_they_are() -> None:
    said = [(v.exact, v.shares_noise) for v in (ExactVerifier(), BlockVerifier(), CoupledVerifier())]
    assert said == [(True, False), (True, False), (True, True)]


def test_branches_cover_everything_once() -> None:
    branches, seen, more = Branches(), [], True
    while more:
        seen.append((branches.choose([0.5, 0.5]), branches.choose([0.2, 0.0, 0.8])))
        more = branches.advance()
    assert seen == list(itertools.product((0, 1), (0, 2)))
