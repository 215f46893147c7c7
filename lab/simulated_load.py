"""A server of an 8B on one H200 under load, in simulation (`python -m lab load`).

Clients in a closed loop, prompts of about 290 tokens and answers of up to 96 unless told otherwise; engine and
controller are real, and time is counted (lab.simulate.load). Shown: tokens per second with speculation off
and adaptive, and the time to the first token. Which forms suit a machine cannot be learnt here: what a pass takes is
given.
"""

from __future__ import annotations

import argparse
from statistics import fmean
from typing import Any

from forerun.measure.bench.batches import parse_batches
from lab.runner import Document, Run, share
from lab.simulate.load import Answered, compare

SHARES = (0.5, 0.9, 0.99)
MODES = ("off", "adaptive")


def facts(clients: int, mode: str, found: Answered) -> dict[str, Any]:
    first = {f"p{100 * share:.0f}": round(found.first_at(share), 5) for share in SHARES}
    return {"clients": clients, "mode": mode, "tokens_per_second": round(found.rate, 1), "ttft": first}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    share(parser, clients="1,8,32,64")
    add("--per-client", type=int, default=3, help="requests of each client; 8 in all at least")
    add("--places", type=int, default=64, help="sequences written together")
    add("--prompt", type=int, default=290, help="tokens of a prompt, on average")
    add("--rate", type=float, default=0.7, help="how likely the head's likeliest token is right")
    add("--apart", type=float, default=0.0, help="milliseconds between clients that begin")
    add("--seeds", type=int, default=1, help="loads, of which means are shown")


def measure(run: Run) -> Document:
    """Every number of clients, off and adaptive."""
    given, rows = run.flags, list[dict[str, Any]]()
    for clients in parse_batches(given.clients, "--clients"):
        shape = given.per_client, given.places, given.prompt, given.rate, given.apart / 1e3
        runs = [compare(clients, *shape, seed) for seed in [None, *range(1, given.seeds)]]
        modes = [[run[i] for run in runs] for i in (0, 1)]
        off, on = (fmean([one.rate for one in mode]) for mode in modes)
        print(f"{clients:3d} clients: tokens/s {off:5.0f} off, {on:5.0f} adaptive ({on / off:.2f}x)", flush=True)
        for share_of in SHARES:
            off, on = (1e3 * fmean([one.first_at(share_of) for one in mode]) for mode in modes)
            print(f"    first token, p{100 * share_of:.0f}: {off:5.1f} ms off, {on:5.1f} adaptive", flush=True)
        rows += [facts(clients, name, one) for run in runs for name, one in zip(MODES, run, strict=True)]
    return {"rows": rows}
