"""One replica under load, round by round, with the times that were measured: who waits, and how long."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from forerun.measure.plan.profile import Profile

LONG = 1e6  # tokens: where the cost of context is read off


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: when it comes, and how long its prompt and its answer are."""

    at: float
    prompt: int
    answer: int


@dataclass(slots=True)
class _Running:
    ask: Ask
    written: float = 0.0
    first: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What came of a run."""

    seconds: float = 0.0  # until the last answer was there
    tokens: int = 0
    sequence_rounds: float = 0.0
    rounds: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first token
    per_token: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_batch(self) -> float:
        return self.sequence_rounds / self.rounds if self.rounds else 0.0

    @property
    def mean_tpot(self) -> float:
        return fmean(self.per_token) if self.per_token else 0.0

    def ttft(self, share: float) -> float:
        """By nearest rank."""
        ranked = sorted(self.first)
        return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0


def poisson(rate: float, count: int, prompt: int, answer: int, seed: int = 0) -> list[Ask]:
    """So many requests at random times."""
    dice, now, asks = random.Random(seed), 0.0, list[Ask]()
    for _ in range(count):
        asks.append(Ask(now, prompt, answer))
        now += dice.expovariate(rate)
    return asks


class _Times:
    """The profile of one drafter, looked up once for every batch size."""

    def __init__(self, profile: Profile, setup: str, batch: int, slower: float) -> None:
        sizes = range(1, batch + 1)
        self.gained = [0.0, *(profile.tokens_per_round(setup, size) for size in sizes)]
        self.per_prompt = [0.0, *(slower * profile.prompt_seconds(setup, size) for size in sizes)]
        self.short = [0.0, *(slower * profile.round_seconds(setup, size, 0.0) for size in sizes)]
        long = [0.0, *(slower * profile.round_seconds(setup, size, LONG) for size in sizes)]
        self.per_context = [(after - before) / LONG for before, after in zip(self.short, long, strict=True)]

    def round(self, running: Sequence[_Running]) -> float:
        size, context = len(running), 0.0
        if self.per_context[size]:
            context = sum(one.ask.prompt + one.written for one in running) / size
        return self.short[size] + self.per_context[size] * context


def simulate(profile: Profile, setup: str, asks: Sequence[Ask], batch: int, slower: float = 1.0) -> Outcome:
    """The requests of one replica in the order in which they come; all times are `slower` times the measured ones."""
    times = _Times(profile, setup, batch, slower)
    now, place, running, out = 0.0, 0, list[_Running](), Outcome()
    while place < len(asks) or running:
        if not running and asks[place].at > now:
            now = asks[place].at
        while place < len(asks) and len(running) < batch and asks[place].at <= now:
            now += asks[place].prompt * times.per_prompt[max(1, len(running))]
            running.append(_Running(asks[place]))
            place += 1
        size = len(running)
        now += times.round(running)
        out.rounds, out.sequence_rounds = out.rounds + 1, out.sequence_rounds + size
        ended = False
        for one in running:
            one.first = one.first or now
            one.written += times.gained[size]
            ended = ended or one.written >= one.ask.answer
        if ended:
            for one in running:
                if one.written >= one.ask.answer:
                    _count(out, one, now)
            running = [one for one in running if one.written < one.ask.answer]
    out.seconds = now - (asks[0].at if asks else 0.0)
    return out


def _count(out: Outcome, one: _Running, now: float) -> None:
    out.tokens += one.ask.answer
    out.first.append(one.first - one.ask.at)
    if one.ask.answer > 1:
        out.per_token.append((now - one.first) / (one.ask.answer - 1))
