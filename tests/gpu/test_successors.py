"""Successors of single tokens from the GPU decoder, and texts drafted with them where rounds follow each other."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from forerun.core.params import SamplingParams
from forerun.core.types import Needs, PlainSeq, Request, TreeBatch
from forerun.drafters.lookup.suffix import SuffixDrafter
from forerun.drafters.lookup.suffix_table import Successors
from tests.gpu.test_following import willing_target
from tests.gpu.test_hybrid_following import counting_target
from tests.gpu.test_lookups_following import Timed, asked, make, misleading, plain, write
from tests.gpu.tiny import DEVICES, VOCAB, make_target, need_cuda

OPENING = (3, 1, 4)


def own(target: object) -> SuffixDrafter:
    found = Successors.of(target, OPENING)  # type: ignore[arg-type]
    assert found is not None
    return SuffixDrafter(successors=found)


@pytest.mark.parametrize("device", DEVICES)
def test_they_are_the_laws_of_passes_over_one_text_each(device: str) -> None:
    need_cuda(device)
    target = make_target("llama", device)
    found = Successors.of(target, OPENING)
    assert found is not None
    for token in (0, 31, 62, VOCAB - 1):
        seq = PlainSeq(9, [*OPENING, token])
        target.prefill([seq], Needs())
        logits = target.score([seq], TreeBatch.chains([[token]], target.device), Needs()).required_logits
        target.release(seq)
        shares = logits[0].float().softmax(-1)
        for share, successor in found.after(token):
            assert share == pytest.approx(float(shares[successor]), rel=0.05)
        assert float(shares.max()) == pytest.approx(found.after(token)[0][0], rel=0.05)
    assert target.used_slots == 0


@pytest.mark.slow
def test_texts_without_copies_are_drafted_too() -> None:
    """Behind every token comes the next one: what misleads a look-up is known to the table."""
    target, some = counting_target(), asked(misleading(4), 40)
    texts, _ = plain(target, some)
    engine = make(target, own(target))
    assert write(engine, some) == texts
    controller = engine.controller
    assert isinstance(controller, Timed)
    assert controller.rounds < 0.7 * sum(map(len, texts))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("at_once", [1, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_plain_decoding(at_once: int, temperature: float) -> None:
    target, rng = willing_target(), random.Random(at_once)
    prompts = [[rng.randrange(2, VOCAB) for _ in range(rng.choice((1, 5, 30)))] for _ in range(8)]
    params = SamplingParams(temperature=temperature)
    some = [
        Request(one, replace(params, max_tokens=rng.randint(1, 40), seed=i), drafter="lookup")
        for i, one in enumerate(prompts)
    ]
    texts, _ = plain(target, some, at_once)
    engine = make(target, own(target), at_once)
    assert write(engine, some, at_once) == texts
