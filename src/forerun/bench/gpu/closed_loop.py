"""The engine under a server's load, without a server: `python -m forerun.bench.gpu.closed_loop`.

So many clients, each of which asks again when it has its answer: requests join and leave one by one, and their prompts
are read beside the others' trees, some of them found in the prefix cache. Without `--shape`, passes compute nothing
(forerun.bench.gpu.host_rounds), so that CPU time is the host's; with it, the default model is loaded on a GPU at the
cost of that shape. Shown for drafting off and on: milliseconds per round by part, CPU time, the share of rounds that
were read before the next was launched; with `--waits` the lines that wait for the device (forerun.testing.host_waits);
with `--kernels` what the device did in a last repeat, and for how long it did nothing (forerun.bench.gpu.kernel_trace).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import torch

from forerun.bench.gpu import host_rounds
from forerun.bench.gpu.inflated import load_ready
from forerun.bench.gpu.kernel_trace import cut_up, idle, kind_of, said, traced
from forerun.bench.machine import machine_facts
from forerun.engine.engine import Engine
from forerun.engine.round import LaunchedRound
from forerun.params import SamplingParams
from forerun.testing.host_waits import HostWaits
from forerun.types import Request

COMMON, TEXTS = 24, 64  # tokens that all prompts start with, as chats do; different prompts
MODEL = "smollm2"
IDLE = 15.0  # microseconds between kernels, from which on the device is said to wait for the host
MODES = {"off": "plain", "on": "default"}  # of host_rounds


def requests(count: int, salt: str, longest: int = 250, tokens: int = 96, seed: int = 5) -> Iterator[Request]:
    """Prompts of 40 tokens and more, each of which comes again some time, and answers of half to all of the tokens."""
    rng = random.Random(seed)
    words = range(5, 1000)
    start = rng.choices(words, k=COMMON)
    texts = [(*start, *rng.choices(words, k=rng.randrange(15, longest))) for _ in range(TEXTS)]
    for i in range(count):
        params = SamplingParams(max_tokens=rng.randrange(tokens // 2, tokens), ignore_eos=True)
        yield Request(texts[i * 2 // 3 % TEXTS], params, cache_salt=salt)


class Watched:
    """An engine whose rounds are counted by whether they followed an unread one."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.followed, self.read_first = engine, 0, 0
        finish: Callable[[LaunchedRound], None] = engine._close

        def counted(launched: LaunchedRound) -> None:
            self.followed += launched.trees.follows is not None
            self.read_first += launched.trees.follows is None
            finish(launched)

        engine._close = counted  # type: ignore[method-assign]

    def serve(self, some: Iterator[Request], clients: int, waits: HostWaits | None = None) -> dict[str, Any]:
        """Answer all of these; what a round took on average."""
        engine, before = self.engine, dict(self.engine.stats.seconds)
        rounds, self.followed, self.read_first = engine.stats.rounds, 0, 0
        gc.collect()
        gc.freeze()
        written, started, cpu = 0, perf_counter(), process_time()
        with nullcontext() if waits is None else waits:
            ended = clients
            while ended or engine.busy:
                for _, request in zip(range(ended), some, strict=False):
                    engine.submit(request)
                events = engine.step() if engine.busy else []
                written += sum([len(event.tokens) for event in events])
                ended = sum([event.finished is not None for event in events])
        spent, cpu, rounds = perf_counter() - started, process_time() - cpu, engine.stats.rounds - rounds
        parts = {part: 1e3 * (now - before[part]) / rounds for part, now in engine.stats.seconds.items()}
        found: dict[str, Any] = {
            "tokens_per_s": written / spent,
            "cpu_ms": 1e3 * cpu / rounds,
            "cpu_us_per_token": 1e6 * cpu / written,
        }
        found |= {f"{part}_ms": ms for part, ms in parts.items()}
        if waits is not None:
            found["waits"] = dict(waits.places)
            waits.places.clear()
        return {**found, "rounds": rounds, "tokens": written, "read_first": self.read_first}


def engines(shape: str | None, clients: int, folder: Path) -> dict[str, Engine]:
    """By mode; on a GPU one engine has both."""
    if shape is None:
        return {mode: host_rounds.make(name, clients) for mode, name in MODES.items()}
    return dict.fromkeys(MODES, load_ready(MODEL, shape, clients, 4096, folder).engine)


def of_mode(mode: str, some: Sequence[Request]) -> Iterator[Request]:
    return iter([replace(one, drafter="none") for one in some] if mode == "off" else some)


def kernels_of(watched: Watched, some: Iterator[Request], clients: int) -> dict[str, Any]:
    """Microseconds of a round by kind of kernel, and how long the device did nothing in it; tracing adds to all."""
    rounds = watched.engine.stats.rounds
    found = traced(lambda: watched.serve(some, clients))
    rounds = watched.engine.stats.rounds - rounds
    count, spent = idle(found, IDLE)
    kinds = {name: us / rounds for name, us in cut_up(found, lambda one: kind_of(one, {})).items()}
    return {"kernels": kinds, "idle_us": spent / rounds, "idles": count / rounds, "rounds": rounds}


def _shown(row: dict[str, Any]) -> str:
    numbers = {name: round(value, 3) for name, value in row.items() if isinstance(value, float | int)}
    return f"{row['mode']:>3}: {numbers} {row.get('waits', '')}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.gpu.closed_loop")
    add = parser.add_argument
    add("--clients", default="32,64")
    add("--per-client", type=int, default=4, help="requests of each")
    add("--repeats", type=int, default=2, help="of both modes, in turn")
    add("--shape", help="load the default model on a GPU at the cost of this shape: 1b or 8b")
    add("--kernels", action="store_true", help="trace a last repeat on the GPU")
    add("--waits", action="store_true", help="name the lines that make the host wait for the device")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    numbers = [int(word) for word in given.clients.split(",")]
    with TemporaryDirectory() as folder:
        known = engines(given.shape, max(numbers), Path(folder)) if given.shape else {}
        for clients in numbers:
            watched = {mode: Watched(one) for mode, one in (known or engines(None, clients, Path())).items()}
            for repeat in range(-1, given.repeats):  # the first to warm up
                waits = HostWaits() if given.waits and repeat == given.repeats - 1 else None
                each = given.per_client if repeat >= 0 else 1
                for mode, one in watched.items():
                    some = [*requests(clients * each, f"{clients} {mode} {repeat}")]
                    row = one.serve(of_mode(mode, some), clients, waits)
                    if repeat >= 0:
                        rows.append({"clients": clients, "mode": mode, **row})
                        print(_shown(rows[-1]), flush=True)
            for mode, one in watched.items() if given.kernels else ():
                some = [*requests(clients * given.per_client, f"{clients} {mode} traced")]
                rows.append(
                    {"clients": clients, "mode": mode, **kernels_of(one, of_mode(mode, some), clients)}
                )
                print(_shown(rows[-1]), said(rows[-1]["kernels"], 1, least=5.0), flush=True)
    print(json.dumps({"what": "closed loop", "machine": machine_facts(), "shape": given.shape, "rows": rows}))


if __name__ == "__main__":
    main()
