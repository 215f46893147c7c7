"""Write a benchmark result as one self-contained HTML page: charts first, every figure below them.

The page is a Jinja template (page.html); its values are prepared here. Charts are inline SVG; their colours come from
the page's style sheet, so they follow its light and dark themes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

from jinja2 import Environment

from forerun.measure.bench.figures import Spread
from forerun.measure.bench.settings import PLAIN
from forerun.measure.report import summary

COLOURS = 6  # of the palette in page.html
LONGEST = 1.6  # of a ratio: an interval that reaches further is cut in pictures, or it would flatten the rest
PARTS = ("prompt", "pass", "draft", "verdict", "host")
_FACTS = (
    "model", "draft_model", "device", "dtype", "cpu", "cores", "threads", "copy_gb_per_s", "bandwidth_share",
    "memory", "suite", "prompts", "prompt_tokens", "max_tokens", "repeats", "budget", "timed", "load_before",
    "load_after", "isa", "left_out", "torch", "transformers", "forerun", "commit", "date", "seconds",
)  # fmt: skip


def render(result: Mapping[str, Any]) -> str:
    source = files("forerun.measure.report").joinpath("page.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    conditions = result["conditions"]
    drafters = list(result["by_task"])
    return template.render(
        result=result,
        conditions=conditions,
        drafters=[{"name": name, "colour": index % COLOURS} for index, name in enumerate(drafters)],
        headline=_headline(result, drafters),
        tasks=_task_bars(result, drafters),
        charts=_charts(result, drafters),
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


def _headline(result: Mapping[str, Any], drafters: Sequence[str]) -> dict[str, Any]:
    """The first drafter's speed-up; in large type only where the interval leaves 1 out."""
    found: dict[str, Any] = {"equality": summary.equality(result), "drafter": None}
    if drafters:
        cells = result["by_task"][drafters[0]]
        best, worst = (choose(cells, key=lambda task: cells[task]["speedup"]) for choose in (max, min))
        overall = summary.spread_of(result["speedup"][drafters[0]])
        found |= {
            "drafter": drafters[0],
            "says": summary.headline(result),
            "is_clear": overall.is_clear,
            "speedup": overall.value,
            "tokens_per_round": result["contenders"][drafters[0]]["tokens_per_round"],
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


def _task_bars(result: Mapping[str, Any], drafters: Sequence[str]) -> dict[str, Any]:
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
                    _bar(drafter, index, result["by_task"][drafter][task], end)
                    for index, drafter in enumerate(drafters)
                ],
            }
            for task in result["conditions"]["tasks"]
        ],
    }


def _bar(drafter: str, index: int, cell: Mapping[str, Any], end: float) -> dict[str, Any]:
    bar = {"drafter": drafter, "colour": index % COLOURS, "width": 100 * cell["speedup"] / end, "whisker": None}
    if cell["low"] is not None:
        left, right = 100 * cell["low"] / end, 100 * _reach(cell) / end
        bar["whisker"] = {"left": left, "width": right - left}
    return {**bar, **_shown(summary.spread_of(cell)), "tokens_per_round": cell["tokens_per_round"]}


def _charts(result: Mapping[str, Any], drafters: Sequence[str]) -> list[dict[str, str]]:
    drawn = [_batch_chart(result, drafters), _acceptance_chart(result, drafters), _cost_chart(result["t"])]
    return [chart for chart in drawn if chart is not None]


def _acceptance_chart(result: Mapping[str, Any], drafters: Sequence[str]) -> dict[str, str] | None:
    lines = []
    for index, drafter in enumerate(drafters):
        counts = result["contenders"][drafter]["accepted_counts"]
        dots = [
            Dot(depth, 100 * kept / drafted, note=f"{kept} of {drafted} trees")
            for depth, (kept, drafted) in enumerate(counts, start=1)
        ]
        if dots:
            lines.append(Line(drafter, index % COLOURS, dots))
    if not lines:
        return None
    deepest = max(len(line.dots) for line in lines)
    step = max(1, -(-deepest // 8))
    depths = [1, *range(1 + step, deepest + step, step)] if deepest > 1 else [1, 2]
    chart = Chart("Acceptance by position", "depth in the tree", lines, depths, [0, 25, 50, 75, 100], unit="%")
    caption = "Of the trees that reached a depth, the share whose path did; the counts are in the table below."
    return {"title": "Acceptance by position", "caption": caption, "svg": chart.svg()}


def _cost_chart(curve: Mapping[str, float]) -> dict[str, str]:
    sizes = [int(size) for size in curve]
    ratios = [seconds / curve["1"] for seconds in curve.values()]
    lines = [
        Line("n separate passes", None, [Dot(size, size) for size in sizes]),
        Line("one pass over n nodes", 0, [Dot(*pair) for pair in zip(sizes, ratios, strict=True)]),
    ]
    powers = [2.0**power for power in range(12) if 2**power <= max(sizes)]
    chart = Chart("Cost of a pass", "nodes n", lines, powers, powers, log_x=True, log_y=True, unit="×")
    first = 1000 * curve["1"]
    caption = f"t(n) in plain passes; t(1) is {first:.1f} ms. Dotted: n passes of one node each."
    return {"title": "What a pass costs", "caption": caption, "svg": chart.svg()}


def _batch_chart(result: Mapping[str, Any], drafters: Sequence[str]) -> dict[str, str] | None:
    first = result["cells"][0]
    same = [
        cell
        for cell in result["cells"]
        if (cell["verifier"], cell["temperature"]) == (first["verifier"], first["temperature"])
    ]
    if len(same) < 2:
        return None
    lines = []
    for index, drafter in enumerate(drafters):
        found = [(cell["batch"], cell["speedup"][drafter]) for cell in same]
        dots = [
            Dot(batch, row["speedup"], row["low"], None if row["high"] is None else _reach(row)) for batch, row in found
        ]
        lines.append(Line(drafter, index % COLOURS, dots))
    highest = max(dot.high or dot.y for line in lines for dot in line.dots)
    chart = Chart(
        "Speed-up against batch size", "sequences in the batch", lines,
        [float(cell["batch"]) for cell in same], ticks(max(highest, 1.2)), log_x=True, mark=1.0, unit="×",
    )  # fmt: skip
    caption = "Each further sequence in a batch makes drafted nodes more costly."
    return {"title": "Speed-up against batch size", "caption": caption, "svg": chart.svg()}


def _split(result: Mapping[str, Any]) -> list[dict[str, Any]]:
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
    """A row for every contender measured; the ratio over our plain loop is its first figure."""
    rows = []
    for name, figures in result["contenders"].items():
        ratio = summary.ratio_over(result, name, PLAIN)
        keys = ("tokens_per_second", "decode_tokens_per_second", "tokens_per_round")
        figure = ["" if figures[key] is None else f"{figures[key]:.2f}" for key in keys]
        shown = None if ratio is None or name == PLAIN else _shown(ratio)
        rows.append({"name": name, "ratio": shown, "figures": figure})
    return rows


def _acceptance(result: Mapping[str, Any]) -> dict[str, Any]:
    rows = {name: summary.accepted_cells(result, name) for name in summary.drafters_of(result)}
    deepest = max(map(len, rows.values()), default=0)
    return {"depths": list(range(1, deepest + 1)), "rows": {name: row for name, row in rows.items() if row}}


def _samples(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for sample in result["samples"]:
        drafted = sum(flag for _, flag in sample["pieces"])
        found.append({**sample, "drafted": round(100 * drafted / max(1, len(sample["pieces"])))})
    return found


WIDTH, HEIGHT = 380, 240
LEFT, RIGHT, TOP, BOTTOM = 38, 12, 12, 36


@dataclass(frozen=True, slots=True)
class Dot:
    """A point and, where one is known, its interval."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    note: str = ""  # added to the tooltip


@dataclass(frozen=True, slots=True)
class Line:
    """A series; `colour` is an index into the style sheet's palette, None = grey and dotted."""

    name: str
    colour: int | None
    dots: Sequence[Dot]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over shared axes."""

    title: str  # for screen readers
    x_label: str
    lines: Sequence[Line]
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    log_x: bool = False
    log_y: bool = False
    mark: float | None = None  # a horizontal line worth seeing: no gain
    unit: str = ""
    _ranges: tuple[float, float, float, float] = field(init=False)

    def __post_init__(self) -> None:
        xs = [_scale(x, self.log_x) for x in self.x_ticks]
        ys = [_scale(y, self.log_y) for y in self.y_ticks]
        wide, tall = max(xs) - min(xs) or 1.0, max(ys) - min(ys) or 1.0
        object.__setattr__(self, "_ranges", (min(xs), wide, min(ys), tall))

    def svg(self) -> str:
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">',
            *self._axes(),
            *(part for line in self.lines for part in self._line(line)),
            "</svg>",
        ]
        return "\n".join(parts)

    def _place(self, x: float, y: float) -> tuple[float, float]:
        left, wide, low, tall = self._ranges
        across = LEFT + (_scale(x, self.log_x) - left) / wide * (WIDTH - LEFT - RIGHT)
        up = (min(max((_scale(y, self.log_y) - low) / tall, 0.0), 1.0)) * (HEIGHT - TOP - BOTTOM)
        return round(across, 1), round(HEIGHT - BOTTOM - up, 1)

    def _axes(self) -> list[str]:
        parts = []
        for y in self.y_ticks:
            _, at = self._place(self.x_ticks[0], y)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
            parts.append(f'<text class="y" x="{LEFT - 6}" y="{at + 4}">{y:g}{self.unit}</text>')
        for x in self.x_ticks:
            at, _ = self._place(x, self.y_ticks[0])
            parts.append(f'<text class="x" x="{at}" y="{HEIGHT - BOTTOM + 15}">{x:g}</text>')
        if self.mark is not None:
            _, at = self._place(self.x_ticks[0], self.mark)
            parts.append(f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text class="x label" x="{middle}" y="{HEIGHT - 4}">{escape(self.x_label)}</text>')
        return parts

    def _line(self, line: Line) -> list[str]:
        style = "ref" if line.colour is None else f"c{line.colour}"
        places = [self._place(dot.x, dot.y) for dot in line.dots]
        path = " ".join(f"{x},{y}" for x, y in places)
        parts = [f'<polyline class="line {style}" points="{path}"/>']
        for dot, (x, y) in zip(line.dots, places, strict=True):
            if dot.low is not None and dot.high is not None:
                ends = self._place(dot.x, dot.low)[1], self._place(dot.x, dot.high)[1]
                parts.append(f'<line class="line {style}" x1="{x}" x2="{x}" y1="{ends[0]}" y2="{ends[1]}"/>')
            if line.colour is not None:
                says = f"{line.name}: {dot.y:.3g}{self.unit} at {dot.x:g}" + (f", {dot.note}" if dot.note else "")
                parts.append(
                    f'<circle class="{style}" cx="{x}" cy="{y}" r="3.5"><title>{escape(says)}</title></circle>'
                )
        return parts


def _scale(value: float, logarithmic: bool) -> float:
    return math.log2(max(value, 1e-9)) if logarithmic else value


def ticks(highest: float, most: int = 6) -> list[float]:
    """Round numbers from 0 to beyond `highest`."""
    steps = [base * 10.0**power for power in range(-2, 4) for base in (1, 2, 5)]
    step = next((step for step in steps if highest / step < most), steps[-1])
    return [round(step * i, 6) for i in range(math.ceil(highest / step - 1e-9) + 1)]
