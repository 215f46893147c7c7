"""A server of an 8B on one H200 under load, in simulation (`python -m forerun.bench.simulated_load`).

Clients in a closed loop, prompts of about 290 tokens and answers of up to 96; engine and controller are real, and time
is counted (forerun.testing.load_simulator). Shown: tokens per second with speculation off and adaptive, and the time to
the first token. Which forms suit a machine cannot be learnt here: what a pass takes is given.
The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from forerun.testing.load_simulator import Answered, compare

SHARES = (0.5, 0.9, 0.99)


def facts(clients: int, mode: str, found: Answered) -> dict[str, Any]:
    first = {f"p{100 * share:.0f}": round(found.first_at(share), 5) for share in SHARES}
    return {"clients": clients, "mode": mode, "tokens_per_second": round(found.rate, 1), "ttft": first}


def main() -> None:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.simulated_load", description=summary)
    parser.add_argument("--clients", default="1,8,32,64")
    parser.add_argument(
        "--per-client", type=int, default=3, help="requests of each client; 8 in all at least"
    )
    parser.add_argument("--places", type=int, default=64, help="sequences written together")
    given = parser.parse_args()
    rows = []
    for clients in map(int, given.clients.split(",")):
        plain, drafted = compare(clients, given.per_client, given.places)
        print(
            f"{clients:3d} clients: tokens/s {plain.rate:5.0f} off, {drafted.rate:5.0f} adaptive "
            f"({drafted.rate / plain.rate:.2f}x)",
            flush=True,
        )
        for share in SHARES:
            off, on = (1e3 * one.first_at(share) for one in (plain, drafted))
            print(f"    first token, p{100 * share:.0f}: {off:5.0f} ms off, {on:5.0f} adaptive", flush=True)
        rows += [facts(clients, "off", plain), facts(clients, "adaptive", drafted)]
    print(json.dumps({"what": "simulated load", "rows": rows}))


if __name__ == "__main__":
    main()
