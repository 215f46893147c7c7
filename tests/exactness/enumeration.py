"""The law of what a round commits, by taking every branch of every random decision: a sum, not an estimate.

What is drafted, what passes a test and what is drawn are branches with known probabilities. A round that
commits fewer tokens than asked for is completed with the target itself: rounds share no random numbers, so
by induction that is what the rounds after it do (tests/verify/test_rounds.py).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from forerun.core.noise import BLOCK, Noise
from forerun.core.types import Draws, Laws, TreeBatch
from forerun.verify.base import Verifier

Table = Callable[[tuple[int, ...]], Tensor]  # tokens below the root -> law [V]
Shape = tuple[int, ...]  # parents, root included


@dataclass
class Branches:
    """A path through all decisions of a run; `advance` goes on to the next path."""

    taken: list[tuple[int, list[int]]] = field(default_factory=list)  # option taken, options left
    at: int = 0
    probability: float = 1.0

    def choose(self, weights: Sequence[float]) -> int:
        if self.at == len(self.taken):
            options = [i for i, weight in enumerate(weights) if weight > 0]
            self.taken.append((options[0], options[1:]))
        choice = self.taken[self.at][0]
        self.at += 1
        self.probability *= weights[choice] / sum(weights)
        return choice

    def advance(self) -> bool:
        while self.taken:
            _, left = self.taken.pop()
            if left:
                self.taken.append((left[0], left[1:]))
                self.at, self.probability = 0, 1.0
                return True
        return False


@dataclass
class Coin:
    """A uniform number that answers `u * q < p` both ways."""

    noise: BranchNoise
    purpose: int
    scale: float = 1.0

    def __mul__(self, scale: Tensor) -> Coin:
        return Coin(self.noise, self.purpose, self.scale * float(scale))

    def __lt__(self, limit: Tensor | float) -> bool:
        return self.noise.passes(self.purpose, min(1.0, float(limit) / self.scale))


@dataclass
class BranchNoise:
    """Noise whose numbers branch; no number may be asked for twice."""

    branches: Branches
    stop_at_first_failure: bool = False  # the mistake of block verification
    asked: set[tuple[int, ...]] = field(default_factory=set)
    failed: bool = False

    def uniform(self, b: int, depth: int, purpose: int, index: int = 0) -> Coin:
        key = (b, depth, purpose, index)
        assert key not in self.asked, f"random number {key} is used twice"
        self.asked.add(key)
        return Coin(self, purpose)

    def passes(self, purpose: int, probability: float) -> bool:
        if self.stop_at_first_failure and self.failed and purpose == BLOCK:
            return False
        passed = self.branches.choose([1 - probability, probability]) == 1
        self.failed |= not passed
        return passed


def dirichlet(rng: random.Random, size: int) -> Tensor:
    weights = [rng.gammavariate(0.6, 1.0) + 1e-12 for _ in range(size)]
    weights = [0.0 if rng.random() < 0.15 else weight for weight in weights]
    weights[rng.randrange(size)] += 1e-3
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


def table(seed: object, size: int) -> Table:
    laws: dict[tuple[int, ...], Tensor] = {}

    def law(context: tuple[int, ...]) -> Tensor:
        if context not in laws:
            laws[context] = dirichlet(random.Random(repr((seed, context))), size)
        return laws[context]

    return law


def context_of(node: int, tokens: Sequence[int], parents: Shape) -> tuple[int, ...]:
    return () if node == 0 else (*context_of(parents[node], tokens, parents), tokens[node])


def draft(branches: Branches, q: Table, parents: Shape, how: str) -> TreeBatch:
    """A tree of this shape, drawn (all branches) or chosen (the likeliest) from q."""
    tokens, laws = [0], []
    for node in range(1, len(parents)):
        law = q(context_of(parents[node], tokens, parents))
        laws.append(law)
        left = law.clone()
        if how != "sampled":
            left[[tokens[i] for i in range(1, node) if parents[i] == parents[node]]] = 0.0
        if how == "chosen":
            left = (left + 1e-9 * (left == 0)) == left.max()
        tokens.append(branches.choose(left.double().tolist()) if left.any() else 0)
    rows = torch.tensor([-1, *[[*parents[1:]].index(parent) for parent in parents[1:]]])
    draws = Draws(torch.stack(laws), rows, how == "sampled") if laws and how != "chosen" else None
    return TreeBatch.trees([(tokens, parents)], draws)


def committed_law(
    p: Table,
    q: Table,
    parents: Shape,
    how: str,
    verifier: Verifier,
    spoil: Callable[[TreeBatch], TreeBatch] = lambda trees: trees,
    **mistakes: bool,
) -> tuple[dict[tuple[int, ...], float], int]:
    """The law of the first tokens committed (one more than the tree is deep), and how many that are."""
    branches = Branches()
    law: dict[tuple[int, ...], float] = defaultdict(float)
    length = 1 + max(len(context_of(i, parents, parents)) for i in range(len(parents)))
    more = True
    while more:
        trees = spoil(draft(branches, q, parents, how))
        tokens, shape = trees.tokens.tolist(), tuple(trees.parents.tolist())
        rows = torch.stack([p(context_of(i, tokens, shape)) for i in range(len(tokens))]).log()
        noise: Noise = BranchNoise(branches, **mistakes)  # type: ignore[assignment]
        verdict = verifier.verify(trees, Laws(rows, (False,)), noise)
        text = (*(tokens[i] for i in verdict.path(0)), int(verdict.bonus[0]))
        for rest, probability in continuations(p, text, length):
            law[rest] += branches.probability * probability
        more = branches.advance()
    return law, length


def continuations(p: Table, text: tuple[int, ...], length: int) -> Iterator[tuple[tuple[int, ...], float]]:
    if len(text) >= length:
        yield text, 1.0
        return
    for token, probability in enumerate(p(text).tolist()):
        for rest, further in continuations(p, (*text, token), length):
            yield rest, probability * further


def distance(law: dict[tuple[int, ...], float], p: Table, length: int) -> float:
    """Total variation between the law of what was committed and the target's."""
    wanted = dict(continuations(p, (), length))
    return 0.5 * sum(abs(law.get(text, 0.0) - wanted.get(text, 0.0)) for text in {*law, *wanted})


def worst(seeds: int, size: int, parents: Shape, how: str, verifier: Verifier, **more: object) -> float:
    most = 0.0
    for seed in range(seeds):
        p, q = table(("p", seed), size), table(("q", seed), size)
        law, length = committed_law(p, q, parents, how, verifier, **more)  # type: ignore[arg-type]
        assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
        most = max(most, distance(law, p, length))
    return most


def accepted_tokens(p: Table, q: Table, parents: Shape, verifier: Verifier) -> float:
    branches, mean, more = Branches(), 0.0, True
    while more:
        trees = draft(branches, q, parents, "sampled")
        tokens = trees.tokens.tolist()
        rows = torch.stack([p(context_of(i, tokens, parents)) for i in range(len(tokens))]).log()
        noise: Noise = BranchNoise(branches)  # type: ignore[assignment]
        verdict = verifier.verify(trees, Laws(rows, (False,)), noise)
        mean += branches.probability * int(verdict.accepted[0])
        more = branches.advance()
    return mean
