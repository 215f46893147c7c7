"""Plot of the table: speed-up and tokens per round of every method, by temperature; dots are the tasks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.measure.bench.settings import PLAIN
from forerun.measure.report.plots import load_pyplot
from lab.spec.table import title_of

_THICK = 0.8  # of the bars of one method together


def draw(document: Mapping[str, Any], file: Path) -> None:
    """Bars for each method that wrote something, those of one temperature in one colour."""
    cells = document["cells"]
    names = [name for name in document["methods"] if any(name in cell["methods"] for cell in cells)]
    if not names:
        return
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(
        1, 2, figsize=(13, 1.6 + 0.42 * len(names)), sharey=True, layout="constrained"
    )
    for panel, key, label in zip(
        panels, ("speedup", "tokens_per_round"), ("x plain", "tokens per round"), strict=True
    ):
        for i, cell in enumerate(cells):
            _draw_cell(panel, cell, names, key, i, len(cells))
        panel.margins(x=0.1)
        panel.axvline(1.0, color="grey", linestyle=":", linewidth=1)
        panel.set(xlabel=label, xlim=(0, None))
        panel.set_yticks(range(len(names)), names)
        panel.grid(axis="x", alpha=0.3)
    panels[0].invert_yaxis()
    panels[0].legend(fontsize=8, loc="lower right")
    facts = document["conditions"]
    where = facts.get("gpu") or facts["cpu"]
    figure.suptitle(
        f"{facts['model']} ({facts['shape']})\n{where}, {facts['date'][:10]}, commit {facts['commit']}",
        fontsize=10,
    )
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _draw_cell(panel: Any, cell: Mapping[str, Any], names: list[str], key: str, i: int, count: int) -> None:
    height = _THICK / count
    rows = {place: cell["methods"][name] for place, name in enumerate(names) if name in cell["methods"]}
    places = [place + (i - (count - 1) / 2) * height for place in rows]
    plain = cell["methods"][PLAIN]["tokens_per_second"]
    label = f"{title_of(cell)} (plain {plain:.0f} tokens/s)"
    values = [row[key] or 0.0 for row in rows.values()]
    panel.barh(places, values, height=0.92 * height, label=label)
    for place, value, row in zip(places, values, rows.values(), strict=True):
        tasks = [found[key] for found in row["by_task"].values() if found[key] is not None]
        panel.plot(tasks, [place] * len(tasks), linestyle="", marker=".", color="black", markersize=3)
        beside = max([value, *tasks]), place  # behind the dots
        panel.annotate(f"{value:.2f}", beside, (5, 0), textcoords="offset points", va="center", fontsize=7)
