"""Which cores passes should run on: where a processor has fast and slow ones, the fast ones.

Panels are shared out evenly and a pass waits for the slowest, so a core of half the speed costs more than it gives.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_SYSTEM = Path("/sys/devices")


@cache
def fast_cores(system: Path = _SYSTEM) -> int | None:
    """How many of the cores that this process may use are fast; None where all are alike or nobody says."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    allowed = os.sched_getaffinity(0)
    fast = allowed & (_intel_fast(system) or _arm_fast(system))
    return len(fast) if fast and fast != allowed else None


def thread_count(asked: int) -> int:
    """As many threads as torch has, fewer where some would sit on slow cores; OMP_NUM_THREADS is obeyed."""
    fast = None if "OMP_NUM_THREADS" in os.environ else fast_cores()
    return min(asked, 64) if fast is None else min(asked, fast, 64)


def _intel_fast(system: Path) -> set[int]:
    """Intel names its two kinds cpu_core and cpu_atom."""
    listed = system / "cpu_core" / "cpus"
    return _parse(listed.read_text()) if listed.is_file() else set()


def _arm_fast(system: Path) -> set[int]:
    """ARM gives every core a capacity, 1024 for the fastest; cores within a fifth of it count as fast."""
    capacities: dict[int, int] = {}
    for file in (system / "system" / "cpu").glob("cpu[0-9]*/cpu_capacity"):
        capacities[int(file.parent.name.removeprefix("cpu"))] = int(file.read_text())
    most = max(capacities.values(), default=0)
    return {core for core, capacity in capacities.items() if 5 * capacity >= 4 * most}


def _parse(text: str) -> set[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
