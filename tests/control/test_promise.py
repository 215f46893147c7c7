"""What users are promised: no request of 32 tokens or more below 0.92x plain decoding, no 20 together below 0.985x.

Through the real engine on a simulated GPU, look-ups keep it whole. What all drafters came to is in scenarios.json: any
20 requests keep it there too, and single requests do but in the scenarios that are named here.
"""

from __future__ import annotations

import json

import pytest

from forerun.control.adaptive import AdaptiveController
from tests.control.scenarios import BOTH, FILE, HEAD, MIXED, NGRAM, NONE, SMALL, SUFFIX, Texts, outcome, write

REQUEST, WINDOW = 0.92, 0.985
OUTCOMES = json.loads(FILE.read_text(encoding="utf-8"))
SHORT = {"CPU texts, short"}  # of 2 to 24 tokens: nothing is promised of them
# a request of 64 to 96 tokens was slower than REQUEST there: the first trials of a text that gains nothing take it
MISSED = {
    "head alone, 1.5B",
    "hybrid, hard texts",
    "hybrid in turn with n-gram and suffix",
    "CPU draft model",  # whole texts are not known there: 60 rounds of one kind of text
}


def test_the_only_recorded_requests_below_the_promise_are_the_known_ones() -> None:
    """Whoever mends one takes it off the list, so that it is not lost again."""
    below = {name for name, found in OUTCOMES.items() if found.get("worst", 1.0) < REQUEST}
    assert below - SHORT == MISSED


def test_no_twenty_recorded_requests_together_are_below_the_promise() -> None:
    asked = {name: found["worst_20"] for name, found in OUTCOMES.items() if "worst_20" in found}
    assert len(asked) >= 14, "every scenario of one request at a time on a GPU"
    assert {name for name, speed in asked.items() if speed < WINDOW} == set()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", [NGRAM, SUFFIX])
def test_look_ups_make_no_request_and_no_twenty_much_slower(name: str) -> None:
    texts = Texts.drawn(20, MIXED, seed=1)
    plain = write(texts, [NONE], SMALL, None, 1)[NONE]
    found = outcome(plain, write(texts, [name], SMALL, AdaptiveController, 1)[name])
    assert found["speed"] > 1.1
    assert found["worst"] >= REQUEST
    assert found["worst_20"] >= WINDOW


@pytest.mark.slow
@pytest.mark.parametrize("others", [(NGRAM, SUFFIX), (NONE, HEAD)], ids=["look-ups", "a head"])
def test_a_drafter_is_as_fast_in_company_as_alone(others: tuple[str, ...]) -> None:
    """Requests of other drafters come in turn with its own."""
    texts = Texts.drawn(16, MIXED, seed=1)
    alone = write(texts, [BOTH], SMALL, AdaptiveController, 1)[BOTH]
    beside = write(texts, [*others, BOTH], SMALL, AdaptiveController, 1)[BOTH]
    assert alone.seconds >= 0.97 * beside.seconds
