"""Is the planner right here? `python -m lab plan-check`: its forecast beside a server under load.

Measures a profile with the engine alone, starts `forerun serve`, sends it the requests of `make bench-serve` at several
rates, and compares tokens a second with what the simulator says of the same arrivals. Others who use the machine
slow both down, and not equally: where the system tells how long threads waited for a core, that is taken out of the
profile and put into the forecast.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from forerun.api.llm import LLM
from forerun.cli.bench import numbers
from forerun.core.errors import InvalidInput
from forerun.measure.bench.alternate import in_turn
from forerun.measure.bench.batches import parse_batches
from forerun.measure.bench.suites import load_suite
from forerun.measure.peers.endpoint import base_of, first_model
from forerun.measure.plan.advice import Ask, simulate
from forerun.measure.plan.measure import Contention, newest_child, prompts_of
from forerun.measure.plan.measure import measure as measure_profile
from forerun.measure.plan.profile import Profile
from lab.runner import Document, Run, share
from lab.serve.command import serving
from lab.serve.load import arrivals, send_all
from lab.serve.stream_client import Endpoint

WITHIN = 0.15
BATCH = 8
Row = dict[str, Any]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    share(parser, model="smollm2", max_tokens=48, batches="1,2,4,8", repeats=2, seed=0)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--loads", default="1,4", help="rates, as multiples of what one client gets")


def measure(run: Run) -> Document:
    """Measure, forecast, compare; `equal` unless a forecast of throughput is off by more than 15%."""
    flags = run.flags
    llm = LLM.load(flags.model, max_batch=BATCH)
    batches = parse_batches(flags.batches)
    profile = measure_profile(llm, batches=batches, max_tokens=flags.max_tokens, repeats=flags.repeats)
    modes = dict(zip(("off", "on"), profile.setups, strict=True))
    lengths = [len(prompt) for prompt in prompts_of(llm, count=flags.requests)]
    with serving(flags.model, f"--max-num-seqs {BATCH}") as url:
        endpoint = Endpoint(base_of(url), first_model(url))
        found = asyncio.run(under_load(flags, endpoint, Contention(newest_child())))
    rows = [forecast(profile, row, modes[row["mode"]], lengths, flags.seed) for row in found]
    worst = max(abs(row["off"]) for row in rows)
    return {"source": profile.source, "rows": rows, "worst": worst, "equal": worst <= WITHIN}


def show(document: Document, flags: argparse.Namespace) -> None:
    """A line for each load and mode."""
    for row in document["rows"]:
        told = f"{row['forecast']:.1f} tokens/s forecast, {row['measured']:.1f} measured ({row['off']:+.0%})"
        said = f"load {row['load']:g}, speculation {row['mode']}: {told}"
        print(f"{said}, others made it {row['slowdown']:.1f} times slower", file=sys.stderr)


async def under_load(flags: argparse.Namespace, endpoint: Endpoint, contention: Contention) -> list[Row]:
    """Every rate with speculation off and on: tokens a second, and how much others slowed the server."""
    items = load_suite(None)
    chosen = [items[i * len(items) // flags.requests] for i in range(flags.requests)]
    plain = {"max_tokens": flags.max_tokens, "temperature": 0}
    bodies = [{"messages": list(item.messages), **plain} for item in chosen]
    alone = fmean([(await send_all(endpoint, [body], [0.0]))[1] for body in bodies[:2]])
    rows = list[Row]()
    for turn, load in enumerate(numbers(flags.loads, "loads")):
        for mode in in_turn(("off", "on"), turn):
            salt = {"speculative": mode, "cache_salt": f"{load} {mode}"}  # none finds its prompts cached
            contention.slowdown()
            times = arrivals(load / alone, len(bodies), flags.seed)
            answers, seconds = await send_all(endpoint, [{**body, **salt} for body in bodies], times)
            if problem := next((a.problem for a in answers if a.problem is not None), None):
                raise InvalidInput(f"the server did not answer: {problem}")
            tokens = [answer.tokens for answer in answers]
            rows.append({
                "load": load, "mode": mode, "rate": load / alone, "tokens": tokens,
                "measured": round(sum(tokens) / seconds, 2), "slowdown": round(contention.slowdown(), 3),
            })  # fmt: skip
    return rows


def forecast(profile: Profile, row: Mapping[str, Any], setup: str, lengths: Sequence[int], seed: int) -> Row:
    """A row with what the simulator says of the same requests at the same times on a machine as busy as it was."""
    times = arrivals(row["rate"], len(lengths), seed)
    asks = [Ask(*each) for each in zip(times, lengths, row["tokens"], strict=True)]
    said = simulate(profile, setup, asks, BATCH, row["slowdown"]).tokens_per_second
    off = round(said / row["measured"] - 1, 4)
    return {**row, "setup": setup, "forecast": round(said, 2), "off": off}
