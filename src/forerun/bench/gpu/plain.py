"""Plain decoding under load on this GPU, and a long prompt that joins (`python -m forerun.bench.gpu.plain`).

For several batch sizes: tokens/s with and without launching the next pass before the last one is read, the time of the
pass on the device, and what a round takes beyond it, in which the GPU waits for the host. Texts must be the same. Then
how long the rounds of running texts take while a long prompt is read beside them, in chunks and in one piece. Random
weights of a shape. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from hashlib import sha256
from statistics import median
from time import perf_counter
from typing import Any

import torch

from forerun.bench.gpu.command import SHAPES, random_target
from forerun.bench.gpu.rounds import seconds_of
from forerun.bench.machine import machine_facts
from forerun.build import make_engine
from forerun.engine.engine import Engine
from forerun.engine.prompt_rows import PromptRows
from forerun.errors import InvalidInput
from forerun.models.cuda.target import CudaDecoder
from forerun.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.types import Request

PROMPT, WARM_UP = 64, 24  # tokens of a prompt; rounds that are not timed: sizes are captured in them


def plain_engine(target: CudaDecoder, batch: int) -> Engine:
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    return make_engine(target, frozenset(), speculative, EngineConfig(max_batch=batch))


def start(engine: Engine, texts: int, length: int, tokens: int) -> list[int]:
    """Submit texts that will all run for so many tokens."""
    params, vocab = SamplingParams(max_tokens=tokens, ignore_eos=True), engine.target.vocab_size
    prompts = [tuple((7 * i + 3 * j) % min(997, vocab) for j in range(length)) for i in range(texts)]
    requests = [Request(prompt, params, cache_salt=None) for prompt in prompts]  # nothing is found
    return [engine.submit(request) for request in requests]


def measure_rounds(target: CudaDecoder, batch: int, rounds: int, ahead: bool) -> dict[str, Any]:
    """Steady rounds of one batch size."""
    before, engine = target.plain.followed, plain_engine(target, batch)
    engine.follows_unread = ahead
    texts: dict[int, list[int]] = {i: [] for i in start(engine, batch, PROMPT, WARM_UP + rounds + 8)}
    while engine.waiting or engine.reading:
        _keep(texts, engine)
    for _ in range(WARM_UP):
        _keep(texts, engine)
    started = perf_counter()
    for _ in range(rounds):
        _keep(texts, engine)
    seconds = (perf_counter() - started) / rounds
    while engine.busy:
        _keep(texts, engine)
    device = seconds_of(target.passes.replay_last, 20)  # only now: it overwrites results
    row = {"batch": batch, "ahead": ahead, "tokens_per_s": batch / seconds, "round_ms": seconds * 1e3}
    row |= {
        "pass_ms": device * 1e3,
        "idle_ms": (seconds - device) * 1e3,
        "followed": target.plain.followed - before,
    }
    return row | {"texts": sha256(json.dumps(list(texts.values())).encode()).hexdigest()[:16]}


def _keep(texts: dict[int, list[int]], engine: Engine) -> None:
    for event in engine.step():
        texts[event.seq_id] += event.tokens


def measure_stall(target: CudaDecoder, batch: int, length: int, rows: int | None) -> dict[str, Any]:
    """Rounds of running texts before and while a long prompt is read; `rows` of it per round, None = as measured."""
    engine = plain_engine(target, batch + 1)
    for _ in range(2):  # the first time captures
        start(engine, batch, PROMPT, 400)
        while engine.waiting or engine.reading:
            engine.step()
        if rows is not None:
            engine.prompt_rows = PromptRows(target.device.type, rows, fixed=rows)
        plain = _timed(engine, 40)
        (joined,) = start(engine, 1, length, 4)
        during: list[float] = []
        while (seq := engine.find(joined)) is not None and not seq.rounds:
            during += _timed(engine, 1)
        for seq_id in [seq.id for seq in engine.running]:
            engine.abort(seq_id)
    return {
        "batch": batch, "prompt": length, "rows": rows or "measured", "plain_ms": median(plain[8:]) * 1e3,
        "median_ms": median(during) * 1e3, "longest_ms": max(during) * 1e3, "rounds": len(during),
        "first_token_ms": sum(during) * 1e3, "longest_over_plain": max(during) / median(plain[8:]),
    }  # fmt: skip


def _timed(engine: Engine, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        started = perf_counter()
        engine.step()
        found.append(perf_counter() - started)
    return found


def measure(target: CudaDecoder, batches: Sequence[int], rounds: int, prompt: int) -> dict[str, Any]:
    rows = []
    for batch in batches:
        for ahead in (False, True):
            row = measure_rounds(target, batch, rounds, ahead)
            rows.append(row)
            print(
                f"batch {batch:3d} {'ahead' if ahead else 'plain'}: {row['tokens_per_s']:7.0f} tokens/s, round "
                f"{row['round_ms']:.3f} ms, pass {row['pass_ms']:.3f}, idle {row['idle_ms']:.3f}, "
                f"{row['followed']} passes launched ahead, texts {row['texts']}",
                flush=True,
            )
    stalls = []
    for size in (None, 1 << 20):
        row = measure_stall(target, batches[-1] // 2 or 1, prompt, size)
        stalls.append(row)
        print(
            f"a prompt of {prompt} beside {row['batch']} texts, rows per round {row['rows']}: plain round "
            f"{row['plain_ms']:.2f} ms, while it is read {row['median_ms']:.2f}, longest {row['longest_ms']:.2f} "
            f"({row['longest_over_plain']:.1f}x), first token after {row['first_token_ms']:.0f} ms",
            flush=True,
        )
    texts = {(row["batch"], row["texts"]) for row in rows}
    return {"rounds": rows, "stalls": stalls, "texts_equal": len(texts) == len(batches)}


def main() -> None:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.gpu.plain", description=summary)
    parser.add_argument("--shape", default="8b", choices=list(SHAPES))
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt that joins")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise InvalidInput("this benchmark needs a CUDA device and torch sees none; use forerun.bench.cpu")
    target = random_target(given.shape, "plain")
    batches = [int(size) for size in given.batches.split(",")]
    facts = {**machine_facts(), "gpu": torch.cuda.get_device_name()}
    print(json.dumps({"machine": facts} | measure(target, batches, given.rounds, given.prompt)))


if __name__ == "__main__":
    main()
