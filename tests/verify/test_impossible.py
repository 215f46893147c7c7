"""Laws without a token: one error under every rule, where the text arrives; and no number that overflows."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun import registry
from forerun.engine.routing import VerifierPool
from forerun.errors import ImpossibleLaw, InvalidInput
from forerun.noise import Noise
from forerun.params import SamplingParams
from forerun.testing import FakeSeq, random_tree
from forerun.types import Draws, Laws, Request, TreeBatch
from forerun.verify.warp import warp
from tests.exactness.harness import DRAFTERS, engine_for, run

V = 9
VERIFIERS = registry.verifiers.names()
HEATS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 3},
    "unseeded": {"temperature": 0.8},
}
EXTREMES: list[dict[str, Any]] = [
    {"presence_penalty": 1000.0, "frequency_penalty": 1000.0},
    {"presence_penalty": -1000.0, "frequency_penalty": -1000.0},
    {"repetition_penalty": 0.001},
    {"repetition_penalty": 1000.0},
    {"logit_bias": {1: 1e9, 2: -1e9, 3: -math.inf}, "repetition_penalty": 1000.0},
    {"logit_bias": dict.fromkeys(range(V), 1e9), "repetition_penalty": 0.001, "frequency_penalty": 1000.0},
]


def pool() -> VerifierPool:
    return VerifierPool(lambda name: registry.verifiers.get(name)())


@pytest.mark.parametrize("heat", HEATS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_one_error_for_every_rule(heat: str, verifier: str) -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(V), -math.inf), **HEATS[heat])
    seq, trees = FakeSeq(0, [1], params=params), TreeBatch.chains([[1, 2, 3]])
    laws = warp(torch.randn(3, V, generator=torch.Generator().manual_seed(0)), [seq], trees)
    with pytest.raises(ImpossibleLaw, match=r"^no token is possible here: ") as caught:
        registry.verifiers.get(verifier)().verify(trees, laws, Noise([3], [1]))
    assert caught.value.rows == (0,)
    assert isinstance(caught.value, InvalidInput)


def test_the_error_names_its_place_in_a_mixed_batch() -> None:
    which = ["exact", "coupled", "exact", "coupled", "block"]
    weights = torch.zeros(5, V)
    for bad in range(5):
        laws = Laws(weights.clone(), (False, False, False, True, True))
        laws.log_weights[bad] = -math.inf
        seqs: Any = [SimpleNamespace(verifier=name) for name in which]
        with pytest.raises(ImpossibleLaw) as caught:
            pool().verify(seqs, TreeBatch.chains([[1]] * 5), laws, Noise([0] * 5, [1] * 5))
        assert caught.value.rows == (bad,)


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("greedy", [True, False])
def test_a_dead_end_beside_the_path_is_nobodys_business(verifier: str, greedy: bool) -> None:
    """The walk goes 0 -> 2 -> 3; after node 1 nothing is possible."""
    weights = torch.full((4, V), -math.inf)
    for node, token in ((0, 6), (2, 7), (3, 8)):
        weights[node, token] = 0.0
    trees = TreeBatch.trees([([1, 5, 6, 7], [-1, 0, 0, 2])])
    verdict = registry.verifiers.get(verifier)().verify(trees, Laws(weights, (greedy,)), Noise([4], [1]))
    assert verdict.to_host() == ([[2, 3]], [8])


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("dead", [1, 2])
def test_what_comes_before_a_dead_end_is_written(verifier: str, sampled: bool, dead: int) -> None:
    """The chain 6, 7 is all that the target can say; after its `dead`-th token nothing is possible."""
    weights = torch.full((3, V), -math.inf)
    weights[0, 6] = weights[1, 7] = weights[2, 8] = 0.0
    weights[dead] = -math.inf
    drawn = Draws(
        torch.nn.functional.one_hot(torch.tensor([6, 7]), V).float(), torch.tensor([-1, 0, 1]), False
    )
    trees = TreeBatch.trees([([1, 6, 7], [-1, 0, 1])], drawn if sampled else None)
    verdict = registry.verifiers.get(verifier)().verify(trees, Laws(weights, (False,)), Noise([4], [1]))
    assert verdict.to_host() == ([list(range(1, dead))], [[6, 7][dead - 1]])


@pytest.mark.parametrize("heat", HEATS)
@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model", "eagle3"])
def test_an_engine_says_so_whatever_drafts(drafter: str, heat: str) -> None:
    """Token 3 is the only one, and banned after two of it: the third cannot be written."""
    biases = {token: -math.inf for token in range(V) if token != 3}
    params = SamplingParams(logit_bias=biases, bad_words=((3, 3, 3),), ignore_eos=True, **HEATS[heat])
    engine = engine_for(drafter, "auto", "tree", V)
    written: list[int] = []
    engine.submit(Request((1, 2), params))

    def write() -> None:
        while engine.busy:
            for event in engine.step():
                written.extend(event.tokens)

    with pytest.raises(ImpossibleLaw, match="no token is possible"):
        write()
    assert written == [3, 3]  # as without a drafter


@pytest.mark.parametrize(
    "values",
    [
        {"presence_penalty": 3.5e38},
        {"frequency_penalty": -1e30},
        {"repetition_penalty": 1e-38},
        {"repetition_penalty": 1e38},
        {"logit_bias": {1: 1e38}},
        {"logit_bias": {1: -1e38}},
        {"temperature": 1e300},
    ],
    ids=str,
)
def test_numbers_that_would_overflow_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(values))):
        SamplingParams(**values)


@pytest.mark.parametrize("extreme", EXTREMES, ids=str)
def test_the_largest_values_overflow_nowhere(extreme: dict[str, Any]) -> None:
    rng = random.Random(1)
    for temperature in (0.0, 1e-4, 1.0, 1e4):
        params = SamplingParams(temperature=temperature, **extreme)
        text = [rng.randrange(V) for _ in range(40)]
        trees = TreeBatch.trees([random_tree(rng, text[-1], V, 8)])
        logits = torch.randn(trees.nodes, V, generator=torch.Generator().manual_seed(2)) * 50
        laws = warp(logits, [FakeSeq(0, text, 5, params)], trees)
        assert not laws.log_weights.isnan().any()
        assert not (laws.log_weights == math.inf).any()
        assert laws.log_weights.softmax(-1).sum(-1).allclose(torch.ones(trees.nodes))


@pytest.mark.parametrize("extreme", EXTREMES, ids=str)
def test_texts_at_the_largest_values_do_not_depend_on_the_drafter(extreme: dict[str, Any]) -> None:
    requests = [
        Request((1, 2, 1, 2, 1), SamplingParams(max_tokens=16, ignore_eos=True, **extreme, **heat))
        for heat in ({}, {"temperature": 1.0, "seed": 5})
    ]
    wanted = run(engine_for("none", "auto", "tree", V), requests)[0]
    for drafter in DRAFTERS:
        assert run(engine_for(drafter, "auto", "tree", V), requests)[0] == wanted
