"""A result as one HTML file that needs nothing else: pictures first, every figure below them.

The page is a Jinja template (page.html); what it shows is prepared here, so that it only lays out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

from forerun.bench.report.charts import Chart, Dot, Line, ticks
from forerun.bench.settings import PLAIN
from forerun.errors import InvalidInput

COLOURS = 6  # of the palette in page.html
PARTS = ("prompt", "target", "draft", "verify", "host")
_FACTS = (
    "model", "draft_model", "device", "dtype", "cpu", "cores", "threads", "copy_gb_per_s", "bandwidth_share",
    "memory", "suite", "prompts", "prompt_tokens", "max_tokens", "repeats", "budget", "timed", "load_before",
    "load_after", "torch", "transformers", "forerun", "commit", "date", "seconds",
)  # fmt: skip


def write_report(result: Mapping[str, Any], path: Path) -> None:
    """Write the page."""
    try:
        path.write_text(render(result), encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"cannot write {str(path)!r}: {error.strerror}; choose another --html") from None


def render(result: Mapping[str, Any]) -> str:
    """The page as text."""
    source = files("forerun.bench.report").joinpath("page.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    conditions = result["conditions"]
    ways = list(result["by_task"])
    return template.render(
        result=result,
        conditions=conditions,
        ways=[{"name": name, "colour": index % COLOURS} for index, name in enumerate(ways)],
        headline=_headline(result, ways),
        tasks=_task_bars(result, ways),
        charts=_charts(result, ways),
        split=_split(result),
        cells=_cells(result) if len(result["cells"]) > 1 else [],
        samples=_samples(result),
        facts=[(key.replace("_", " "), conditions[key]) for key in _FACTS if conditions.get(key) is not None],
        parts=PARTS,
        plain=PLAIN,
    )


def _headline(result: Mapping[str, Any], ways: Sequence[str]) -> dict[str, Any]:
    compared = sum(cell["compared"] for cell in result["cells"])
    differing = sum(len(cell["differing"]) for cell in result["cells"])
    found: dict[str, Any] = {"compared": compared, "same": compared - differing, "way": None}
    if ways:
        cells = result["by_task"][ways[0]]
        best, worst = (choose(cells, key=lambda task: cells[task]["speedup"]) for choose in (max, min))
        found |= {
            "way": ways[0],
            **result["speedup"][ways[0]],
            "tokens_per_round": result["contenders"][ways[0]]["tokens_per_round"],
            "best": (best, cells[best]["speedup"]),
            "worst": (worst, cells[worst]["speedup"]),
        }
    return found


def _task_bars(result: Mapping[str, Any], ways: Sequence[str]) -> dict[str, Any]:
    """Bars in percent of a scale that ends a little beyond the longest interval."""
    rows = [cells[task] for cells in result["by_task"].values() for task in cells]
    end = max([1.25, *(1.04 * row["high"] for row in rows)])
    return {
        "one": 100 / end,
        "single": any(row["low"] == row["high"] for row in rows),
        "marks": [{"at": 100 * tick / end, "value": tick} for tick in ticks(end) if tick <= end],
        "rows": [
            {
                "task": task.replace("_", " "),
                "bars": [
                    {
                        "way": way,
                        "colour": index % COLOURS,
                        **(cell := result["by_task"][way][task]),
                        "width": 100 * cell["speedup"] / end,
                        "from": 100 * cell["low"] / end,
                        "to": 100 * cell["high"] / end,
                    }
                    for index, way in enumerate(ways)
                ],
            }
            for task in result["conditions"]["tasks"]
        ],
    }


def _charts(result: Mapping[str, Any], ways: Sequence[str]) -> list[dict[str, str]]:
    drawn = [_batch_chart(result, ways), _acceptance_chart(result, ways), _cost_chart(result["t"])]
    return [chart for chart in drawn if chart is not None]


def _acceptance_chart(result: Mapping[str, Any], ways: Sequence[str]) -> dict[str, str] | None:
    lines = []
    for index, way in enumerate(ways):
        shares = result["contenders"][way]["accepted_per_position"]
        dots = [Dot(depth, 100 * share) for depth, share in enumerate(shares, start=1)]
        if dots:
            lines.append(Line(way, index % COLOURS, dots))
    if not lines:
        return None
    deepest = max(len(line.dots) for line in lines)
    step = max(1, -(-deepest // 8))
    depths = [1, *range(1 + step, deepest + step, step)] if deepest > 1 else [1, 2]
    chart = Chart(
        "Acceptance by position", "depth in the tree", "", lines, depths, [0, 25, 50, 75, 100], unit="%"
    )
    caption = "Of the trees that reached a depth, the share whose path did."
    return {"title": "Acceptance by position", "caption": caption, "svg": chart.svg()}


def _cost_chart(curve: Mapping[str, float]) -> dict[str, str]:
    sizes = [int(size) for size in curve]
    ratios = [seconds / curve["1"] for seconds in curve.values()]
    lines = [
        Line("n separate passes", None, [Dot(size, size) for size in sizes]),
        Line("one pass over n nodes", 0, [Dot(*pair) for pair in zip(sizes, ratios, strict=True)]),
    ]
    powers = [2.0**power for power in range(12) if 2**power <= max(sizes)]
    chart = Chart("Cost of a pass", "nodes n", "", lines, powers, powers, log_x=True, log_y=True, unit="×")
    first = 1000 * curve["1"]
    caption = f"t(n) in plain passes; t(1) is {first:.1f} ms. Dotted: n passes of one node each."
    return {"title": "What a pass costs", "caption": caption, "svg": chart.svg()}


def _batch_chart(result: Mapping[str, Any], ways: Sequence[str]) -> dict[str, str] | None:
    first = result["cells"][0]
    same = [
        cell
        for cell in result["cells"]
        if (cell["verifier"], cell["temperature"]) == (first["verifier"], first["temperature"])
    ]
    if len(same) < 2:
        return None
    lines = []
    for index, way in enumerate(ways):
        found = [(cell["batch"], cell["speedup"][way]) for cell in same]
        dots = [Dot(batch, row["speedup"], row["low"], row["high"]) for batch, row in found]
        lines.append(Line(way, index % COLOURS, dots))
    highest = max(dot.high or dot.y for line in lines for dot in line.dots)
    chart = Chart(
        "Speed-up against batch size", "texts written at once", "", lines,
        [float(cell["batch"]) for cell in same], ticks(max(highest, 1.2)), log_x=True, mark=1.0, unit="×",
    )  # fmt: skip
    caption = "Every text more in a batch makes drafted nodes dearer."
    return {"title": "Speed-up against batch size", "caption": caption, "svg": chart.svg()}


def _split(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Seconds per token by part, as shares of the slowest contender's."""
    rows = []
    for name, figures in result["contenders"].items():
        if spent := figures["seconds"]:
            per_token = 1000 / figures["tokens_per_second"]
            whole = sum(spent.values()) or 1.0
            rows.append({"name": name, "ms": per_token, "shares": {p: spent[p] / whole for p in PARTS}})
    longest = max((row["ms"] for row in rows), default=1.0)
    for row in rows:
        row["widths"] = {part: 100 * share * row["ms"] / longest for part, share in row["shares"].items()}
    return rows


def _cells(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    equal = {True: "yes", False: "no", None: "law only"}
    return [{**cell, "same": equal[cell["equal"]]} for cell in result["cells"]]


def _samples(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for sample in result["samples"]:
        drafted = sum(flag for _, flag in sample["pieces"])
        found.append({**sample, "drafted": round(100 * drafted / max(1, len(sample["pieces"])))})
    return found
