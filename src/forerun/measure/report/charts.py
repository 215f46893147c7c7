"""Line charts as inline SVG; colours come from the page's style sheet, so they follow its light and dark themes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

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
        """The chart as markup."""
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
                says = f"{line.name}: {dot.y:.3g}{self.unit} at {dot.x:g}" + (
                    f", {dot.note}" if dot.note else ""
                )
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
