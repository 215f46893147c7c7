"""Plots of a CPU benchmark (matplotlib): cost of a pass, tokens/s by contender, speed-up by task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.core.errors import MissingDependency
from forerun.measure.bench.settings import PLAIN

_OURS, _THEIRS = "tab:blue", "tab:gray"


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw t(n) by number format, tokens/s by contender and the speed-up by task into an image file."""
    pyplot = load_pyplot()
    figure, (left, middle, right) = pyplot.subplots(
        1, 3, figsize=(17, 4.8), width_ratios=(2, 2, 3), layout="constrained"
    )
    _draw_costs(left, _curves(result))
    _draw_rates(middle, result["contenders"])
    _draw_tasks(right, result["by_task"], result["conditions"]["tasks"])
    facts = result["conditions"]
    figure.suptitle(
        f"{facts['model']}, {facts['cpu']}, {facts['threads']} threads, {facts['date'][:10]}, commit {facts['commit']}"
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _curves(result: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    """t(n) by number format where that was measured, else the one that was run."""
    modes = {name: found["t"] for name, found in result.get("modes", {}).items() if found["t"]}
    return modes or {result["conditions"]["dtype"]: result["t"]}


def _draw_costs(axes: Any, curves: Mapping[str, Mapping[str, float]]) -> None:
    sizes = [int(size) for size in next(iter(curves.values()))]
    for name, curve in curves.items():
        points = [1000 * seconds for seconds in curve.values()]
        axes.plot([int(size) for size in curve], points, marker="o", markersize=4, label=name)
    axes.set(xscale="log", yscale="log", xlabel="nodes n", ylabel="t(n), ms", title="Cost of one pass over n nodes")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_rates(axes: Any, contenders: Mapping[str, Any]) -> None:
    """Bars from the top in the order of the tables; ours begin with the plain loop."""
    names = list(contenders)
    rates = [figures["tokens_per_second"] for figures in contenders.values()]
    first = names.index(PLAIN)
    bars = axes.barh(names, rates, color=[_OURS if i >= first else _THEIRS for i in range(len(names))])
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="tokens/s, prompts included", title="All tasks")


def whisker(cell: Mapping[str, Any]) -> tuple[float, float]:
    """How far an interval reaches below and above its ratio; above at most as far as the ratio is high."""
    value, low, high = cell["speedup"], cell["low"], cell["high"]
    if low is None:
        return 0.0, 0.0
    return max(0.0, value - low), min(max(0.0, high - value), value)


def _draw_tasks(axes: Any, by_task: Mapping[str, Any], tasks: list[str]) -> None:
    """Grouped bars; the whiskers are 95% intervals, cut where they would flatten the bars; none from one prompt."""
    width = 0.8 / max(1, len(by_task))
    for index, (name, cells) in enumerate(by_task.items()):
        places = [place + (index - (len(by_task) - 1) / 2) * width for place in range(len(tasks))]
        found = [cells[task] for task in tasks]
        heights = [cell["speedup"] for cell in found]
        below, above = zip(*(whisker(cell) for cell in found), strict=True)
        axes.bar(places, heights, width, yerr=(below, above), capsize=2, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(tasks)), tasks, rotation=25, ha="right")
    axes.set(ylabel="speed-up over our plain loop", title="Speed-up by task")
    axes.set_ylim(top=1.15 * axes.get_ylim()[1])  # room for the legend above the bars
    axes.legend(loc="upper center", ncols=max(1, len(by_task)))


def load_pyplot() -> Any:
    """Matplotlib's pyplot, imported when a plot is drawn, into files: no display is needed."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingDependency("plots need matplotlib; install it with: pip install 'forerun[bench]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot
