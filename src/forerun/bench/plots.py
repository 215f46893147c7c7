"""Two pictures of a run: what a pass costs, and what drafting gained by task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import MissingDependency


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw t(n) and the speed-up by task into an image file."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingDependency(
            "plots need matplotlib; install it with: pip install 'forerun[bench]'"
        ) from error
    mpl.use("Agg")  # there may be no screen
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 4.5), width_ratios=(2, 3), layout="constrained"
    )
    _draw_costs(left, result["t"])
    _draw_tasks(right, result["by_task"], result["conditions"]["tasks"])
    facts = result["conditions"]
    figure.suptitle(f"{facts['model']}, {facts['cpu']}, {facts['threads']} threads, {facts['dtype']}")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_costs(axes: Any, curve: Mapping[str, float]) -> None:
    sizes = [int(size) for size in curve]
    one = curve["1"]
    axes.plot(sizes, [seconds / one for seconds in curve.values()], marker="o", label="measured")
    axes.plot(sizes, sizes, linestyle=":", color="grey", label="n separate passes")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="nodes n",
        ylabel="t(n) / t(1)",
        title="Cost of one pass over n nodes",
    )
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.legend()


def _draw_tasks(axes: Any, by_task: Mapping[str, Any], tasks: list[str]) -> None:
    """Grouped bars; the whiskers are the lowest and the highest repeat."""
    width = 0.8 / max(1, len(by_task))
    for index, (name, cells) in enumerate(by_task.items()):
        places = [place + (index - (len(by_task) - 1) / 2) * width for place in range(len(tasks))]
        heights = [cells[task]["speedup"] for task in tasks]
        below = [cells[task]["speedup"] - cells[task]["low"] for task in tasks]
        above = [cells[task]["high"] - cells[task]["speedup"] for task in tasks]
        axes.bar(places, heights, width, yerr=(below, above), capsize=2, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(tasks)), tasks, rotation=25, ha="right")
    axes.set(ylabel="speed-up over our plain loop", title="Speed-up by task")
    axes.legend()
