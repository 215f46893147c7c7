"""How long a prompt takes to its first and its next tokens, plain and by default, and which kernels take that time.

Rows of a prompt that a head has not read when its text starts are read before the first draft, so both are timed.
`--short` has a table of answers by their length instead, whole calls and launched passes: nobody knows where one ends.
On a GPU: python -m tests.gpu.prompt_times --model FILE
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from forerun.api.llm import LLM
from forerun.core.params import EngineConfig, SamplingParams
from forerun.core.types import Request, Scores
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
    add("--short", default="", help="tokens of short answers, by comma, such as 1,2,3,5,8,16,32")
    given = parser.parse_args()
    lengths = [int(word) for word in given.lengths.split(",")]
    longest = max(lengths) + 64
    config = EngineConfig(device=given.device, max_batch=1, max_length=longest, kv_slots=2 * longest)
    llm = LLM.load(given.model, config=config)
    if given.short:
        _short(llm, [int(word) for word in given.short.split(",")], given.repeats)
        return
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


def _short(llm: LLM, lengths: Sequence[int], repeats: int) -> None:
    """Answers that end by a token that they have nowhere before, plain and by default in turn."""
    engine, prompts = llm.engine, source_prompts(llm, 45, 12)
    engine.captures.up_to(1)
    texts = {prompt: _answer(engine, prompt, "none", max(lengths))[0] for prompt in prompts}
    for prompt in prompts:
        _answer(engine, prompt, None, 128)  # a controller has seen long texts first
    for length in lengths:
        found = {name: list[tuple[float, int]]() for name in NAMES}
        some = [(p, text[:length]) for p, text in texts.items() if text[length - 1] not in text[: length - 1]]
        differ = 0
        for turn in range(repeats + 1):
            for prompt, text in some:
                for name in NAMES:
                    written, seconds, passes = _answer(engine, prompt, name, 512, text[-1])
                    differ += written != text
                    if turn:
                        found[name].append((seconds, passes))
        if not found[None]:
            print(f"{length:3} tokens: no text ends there", flush=True)
            continue
        plain, own = found["none"], found[None]
        ratios = sorted(a[0] / b[0] for a, b in zip(plain, own, strict=True))
        low, middle, high = (ratios[int(share * (len(ratios) - 1))] for share in (0.25, 0.5, 0.75))
        times = [1e3 * statistics.median(one[0] for one in some) for some in (plain, own)]
        launched = [statistics.fmean(one[1] for one in some) for some in (plain, own)]
        said = f"{length:3} tokens, {len(some)} texts: {times[0]:.2f} -> {times[1]:.2f} ms, {middle:.3f}x"
        rest = f"passes {launched[0]:.1f} -> {launched[1]:.1f}, {differ} differ"
        print(f"{said} ({low:.3f} to {high:.3f}); {rest}", flush=True)


def _answer(
    engine: Engine, prompt: tuple[int, ...], drafter: str | None, most: int, last: int | None = None
) -> tuple[list[int], float, int]:
    """What is written up to a token, seconds of the call, and passes that were launched; then the device is idle."""
    stops, passes, text = () if last is None else (last,), 0, list[int]()
    params = SamplingParams(most, ignore_eos=True, stop_token_ids=stops)
    started, score = perf_counter(), engine.target.score

    def counted(*given: Any, **more: Any) -> Scores:
        nonlocal passes
        passes += 1
        return score(*given, **more)

    engine.target.score = counted  # type: ignore[method-assign]
    engine.submit(Request(prompt, params, drafter=drafter, cache_salt=None))
    while engine.busy:
        text += [token for event in engine.step() for token in event.tokens]
    seconds = perf_counter() - started
    engine.target.score = score  # type: ignore[method-assign]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return text, seconds, passes


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
