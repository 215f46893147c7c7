"""How long a prompt takes to its first and its next tokens, plain and by default, and which kernels take that time.

Rows of a prompt that a head has not read when its text starts are read before the first draft, so both are timed.
On a GPU: python -m tests.gpu.prompt_times --model FILE
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile

from forerun.api.llm import LLM
from forerun.core.params import EngineConfig, SamplingParams
from forerun.core.types import Request
from forerun.engine.engine import Engine
from tests.gpu.sparse_times import source_prompts

PARAMS = SamplingParams(8, ignore_eos=True)
NAMES = ("none", None)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2")
    add("--device", default="auto")
    add("--lengths", default="4000,16000,30000", help="tokens of the prompts, by comma; default: %(default)s")
    add("--repeats", type=int, default=5, help="of each, in turn; default: %(default)s")
    add("--kernels", type=int, default=12, help="how many are listed; default: %(default)s")
    given = parser.parse_args()
    lengths = [int(word) for word in given.lengths.split(",")]
    longest = max(lengths) + 64
    config = EngineConfig(device=given.device, max_batch=1, max_length=longest, kv_slots=2 * longest)
    llm = LLM.load(given.model, config=config)
    for length in lengths:
        prompt = source_prompts(llm, length, 1)[0]
        times = {name: list[tuple[float, float]]() for name in NAMES}
        for turn in range(given.repeats + 1):  # the first one captures
            for name in NAMES:
                found = _seconds(llm.engine, prompt, name)
                if turn:
                    times[name].append(found)
        (plain, plain_next), (other, other_next) = (
            [statistics.median(one) for one in zip(*times[name], strict=True)] for name in NAMES
        )
        said = f"first token {1e3 * plain:.1f} -> {1e3 * other:.1f} ms ({other / plain - 1:+.1%})"
        behind = f"the next ones {1e3 * (plain_next - plain):.1f} -> {1e3 * (other_next - other):.1f} ms later"
        print(f"{length} tokens, plain -> default: {said}; {behind}", flush=True)
        _compare(llm.engine, prompt, given.kernels)


def _seconds(engine: Engine, prompt: tuple[int, ...], drafter: str | None, most: int = 2) -> tuple[float, float]:
    """Until the first event of a request, and until the one after it; the rest is written, too."""
    started, found = perf_counter(), list[float]()
    engine.submit(Request(prompt, PARAMS, drafter=drafter, cache_salt=None))
    while engine.busy:
        if engine.step() and len(found) < most:
            found.append(perf_counter() - started)
    return found[0], found[-1]


def _compare(engine: Engine, prompt: tuple[int, ...], most: int) -> None:
    """Milliseconds of each kernel up to the end of a text of a few tokens, and of the device between kernels."""
    if not torch.cuda.is_available():
        return
    sums = {name: _kernels(engine, prompt, name) for name in NAMES}
    ranked = sorted({*sums["none"], *sums[None]}, key=lambda kernel: sums["none"][kernel] - sums[None][kernel])
    print(f"    all kernels {sum(sums['none'].values()):8.2f} -> {sum(sums[None].values()):8.2f} ms")
    for kernel in ranked[:most]:
        print(f"    {sums['none'][kernel]:8.2f} -> {sums[None][kernel]:8.2f} ms  {kernel[:90]}", flush=True)


def _kernels(engine: Engine, prompt: tuple[int, ...], drafter: str | None) -> defaultdict[str, float]:
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        _seconds(engine, prompt, drafter)
        torch.cuda.synchronize()
    sums = defaultdict[str, float](float)
    for event in found.key_averages():
        sums[event.key] += event.self_device_time_total / 1e3
    return sums


if __name__ == "__main__":
    main()
