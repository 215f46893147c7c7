"""A server under load (`make bench-serve`): speculation off, fixed and adaptive, from an idle server to a full one.

Starts `forerun serve` in a process of its own (or takes one at --url), asks every prompt once alone, and then sends the
same requests in every mode: at the same random times (--loads), or by so many clients at once (--clients). Every text
must be the one that was written alone.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import fmean
from threading import Thread
from time import process_time
from typing import Any

from rich.console import Console

from forerun.core.errors import InvalidInput
from forerun.measure.bench.alternate import in_turn
from forerun.measure.bench.suites import load_suite
from forerun.measure.peers.process import base_of, first_model
from forerun.measure.report.tables import figure_table
from lab.runner import Document, Run, picture, share
from lab.serve.load import Load, Target, figures, host_figures, over_off, plot, read_host, send_all
from lab.serve.stream_client import Endpoint

MODES: dict[str, Any] = {"off": "off", "fixed": {"budget": 4}, "adaptive": "on"}
EMULATED = "emulated"  # instead of a shape: no model, passes that take a GPU's time
FEWEST = 8  # requests of a run with few clients
Body = dict[str, Any]


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    share(parser, model="smollm2", clients="", suite=None, max_tokens=48, repeats=1, seed=0, plot=None)
    add("--url", help="a server that runs already; one that does not know `speculative` is asked in one mode")
    add("--serve-args", default="", help="more words for forerun serve, in one string")
    add("--shape", help=f"serve it at the cost of a larger shape, on a GPU: 1b or 8b; {EMULATED} = without a model")
    add("--loads", default="0.5,1,2,4", help="rates, as multiples of what one client at a time gets")
    add("--modes", default=",".join(MODES), help="of off, fixed and adaptive")
    add("--requests", type=int, default=16, help="per rate and mode")
    add("--per-client", type=int, default=3, help=f"requests of each client; {FEWEST} in all at least")
    add("--first-seconds", type=float, default=2.0, help="a good answer begins within")
    add("--token-seconds", type=float, default=0.2, help="a good answer has a token every")


def measure(run: Run) -> Document:
    """Start a server, or take the one that is named, and send it everything."""
    flags = run.flags
    own = serving(flags.model, flags.serve_args, flags.shape)
    with nullcontext(flags.url) if flags.url else own as url:
        return asyncio.run(measure_server(flags, Endpoint(base_of(url), first_model(url))))


@contextmanager
def serving(model: str, words: str, shape: str | None = None) -> Iterator[str]:
    """`forerun serve` in a process of its own, as long as it is needed; `shape` = at that shape's cost."""
    what = ["forerun", "serve"] if shape is None else ["lab", "serve-inflated", "--shape", shape]
    what = ["lab", "serve-emulated"] if shape == EMULATED else what
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


async def measure_server(flags: argparse.Namespace, endpoint: Endpoint) -> Document:
    """Every prompt alone, then every rate and every number of clients in every mode."""
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
            for mode in in_turn([*modes], repeat):
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
                    {**load.facts(), "mode": mode, "repeat": repeat, **found, **spent, "client_cpu": busy_share}
                )
    lost, unequal = (sum(row[name] for row in rows) for name in ("lost", "unequal"))
    return {
        "model": endpoint.model, "shape": flags.shape, "alone_seconds": round(alone["seconds"], 4),
        "alone_ttft": alone["ttft"], "lost": lost, "unequal": unequal, "equal": lost == unequal == 0,
        "over_off": over_off(rows), "rows": rows,
    }  # fmt: skip


def pick_modes(words: str) -> dict[str, Any]:
    if unknown := [word for word in words.split(",") if word not in MODES]:
        raise InvalidInput(f"unknown mode {unknown[0]!r}; use {', '.join(MODES)}")
    return {mode: MODES[mode] for mode in words.split(",")}


def plans(flags: argparse.Namespace, alone_seconds: float) -> list[Load]:
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


def show(document: Document, flags: argparse.Namespace) -> None:
    if (file := picture(flags.plot)) is not None:
        plot(document, file)
    figures = ["requests/s", "good/s", "tokens/s", "TTFT p50", "p99", "TPOT p50", "p99", "lost", "unequal"]
    table = figure_table(
        "A server under load: seconds to the first token and per later token", "load", "mode", *figures
    )
    for row in document["rows"]:
        times = [row["ttft"]["p50"], row["ttft"]["p99"], row["tpot"]["p50"], row["tpot"]["p99"]]
        cells = [_name(row), row["mode"], row["requests_per_second"], row["good_per_second"]]
        cells += [row["tokens_per_second"], *("-" if t is None else f"{t:.3f}" for t in times)]
        table.add_row(*map(str, [*cells, row["lost"], row["unequal"]]))
    Console(stderr=True, width=120).print(table)
    for row in document["over_off"]:
        print(f"{_name(row)}: {row['mode']} writes {row['ratio']:.2f}x the tokens per second of off", file=sys.stderr)


def _name(row: dict[str, Any]) -> str:
    return f"{row['load']:g}x" if row["clients"] is None else f"{row['clients']} clients"
