"""Open-loop load: requests come at random times, whether or not earlier ones were answered, and what that came to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from forerun.bench.serve.stream_client import Answer, Endpoint, ask

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """What counts as a good answer, in seconds."""

    first: float
    per_token: float


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds after the start at which requests come: a Poisson process."""
    dice, now, times = random.Random(seed), 0.0, list[float]()
    for _ in range(count):
        times.append(now)
        now += dice.expovariate(rate)
    return times


async def send_all(
    endpoint: Endpoint, bodies: Sequence[Body], times: Sequence[float]
) -> tuple[list[Answer], float]:
    """Send each at its time; the answers in order, and the seconds until the last was there."""
    started = perf_counter()

    async def one(body: Body, at: float) -> Answer:
        await asyncio.sleep(max(0.0, started + at - perf_counter()))
        return await ask(endpoint, body)

    answers = await asyncio.gather(*(one(body, at) for body, at in zip(bodies, times, strict=True)))
    return list(answers), perf_counter() - started


def figures(
    answers: Sequence[Answer], wanted: Sequence[str], seconds: float, target: Target
) -> dict[str, Any]:
    """Throughput, goodput, percentiles, and what was lost or changed."""
    whole = [(a, w) for a, w in zip(answers, wanted, strict=True) if a.problem is None]
    first = sorted(s for a, _ in whole if (s := a.first_seconds) is not None)
    later = sorted(s for a, _ in whole if (s := a.seconds_per_token) is not None)
    good = sum(
        (a.first_seconds or 0.0) <= target.first and (a.seconds_per_token or 0.0) <= target.per_token
        for a, _ in whole
    )
    return {
        "requests": len(answers), "seconds": round(seconds, 3), "lost": len(answers) - len(whole),
        "problems": sorted({a.problem for a in answers if a.problem is not None})[:4],
        "unequal": sum(a.text != w for a, w in whole),
        "tokens_per_second": round(sum(a.tokens for a, _ in whole) / seconds, 2),
        "requests_per_second": round(len(whole) / seconds, 3), "good_per_second": round(good / seconds, 3),
        "ttft": _percentiles(first), "tpot": _percentiles(later),
    }  # fmt: skip


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """By nearest rank, of sorted values."""

    def at(share: float) -> float | None:
        if not values:
            return None
        return round(values[min(len(values) - 1, int(share * len(values)))], 5)

    return {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}
