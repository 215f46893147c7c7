"""Simulate short requests that arrive at random, alone and beside long prompts that follow each other.

    alone, beside = (first_tokens(SimulatedServer(False, speeds=h200_small()), long) for long in (0, 30_000))
    beside.first_at(0.99) / alone.first_at(0.99)

As tests.gpu.company_times measures it: 20 requests a second with 40 to 160 tokens, 32 tokens each. The times are those
of a model of 1.5B on one H200: a plain pass of 2.7 ms, prompts of 8 us a token and 3.5e-10 s a token squared.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from lab.simulate.speeds import Speeds
from tests.simulate.load import Ask, SimulatedServer

ANSWER = 32


def h200_small(plain: float = 2.7e-3) -> Speeds:
    """Rows cost little up to about 128, then what products take."""
    full = 8.2e-3
    shape = {1: 0.0, 64: 0.05, 128: 0.1, 256: 0.21, 512: 0.47, 1024: 1.0}
    return Speeds({rows: plain + share * (full - plain) for rows, share in shape.items()}, context=7e-10)


@dataclass(slots=True)
class Company:
    """Seconds to the first token of short requests, sorted, and of long ones."""

    short: list[float] = field(default_factory=list)
    long: list[float] = field(default_factory=list)

    def first_at(self, share: float) -> float:
        return sorted(self.short)[int(share * (len(self.short) - 1))]

    @property
    def reading(self) -> float:
        return sum(self.long) / len(self.long)


def first_tokens(server: SimulatedServer, long: int, requests: int = 100, rate: float = 20.0, seed: int = 1) -> Company:
    """`long`: tokens of the prompts beside them, 0 = none."""
    engine, clock, rng, found = server.engine, server.clock, random.Random(seed), Company()
    server.gpu.finish()
    due, now = list[tuple[float, Ask]](), clock.seconds + 0.01
    for _ in range(requests):
        now += rng.expovariate(rate)
        due.append((now, Ask(rng.randint(40, 160), ANSWER)))
    sent, which = dict[int, float](), -1
    while due or sent:
        if long and due and which not in sent:
            which = server.submit(Ask(long, ANSWER))
            sent[which] = clock.seconds
        while due and due[0][0] <= clock.seconds:
            at, ask = due.pop(0)
            sent[server.submit(ask)] = at
        if not engine.busy:
            clock.wait_until(due[0][0] if due else clock.seconds)
            continue
        if (left := engine.spare_seconds()) > 0.0:  # as forerun.engine.driver does
            clock.wait_until(min(clock.seconds + left, due[0][0] if due else float("inf")))
            continue
        for event in engine.step():
            if event.tokens and event.seq_id in sent:
                (found.long if event.seq_id == which else found.short).append(clock.seconds - sent.pop(event.seq_id))
    while engine.busy:
        engine.step()
    return found
