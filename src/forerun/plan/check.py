"""Is the planner right here? `python -m forerun.plan.check`: its forecast beside a server under load.

Measures a profile with the engine alone, starts `forerun serve`, sends it the requests of `make bench-serve` at several
rates, and compares tokens a second with what the simulator says of the same arrivals. Others who use the machine
slow both down, and not equally: where the system tells how long threads waited for a core, that is taken out of the
profile and put into the forecast. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from forerun.bench.machine import load_average
from forerun.bench.peers.endpoint import base_of, first_model
from forerun.bench.serve.command import serving
from forerun.bench.serve.load import arrivals, send_all
from forerun.bench.serve.stream_client import Endpoint
from forerun.bench.suites import load_suite
from forerun.errors import InvalidInput
from forerun.llm import LLM
from forerun.plan.contention import Contention, newest_child
from forerun.plan.measure import measure, prompts_of
from forerun.plan.profile import Profile
from forerun.plan.simulate import Ask, simulate

WITHIN = 0.15
BATCH = 8
Row = dict[str, Any]


def main(words: Sequence[str] | None = None) -> int:
    """Measure, forecast, compare; 1 if a forecast of throughput is off by more than 15%."""
    flags = _parse(words)
    llm = LLM.load(flags.model, max_batch=BATCH)
    batches = [int(size) for size in flags.batches.split(",")]
    profile = measure(llm, batches=batches, max_tokens=flags.max_tokens, repeats=flags.repeats)
    modes = dict(zip(("off", "on"), profile.setups, strict=True))
    lengths = [len(prompt) for prompt in prompts_of(llm, count=flags.requests)]
    with serving(flags.model, f"--max-num-seqs {BATCH}") as url:
        endpoint = Endpoint(base_of(url), first_model(url))
        found = asyncio.run(under_load(flags, endpoint, Contention(newest_child())))
    rows = [forecast(profile, row, modes[row["mode"]], lengths, flags.seed) for row in found]
    document = {
        "what": "plan-check", "machine": profile.machine, "source": profile.source, "rows": rows,
        "load_average": load_average(), "worst": max(abs(row["off"]) for row in rows),
    }  # fmt: skip
    for row in rows:
        told = f"{row['forecast']:.1f} tokens/s forecast, {row['measured']:.1f} measured ({row['off']:+.0%})"
        said = f"load {row['load']:g}, speculation {row['mode']}: {told}"
        print(f"{said}, others made it {row['slowdown']:.1f} times slower", file=sys.stderr)
    print(json.dumps(document))
    return 0 if document["worst"] <= WITHIN else 1


async def under_load(flags: argparse.Namespace, endpoint: Endpoint, contention: Contention) -> list[Row]:
    """Every rate with speculation off and on: tokens a second, and how much others slowed the server."""
    items = load_suite(None)
    chosen = [items[i * len(items) // flags.requests] for i in range(flags.requests)]
    plain = {"max_tokens": flags.max_tokens, "temperature": 0}
    bodies = [{"messages": list(item.messages), **plain} for item in chosen]
    alone = fmean([(await send_all(endpoint, [body], [0.0]))[1] for body in bodies[:2]])
    rows = list[Row]()
    for load in (float(word) for word in flags.loads.split(",")):
        for mode in ("off", "on"):
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


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m forerun.plan.check", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--loads", default="1,4", help="rates, as multiples of what one client gets")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--repeats", type=int, default=2, help="of the profile")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
