"""What drafters learn from one request reaches another only where that was asked for, and only under the same salt."""

from __future__ import annotations

import pytest

from forerun.build.engine import make_engine
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.engine.engine import Engine
from forerun.testing import TableLM

LEARNING = ("suffix", "recycling", "lookahead")
LENGTH = 40


def engine_of(drafter: str, shared: bool) -> Engine:
    """A target whose texts never repeat a token soon, so that only an earlier request can teach."""
    speculative = SpeculativeConfig(drafter, shared=shared, budget=4, controller="fixed")
    return make_engine(TableLM(4096, order=1, seed=3, sharpness=4.0), frozenset(), speculative)


def accepted(engine: Engine, salt: str | None) -> int:
    """Tokens that were drafted and accepted in one text, the same every time."""
    request = Request((1,), SamplingParams(max_tokens=LENGTH), cache_salt=salt)
    seq = engine.prepare(request)
    engine.enqueue(seq)
    while engine.busy:
        engine.step()
    assert len(seq.tokens) == LENGTH + 1
    return seq.stats.accepted


@pytest.mark.parametrize("drafter", LEARNING)
def test_a_request_learns_from_those_of_its_own_salt_alone(drafter: str) -> None:
    engine = engine_of(drafter, shared=True)
    first = accepted(engine, "a")
    assert accepted(engine, "b") == first
    assert accepted(engine, None) == first
    assert accepted(engine, None) == first  # not even from another that has none
    assert accepted(engine, "a") > first + LENGTH // 3
    assert accepted(engine, "b") > first + LENGTH // 3


@pytest.mark.parametrize("drafter", LEARNING)
def test_nothing_is_carried_over_unless_that_was_asked_for(drafter: str) -> None:
    engine = engine_of(drafter, shared=False)
    assert len({accepted(engine, "a") for _ in range(3)}) == 1
