"""What a pass takes by its rows, right behind another and behind a pause (python -m forerun.bench.cpu.passes).

A draft is a pause between passes: meanwhile the last cache may lose weights, and threads may sleep. So passes over n
rows are timed in runs of their own, with nothing between them, and with so many milliseconds of Python between them;
sizes and pauses take turns, because machines drift. Lower quartiles, by the clock. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from time import perf_counter

import torch

from forerun.bench.machine import load_average, machine_facts
from forerun.build import load_target
from forerun.control.cost import scratch_sequences, time_pass
from forerun.control.probe_text import probe_text
from forerun.models.base import Target
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.native import library
from forerun.params import EngineConfig
from forerun.types import Needs

RUN = 5  # passes of one kind behind each other; the first does not count


def measure(
    target: Target, sizes: Sequence[int], pauses: Sequence[float], repeats: int
) -> dict[float, dict[int, float]]:
    """By milliseconds of a pause and by rows, the lower quartile of the seconds of a pass."""
    text = probe_text(target, max(sizes))
    probes = scratch_sequences(target, min(64, max(sizes)), text)
    found: dict[float, dict[int, list[float]]] = {pause: {size: [] for size in sizes} for pause in pauses}
    try:
        target.prefill(probes, Needs())
        for _ in range(repeats):
            for size in sizes:
                for pause in pauses:
                    for number in range(RUN):
                        wait(1e-3 * pause)
                        spent = time_pass(target, probes, size, text)
                        if number:
                            found[pause][size].append(spent)
    finally:
        for probe in probes:
            target.release(probe)
    return {
        pause: {size: sorted(each)[len(each) // 4] for size, each in by_size.items()}
        for pause, by_size in found.items()
    }


def wait(seconds: float) -> None:
    """Let Python work, as a drafter does."""
    until = perf_counter() + seconds
    while perf_counter() < until:
        sum(range(50))


def main(words: Sequence[str] | None = None) -> int:
    """Print a line for each pause, and the document."""
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.cpu.passes")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,2,3,4,6,8,16,32,64")
    parser.add_argument("--pauses", default="0,0.5,1.5", help="milliseconds of Python before a pass")
    parser.add_argument("--repeats", type=int, default=8)
    flags, load = parser.parse_args(words), load_average()
    torch.set_num_threads(flags.threads)
    target = load_target(open_checkpoint(flags.model), EngineConfig(device="cpu", threads=flags.threads))
    sizes, pauses = [int(n) for n in flags.rows.split(",")], [float(ms) for ms in flags.pauses.split(",")]
    found = measure(target, sizes, pauses, flags.repeats)
    for pause, curve in found.items():
        first = found[pauses[0]][sizes[0]]
        listed = "  ".join(
            f"{size}: {1e3 * spent:.2f} ({spent / first:.2f})" for size, spent in curve.items()
        )
        print(f"behind {pause} ms of Python, ms by rows (over the first): {listed}")
    document = {
        "benchmark": "cpu_passes", "isa": library.isa(), "seconds": found, "load_before": load,
        "conditions": machine_facts(),
    }  # fmt: skip
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
