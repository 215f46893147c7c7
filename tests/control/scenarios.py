"""Scenarios that a controller is judged by: what whole runs came to, over seeds, in counted time.

python -m tests.control.scenarios        # writes scenarios.json anew: only when outcomes are meant to change

Engine, controller and look-ups are real wherever a GPU is simulated (lab.simulate); the CPU is the one of
tests.control.simulate. Every scenario gives its speed over plain decoding, the slowest request, the
slowest 20 requests in a row of one drafter, and the share of rounds that were read before the next was launched.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from forerun.build.engine import make_engine
from forerun.control.adaptive import AdaptiveController
from forerun.control.base import FixedController
from forerun.control.cost import CostModel
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Needs, Prompts, Request, Round, Scores, Seq, TreeBatch, TreeForm
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.device.plan import form_of
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.drafters.lookup.suffix import SuffixDrafter
from forerun.engine.engine import Engine
from lab.simulate.speeds import Speeds, level_rate
from tests.control.lookup_texts import COPYING, RECORDED
from tests.control.simulate.lookup import H200, HostSeconds, LookupSimulation
from tests.control.simulate.native_run import ARM, X86, Host, RunSimulation
from tests.control.simulate.predictable import Make, Simulation, TextKind
from tests.simulate.device import SimulatedClock
from tests.simulate.head import SimulatedHead
from tests.simulate.load import SimulatedServer, asks
from tests.simulate.recorded import OTHER, PASSES, NoisyDevice, RecordedAnswers, RecordedText

FILE = Path(__file__).with_name("scenarios.json")
SEEDS = (1, 2, 3)
WORDS = 50_000
NONE, HEAD, NGRAM, SUFFIX, BOTH = "none", "head", "ngram", "suffix", "both"
WINDOW = 20  # requests
MakesController = Callable[..., Any]  # as AdaptiveController is made
# milliseconds of a pass by rows: a 1.5B on an H200, and a mixture of experts there (docs/moe.md)
SMALL = {1: 1.45, 8: 1.5, 16: 1.56, 32: 1.66, 48: 1.8, 64: 2.0, 128: 2.8, 256: 4.4, 512: 8.0, 1024: 15.0}
EXPERTS = {1: 2.28, 2: 2.76, 3: 3.09, 4: 3.33, 6: 3.62, 8: 3.78, 16: 4.16, 24: 5.1, 32: 5.2, 64: 6.4, 128: 9.0,
           256: 14.0, 512: 24.0, 1024: 44.0}  # fmt: skip


@dataclass(slots=True)
class TextAnswers(RecordedAnswers):
    """Texts, of whose tokens a head knows a share of its own in each text, wherever its tree starts."""

    rates: dict[int, float] = field(default_factory=dict)  # by the first token, of which no two texts have the same
    firsts: dict[int, RecordedText] = field(default_factory=dict)

    def _place(self, seq: Seq) -> tuple[RecordedText, int]:
        return self.firsts[seq.tokens[0]], len(seq.tokens) - seq.prompt_length

    def accepted(self, seq: Seq, form: TreeForm) -> int:
        first, count = seq.tokens[0], 0
        each = level_rate(form_of(form), round(self.rates[first], 3))
        while count < form.depth and _draw(first, len(seq.tokens) + count) < each:
            count += 1
        return count


class TextHead(SimulatedHead):
    """Its trees have their tokens, which count where drafts of several drafters share a pass."""

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        trees, answers = super().propose(seqs, budgets), self.gpu.answers
        if (form := trees.form) is None:
            return trees
        assert isinstance(answers, TextAnswers)
        tokens, parents = list[int](), list[int]()
        for seq in seqs:
            count = answers.accepted(seq, form)
            right = [answers.word(seq, depth) for depth in range(count)]
            tokens += [seq.tokens[-1], *right, *[OTHER] * (form.nodes - 1 - count)]
            parents += [-1, *range(form.depth), *[0] * (form.nodes - form.depth - 1)]
        rows = torch.tensor(tokens), torch.tensor(parents)
        return TreeBatch(*rows, trees.starts, form=form, draft_seconds=trees.draft_seconds)


@cache
def _draw(text: int, place: int) -> float:
    return random.Random(f"{text} {place}").random()


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts with a rate each; a request is a text and the drafter that it asks for."""

    texts: list[RecordedText]
    rates: list[float]

    @classmethod
    def drawn(
        cls, count: int, rates: tuple[float, float], seed: int, *, length: int = 64, matches: bool = True
    ) -> Texts:
        """Recorded texts, or with `matches=False` texts in which no token comes twice."""
        rng, found, own = random.Random(seed), list[RecordedText](), list[float]()
        for i in range(count):
            prompt, answer = RECORDED[i % len(RECORDED)]
            tokens = [4 + token % (WORDS - 2000) for token in (*prompt, *answer[:length])]
            if not matches:
                tokens = [4 + (i * 1009 + j) % (WORDS - 2000) for j in range(40 + length)]
            cut = len(tokens) - min(length, len(answer) if matches else length)
            found.append(RecordedText("", [WORDS - 1 - i, *tokens[:cut]], tokens[cut:], np.zeros(0, np.int16)))
            own.append(rng.uniform(*rates))
        return cls(found, own)

    @classmethod
    def behind(cls, lengths: Sequence[int], rates: tuple[float, float], seed: int, *, answer: int = 128) -> Texts:
        """Texts behind prompts of these lengths, in which no token comes twice."""
        rng, found = random.Random(seed), list[RecordedText]()
        for i, length in enumerate(lengths):
            tokens = [4 + (i * 1009 + j) % (WORDS - 2000) for j in range(length - 1 + answer)]
            prompt = [WORDS - 1 - i, *tokens[: length - 1]]
            found.append(RecordedText("", prompt, tokens[length - 1 :], np.zeros(0, np.int16)))
        return cls(found, [rng.uniform(*rates) for _ in lengths])


@dataclass(slots=True)
class Written:
    """What a run took."""

    seconds: float = 0.0
    each: list[float] = field(default_factory=list)  # seconds by request
    rounds: int = 0
    read_first: int = 0


@dataclass(slots=True)
class LongDevice(NoisyDevice):
    """A pass also takes time for what its sequences have cached: for each of them, and for each node of its tree."""

    max_length: int = 1 << 18
    slopes: tuple[float, float] = (0.0, 0.0)  # seconds for each token that is cached
    _reading: float = 0.0  # of the pass that is launched

    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        rows = trees.nodes if trees.form is None else trees.form.rows
        cached = sum(self.cached_tokens(seq) for seq in seqs)
        self._reading = cached * (self.slopes[0] + self.slopes[1] * rows / len(seqs))
        found = NoisyDevice.score(self, seqs, trees, needs, prompts)
        self._reading = 0.0
        return found

    def busy_for(self, seconds: float) -> None:
        NoisyDevice.busy_for(self, seconds + self._reading)
        self._reading = 0.0


def engine_of(
    texts: Texts,
    passes: Mapping[int, float],
    make: MakesController | None,
    seed: int,
    batch: int,
    slopes: tuple[float, float] = (0.0, 0.0),
) -> tuple[Engine, NoisyDevice]:
    """An engine with all drafters; without a controller it is one that never drafts. `slopes`: of a LongDevice."""
    speeds, clock = Speeds({rows: ms / 1e3 for rows, ms in passes.items()}), SimulatedClock()
    rates = {one.prompt[0]: rate for one, rate in zip(texts.texts, texts.rates, strict=True)}
    firsts = {one.prompt[0]: one for one in texts.texts}
    answers = TextAnswers(vocab_size=WORDS, rates=rates, firsts=firsts)
    gpu = LongDevice(clock, speeds, answers, rng=random.Random(seed), slopes=slopes)
    config = SpeculativeConfig(drafter=NONE, controller="fixed")
    engine = make_engine(gpu, frozenset(), config, EngineConfig(max_batch=batch))
    pool = engine.drafters
    for name, drafter in (
        (HEAD, TextHead(gpu, 0.6)),
        (NGRAM, NgramDrafter()),
        (SUFFIX, SuffixDrafter()),
        (BOTH, HybridDrafter(NgramDrafter(), TextHead(gpu, 0.6))),
    ):
        pool.add(name, drafter)
    engine.controller = (
        FixedController(0)
        if make is None
        else make(CostModel(speeds.curve(), slopes), 60, 10, pool.offer, pool.looks_up, follows=True)
    )
    return engine, gpu


def write(
    texts: Texts,
    names: Sequence[str],
    passes: Mapping[int, float],
    make: MakesController | None,
    seed: int,
    batch: int = 1,
    slopes: tuple[float, float] = (0.0, 0.0),
) -> dict[str, Written]:
    """All texts by each of these drafters in turn, alone; or, in a batch, one drafter for each text, all at once."""
    engine, gpu = engine_of(texts, passes, make, seed, batch, slopes)
    found, current, observe = {name: Written() for name in names}, [""], engine.controller.observe

    def noted(outcome: Round) -> None:
        own = found[current[0]]
        own.rounds += 1
        own.read_first += not outcome.followed
        observe(outcome)

    engine.controller.observe = noted  # type: ignore[method-assign]
    if batch > 1:
        current[0] = names[0]
        some = [(text, names[i % len(names)]) for i, text in enumerate(texts.texts)]
        found[names[0]].seconds = _answer(engine, gpu, some)
        return found
    for i, text in enumerate(texts.texts):
        for name in (*names[i % len(names) :], *names[: i % len(names)]):
            current[0] = name
            taken = _answer(engine, gpu, [(text, name)])
            found[name].seconds += taken
            found[name].each.append(taken)
    return found


def _answer(engine: Engine, gpu: NoisyDevice, some: Sequence[tuple[RecordedText, str]]) -> float:
    gpu.finish()
    started, expected, written = gpu.clock.seconds, dict[int, list[int]](), dict[int, list[int]]()
    for text, name in some:
        params = SamplingParams(max_tokens=len(text.answer), ignore_eos=True)
        request = Request(tuple(text.prompt), params, drafter=name, cache_salt=None)
        expected[engine.submit(request)] = text.answer
    while engine.busy:
        gpu.clock.wait_until(gpu.clock.seconds + max(0.0, engine.spare_seconds()))
        for event in engine.step():
            assert event.error is None, event.error
            written.setdefault(event.seq_id, []).extend(event.tokens)
    gpu.finish()
    assert written == expected
    return gpu.clock.seconds - started


def outcome(plain: Written, own: Written) -> dict[str, float]:
    """Speeds over plain decoding, and the share of rounds that were read first."""
    found = {"speed": plain.seconds / own.seconds, "read_first": own.read_first / max(1, own.rounds)}
    if own.each:
        pairs = [*zip(plain.each, own.each, strict=True)]
        windows = [pairs[i : i + WINDOW] for i in range(max(1, len(pairs) - WINDOW + 1))]
        found["worst"] = min(once / drafted for once, drafted in pairs)
        found["worst_20"] = min(sum(one[0] for one in some) / sum(one[1] for one in some) for some in windows)
    return found


def alone(
    name: str, passes: Mapping[int, float], rates: tuple[float, float], others: Sequence[str] = (), **kinds: Any
) -> Callable[[MakesController, int], dict[str, float]]:
    """One drafter at batch 1, its requests in turn with those of others."""

    def run(make: MakesController, seed: int) -> dict[str, float]:
        texts = Texts.drawn(32, rates, seed, **kinds)
        plain = write(texts, [NONE], passes, None, seed)[NONE]
        return outcome(plain, write(texts, [*others, name], passes, make, seed)[name])

    return run


def long_and_short(
    passes: Mapping[int, float], rates: tuple[float, float], slopes: tuple[float, float], lengths: Sequence[int]
) -> Callable[[MakesController, int], dict[str, float]]:
    """A head's texts behind short and long prompts in turn; what is judged is the writing of the long ones.

    Left out is what reading their prompts takes: the target's, and the head's, which it needs before it can draft.
    """

    def run(make: MakesController, seed: int) -> dict[str, float]:
        texts, longest = Texts.behind(lengths, rates, seed), max(lengths)
        plain = write(texts, [NONE], passes, None, seed, slopes=slopes)[NONE].each
        own = write(texts, [HEAD], passes, make, seed, slopes=slopes)[HEAD].each
        read, also = longest // 1024 * passes[1024] / 1e3, Speeds(passes).of_reading(longest)
        pairs = [
            (once - read, drafted - read - also)
            for once, drafted, length in zip(plain, own, lengths, strict=True)
            if length == longest
        ]
        speeds = [once / drafted for once, drafted in pairs]
        return {"speed": sum(one[0] for one in pairs) / sum(one[1] for one in pairs), "worst": min(speeds)}

    return run


def by_length(
    make: MakesController,
    rates: Mapping[int, float],
    lengths: Sequence[int],
    passes: Mapping[int, float],
    slopes: tuple[float, float],
    answer: int = 128,
) -> dict[int, float]:
    """Speed over plain decoding of the texts behind prompts of each length, in turn, without reading the prompts."""
    drawn = Texts.behind(lengths, (0.5, 0.5), 1, answer=answer)
    texts = Texts(drawn.texts, [rates[length] for length in lengths])
    plain = write(texts, [NONE], passes, None, 1, slopes=slopes)[NONE].each
    own, spent = write(texts, [HEAD], passes, make, 1, slopes=slopes)[HEAD].each, dict[int, list[float]]()
    for once, drafted, length in zip(plain, own, lengths, strict=True):
        read, sums = length // 1024 * passes[1024] / 1e3, spent.setdefault(length, [0.0, 0.0])
        sums[0] += once - read
        sums[1] += drafted - read - Speeds(passes).of_reading(length)
    return {length: once / drafted for length, (once, drafted) in spent.items()}


def together(
    names: Sequence[str], batch: int, rates: tuple[float, float], passes: Mapping[int, float] = PASSES
) -> Callable[[MakesController, int], dict[str, float]]:
    """A batch of texts, each with one of these drafters."""

    def run(make: MakesController, seed: int) -> dict[str, float]:
        texts = Texts.drawn(3 * batch, rates, seed, length=96)
        plain = write(texts, [NONE], passes, None, seed, batch)[NONE]
        return outcome(plain, write(texts, names, passes, make, seed, batch)[names[0]])

    return run


def served(clients: int) -> Callable[[MakesController, int], dict[str, float]]:
    """Clients in a closed loop: prompts wait while others write. First tokens may come later than without drafts."""

    def run(make: MakesController, seed: int) -> dict[str, float]:
        found = []
        for drafts in (False, True):
            server = SimulatedServer(drafts)
            if drafts:
                offer = server.engine.drafters.get(HEAD).offer
                server.engine.controller = make(CostModel(server.gpu.speeds.curve()), 60, 10, offer)
            server.serve(asks(2 * clients, seed + 100), clients)
            found.append(server.serve(asks(3 * clients, seed), clients))
        plain, drafted = found
        return {"speed": drafted.rate / plain.rate, "first_token": plain.first_at(0.9) / drafted.first_at(0.9)}

    return run


def on_cpu(make_: Make, cost: CostModel, batch: int) -> Callable[[MakesController, int], dict[str, float]]:
    """Drafters without captured graphs, on texts of several kinds."""
    kinds = (TextKind(0.75, copied=0.3), TextKind(0.1), TextKind(0.9, copied=0.5), TextKind(0.4, copied=0.1)) * 3

    def run(make: MakesController, seed: int) -> dict[str, float]:
        simulation = Simulation(cost, make_, batch=batch, seed=seed)
        simulation.controller = make(CostModel(cost.seconds), 60, 10, simulation._offer)
        parts = [simulation.write(kind, 60) for kind in kinds]
        speeds = [tokens / passes for tokens, passes in parts]
        return {"speed": sum(one[0] for one in parts) / sum(one[1] for one in parts), "worst": min(speeds)}

    return run


def texts_on_cpu(
    make_: Make, *parts: tuple[float, float], lengths: Sequence[int] = (64,), limit: int = 0
) -> Callable[[MakesController, int], dict[str, float]]:
    """Texts one behind the other, which a drafter must read before it drafts; 24 of each of these acceptance rates."""

    def run(make: MakesController, seed: int) -> dict[str, float]:
        simulation, rng = Simulation(SMALL_CPU, make_, seed=seed), random.Random(seed)
        found = list[tuple[int, float, bool]]()
        simulation.controller = make(CostModel(SMALL_CPU.seconds), 60, 10, simulation._offer)
        for rates in parts:
            for _ in range(24):
                kind, length, start = TextKind(rng.uniform(*rates)), rng.choice(lengths), rng.uniform(0.3, 2.0)
                found.append((length, *simulation.write_text(kind, length, start, limit)))
        tokens, passes, read = zip(*found, strict=True)
        least = min(length / taken for length, taken, _ in found)
        return {"speed": sum(tokens) / sum(passes), "worst": least, "read_first": fmean(read)}

    return run


def cpu_lookups(cost: CostModel) -> Callable[[MakesController, int], dict[str, float]]:
    def run(make: MakesController, seed: int) -> dict[str, float]:
        simulation = RunSimulation(cost, Host(), {"recorded": RECORDED, "copied": COPYING[:4]}, noise=0.02, seed=seed)
        simulation.controller = make(CostModel(cost.seconds), 60, 10, simulation.drafter.offer, lambda seq: True)
        done = simulation.run()
        return {"speed": done.speed(), "worst": done.least_speed()}

    return run


def gpu_lookups(batch: int) -> Callable[[MakesController, int], dict[str, float]]:
    """Many sequences, for which look-ups take the host long."""

    def run(make: MakesController, seed: int) -> dict[str, float]:
        simulation = LookupSimulation(H200, HostSeconds(), NgramDrafter(), RECORDED[seed:], batch)
        simulation.controller = make(CostModel(H200.seconds), 60, 10, simulation._offer, lambda seq: True, follows=True)
        return {"speed": simulation.run(600).speed(), "worst": simulation.history.worst_window()}

    return run


# seconds for each token of context, of a sequence and of each row: a 1B on an H200 behind 32,000 tokens
LONG_1B = (25e-9, 2.9e-9)
LONG_8B = (37e-9, 2.3e-9)  # an 8B
IN_TURN = (40, 30_000) * 6
CPU = CostModel({1: 1.0, 2: 1.33, 4: 1.9, 8: 3.4, 16: 6.0})
SMALL_CPU = CostModel({1: 1.0, 2: 1.19, 4: 1.68, 8: 2.93, 16: 5.6})  # a 135M on x86
EASY, ANY = (0.7, 0.9), (0.1, 0.9)
MIXED, HARD = (0.05, 0.8), (0.0, 0.4)
SCENARIOS: dict[str, Callable[[MakesController, int], dict[str, float]]] = {
    "head alone, 8B": alone(HEAD, PASSES, MIXED, matches=False),
    "head alone, 1.5B": alone(HEAD, SMALL, MIXED, matches=False),
    "head alone, hard texts": alone(HEAD, SMALL, HARD, matches=False),
    "hybrid, 8B": alone(BOTH, PASSES, MIXED),
    "hybrid, 1.5B": alone(BOTH, SMALL, MIXED, length=96),
    "hybrid, hard texts": alone(BOTH, SMALL, HARD),
    "n-gram alone, 8B": alone(NGRAM, PASSES, MIXED, length=96),
    "suffix alone, 1.5B": alone(SUFFIX, SMALL, MIXED, length=96),
    "hybrid in turn with n-gram and suffix": alone(BOTH, SMALL, MIXED, (NGRAM, SUFFIX)),
    "hybrid in turn with all": alone(BOTH, SMALL, MIXED, (NONE, NGRAM, SUFFIX, HEAD)),
    "head in turn with suffix": alone(HEAD, SMALL, MIXED, (SUFFIX,), matches=False),
    "n-gram in turn with hybrid": alone(NGRAM, PASSES, MIXED, (BOTH,), length=96),
    "mixed batch of 8": together((HEAD, NGRAM, NONE, BOTH), 8, MIXED),
    "head, 8 sequences": together((HEAD,), 8, MIXED),
    "head, 32 sequences": together((HEAD,), 32, MIXED),
    "hybrid, 32 sequences": together((BOTH,), 32, MIXED),
    "hybrid, 2 sequences": together((BOTH,), 2, MIXED),
    "prompts wait, 8 clients": served(8),
    "prompts wait, 32 clients": served(32),
    "experts": alone(HEAD, EXPERTS, (0.3, 0.8), matches=False),
    "experts, hybrid": alone(BOTH, EXPERTS, (0.3, 0.8)),
    "long in turn with short": long_and_short(SMALL, MIXED, LONG_1B, IN_TURN),
    "long in turn with short, hard texts": long_and_short(SMALL, (0.05, 0.3), LONG_1B, IN_TURN),
    "long texts alone": long_and_short(SMALL, (0.5, 0.7), LONG_1B, IN_TURN[1::2]),
    "n-gram, 32 sequences": gpu_lookups(32),
    "n-gram, 8 sequences": gpu_lookups(8),
    "CPU head": on_cpu(Make(0.1), CPU, 1),
    "CPU dear head": on_cpu(Make(0.3), CPU, 1),
    "CPU head, 3 sequences": on_cpu(Make(0.1), CPU, 3),
    "CPU draft model": on_cpu(Make(0.1, chosen=False, stops=False, start=4.0), CPU, 1),
    "CPU Medusa": on_cpu(Make(0.1, stops=False, one_pass=True), CPU, 1),
    "CPU hybrid": on_cpu(Make(0.1, ngram=True), CPU, 1),
    "CPU n-gram and draft model": on_cpu(Make(0.15, chosen=False, stops=False, start=2.0, ngram=True), CPU, 1),
    "CPU texts, hard": texts_on_cpu(Make(0.15), (0.1, 0.4), (0.1, 0.4)),
    "CPU texts, easy": texts_on_cpu(Make(0.15), EASY),
    "CPU texts, easy behind hard ones": texts_on_cpu(Make(0.15), (0.1, 0.4), EASY),
    "CPU texts of all kinds": texts_on_cpu(Make(0.15), ANY, ANY),
    "CPU texts, short": texts_on_cpu(Make(0.15), ANY, ANY, lengths=(2, 3, 8, 16, 24), limit=512),
    "CPU texts, draft model": texts_on_cpu(Make(0.12, chosen=False, stops=False), ANY, EASY),
    "CPU n-gram, ARM": cpu_lookups(ARM),
    "CPU n-gram, x86": cpu_lookups(X86),
}


def over_seeds(name: str, make: MakesController = AdaptiveController, seeds: Sequence[int] = SEEDS) -> dict[str, float]:
    """The mean speed, the worst of the worst, the mean share."""
    found = [SCENARIOS[name](make, seed) for seed in seeds]
    reduce = {"worst": min, "worst_20": min}
    return {key: round(reduce.get(key, fmean)([one[key] for one in found]), 4) for key in found[0]}


if __name__ == "__main__":
    made = {}
    for name in SCENARIOS:
        made[name] = over_seeds(name)
        sys.stdout.write(f"{name}: {made[name]}\n")
        sys.stdout.flush()
    FILE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
