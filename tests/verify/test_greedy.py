"""The greedy rule in its three forms: on the host, by torch for all trees at once, and by a Triton kernel."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from forerun.core.tree import topology_of, trace
from forerun.core.types import Greedy, Laws, TreeBatch, Verdict
from forerun.testing import path_to
from forerun.verify.decide import VerifierPool
from forerun.verify.exact import ExactVerifier
from forerun.verify.greedy import device_walk, greedy_verdict, walk_argmax, walk_by_torch
from forerun.verify.typical import TypicalVerifier
from tests.verify.trees import make_tree

VOCAB = 6  # small: argmax and nodes often agree


def _slow_walk(tokens: list[int], parents: list[int], argmax: list[int]) -> tuple[list[int], int]:
    """By trying every path: the longest one whose every token is the argmax after the node before it."""
    best: list[int] = []
    for node in range(len(tokens)):
        path = path_to(parents, node)
        if all(tokens[i] == argmax[parents[i]] for i in path) and len(path) > len(best):
            best = path
    return best, argmax[best[-1] if best else 0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])])
@pytest.mark.parametrize("seed", range(20))
def test_all_forms_of_the_rule_agree_with_trying_every_path(seed: int, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rng = random.Random(seed)
    count, nodes, depth = rng.randint(1, 4), rng.randint(1, 24), rng.randint(3, 6)
    trees = [make_tree(rng, nodes, depth, VOCAB) for _ in range(count)]
    argmax = [[rng.randrange(VOCAB) for _ in range(nodes)] for _ in trees]
    wanted = [_slow_walk(*tree, said) for tree, said in zip(trees, argmax, strict=True)]
    for (tokens, parents), said, right in zip(trees, argmax, wanted, strict=True):
        assert walk_argmax(tokens, topology_of(tuple(parents)).children, said) == right
    both = torch.tensor([[tree[i] for tree in trees] for i in (0, 1)], device=device)
    ancestors = trace(both[1], depth)[1].int()
    for walk in {walk_by_torch, device_walk(torch.device(device))}:
        paths = torch.full((count, depth), 99, device=device)
        accepted, bonus = torch.full((2, count), 99, device=device)
        walk(both, ancestors, torch.tensor(argmax, device=device), paths, accepted, bonus)
        found = Verdict(paths, accepted, bonus).to_host()
        assert found == ([path for path, _ in wanted], [token for _, token in wanted])


def test_long_paths_are_among_those_tried() -> None:
    """The negative control of the test above: with this vocabulary the walks really go somewhere."""
    lengths = []
    for seed in range(200):
        rng = random.Random(seed)
        tokens, parents = make_tree(rng, 24, 6, VOCAB)
        lengths.append(len(_slow_walk(tokens, parents, [rng.randrange(VOCAB) for _ in tokens])[0]))
    assert sum(length >= 2 for length in lengths) > 20


@dataclass
class _Sequence:
    """What the pool looks at."""

    verifier: str
    seed: int = 0
    tokens: tuple[int, ...] = (0,)


class TestWhoDecides:
    """What a pass knows is used where every law is its argmax and every verifier exact, and nowhere else."""

    trees = TreeBatch.trees([([3, 1, 2], [-1, 0, 0])])
    logits = torch.tensor([[0.0, 0.0, 9.0, 0.0], [9.0, 0.0, 0.0, 0.0], [0.0, 9.0, 0.0, 0.0]])
    wrong = Greedy(argmax=[1, 3, 3])  # not the argmax of the logits: shows who was asked

    def verdict(self, laws: Laws, known: Greedy | None, name: str = "exact") -> tuple[list[list[int]], list[int]]:
        pool = VerifierPool(lambda name: ExactVerifier() if name == "exact" else TypicalVerifier())
        seqs: Any = [_Sequence(name)]
        return pool.verify(seqs, self.trees, laws, known).to_host()

    def test_an_exact_rule_takes_what_is_known(self) -> None:
        assert self.verdict(Laws(self.logits, (True,), plain_greedy=True), self.wrong) == ([[1]], [3])

    def test_laws_that_are_not_the_logits_are_walked(self) -> None:
        assert self.verdict(Laws(self.logits, (True,)), self.wrong) == ([[2]], [1])

    def test_nothing_known_is_walked(self) -> None:
        assert self.verdict(Laws(self.logits, (True,), plain_greedy=True), None) == ([[2]], [1])

    def test_a_rule_that_is_not_exact_is_asked(self) -> None:
        laws = Laws(self.logits, (True,), plain_greedy=True)
        assert self.verdict(laws, self.wrong, "typical") == ([[2]], [1])

    def test_a_verdict_from_the_device_is_handed_on_as_it_is(self) -> None:
        verdict = Verdict.of([[]], [7], "cpu")
        assert greedy_verdict(self.trees, Greedy(verdict=lambda: verdict)) is verdict
