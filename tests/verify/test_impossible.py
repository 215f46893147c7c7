"""Laws without a token: one error under every rule, where the text arrives; and no number that overflows."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from forerun.core import registry
from forerun.core.errors import CannotSample, InvalidInput
from forerun.core.params import Prefix, SamplingParams
from forerun.core.types import Request, TreeBatch
from forerun.engine.engine import Engine
from forerun.testing import FakeSeq, random_tree
from forerun.verify.processors import Allow
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


def write(engine: Engine, *requests: Request) -> list[tuple[list[int], Exception | None]]:
    """What each request wrote, and the error that ended it."""
    ids = [engine.submit(request) for request in requests]
    tokens, errors = {i: list[int]() for i in ids}, dict[int, Exception | None]()
    while engine.busy:
        for event in engine.step():
            tokens[event.seq_id] += event.tokens
            errors[event.seq_id] = event.error
    return [(tokens[i], errors[i]) for i in ids]


@pytest.mark.parametrize("heat", HEATS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_one_error_for_every_rule(heat: str, verifier: str) -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(V), -math.inf), **HEATS[heat])
    plain = SamplingParams(max_tokens=6, ignore_eos=True)
    engine = engine_for("ngram", verifier, "tree", V)
    (none, error), (text, fine) = write(engine, Request((1, 2, 1), params), Request((1, 2), plain))
    assert isinstance(error, CannotSample)
    assert isinstance(error, InvalidInput)
    assert str(error).startswith("no token can follow: ")
    assert (none, len(text), fine) == ([], 6, None)  # the neighbour goes on


@pytest.mark.parametrize("heat", HEATS)
@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model", "eagle3", "medusa"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_what_comes_before_a_dead_end_is_written_whatever_drafts(drafter: str, heat: str, shape: str) -> None:
    """Token 3 is the only one, and banned after two of it: the third cannot be written."""
    biases = {token: -math.inf for token in range(V) if token != 3}
    params = SamplingParams(logit_bias=biases, bad_words=((3, 3, 3),), ignore_eos=True, **HEATS[heat])
    for prompt in ((1, 2), (3, 3, 3, 3, 2)):  # the second makes ngram draft it
        [(written, error)] = write(engine_for(drafter, "auto", shape, V), Request(prompt, params))
        assert written == [3, 3]
        assert isinstance(error, CannotSample)


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("heat", ["greedy", "seeded"])
def test_a_dead_end_beside_the_text_is_nobodys_business(verifier: str, heat: str) -> None:
    """After 5 nothing is possible. It is drafted, as the prompt has it, and the target never says it."""
    asked = []

    def rule(prefix: Prefix) -> list[int] | None:
        if prefix.path and prefix.path[-1] == 5:
            asked.append(prefix)
            return []
        return None

    params = SamplingParams(
        max_tokens=16, ignore_eos=True, logit_bias={5: -90.0}, processors=[Allow(rule)], **HEATS[heat]
    )
    prompt = tuple(token for other in range(V) for token in (other, 5))
    [(written, error)] = write(engine_for("ngram", verifier, "tree", V), Request(prompt, params))
    assert (len(written), error) == (16, None)
    assert asked
    [(alone, _)] = write(engine_for("none", verifier, "tree", V), Request(prompt, params))
    assert written == alone or verifier in ("exact", "block", "typical")


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


@pytest.mark.slow
@pytest.mark.parametrize("extreme", EXTREMES, ids=str)
def test_texts_at_the_largest_values_do_not_depend_on_the_drafter(extreme: dict[str, Any]) -> None:
    requests = [
        Request((1, 2, 1, 2, 1), SamplingParams(max_tokens=16, ignore_eos=True, **extreme, **heat))
        for heat in ({}, {"temperature": 1.0, "seed": 5})
    ]
    wanted = run(engine_for("none", "auto", "tree", V), requests)[0]
    for drafter in DRAFTERS:
        assert run(engine_for(drafter, "auto", "tree", V), requests)[0] == wanted
