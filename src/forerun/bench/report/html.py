"""A result as one HTML file that needs nothing else: pictures first, every figure below them.

The page is a Jinja template (page.html); what it shows is prepared here, so that it only lays out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

from forerun.bench.report import summary
from forerun.bench.report.charts import Chart, Dot, Line, ticks
from forerun.bench.settings import PLAIN
from forerun.bench.stats import Spread
from forerun.errors import InvalidInput

COLOURS = 6  # of the palette in page.html
LONGEST = 1.6  # of a ratio: an interval that reaches further is cut in pictures, or it would flatten the rest
PARTS = ("prompt", "target", "draft", "verify", "host")
_FACTS = (
    "model", "draft_model", "device", "dtype", "cpu", "cores", "threads", "copy_gb_per_s", "bandwidth_share",
    "memory", "suite", "prompts", "prompt_tokens", "max_tokens", "repeats", "budget", "timed", "load_before",
    "load_after", "isa", "left_out", "torch", "transformers", "forerun", "commit", "date", "seconds",
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
        contenders=_contenders(result),
        acceptance=_acceptance(result),
        notes=summary.notes(result),
        intervals=summary.INTERVALS,
        samples=_samples(result),
        facts=[(key.replace("_", " "), conditions[key]) for key in _FACTS if conditions.get(key) is not None],
        parts=PARTS,
        plain=PLAIN,
    )


def _headline(result: Mapping[str, Any], ways: Sequence[str]) -> dict[str, Any]:
    """The first drafter's speed-up; in large type only where the interval leaves 1 out."""
    found: dict[str, Any] = {"equality": summary.equality(result), "way": None}
    if ways:
        cells = result["by_task"][ways[0]]
        best, worst = (choose(cells, key=lambda task: cells[task]["speedup"]) for choose in (max, min))
        overall = summary.spread_of(result["speedup"][ways[0]])
        found |= {
            "way": ways[0],
            "says": summary.headline(result),
            "is_clear": overall.is_clear,
            "speedup": overall.value,
            "tokens_per_round": result["contenders"][ways[0]]["tokens_per_round"],
            "best": (best, _shown(summary.spread_of(cells[best]))),
            "worst": (worst, _shown(summary.spread_of(cells[worst]))),
        }
    return found


def _shown(found: Spread) -> dict[str, Any]:
    """A ratio, its interval in words, and whether it leaves 1 out."""
    return {"value": f"{found.value:.2f}×", "interval": found.interval, "is_clear": found.is_clear}


def _reach(cell: Mapping[str, Any]) -> float:
    """How far right a ratio and its interval are drawn."""
    value: float = cell["speedup"]
    return value if cell["high"] is None else max(value, min(cell["high"], LONGEST * value))


def _task_bars(result: Mapping[str, Any], ways: Sequence[str]) -> dict[str, Any]:
    """Bars in percent of a scale that ends a little beyond the longest interval."""
    rows = [cells[task] for cells in result["by_task"].values() for task in cells]
    end = max([1.25, *(1.04 * _reach(row) for row in rows)])
    return {
        "one": 100 / end,
        "single": any(row["low"] is None for row in rows),
        "marks": [{"at": 100 * tick / end, "value": tick} for tick in ticks(end) if tick <= end],
        "rows": [
            {
                "task": task.replace("_", " "),
                "bars": [
                    _bar(way, index, result["by_task"][way][task], end) for index, way in enumerate(ways)
                ],
            }
            for task in result["conditions"]["tasks"]
        ],
    }


def _bar(way: str, index: int, cell: Mapping[str, Any], end: float) -> dict[str, Any]:
    bar = {"way": way, "colour": index % COLOURS, "width": 100 * cell["speedup"] / end, "whisker": None}
    if cell["low"] is not None:
        left, right = 100 * cell["low"] / end, 100 * _reach(cell) / end
        bar["whisker"] = {"left": left, "width": right - left}
    return {**bar, **_shown(summary.spread_of(cell)), "tokens_per_round": cell["tokens_per_round"]}


def _charts(result: Mapping[str, Any], ways: Sequence[str]) -> list[dict[str, str]]:
    drawn = [_batch_chart(result, ways), _acceptance_chart(result, ways), _cost_chart(result["t"])]
    return [chart for chart in drawn if chart is not None]


def _acceptance_chart(result: Mapping[str, Any], ways: Sequence[str]) -> dict[str, str] | None:
    lines = []
    for index, way in enumerate(ways):
        counts = result["contenders"][way]["accepted_counts"]
        dots = [
            Dot(depth, 100 * kept / drafted, note=f"{kept} of {drafted} trees")
            for depth, (kept, drafted) in enumerate(counts, start=1)
        ]
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
    caption = (
        "Of the trees that reached a depth, the share whose path did; the counts are in the table below."
    )
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
        dots = [
            Dot(batch, row["speedup"], row["low"], None if row["high"] is None else _reach(row))
            for batch, row in found
        ]
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
    return [
        {
            "name": f"{cell['verifier']}, T={cell['temperature']:g}, batch {cell['batch']}",
            "same": equal[cell["equal"]],
            "ratios": [_shown(summary.spread_of(found)) for found in cell["speedup"].values()],
        }
        for cell in result["cells"]
    ]


def _contenders(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for everybody who was measured; the ratio over our plain loop is its first figure."""
    rows = []
    for name, figures in result["contenders"].items():
        ratio = summary.ratio_over(result, name, PLAIN)
        keys = ("tokens_per_second", "decode_tokens_per_second", "tokens_per_round")
        figure = ["" if figures[key] is None else f"{figures[key]:.2f}" for key in keys]
        shown = None if ratio is None or name == PLAIN else _shown(ratio)
        rows.append({"name": name, "ratio": shown, "figures": figure})
    return rows


def _acceptance(result: Mapping[str, Any]) -> dict[str, Any]:
    """Acceptance by depth with the counts it rests on."""
    rows = {name: summary.accepted_cells(result, name) for name in summary.drafters_of(result)}
    deepest = max(map(len, rows.values()), default=0)
    return {"depths": list(range(1, deepest + 1)), "rows": {name: row for name, row in rows.items() if row}}


def _samples(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for sample in result["samples"]:
        drafted = sum(flag for _, flag in sample["pieces"])
        found.append({**sample, "drafted": round(100 * drafted / max(1, len(sample["pieces"])))})
    return found
