"""Load on a server, and what it came to.

Open loop: requests come at random times, whether or not earlier ones were answered. Closed loop: so many clients, each
of which asks again as soon as it has its answer.
"""

from __future__ import annotations

import asyncio
import random
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from lab.plots import load_pyplot
from lab.serve.stream_client import Answer, Endpoint, ask

Counts = dict[str, float]
PARTS = ("prompt", "draft", "pass", "verdict", "host")  # as forerun.engine.stats books them
_NAMES = {
    'forerun:cpu_seconds_total{model_name="%s",thread="engine"}': "engine",
    'forerun:cpu_seconds_total{model_name="%s",thread="front"}': "front",
    'forerun:cpu_seconds_total{model_name="%s",thread="others"}': "others",
    'forerun:generation_tokens_total{model_name="%s"}': "tokens",
    'forerun:rounds_total{model_name="%s"}': "rounds",
    **{f'forerun:round_seconds_total{{model_name="%s",part="{part}"}}': part for part in PARTS},
}


def read_host(endpoint: Endpoint) -> Counts:
    """What the server has counted so far; empty where it is not one of ours."""
    asked = urllib.request.Request(f"{endpoint.base}/metrics", headers=dict(endpoint.headers))
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except (urllib.error.URLError, OSError, ValueError):
        return {}
    wanted = {name % endpoint.model: short for name, short in _NAMES.items()}
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {wanted[name]: float(value) for name, _, value in pairs if name in wanted}


def host_figures(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Per token of a run: microseconds of CPU by thread; per round: milliseconds of its thread, and by part."""
    spent = {name: after[name] - before[name] for name in after if name in before}
    if len(spent) < len(_NAMES) or spent["tokens"] <= 0 or spent["rounds"] <= 0:
        return {}
    token, a_round = 1e6 / spent["tokens"], 1e3 / spent["rounds"]
    return {
        **{f"{name}_us_per_token": round(spent[name] * token, 2) for name in ("engine", "front", "others")},
        "engine_cpu_ms_per_round": round(spent["engine"] * a_round, 3),
        **{f"{part}_ms_per_round": round(spent[part] * a_round, 3) for part in PARTS},
        "tokens_per_round": round(spent["tokens"] / spent["rounds"], 2),
    }


Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    first: float
    per_token: float


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come: at a rate (open loop), or from so many clients (closed loop)."""

    requests: int
    rate: float = 0.0  # a second
    times: float = 0.0  # what one client at a time gets, which makes that rate
    clients: int | None = None
    seed: int = 0

    async def send(self, endpoint: Endpoint, bodies: Sequence[Body]) -> tuple[list[Answer], float]:
        if self.clients is not None:
            return await send_by_clients(endpoint, bodies, self.clients)
        return await send_all(endpoint, bodies, arrivals(self.rate, len(bodies), self.seed))

    def facts(self) -> dict[str, Any]:
        open_loop = self.clients is None
        return {
            "load": self.times if open_loop else None, "rate": round(self.rate, 4) if open_loop else None,
            "clients": self.clients,
        }  # fmt: skip


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds after the start at which requests come: a Poisson process."""
    dice, now, times = random.Random(seed), 0.0, list[float]()
    for _ in range(count):
        times.append(now)
        now += dice.expovariate(rate)
    return times


async def send_all(endpoint: Endpoint, bodies: Sequence[Body], times: Sequence[float]) -> tuple[list[Answer], float]:
    """Send each at its time; the answers in order, and the seconds until the last was there."""
    started = perf_counter()

    async def one(body: Body, at: float) -> Answer:
        await asyncio.sleep(max(0.0, started + at - perf_counter()))
        return await ask(endpoint, body)

    answers = await asyncio.gather(*(one(body, at) for body, at in zip(bodies, times, strict=True)))
    return list(answers), perf_counter() - started


async def send_by_clients(endpoint: Endpoint, bodies: Sequence[Body], clients: int) -> tuple[list[Answer], float]:
    """So many clients take the next request each until none is left; the answers in order, and the seconds in all."""
    started, answers, waiting = perf_counter(), dict[int, Answer](), iter(enumerate(bodies))

    async def client() -> None:
        for number, body in waiting:
            answers[number] = await ask(endpoint, body)

    await asyncio.gather(*(client() for _ in range(clients)))
    return [answers[number] for number in range(len(bodies))], perf_counter() - started


def figures(answers: Sequence[Answer], wanted: Sequence[str], seconds: float, target: Target) -> dict[str, Any]:
    """Throughput, goodput, percentiles, and what was lost or changed."""
    whole = [(a, w) for a, w in zip(answers, wanted, strict=True) if a.problem is None]
    first = sorted(s for a, _ in whole if (s := a.first_seconds) is not None)
    later = sorted(s for a, _ in whole if (s := a.seconds_per_token) is not None)
    good = sum(
        (a.first_seconds or 0.0) <= target.first and (a.seconds_per_token or 0.0) <= target.per_token for a, _ in whole
    )
    return {
        "requests": len(answers), "seconds": round(seconds, 3), "lost": len(answers) - len(whole),
        "problems": sorted({a.problem for a in answers if a.problem is not None})[:4],
        "unequal": sum(a.text != w for a, w in whole),
        "tokens_per_second": round(sum(a.tokens for a, _ in whole) / seconds, 2),
        "requests_per_second": round(len(whole) / seconds, 3), "good_per_second": round(good / seconds, 3),
        "ttft": _percentiles(first), "tpot": _percentiles(later),
    }  # fmt: skip


def over_off(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tokens per second by those without speculation, for every load and other mode; medians where repeated."""
    found: dict[tuple[Any, Any], dict[str, list[float]]] = {}
    for row in rows:
        place = found.setdefault((row["load"], row["clients"]), {})
        place.setdefault(row["mode"], []).append(row["tokens_per_second"])
    return [
        {"load": load, "clients": clients, "mode": mode, "ratio": round(median(speeds) / median(modes["off"]), 3)}
        for (load, clients), modes in found.items()
        for mode, speeds in modes.items()
        if mode != "off" and min(modes.get("off", [0.0])) > 0.0
    ]


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """By nearest rank, of sorted values."""

    def at(share: float) -> float | None:
        if not values:
            return None
        return round(values[min(len(values) - 1, int(share * len(values)))], 5)

    return {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}


def plot(document: dict[str, Any], file: Path) -> None:
    pyplot = load_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    facts = document["conditions"]
    rows = [row for row in document["rows"] if row["clients"] is None] or document["rows"]
    by = "rate" if rows[0]["clients"] is None else "clients"
    for mode in dict.fromkeys(row["mode"] for row in rows):
        own = [row for row in rows if row["mode"] == mode]
        rates = [row[by] for row in own]
        left.plot(rates, [row["tokens_per_second"] for row in own], marker="o", label=f"speculation {mode}")
        right.plot(rates, [row["ttft"]["p99"] for row in own], marker="o", label=f"speculation {mode}")
    for axes, says in ((left, "tokens per second"), (right, "seconds to the first token, p99")):
        axes.set_xlabel("requests per second that come in" if by == "rate" else "clients at once")
        axes.set_ylabel(says)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle(f"{document['model']}, {facts['cpu']}, {facts['date'][:10]}")
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
