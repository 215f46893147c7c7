"""Start-up time: how long the command line takes to write three tokens (python -m forerun.bench.cpu.start).

Each run is a process of its own. The best of several is what the machine can do; on a busy one, CPU time (of all
threads together) says more than the clock. Importing torch alone is measured beside it. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from time import perf_counter

from forerun.bench.machine import load_average, machine_facts

_RUNS = 5
_COMMANDS = {
    "generate": ["-m", "forerun", "generate", "Hi", "--max-tokens", "3"],
    "import_torch": ["-c", "import torch"],
    "unknown_model": ["-m", "forerun", "generate", "Hi", "--model", "nosuch"],
}


def measure() -> dict[str, dict[str, float]]:
    """The best of several runs of each command, after one that fills the caches: {command: {wall_s, cpu_s}}."""
    found: dict[str, dict[str, float]] = {}
    for name, words in _COMMANDS.items():
        runs = [_run(words) for _ in range(1 + _RUNS)][1:]
        found[name] = {
            "wall_s": round(min(wall for wall, _ in runs), 2),
            "cpu_s": round(min(cpu for _, cpu in runs), 2),
        }
    return found


def _run(words: list[str]) -> tuple[float, float]:
    """Seconds by the clock and of CPU."""
    before, started = os.times(), perf_counter()
    subprocess.run([sys.executable, *words], capture_output=True, check=False)
    wall, after = perf_counter() - started, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, used


def main() -> None:
    """Measure, and print a line per command and the document."""
    load = load_average()
    found = measure()
    for name, seconds in found.items():
        print(f"{name:<14} {seconds['wall_s']:.2f} s, {seconds['cpu_s']:.2f} s of CPU, best of {_RUNS}")
    conditions = {**machine_facts(), "load_before": load, "load_after": load_average()}
    print(json.dumps({"benchmark": "start", "seconds": found, "conditions": conditions}))


if __name__ == "__main__":
    main()
