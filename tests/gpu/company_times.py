"""Long texts in one batch against the same texts alone; first tokens of short requests beside long prompts.

Prompts are sources of Python's library. The first table compares texts and counts those that differ. The second has
short requests that arrive at random, plain and drafted, without and beside long prompts that follow each other.
On a GPU: python -m tests.gpu.company_times --model FILE
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from time import perf_counter, sleep

from forerun.api.llm import LLM
from forerun.core.params import EngineConfig, SamplingParams
from forerun.core.types import Request
from forerun.engine.engine import Engine
from tests.gpu.sparse_times import source_prompts

BESIDE = 16  # short requests that are written at once, mostly fewer: what they need is captured first


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2")
    add("--device", default="auto")
    add("--batch", type=int, default=8, help="long texts at once; 0 = none; default: %(default)s")
    add("--length", type=int, default=16_000, help="tokens of their prompts; default: %(default)s")
    add("--max-tokens", type=int, default=128, help="that they write; default: %(default)s")
    add("--prompt", type=int, default=30_000, help="tokens of the prompt beside short requests; default: %(default)s")
    add("--requests", type=int, default=200, help="short ones; 0 = none; default: %(default)s")
    add("--rate", type=float, default=25.0, help="of them a second; default: %(default)s")
    given = parser.parse_args()
    longest = max(given.length, given.prompt) + given.max_tokens + 64
    slots = max(given.batch * (given.length + given.max_tokens + 256), 2 * longest) + 32 * 512
    config = EngineConfig(device=given.device, max_batch=32, max_length=longest, kv_slots=slots)
    llm = LLM.load(given.model, config=config)
    if given.batch:
        _compare(llm, given)
    if given.requests:
        _arrivals(llm, given)


def _compare(llm: LLM, given: argparse.Namespace) -> None:
    """Texts of the batch, plain and by default, against the plain ones alone."""
    engine, prompts = llm.engine, source_prompts(llm, given.length, given.batch)
    params = SamplingParams(given.max_tokens, ignore_eos=True)
    engine.captures.up_to(given.batch)
    alone = [_texts(engine, [one], params, "none")[0][0] for one in prompts]
    for name in ("none", None):
        for _ in range(2):  # the first time compiles
            together, seconds = _texts(engine, prompts, params, name)
        differ = sum(a != b for a, b in zip(alone, together, strict=True))
        rate = given.batch * (given.max_tokens - 1) / seconds
        said = f"{given.batch} x {given.length} tokens, {name or 'default':>7}: {rate:7.1f} tokens/s behind the prompts"
        print(f"{said}, {differ} of {len(prompts)} texts differ from plain alone", flush=True)


def _texts(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, drafter: str | None
) -> tuple[list[list[int]], float]:
    """Texts, and the seconds since all had begun; no prompt is found in the cache."""
    ids = [engine.submit(Request(tuple(one), params, drafter=drafter, cache_salt=None)) for one in prompts]
    texts: dict[int, list[int]] = {seq_id: [] for seq_id in ids}
    begun = 0.0
    while engine.busy:
        for event in engine.step():
            texts[event.seq_id] += event.tokens
        begun = begun or (perf_counter() if all(texts.values()) else 0.0)
    return [texts[seq_id] for seq_id in ids], perf_counter() - begun


def _arrivals(llm: LLM, given: argparse.Namespace) -> None:
    """Milliseconds to the first token of short requests."""
    tokens = llm.encode(str(random.__doc__) + str(argparse.__doc__) + str(statistics.__doc__))
    draw = random.Random(1)
    short = [tuple(draw.sample(tokens, min(len(tokens), draw.randint(40, 160)))) for _ in range(given.requests)]
    times = [draw.expovariate(given.rate) for _ in short]
    long = source_prompts(llm, given.prompt, 1)[0]
    llm.engine.captures.up_to(BESIDE)
    for name in ("none", None):
        base = 0.0
        for beside in (False, False, True, True):  # each kind twice: the first time compiles
            firsts, reads = _first_tokens(llm.engine, short, times, long if beside else (), name)
            firsts.sort()
            p50, p99 = (1e3 * firsts[int(share * (len(firsts) - 1))] for share in (0.5, 0.99))
            base = base if beside else p99
            said = f"{name or 'default':>7} {f'beside {given.prompt}' if beside else 'alone':>12}"
            rest = f", {p99 / base:.2f}x alone; long prompts took {statistics.fmean(reads):.2f} s" if reads else ""
            print(f"{said}: first token p50 {p50:6.1f} ms, p99 {p99:6.1f} ms{rest}", flush=True)


def _first_tokens(
    engine: Engine, short: Sequence[tuple[int, ...]], gaps: Sequence[float], long: tuple[int, ...], drafter: str | None
) -> tuple[list[float], list[float]]:
    """Seconds to the first token of each short request, and of each long prompt; these follow one another."""
    params = SamplingParams(32, ignore_eos=True)
    due, clock = list[float](), perf_counter() + 0.01
    for gap in gaps:
        clock += gap
        due.append(clock)
    sent, firsts, read = dict[int, float](), list[float](), list[float]()
    which, waiting = -1, list(zip(due, short, strict=True))
    while waiting or sent:
        if long and waiting and which not in sent:
            which = engine.submit(Request(long, params, drafter=drafter, cache_salt=None))
            sent[which] = perf_counter()
        while waiting and waiting[0][0] <= perf_counter():
            at, prompt = waiting.pop(0)
            sent[engine.submit(Request(prompt, params, drafter=drafter, cache_salt=None))] = at
        if not engine.busy:
            sleep(max(0.0, waiting[0][0] - perf_counter()) if waiting else 0.0)
            continue
        if (left := engine.spare_seconds()) > 0.0:  # as forerun.engine.driver does
            sleep(min(left, max(0.0, waiting[0][0] - perf_counter()) if waiting else left))
            continue
        for event in engine.step():
            if event.tokens and event.seq_id in sent:
                (read if event.seq_id == which else firsts).append(perf_counter() - sent.pop(event.seq_id))
    while engine.busy:
        engine.step()
    return firsts, read


if __name__ == "__main__":
    main()
