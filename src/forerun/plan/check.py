"""Is the planner right here? `python -m forerun.plan.check`: its forecast beside a server under load.

Measures a profile with the engine alone, forecasts what `python -m forerun.bench.serve` will find at every rate and in
every mode, and runs it. A machine that others use changes between the two, so the forecast is also given in units of
what one request alone took in each. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.bench.machine import is_busy, load_average
from forerun.bench.peers.endpoint import base_of, first_model
from forerun.bench.serve.command import measure as measure_server
from forerun.bench.serve.command import parse as parse_serve
from forerun.bench.serve.command import serving
from forerun.bench.serve.load import arrivals
from forerun.bench.serve.stream_client import Endpoint
from forerun.llm import LLM
from forerun.plan.measure import measure, prompts_of, setups_for
from forerun.plan.profile import Profile
from forerun.plan.simulate import Ask, simulate

WITHIN = 0.15
FIXED = 4  # the budget of bench-serve's mode `fixed`


def main(words: Sequence[str] | None = None) -> int:
    """Measure, forecast, compare; 1 if a forecast of throughput is off by more than 15%, drift taken out.

    Drift is how much longer one request alone took beside the server than it should have by the profile.
    """
    flags = _parse(words)
    llm = LLM.load(flags.model, max_batch=8)
    setups = setups_for(llm, [FIXED] if flags.fixed else [])
    modes = dict(zip(("off", "adaptive", "fixed"), setups, strict=False))
    batches = [int(size) for size in flags.batches.split(",")]
    profile = measure(llm, batches=batches, max_tokens=flags.max_tokens, setups=setups)
    lengths = [len(prompt) for prompt in prompts_of(llm, count=flags.requests)]
    asked = [
        "--requests", str(flags.requests), "--max-tokens", str(flags.max_tokens), "--loads", flags.loads,
        "--model", flags.model,
    ]  # fmt: skip
    serve_flags = parse_serve(asked)
    with serving(flags.model, "") as url:
        found = asyncio.run(measure_server(serve_flags, Endpoint(base_of(url), first_model(url))))
    rows = forecast(profile, found, modes, lengths, serve_flags.seed)
    document = {
        "what": "plan-check", "machine": profile.machine, "source": profile.source, "rows": rows,
        "busy_after": is_busy(load_average(), 1), "worst": max(abs(row["off_without_drift"]) for row in rows),
        "drift": rows[0]["drift"],
    }  # fmt: skip
    for row in rows:
        told = f"{row['forecast']:.1f} tokens/s forecast, {row['measured']:.1f} measured"
        off = f"{row['off']:+.0%}, {row['off_without_drift']:+.0%} without drift"
        print(f"load {row['load']:g}, {row['mode']}: {told}: {off}", file=sys.stderr)
    print(json.dumps(document))
    return 0 if document["worst"] <= WITHIN else 1


def forecast(
    profile: Profile, found: Mapping[str, Any], modes: Mapping[str, str], lengths: Sequence[int], seed: int
) -> list[dict[str, Any]]:
    """Tokens a second at each rate and mode of a bench-serve document, as simulated and as measured."""
    total = sum(row["tokens_per_second"] * row["seconds"] for row in found["rows"])
    answer = max(1, round(total / sum(row["requests"] - row["lost"] for row in found["rows"])))
    alone = [
        simulate(profile, modes["adaptive"], [Ask(0.0, length, answer)], 1).seconds for length in lengths
    ]
    drift = found["alone_seconds"] / (sum(alone) / len(alone))
    rows = []
    for row in (row for row in found["rows"] if row["mode"] in modes):
        times = arrivals(row["rate"], row["requests"], seed)
        asks = [Ask(at, length, answer) for at, length in zip(times, lengths, strict=True)]
        setup = modes[row["mode"]]
        raw, same = (simulate(profile, setup, asks, 8, slower) for slower in (1.0, drift))
        measured = row["tokens_per_second"]
        rows.append({
            "load": row["load"], "mode": row["mode"], "setup": setup, "forecast": round(raw.tokens_per_second, 2),
            "measured": measured, "off": round(raw.tokens_per_second / measured - 1, 4), "drift": round(drift, 3),
            "off_without_drift": round(same.tokens_per_second / measured - 1, 4),
        })  # fmt: skip
    return rows


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m forerun.plan.check", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--loads", default="0.5,2,4", help="rates, as multiples of what one client gets")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--fixed", action="store_true", help="also the mode with a fixed budget")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
