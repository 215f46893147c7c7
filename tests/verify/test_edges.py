"""The corners where implementations go wrong: u = 0, impossible tokens, nothing left, last tokens, ties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.noise import BLOCK, DRAW
from forerun.core.types import Draws, Laws, TreeBatch, Verdict
from forerun.testing import TableLM, tree_of
from forerun.verify.base import Verifier
from forerun.verify.coupled import CoupledVerifier
from forerun.verify.exact import BlockVerifier, ExactVerifier, residual
from forerun.verify.typical import TypicalVerifier

ALL: list[Verifier] = [ExactVerifier(), BlockVerifier(), CoupledVerifier(), TypicalVerifier()]
BELOW_ONE = 1 - 2.0**-53
SAMPLED = [ExactVerifier(), BlockVerifier()]


@dataclass
class FixedNoise:
    """The same number for every test and every draw."""

    test: float = 0.5
    draw: float = 0.5

    def uniform(self, b: int, depth: int, purpose: int, index: int = 0) -> float:
        return self.draw if purpose == DRAW else self.test

    def uniforms(self, b: int, depth: int, like: Tensor) -> Tensor:
        return torch.full_like(like, 0.5)


def verify(
    verifier: Verifier, trees: TreeBatch, rows: Sequence[Sequence[float]], noise: FixedNoise, greedy: bool = False
) -> Verdict:
    laws = Laws(torch.tensor(rows).log(), (greedy,) * len(trees))
    return verifier.verify(trees, laws, noise)  # type: ignore[arg-type]


def chain(tokens: Sequence[int], *laws: Sequence[float], replace: bool = True) -> TreeBatch:
    rows = torch.tensor([-1, *range(len(tokens) - 1)])
    draws = Draws(torch.tensor(laws), rows, replace)
    return TreeBatch.trees([(tokens, list(range(-1, len(tokens) - 1)))], draws)


@pytest.mark.parametrize("verifier", SAMPLED, ids=["exact", "block"])
def test_an_impossible_token_falls_even_at_u_zero(verifier: Verifier) -> None:
    trees = chain([0, 1], [0.0, 1.0, 0.0])
    verdict = verify(verifier, trees, [[0.5, 0.0, 0.5], [1.0, 0.0, 0.0]], FixedNoise(test=0.0, draw=0.0))
    assert verdict.path(0) == []
    assert verdict.bonus.tolist() == [0]


@pytest.mark.parametrize("verifier", SAMPLED, ids=["exact", "block"])
@pytest.mark.parametrize("u", [0.0, 0.5, 0.99999])
def test_equal_laws_always_stand(verifier: Verifier, u: float) -> None:
    law = [0.2, 0.3, 0.5]
    verdict = verify(verifier, chain([0, 2, 0], law, law), [law, law, law], FixedNoise(test=u))
    assert verdict.path(0) == [1, 2]


def test_nothing_left_falls_back_to_the_target() -> None:
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert torch.equal(residual(p, p), p)
    assert residual(p, torch.tensor([1.0, 0.0])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("verifier", SAMPLED, ids=["exact", "block"])
def test_a_fallen_token_whose_residual_is_empty_by_rounding_never_gives_an_impossible_one(verifier: Verifier) -> None:
    # q claims a little more than p everywhere, so no residual is left, and the token falls at u near 1
    trees = chain([0, 1], [0.5 + 1e-6, 0.5 + 1e-6, 0.0])
    verdict = verify(verifier, trees, [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], FixedNoise(BELOW_ONE, BELOW_ONE))
    assert verdict.path(0) == []
    assert verdict.bonus.tolist() == [1]


def test_u_near_one_draws_the_last_possible_token() -> None:
    rows = [[0.3, 0.7, 0.0, 0.0]]
    verdict = verify(ExactVerifier(), TreeBatch.chains([[0]]), rows, FixedNoise(draw=BELOW_ONE))
    assert verdict.bonus.tolist() == [1]
    verdict = verify(ExactVerifier(), TreeBatch.chains([[0]]), [[0.3, 0.0, 0.0, 0.7]], FixedNoise(draw=BELOW_ONE))
    assert verdict.bonus.tolist() == [3]


@pytest.mark.parametrize("verifier", ALL, ids=lambda v: type(v).__name__)
def test_a_lone_root_gets_one_token(verifier: Verifier) -> None:
    trees = TreeBatch.chains([[0], [2]])
    verdict = verify(verifier, trees, [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], FixedNoise())
    assert verdict.paths.shape == (2, 0)
    assert verdict.bonus.tolist() == [1, 2]


@pytest.mark.parametrize("verifier", ALL, ids=lambda v: type(v).__name__)
def test_an_empty_batch_has_an_empty_verdict(verifier: Verifier) -> None:
    laws = Laws(torch.zeros(0, 3), ())
    verdict = verifier.verify(TreeBatch.chains([]), laws, FixedNoise())  # type: ignore[arg-type]
    assert len(verdict.bonus) == 0


@pytest.mark.parametrize("verifier", ALL, ids=lambda v: type(v).__name__)
def test_greedy_ties_go_to_the_first_token(verifier: Verifier) -> None:
    trees = TreeBatch.trees([([0, 2, 1], [-1, 0, 0])])
    verdict = verify(verifier, trees, [[0.2, 0.4, 0.4]] * 3, FixedNoise(), greedy=True)
    assert verdict.path(0) == [2]
    assert verdict.bonus.tolist() == [1]


@pytest.mark.parametrize("verifier", ALL, ids=lambda v: type(v).__name__)
def test_tokens_of_minus_infinity_are_never_committed(verifier: Verifier) -> None:
    trees = TreeBatch.trees([([0, 1, 3], [-1, 0, 0])])
    for u in (0.0, 0.5, BELOW_ONE):
        verdict = verify(verifier, trees, [[0.0, 0.0, 1.0, 0.0]] * 3, FixedNoise(u, u))
        assert verdict.path(0) == []
        assert verdict.bonus.tolist() == [2]


@pytest.mark.parametrize("replace", [True, False])
def test_a_sibling_that_q_cannot_draw_is_taken_for_chosen(replace: bool) -> None:
    # q has one token; the second sibling cannot come from it. It is followed if the target itself draws it.
    draws = Draws(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([-1, 0, 0]), replace)
    trees = TreeBatch.trees([([0, 0, 2], [-1, 0, 0])], draws)
    rows = [[0.0, 0.5, 0.5], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    verdict = verify(ExactVerifier(), trees, rows, FixedNoise(draw=0.9))
    assert verdict.path(0) == [2]
    assert verdict.bonus.tolist() == [1]
    assert verify(ExactVerifier(), trees, rows, FixedNoise(draw=0.1)).bonus.tolist() == [1]


def test_siblings_of_two_laws_are_refused() -> None:
    draws = Draws(torch.tensor([[0.5, 0.5], [0.1, 0.9]]), torch.tensor([-1, 0, 1]), True)
    trees = TreeBatch.trees([([0, 0, 1], [-1, 0, 0])], draws)
    with pytest.raises(AssertionError, match="one law"):
        verify(ExactVerifier(), trees, [[0.5, 0.5]] * 3, FixedNoise())


def test_block_accepts_a_long_prefix_whose_shorter_one_failed() -> None:
    @dataclass
    class LastPasses(FixedNoise):
        def uniform(self, b: int, depth: int, purpose: int, index: int = 0) -> float:
            assert purpose != BLOCK or depth == 0, "tests belong to the root's position"
            return {1: 0.99, 2: 0.0}.get(index, 0.5) if purpose == BLOCK else 0.5

    law = [0.5, 0.5]
    trees = chain([0, 1, 1], [0.1, 0.9], [0.4, 0.6])
    rows = [[0.5, 0.5], law, law]
    assert verify(BlockVerifier(), trees, rows, LastPasses()).path(0) == [1, 2]


def test_typical_takes_the_longest_plausible_path_and_the_likelier_of_two() -> None:
    trees = TreeBatch.trees([([0, 1, 2, 0, 1, 3], [-1, 0, 0, 1, 2, 2])])
    flat, sure = [0.4, 0.3, 0.2, 0.1], [0.97, 0.01, 0.01, 0.01]
    rows = [flat, sure, [0.1, 0.5, 0.1, 0.3], flat, sure, flat]
    verdict = verify(TypicalVerifier(), trees, rows, FixedNoise(draw=0.0))
    assert verdict.path(0) == [1, 3]  # 0.3 * 0.97 beats 0.2 * 0.5
    strict = TypicalVerifier(epsilon=0.25, delta=9.0)
    assert verify(strict, trees, rows, FixedNoise(draw=0.0)).path(0) == [1, 3]
    assert verify(TypicalVerifier(epsilon=0.6, delta=9.0), trees, rows, FixedNoise(draw=0.0)).path(0) == []


def test_typical_ranks_by_the_whole_path() -> None:
    """0.3 * 0.5 beats 0.2 * 0.6, although the second path ends with the likelier token; in either order."""
    first, second, flat = [0.4, 0.3, 0.2, 0.1], [0.5, 0.2, 0.2, 0.1], [0.25] * 4
    other = [0.1, 0.6, 0.2, 0.1]
    trees = TreeBatch.trees([([0, 1, 2, 0, 1], [-1, 0, 0, 1, 2])])
    rows = [first, second, other, flat, flat]
    assert verify(TypicalVerifier(), trees, rows, FixedNoise(draw=0.0)).path(0) == [1, 3]
    turned = TreeBatch.trees([([0, 2, 1, 1, 0], [-1, 0, 0, 1, 2])])
    rows = [first, other, second, flat, flat]
    assert verify(TypicalVerifier(), turned, rows, FixedNoise(draw=0.0)).path(0) == [2, 4]


def test_typical_asks_less_where_the_target_is_unsure() -> None:
    p = [0.04] * 25
    limit = 0.3 * math.exp(-math.log(25))
    assert limit < 0.04
    trees = TreeBatch.chains([[0, 7]])
    assert verify(TypicalVerifier(), trees, [p, p], FixedNoise()).path(0) == [1]
    sure = [0.96, 0.04] + [0.0] * 23
    trees = TreeBatch.chains([[0, 1]])
    assert verify(TypicalVerifier(), trees, [sure, sure], FixedNoise()).path(0) == []


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.3), (1.0, 0.3), (0.1, 0.0)])
def test_typical_refuses_constants_that_mean_nothing(epsilon: float, delta: float) -> None:
    with pytest.raises(InvalidInput, match="out of range"):
        TypicalVerifier(epsilon, delta)


def test_tree_of_reads_one_tree() -> None:
    trees = TreeBatch.trees([([5], [-1]), ([1, 2], [-1, 0])])
    assert tree_of(trees, 1) == ([1, 2], [-1, 0])
    assert TableLM(4).law([1, 2, 3]).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("verifier", SAMPLED, ids=["exact", "block"])
def test_a_drafter_with_fewer_words_is_tested_like_any_other(verifier: Verifier) -> None:
    """A vocabulary padded on the target's side: what the drafter does not know has no mass in its law."""
    rows = [[0.1, 0.1, 0.2, 0.6], [0.25] * 4]
    falls = verify(verifier, chain([0, 0], [1.0, 0.0]), rows, FixedNoise(test=0.5, draw=0.9))
    assert falls.to_host() == ([[]], [3]), "the residual reaches the words that only the target knows"
    stands = verify(verifier, chain([0, 0], [1.0, 0.0]), rows, FixedNoise(test=0.05, draw=0.5))
    assert stands.to_host()[0] == [[1]]
