"""Look-ups alone on a device: plain rounds follow each other as without, unless a match is worth reading one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from forerun.build.engine import make_engine
from forerun.control.adaptive import AdaptiveController
from forerun.control.overlap import Overlap
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request, Round
from forerun.drafters.base import BaseDrafter
from forerun.drafters.lookup.lookahead import LookaheadDrafter
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.drafters.lookup.recycling import RecyclingDrafter
from forerun.drafters.lookup.suffix import SuffixDrafter
from forerun.engine.engine import Engine
from forerun.models.cuda.target import CudaDecoder
from tests.gpu.test_following import willing_target
from tests.gpu.test_hybrid_following import COST, counting_target
from tests.gpu.tiny import VOCAB, make_target

GAP = 3e-4  # seconds of the host in a round that was read first
LOOKUPS: list[Callable[[], BaseDrafter]] = [NgramDrafter, SuffixDrafter, RecyclingDrafter, LookaheadDrafter]


class Timed(AdaptiveController):
    """Is told the seconds of a GPU instead of those of this machine."""

    rounds = followed = drafted = accepted = 0

    def observe(self, outcome: Round) -> None:
        nodes = sum(outcome.drafted)
        self.rounds += 1
        self.followed += outcome.followed
        self.drafted += bool(nodes)
        self.accepted += sum(outcome.accepted)
        seconds = {"draft": 0.0, "host": 0.0 if outcome.followed else GAP}
        seconds["pass"] = COST.pass_seconds(nodes + len(outcome.seqs))
        super().observe(replace(outcome, seconds=seconds, prompt_rows=0))


def make(target: CudaDecoder, lookup: BaseDrafter | None = None, batch: int = 1) -> Engine:
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(target, frozenset({1}), speculative, EngineConfig(max_batch=batch))
    if lookup is not None:
        engine.drafters.add("lookup", lookup)
        engine.controller = Timed(COST, 60, 10, lookup.offer, engine.drafters.looks_up, follows=True)
    engine.timeline.depth = 2
    return engine


def asked(prompts: list[list[int]], tokens: int, **params: object) -> list[Request]:
    return [
        Request(one, SamplingParams(max_tokens=tokens, **params), drafter="lookup")  # type: ignore[arg-type]
        for one in prompts
    ]


def write(engine: Engine, some: list[Request], at_once: int = 1) -> list[list[int]]:
    """So many at a time."""
    found: dict[int, list[int]] = {}
    for first in range(0, len(some), at_once):
        found |= {engine.submit(one): [] for one in some[first : first + at_once]}
        while engine.busy:
            for event in engine.step():
                assert event.error is None
                found[event.seq_id] += event.tokens
    assert engine.target.used_slots == 0
    return list(found.values())


def plain(target: CudaDecoder, some: list[Request], at_once: int = 1) -> tuple[list[list[int]], int]:
    """Texts of plain decoding, and the passes that were launched before the last one was read."""
    before = target.plain.followed
    texts = write(make(target, batch=at_once), [replace(one, drafter=None) for one in some], at_once)
    return texts, target.plain.followed - before


def misleading(count: int) -> list[list[int]]:
    """Prompts with all tokens that will be written: behind none of them comes what comes here."""
    rng, prompts = random.Random(count), list[list[int]]()
    while len(prompts) < count:
        one = [*range(2, VOCAB)]
        rng.shuffle(one)
        one = [token for i, token in enumerate(one) if not i or token != one[i - 1] + 1]
        prompts.append([*one, rng.randrange(2, VOCAB - 60)])
    return prompts


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("lookup", LOOKUPS)
def test_rounds_follow_as_in_plain_decoding_where_nothing_is_copied(
    lookup: Callable[[], BaseDrafter], at_once: int
) -> None:
    target, some = counting_target(), asked(misleading(4), 24)
    texts, ahead = plain(target, some, at_once)
    engine = make(target, lookup(), at_once)
    assert write(engine, some, at_once) == texts
    controller = engine.controller
    assert isinstance(controller, Timed)
    assert ahead > 0.8 * controller.rounds
    assert controller.followed >= ahead - 3
    assert controller.drafted <= 3


def test_a_controller_that_always_waits_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: as if every match were worth it."""
    monkeypatch.setattr(Overlap, "waits", lambda self, chooser, head, offers: True)
    target, some = counting_target(), asked(misleading(3), 24)
    texts, ahead = plain(target, some)
    engine = make(target, NgramDrafter())
    assert write(engine, some) == texts
    assert isinstance(engine.controller, Timed)
    assert engine.controller.followed < 0.2 * ahead


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3, "top_k": 2}], ids=["T=0", "T=1"])
@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("lookup", LOOKUPS)
def test_copied_text_is_drafted(lookup: Callable[[], BaseDrafter], at_once: int, params: dict[str, object]) -> None:
    """The prompt holds what will be written, twice."""
    target, rng = counting_target(), random.Random(3)
    starts = [rng.randrange(2, VOCAB - 50) for _ in range(4)]
    prompts = [[*range(one, one + 48), *range(one, one + 48), one] for one in starts]
    some = asked(prompts, 40, **params)
    texts, _ = plain(target, some, at_once)
    engine = make(target, lookup(), at_once)
    assert write(engine, some, at_once) == texts
    controller = engine.controller
    assert isinstance(controller, Timed)
    if not params:
        assert controller.rounds < 0.6 * len(starts) / at_once * 40
        assert controller.drafted >= 4 / at_once


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_plain_decoding(seed: int, temperature: float) -> None:
    """Whoever joins and ends, with stop tokens and limits, in texts that repeat themselves now and then."""
    target, rng = willing_target(), random.Random(seed)
    prompts = [[rng.randrange(2, VOCAB) for _ in range(rng.choice((1, 5, 30)))] for _ in range(10)]
    some = [
        Request(one, SamplingParams(max_tokens=rng.randint(1, 40), temperature=temperature, seed=i), drafter="lookup")
        for i, one in enumerate(prompts)
    ]
    wanted, _ = plain(target, some)
    engine = make(target, NgramDrafter(), batch=3)
    assert write(engine, some, at_once=5) == wanted


def test_texts_that_the_host_decides_about_are_looked_up_too() -> None:
    """Nothing follows, so that there is no gap to save: penalties, and log-probabilities of tokens."""
    target = make_target("llama", "cpu")
    some = asked([[5, 6, 7, 8] * 12] * 2, 30, repetition_penalty=1.1)
    wanted, _ = plain(target, some)
    assert write(make(target, NgramDrafter()), some) == wanted
