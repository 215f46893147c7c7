"""Plots of measured figures as SVG, drawn from the result documents in `benchmarks/`.

`python -m tools.docs_pages` writes them. They are drawn by hand, so that the same numbers give the same bytes
everywhere: a test compares the files with what is drawn here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path

from tools.docs_figures import RACE, Documents, documents, methods, number, race_rows

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
OURS, PEER, LIGHT, INK, GRID = "#00796b", "#e6873c", "#f3c9a0", "#333333", "#dddddd"
_FONT = 'font-family="sans-serif" font-size="12"'


def _text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}" {_FONT}{more}>{words}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'


def _picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    inside = [f"<title>{title}</title>", _box(0, 0, width, height, "#ffffff"), *parts]
    return "\n".join([head, *inside, "</svg>"]) + "\n"


def batches(known: Documents | None = None) -> str:
    """Speed over our plain loop by batch size: our default, vLLM with the same head, vLLM plain."""
    rows = (known or documents())["h200-batches-8b"]["tables"]["batches"]["rows"]
    series = (
        ("Forerun, default", OURS, "default"),
        ("vLLM, same head", PEER, "vllm_head"),
        ("vLLM, plain", LIGHT, "vllm_plain"),
    )
    left, top, high, bar, most = 46, 44, 200, 30, 3.0
    group = len(series) * bar + 26
    width, bottom = left + len(rows) * group + 10, top + high

    def y(value: float) -> float:
        return bottom - high * value / most

    parts = [
        _text(
            left,
            18,
            "Tokens/s over our own plain loop, by sequences at once (8B cost, one H200)",
            more=' font-weight="bold"',
        )
    ]
    for tick in (0, 1, 2, 3):
        line = INK if tick == 1 else GRID
        parts.append(f'<line x1="{left}" y1="{y(tick):.1f}" x2="{width - 10}" y2="{y(tick):.1f}" stroke="{line}"/>')
        parts.append(_text(left - 6, y(tick) + 4, f"{tick}x", "end"))
    for place, row in enumerate(rows):
        start = left + place * group + 13
        for at, (_, fill, key) in enumerate(series):
            value = row[key] / row["plain"]
            parts.append(_box(start + at * bar, y(value), bar - 3, bottom - y(value), fill))
            parts.append(
                _text(
                    start + at * bar + (bar - 3) / 2,
                    y(value) - 4,
                    number(value, ".2f"),
                    "middle",
                    ' font-weight="bold"' if not at else "",
                )
            )
        parts.append(_text(start + group / 2 - 13, bottom + 18, str(row["batch"]), "middle"))
    for at, (name, fill, _) in enumerate(series):
        parts += [_box(left + at * 160, bottom + 32, 12, 12, fill), _text(left + at * 160 + 18, bottom + 42, name)]
    return _picture(width, bottom + 56, "Speed by batch size beside vLLM", parts)


def drafters(known: Documents | None = None) -> str:
    """Speed over plain decoding of every drafter on Spec-Bench, greedy, with 95% intervals."""
    rows = [row for row in methods(known) if row["method"] != "plain"]
    left, top, step, wide, most = 120, 36, 22, 420, 4.2
    bottom = top + step * len(rows)

    def x(value: float) -> float:
        return left + wide * min(value, most) / most

    parts = [
        _text(8, 18, "x plain decoding on Spec-Bench, T=0, batch 1 (8B cost, one H200)", more=' font-weight="bold"')
    ]
    for tick in range(5):
        line = INK if tick == 1 else GRID
        parts.append(f'<line x1="{x(tick):.1f}" y1="{top}" x2="{x(tick):.1f}" y2="{bottom}" stroke="{line}"/>')
        parts.append(_text(x(tick), bottom + 16, f"{tick}x", "middle"))
    for place, row in enumerate(rows):
        value, low, high = row["all"]
        y = top + place * step + 4
        fill = OURS if row["method"] == "ngram+eagle3" else "#7fbfb5"
        parts += [_text(left - 8, y + 12, row["method"], "end"), _box(left, y, x(value) - left, step - 7, fill)]
        parts.append(f'<line x1="{x(low):.1f}" y1="{y + 7.5}" x2="{x(high):.1f}" y2="{y + 7.5}" stroke="{INK}"/>')
        parts.append(_text(left + wide + 8, y + 12, number(value, ".2fx")))
    return _picture(left + wide + 60, bottom + 26, "Every drafter on Spec-Bench", parts)


_LINES = (OURS, PEER, "#3b6fb6", "#b03a5b", "#7a5cae", "#8a8a2c", "#5b5b5b", "#1f9ecf")


def race(known: Documents | None = None) -> str:
    """Tokens per round by minutes of training, a line for each method, named at its end."""
    rows = race_rows((known or documents())[RACE])
    left, top, wide, high = 46, 36, 460, 260
    longest = max(row["curve"][-1][0] for row in rows)
    most = max(1.5, ceil(max(value for row in rows for _, value in row["curve"]) * 2) / 2)

    def at(minutes: float, value: float) -> tuple[float, float]:
        return left + wide * minutes / longest, top + high * (most - value) / (most - 1)

    parts = [_text(8, 18, "Tokens per round by training minutes, equal for all", more=' font-weight="bold"')]
    for tick in range(2, round(2 * most) + 1):
        y = at(0, tick / 2)[1]
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + wide}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(_text(left - 6, y + 4, number(tick / 2, ".1f"), "end"))
    for tick in range(5):
        x = at(longest * tick / 4, 1)[0]
        parts.append(_text(x, top + high + 18, number(longest * tick / 4, ".2f"), "middle"))
    lowest = top - 14.0
    for place, row in enumerate(rows):
        points = [at(*point) for point in row["curve"]]
        fill, y = _LINES[place % len(_LINES)], max(points[-1][1] + 4, lowest + 14)  # names keep their distance
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{fill}" stroke-width="2"/>')
        parts += [_box(left + wide + 8, y - 8, 8, 8, fill), _text(left + wide + 22, y, row["method"])]
        lowest = y
    return _picture(left + wide + 100, max(top + high, round(lowest)) + 26, "Training methods at equal minutes", parts)


PLOTS: dict[str, Callable[[Documents | None], str]] = {"batches.svg": batches, "drafters.svg": drafters}


def plots(known: Documents | None = None) -> dict[Path, str]:
    """Every plot, as it should be; that of a race once there was one."""
    drawn = {ASSETS / name: draw(known) for name, draw in PLOTS.items()}
    raced = {ASSETS / f"{RACE}.svg": race(known)} if RACE in (known or documents()) else {}
    return drawn | raced
