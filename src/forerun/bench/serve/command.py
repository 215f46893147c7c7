"""A server under load (`make bench-serve`): speculation off, fixed and adaptive, from an idle server to a full one.

Starts `forerun serve` in a process of its own (or takes one at --url), asks every prompt once alone, and then sends the
same requests in every mode: at the same random times (--loads), or by so many clients at once (--clients). Every text
must be the one that was written alone. Shows a table; the last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from threading import Thread
from time import process_time
from typing import Any

from rich.console import Console
from rich.table import Table

from forerun.bench.machine import cores, is_busy, load_average, machine_facts
from forerun.bench.peers.endpoint import base_of, first_model
from forerun.bench.serve.host_time import host_figures, read_host
from forerun.bench.serve.load import Load, Target, figures, over_off, send_all
from forerun.bench.serve.stream_client import Endpoint
from forerun.bench.suites import load_suite
from forerun.errors import ForerunError, InvalidInput

MODES: dict[str, Any] = {"off": "off", "fixed": {"budget": 4}, "adaptive": "on"}
EMULATED = "emulated"  # instead of a shape: no model, passes that take a GPU's time
FEWEST = 8  # requests of a run with few clients
Body = dict[str, Any]


def main(words: Sequence[str] | None = None) -> int:
    """Run it; 1 if a text was lost or not the one written alone."""
    flags = parse(words)
    try:
        own = serving(flags.model, flags.serve_args, flags.shape)
        with nullcontext(flags.url) if flags.url else own as url:
            document = asyncio.run(measure(flags, Endpoint(base_of(url), first_model(url))))
    except ForerunError as error:
        print(f"bench serve: {error}", file=sys.stderr)
        return 2
    if flags.plot is not None:
        from forerun.bench.serve.plot import plot

        plot(document, flags.plot)
    line = json.dumps(document)
    if flags.json is not None:
        flags.json.parent.mkdir(parents=True, exist_ok=True)
        flags.json.write_text(line + "\n", encoding="utf-8")
    show(document)
    print(line)
    return 0 if document["lost"] == document["unequal"] == 0 else 1


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m forerun.bench.serve", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--url", help="a server that runs already; one that does not know `speculative` is asked in one mode")
    add("--model", default="smollm2", help="what to serve")
    add("--serve-args", default="", help="more words for forerun serve, in one string")
    add(
        "--shape",
        help=f"serve it at the cost of a larger shape, on a GPU: 1b or 8b; {EMULATED} = without a model",
    )
    add("--loads", default="0.5,1,2,4", help="rates, as multiples of what one client at a time gets")
    add("--clients", default="", help="numbers of clients, each of which asks again when it has its answer")
    add("--modes", default=",".join(MODES), help="of off, fixed and adaptive")
    add("--requests", type=int, default=16, help="per rate and mode")
    add("--per-client", type=int, default=3, help=f"requests of each client; {FEWEST} in all at least")
    add("--repeats", type=int, default=1, help="of all rates and clients")
    add("--max-tokens", type=int, default=48)
    add("--suite", help="a JSONL file of prompts; default: built in")
    add("--first-seconds", type=float, default=2.0, help="a good answer begins within")
    add("--token-seconds", type=float, default=0.2, help="a good answer has a token every")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="PATH")
    add("--plot", type=Path, metavar="PATH")
    return parser.parse_args(words)


@contextmanager
def serving(model: str, words: str, shape: str | None = None) -> Iterator[str]:
    """`forerun serve` in a process of its own, as long as it is needed; `shape` = at that shape's cost."""
    what = ["forerun.cli", "serve"] if shape is None else ["forerun.cli.serve_inflated", "--shape", shape]
    what = ["forerun.cli.serve_emulated"] if shape == EMULATED else what
    with running(["-m", *what, model, "--port", "0", *words.split()]) as url:
        yield url


@contextmanager
def running(words: Sequence[str]) -> Iterator[str]:
    """A server that Python starts with these words, and says where it listens; its address."""
    with subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line.strip())
            found = [word for word in line.split() if word.startswith("http://")]
            if line.startswith("serving") and found:
                break
        else:
            raise InvalidInput(f"the server did not start: {' '.join(said)[-300:]}")
        Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop it
        try:
            yield found[0]
        finally:
            process.send_signal(signal.SIGTERM)


async def measure(flags: argparse.Namespace, endpoint: Endpoint) -> dict[str, Any]:
    """Every prompt alone, then every rate and every number of clients in every mode."""
    busy = load_average()
    prompts = [list(item.messages) for item in load_suite(flags.suite)]
    chosen = [prompts[i * len(prompts) // flags.requests % len(prompts)] for i in range(flags.requests)]
    bodies: list[Body] = [{"messages": m, "max_tokens": flags.max_tokens, "temperature": 0} for m in chosen]
    known = not flags.url or await _knows_modes(endpoint, bodies[0])
    modes = pick_modes(flags.modes) if known else {"as served": None}
    alone = await _alone(endpoint, bodies)
    wanted = dict(zip(map(str, chosen), alone["texts"], strict=True))
    target = Target(flags.first_seconds, flags.token_seconds)
    rows = []
    for repeat in range(flags.repeats):
        for load in plans(flags, alone["seconds"]):
            for mode in modes if repeat % 2 == 0 else reversed(modes):
                # a salt for each run: none finds its prompts cached by the one before
                own = {"speculative": modes[mode], "cache_salt": f"{load} {mode} {flags.seed} {repeat}"}
                asked = [bodies[i % len(bodies)] for i in range(load.requests)]
                if modes[mode] is not None:
                    asked = [{**body, **own} for body in asked]
                before, own_cpu = await asyncio.to_thread(read_host, endpoint), process_time()
                answers, seconds = await load.send(endpoint, asked)
                # near 1, the client is what is measured
                busy_share = round((process_time() - own_cpu) / seconds, 3)
                spent = host_figures(before, await asyncio.to_thread(read_host, endpoint))
                found = figures(answers, [wanted[str(body["messages"])] for body in asked], seconds, target)
                rows.append(
                    {
                        **load.facts(),
                        "mode": mode,
                        "repeat": repeat,
                        **found,
                        **spent,
                        "client_cpu": busy_share,
                    }
                )
    return {
        "what": "bench-serve", "schema": 2, "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(), "busy_before": is_busy(busy, cores()), "model": endpoint.model,
        "shape": flags.shape, "alone_seconds": round(alone["seconds"], 4), "alone_ttft": alone["ttft"],
        "lost": sum(row["lost"] for row in rows), "unequal": sum(row["unequal"] for row in rows),
        "over_off": over_off(rows), "rows": rows,
    }  # fmt: skip


def pick_modes(words: str) -> dict[str, Any]:
    """Modes by name."""
    if unknown := [word for word in words.split(",") if word not in MODES]:
        raise InvalidInput(f"unknown mode {unknown[0]!r}; use {', '.join(MODES)}")
    return {mode: MODES[mode] for mode in words.split(",")}


def plans(flags: argparse.Namespace, alone_seconds: float) -> list[Load]:
    """The loads that the flags ask for."""
    rates = [float(word) for word in flags.loads.split(",") if word]
    clients = [int(word) for word in flags.clients.split(",") if word]
    return [
        *(Load(flags.requests, rate=each / alone_seconds, times=each, seed=flags.seed) for each in rates),
        *(Load(max(FEWEST, flags.per_client * each), clients=each) for each in clients),
    ]


async def _alone(endpoint: Endpoint, bodies: Sequence[Body]) -> dict[str, Any]:
    """Each request with nobody else there: the texts to compare with, and how long one takes."""
    texts, seconds, firsts = [], [], []
    for body in bodies:
        (answer,), spent = await send_all(endpoint, [body], [0.0])
        if answer.problem is not None:
            raise InvalidInput(f"{endpoint.base} cannot answer: {answer.problem}")
        texts.append(answer.text)
        seconds.append(spent)
        firsts.append(answer.first_seconds or 0.0)
    return {"texts": texts, "seconds": fmean(seconds), "ttft": round(fmean(firsts), 4)}


async def _knows_modes(endpoint: Endpoint, body: Body) -> bool:
    (answer,), _ = await send_all(endpoint, [{**body, "max_tokens": 1, "speculative": "off"}], [0.0])
    return answer.problem is None


def show(document: dict[str, Any]) -> None:
    """A table for a person."""
    table = Table(title="A server under load: seconds to the first token and per later token")
    for name in (
        "load",
        "mode",
        "requests/s",
        "good/s",
        "tokens/s",
        "TTFT p50",
        "p99",
        "TPOT p50",
        "p99",
        "lost",
        "unequal",
    ):
        table.add_column(name, justify="right")
    for row in document["rows"]:
        times = [row["ttft"]["p50"], row["ttft"]["p99"], row["tpot"]["p50"], row["tpot"]["p99"]]
        cells = [_name(row), row["mode"], row["requests_per_second"], row["good_per_second"]]
        cells += [row["tokens_per_second"], *("-" if t is None else f"{t:.3f}" for t in times)]
        table.add_row(*map(str, [*cells, row["lost"], row["unequal"]]))
    Console(stderr=True, width=120).print(table)
    for row in document["over_off"]:
        print(
            f"{_name(row)}: {row['mode']} writes {row['ratio']:.2f}x the tokens per second of off",
            file=sys.stderr,
        )


def _name(row: dict[str, Any]) -> str:
    """A load in words."""
    return f"{row['load']:g}x" if row["clients"] is None else f"{row['clients']} clients"
