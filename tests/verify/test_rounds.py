"""Many rounds with the real noise: numbers are never used twice, and texts have the target's law.

Noise is hashed, so these tests give the same answer each time: the limits are chi-square's with wide margins.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from forerun.core.noise import Noise, exponential
from forerun.core.params import SamplingParams
from forerun.core.types import Budget, Needs
from forerun.drafters.base import Drafter
from forerun.testing import FakeSeq, LawDrafter, ScriptedDrafter, TableLM, extend
from forerun.verify.base import Verifier
from forerun.verify.coupled import CoupledVerifier
from forerun.verify.exact import BlockVerifier, ExactVerifier
from forerun.verify.typical import TypicalVerifier
from forerun.verify.warp import warp

V, LENGTH = 3, 3
TARGET = TableLM(V, order=2, seed=1)
DRAFT = TableLM(V, order=1, seed=2)
DRAFTERS: dict[str, Drafter] = {
    "none": ScriptedDrafter(lambda seq, budget: (seq.tokens[-1:], [-1])),
    "chosen": LawDrafter(DRAFT.law, "chosen"),
    "sampled": LawDrafter(DRAFT.law, "sampled"),
    "distinct": LawDrafter(DRAFT.law, "distinct"),
    "random": ScriptedDrafter.random(V),
}
VERIFIERS: dict[str, Verifier] = {"exact": ExactVerifier(), "block": BlockVerifier(), "coupled": CoupledVerifier()}
CHAIN, TREE = Budget(nodes=2, depth=2), Budget(nodes=5, depth=2, width=2)


@dataclass
class CountedNoise:
    """Noise that remembers every number asked for, by what it was hashed from."""

    noise: Noise
    asked: Counter[tuple[object, ...]] = field(default_factory=Counter)

    def uniform(self, b: int, depth: int, purpose: int, index: int = 0) -> float:
        self.asked[self.noise.seeds[b], self.noise.positions[b] + depth, purpose, index] += 1
        return self.noise.uniform(b, depth, purpose, index)

    def uniforms(self, b: int, depth: int, like: Tensor) -> Tensor:
        self.asked[self.noise.seeds[b], self.noise.positions[b] + depth] += 1
        return self.noise.uniforms(b, depth, like)


def write(
    seqs: list[FakeSeq], drafter: Drafter, verifier: Verifier, budget: Budget, length: int
) -> Counter[tuple[object, ...]]:
    """Rounds until every sequence has `length` tokens of output; the numbers that were asked for."""
    target = TableLM(TARGET.vocab_size, TARGET.order, TARGET.seed)
    target.prefill(seqs, Needs())
    asked: Counter[tuple[object, ...]] = Counter()
    while live := [seq for seq in seqs if len(seq.tokens) - seq.prompt_length < length]:
        trees = drafter.propose(live, [budget] * len(live))
        logits = target.score(live, trees, Needs()).logits
        assert logits is not None
        noise = CountedNoise(Noise([seq.seed for seq in live], [len(seq.tokens) for seq in live]), asked)
        verdict = verifier.verify(trees, warp(logits, live, trees), noise)  # type: ignore[arg-type]
        target.commit(live, trees, verdict)
        extend(live, trees, verdict)
    return asked


def seqs_of(count: int, temperature: float = 1.0) -> list[FakeSeq]:
    params = SamplingParams(temperature=temperature)
    return [FakeSeq(i, [0, 1], params=params, seed=1000 + i) for i in range(count)]


def chi_square(seqs: list[FakeSeq]) -> float:
    """Of the first tokens of every text against the target's joint law, in standard deviations."""
    seen = Counter(tuple(seq.tokens[2 : 2 + LENGTH]) for seq in seqs)
    total = 0.0
    for text in itertools.product(range(V), repeat=LENGTH):
        expected = float(len(seqs))
        for i, token in enumerate(text):
            expected *= float(TARGET.law([0, 1, *text[:i]])[token])
        total += (seen[text] - expected) ** 2 / expected
    freedom = V**LENGTH - 1
    return (total - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("budget", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_numbers_are_used_once_and_texts_have_the_targets_law(verifier: str, drafter: str, budget: Budget) -> None:
    seqs = seqs_of(250)
    asked = write(seqs, DRAFTERS[drafter], VERIFIERS[verifier], budget, LENGTH)
    assert max(asked.values()) == 1
    assert chi_square(seqs) < 4.5


def test_the_chi_square_can_fail() -> None:
    seqs = seqs_of(250)
    write(seqs, DRAFTERS["chosen"], TypicalVerifier(), TREE, LENGTH)
    assert chi_square(seqs) > 20


@pytest.mark.parametrize("budget", [CHAIN, TREE, Budget(8, 8)], ids=["chain", "tree", "long"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_coupled_text_is_a_function_of_the_seed(drafter: str, budget: Budget) -> None:
    plain, drafted = seqs_of(10), seqs_of(10)
    write(plain, DRAFTERS["none"], CoupledVerifier(), CHAIN, 30)
    write(drafted, DRAFTERS[drafter], CoupledVerifier(), budget, 30)
    assert [seq.tokens[:32] for seq in drafted] == [seq.tokens[:32] for seq in plain]
    assert len({tuple(seq.tokens) for seq in plain}) == len(plain)


@pytest.mark.parametrize("verifier", [*VERIFIERS.values(), TypicalVerifier()], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_the_argmax_whatever_is_drafted(verifier: Verifier, drafter: str) -> None:
    seqs = seqs_of(2, temperature=0.0)
    write(seqs, DRAFTERS[drafter], verifier, TREE, 20)
    wanted = [0, 1]
    for _ in range(20):
        wanted.append(int(TARGET.logits(wanted).argmax()))
    assert [seq.tokens[:22] for seq in seqs] == [wanted, wanted]


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_neighbours_in_a_batch_change_nothing(verifier: str) -> None:
    together = seqs_of(6)
    together[2].params = together[4].params = SamplingParams()  # greedy among sampled ones
    alone = seqs_of(6)
    alone[2].params = alone[4].params = SamplingParams()
    write(together, DRAFTERS["distinct"], VERIFIERS[verifier], TREE, 12)
    for seq in alone:
        write([seq], DRAFTERS["distinct"], VERIFIERS[verifier], TREE, 12)
    assert [seq.tokens[:14] for seq in alone] == [seq.tokens[:14] for seq in together]


def test_a_drafter_that_shares_the_noise_is_accepted_more_often() -> None:
    """Not luck: the bound (1 - TV) / (1 + TV) against the agreement of two independent draws."""
    seqs, agree, bound = seqs_of(300), 0, 0.0
    p, q = TARGET.logits([0, 1]), DRAFT.logits([0, 1])
    for seq in seqs:
        noise = exponential(seq.seed, 2, len(p))
        agree += int((p - noise.log()).argmax() == (q - noise.log()).argmax())
    distance = 0.5 * float((p.softmax(-1) - q.softmax(-1)).abs().sum())
    bound = (1 - distance) / (1 + distance)
    assert agree / len(seqs) > bound - 0.05
    assert agree / len(seqs) > float(torch.dot(p.softmax(-1), q.softmax(-1))) + 0.05
