"""The engine over the emulated device: same texts whatever drafts, and plain rounds where look-ups do not pay."""

from __future__ import annotations

import pytest

from forerun.control.lookups import LookupGate
from forerun.core.params import SamplingParams
from forerun.core.types import FREE, Offer, Request, Seq
from forerun.engine.engine import Engine
from lab.host import HEAD, NGRAM_HEAD, Text, made_texts, make, measure_rounds


def write(engine: Engine, texts: list[Text]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for prompt, answer in texts:
        request = Request(prompt, SamplingParams(max_tokens=len(answer), ignore_eos=True))
        found[engine.submit(request)] = []
    while engine.busy:
        for event in engine.step():
            assert event.error is None
            found[event.seq_id] += event.tokens
    return found


@pytest.mark.parametrize("copied", [0.1, 0.9])
@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix", HEAD, NGRAM_HEAD])
def test_texts_are_those_that_the_target_knows(drafter: str, copied: float) -> None:
    texts = made_texts(12, copied)
    texts = [(prompt, answer[:40]) for prompt, answer in texts]
    engine = make(drafter, texts, 8, None)
    assert [*write(engine, texts).values()] == [answer for _, answer in texts]
    assert (engine.stats.accepted > 100) is (drafter in (HEAD, NGRAM_HEAD) or (copied == 0.9 and drafter != "none"))


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_while_the_gate_is_closed_rounds_are_plain_and_nobody_looks_anything_up(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LookupGate, "to_search", lambda self, ids, unread=False: ())
    monkeypatch.setattr(LookupGate, "searches_all", lambda self, batch: False)
    texts = [(prompt, answer[:24]) for prompt, answer in made_texts(40, 0.9)]
    engine = make(drafter, texts, 40, None)
    looked = list[int]()

    def offer(self: object, seq: Seq) -> Offer:
        looked.append(len(engine.running))
        return FREE

    monkeypatch.setattr(type(engine.drafters.get(drafter)), "offer", offer)
    assert [*write(engine, texts).values()] == [answer for _, answer in texts]
    assert engine.stats.drafted == 0
    assert not [batch for batch in looked if batch > 1], "one alone is always asked"
    assert engine.stats.forms == {"plain": engine.stats.tokens}


def test_parts_of_the_host_are_measured() -> None:
    texts = made_texts(16, 0.2)
    row = measure_rounds(make("ngram", texts, 4, None), texts, 4, 40)
    assert row["plan_ms"] > 0.0
    assert row["round_ms"] >= row["host_ms"] > row["outcome_ms"] > 0.0
