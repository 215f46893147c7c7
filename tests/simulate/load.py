"""Simulate a server under load: clients in a closed loop, the real engine and controller, time that is counted.

    plain, drafted = compare(32)
    drafted.rate / plain.rate, drafted.first_at(0.99)

Every client asks again as soon as it has its answer. For each number of clients: the time to the first token and tokens
per second, with drafts (forerun.control.adaptive) and without, on an 8B of one H200 (lab.simulate.device).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.build.engine import make_engine
from forerun.control.adaptive import AdaptiveController
from forerun.control.base import Controller, FixedController
from forerun.control.cost import CostModel
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.engine.engine import Engine
from lab.simulate.device import SimulatedDevice
from lab.simulate.speeds import Speeds, h200
from tests.simulate.device import DrawnAnswers, SimulatedClock
from tests.simulate.head import SimulatedHead

HEAD = "head"
RETURN = 1e-3  # seconds from the last token of an answer to the client's next request


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: tokens of its prompt, and of its answer."""

    prompt: int
    answer: int


def asks(count: int, seed: int = 0, prompt: int = 290, answer: int = 96) -> list[Ask]:
    """Prompts of a third to five thirds of that length, and answers of half to all of theirs."""
    rng = random.Random(seed)
    return [Ask(rng.randint(prompt // 3, prompt * 5 // 3), rng.randint(answer // 2, answer)) for _ in range(count)]


@dataclass(slots=True)
class Answered:
    """What a load came to."""

    first: list[float] = field(default_factory=list)  # seconds to the first token, by request
    passes: list[int] = field(default_factory=list)  # passes that were launched meanwhile
    longest_pause: float = 0.0  # seconds between two events of one request
    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def first_at(self, share: float) -> float:
        """By nearest rank, as lab.serve does."""
        return sorted(self.first)[min(len(self.first) - 1, int(share * len(self.first)))]


class SimulatedServer:
    """One engine on a simulated GPU; `drafts` = the adaptive controller, else speculation is off."""

    def __init__(self, drafts: bool, *, places: int = 64, speeds: Speeds | None = None, rate: float = 0.7) -> None:
        self.clock, speeds = SimulatedClock(), speeds or h200()
        self.gpu = SimulatedDevice(self.clock, speeds, DrawnAnswers(rate))
        speculative = SpeculativeConfig(drafter="none", controller="fixed")
        self.engine: Engine = make_engine(self.gpu, frozenset(), speculative, EngineConfig(max_batch=places))
        self.drafter = HEAD if drafts else "none"
        head = SimulatedHead(self.gpu, rate)
        self.engine.drafters.add(HEAD, head)
        if drafts:
            controller: Controller = AdaptiveController(CostModel(speeds.curve()), 60, 10, head.offer)
        else:
            controller = FixedController(0)
        self.engine.controller = controller

    def serve(self, some: Sequence[Ask], clients: int, apart: float = 0.0) -> Answered:
        """All of these, by so many clients who begin at once, or so many seconds after each other."""
        self.gpu.finish()
        started, found = self.clock.seconds, Answered()
        coming = iter(some)
        arrivals = [(started + i * apart, i) for i in range(min(clients, len(some)))]
        pending = {i: next(coming) for _, i in arrivals}  # by client
        asked: dict[int, tuple[float, int, int]] = {}  # sequence -> when, passes before it, client
        last: dict[int, float] = {}
        while arrivals or self.engine.busy:
            while arrivals and arrivals[0][0] <= self.clock.seconds:
                when, client = heapq.heappop(arrivals)
                number = self.submit(pending.pop(client))
                asked[number] = when, len(self.gpu.passes), client
                last[number] = -1.0
            if not self.engine.busy:
                self.clock.wait_until(arrivals[0][0])
                continue
            if (left := self.engine.spare_seconds()) > 0.0:  # as forerun.engine.driver does
                coming_at = arrivals[0][0] if arrivals else float("inf")
                self.clock.wait_until(min(self.clock.seconds + left, coming_at))
                continue
            for event in self.engine.step():
                assert event.error is None
                now, number = self.clock.seconds, event.seq_id
                found.tokens += len(event.tokens)
                if last[number] < 0.0:
                    found.first.append(now - asked[number][0])
                    found.passes.append(len(self.gpu.passes) - asked[number][1])
                else:
                    found.longest_pause = max(found.longest_pause, now - last[number])
                last[number] = now
                if event.finished is not None and (following := next(coming, None)) is not None:
                    client = asked[number][2]
                    pending[client] = following
                    heapq.heappush(arrivals, (now + RETURN, client))
        found.seconds = self.clock.seconds - started
        return found

    def submit(self, ask: Ask) -> int:
        prompt = tuple([1 + i % 1000 for i in range(ask.prompt)])
        params = SamplingParams(max_tokens=ask.answer, ignore_eos=True)
        return self.engine.submit(Request(prompt, params, drafter=self.drafter))


def compare(
    clients: int,
    each: int = 3,
    places: int = 64,
    prompt: int = 290,
    rate: float = 0.7,
    apart: float = 0.0,
    seed: int | None = None,
) -> tuple[Answered, Answered]:
    """A load without drafts and with them, on servers that have served such loads before."""
    found = []
    for drafts in (False, True):
        server = SimulatedServer(drafts, places=places, rate=rate)
        for few in (1, 8, clients):
            server.serve(asks(max(8, each * few), few, prompt), few, apart)
        last = asks(max(8, each * clients), clients if seed is None else seed, prompt)
        found.append(server.serve(last, clients, apart))
    return found[0], found[1]
