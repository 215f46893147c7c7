"""What some work on the GPU was made of: its kernels, traced by torch.profiler, and the time that each kind takes.

Kernels of a pass start before the last one has ended and wait inside (programmatic launches), so that their durations
add up to more than the work takes. Time is therefore cut up by ends: a kernel has what lies between the end of the one
before it and its own, as far as it was running; the rest is a gap. Tracing lengthens short kernels and gaps: compare
parts, and take whole times from runs without it.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

GAP = "gap"
_TORCH = re.compile(r"at::native::(?:\(anonymous namespace\)::|<unnamed>::)?(\w+)")
_KINDS = {
    "attend": "attention", "combine": "attention", "embed": "embed", "place": "fill", "record": "verdict",
    "follow": "verdict", "tops": "growth", "advance": "growth", "cut": "growth", "plan": "draft plan",
    "enter": "head input", "pick": "head input", "append": "features", "keep": "rows kept", "move": "moves",
    "uniform_rows": "noise", "finish_residual": "ends of products", "finish_qkv": "ends of products",
}  # fmt: skip

Grid = tuple[int, ...]


class Kernel(NamedTuple):
    """One kernel or copy on the device; microseconds."""

    name: str
    grid: Grid
    start: float
    end: float


def traced(work: Callable[[], object]) -> list[Kernel]:
    """The kernels of some work, which is waited for; none where there is no GPU."""
    if not torch.cuda.is_available():
        work()
        return []
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return kernels_of(json.loads(file.read_text(encoding="utf-8"))["traceEvents"])


def kernels_of(events: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """What ran on the device, of the events of a Chrome trace."""
    ours = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return [
        Kernel(
            one["name"],
            tuple(one.get("args", {}).get("grid", ())),
            float(one["ts"]),
            float(one["ts"]) + float(one["dur"]),
        )
        for one in ours
    ]


def kind_of(kernel: Kernel, products: Mapping[Grid, str]) -> str:
    """`products` names products by tiles and splits of their grids."""
    name = kernel.name
    if name == "linear":
        return products.get(kernel.grid[1:], "other products")
    if name == "wide":
        return "wide products"
    if name in _KINDS:
        return _KINDS[name]
    if "ArgMax" in name:
        return "argmax"
    if "gemm" in name.lower() or "nvjet" in name or "cutlass" in name:
        return "library products"
    if name.startswith(("Memcpy", "Memset")):
        return name.split(" (")[0]
    found = _TORCH.search(name)
    return f"torch {found.group(1)}" if found else name.split("<")[0][:40]


def cut_up(kernels: Iterable[Kernel], kind: Callable[[Kernel], str]) -> dict[str, float]:
    """Microseconds by kind, which together are all from the first start to the last end."""
    by_end = sorted(kernels, key=lambda kernel: (kernel.end, kernel.start))
    starts = [one.start for one in by_end]  # the first start of this one and all that end later
    for i in reversed(range(len(starts) - 1)):
        starts[i] = min(starts[i], starts[i + 1])
    spent = defaultdict[str, float](float)
    reached = starts[0] if starts else 0.0
    for one, start in zip(by_end, starts, strict=True):
        begun = max(reached, start)
        spent[GAP] += begun - reached
        spent[kind(one)] += one.end - begun
        reached = one.end
    return {name: spent[name] for name in sorted(spent, key=lambda name: -spent[name])}


def idle(kernels: Iterable[Kernel], least: float) -> tuple[int, float]:
    """Gaps of at least so many microseconds in which nothing ran, and how long they are together."""
    count, spent, reached = 0, 0.0, None
    for one in sorted(kernels, key=lambda kernel: kernel.start):
        if reached is not None and one.start - reached >= least:
            count, spent = count + 1, spent + one.start - reached
        reached = one.end if reached is None else max(reached, one.end)
    return count, spent


def said(spent: Mapping[str, float], repeats: int, least: float = 1.0) -> str:
    """Microseconds of each kind in one of several repeats, those of less than `least` together."""
    parts = {name: value / repeats for name, value in spent.items()}
    shown = [f"{name} {value:.0f}" for name, value in parts.items() if value >= least]
    rest = sum(value for value in parts.values() if value < least)
    return ", ".join([*shown, f"others {rest:.0f}"] if rest >= least else shown)
