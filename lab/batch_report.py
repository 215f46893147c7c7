"""The batch sweep as a table and as a plot, with another engine beside ours where its figures are given.

Another engine's figures, on the same prompts and weights, come from a JSON file: batch sizes and tokens/s.

    [{"batch": 8, "plain": 1284.0, "head": 2317.0, "texts": 66, "equal": 29}, ...]

`texts` and `equal` may be left out: how many texts it wrote, and how many with drafts equal its own without.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.core.errors import InvalidInput
from forerun.measure.bench.batches import PLAIN
from lab.plots import load_pyplot

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RivalRow:
    batch: int
    plain: float | None  # tokens/s
    head: float | None
    texts: int | None = None
    equal: int | None = None


def read_rival(file: Path) -> list[RivalRow]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        rows = [_row(one) for one in found]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        example = '[{"batch": 8, "plain": 1284.0, "head": 2317.0}]'
        raise InvalidInput(f"{str(file)!r} does not hold another engine's figures as {example}") from error
    return sorted(rows, key=lambda row: row.batch)


def _row(one: dict[str, Any]) -> RivalRow:
    texts = one.get("texts")
    count = len(texts) if isinstance(texts, list) else None if texts is None else int(texts)
    equal = one.get("equal")
    return RivalRow(
        int(one["batch"]), _rate(one.get("plain")), _rate(one.get("head")), count, None if equal is None else int(equal)
    )


def _rate(value: Any) -> float | None:
    if value is None:
        return None
    rate = float(value)
    if not 0.0 < rate < float("inf"):
        raise ValueError(f"a rate of {value}")
    return rate


def show_batches(batches: Mapping[str, Any], file: Path | None, title: str) -> None:
    rival = [RivalRow(**row) for row in batches["rival"]]
    if file is not None and batches["rows"]:
        draw(batches["rows"], file, title, rival)
    print(table(batches["rows"], rival))


def say_row(row: Row) -> None:
    print(
        f"batch {row['batch']:>3} {row['setup']:>16}: {row['tokens_per_s']:8.1f} tokens/s, "
        f"{row['x_plain']:.2f}x plain, {row['tokens_per_round']:.2f} tokens per round "
        f"({row['own_tokens_per_round']:.2f} without others), {row['differing']} of {row['texts']} texts differ",
        file=sys.stderr,
        flush=True,
    )


def table(rows: Sequence[Row], rival: Sequence[RivalRow] = (), rival_name: str = "vLLM") -> str:
    """Tokens/s by batch size and setup, over plain with its interval, and what the other engine reached."""
    setups = [*dict.fromkeys(row["setup"] for row in rows)]
    drafted = [name for name in setups if name != PLAIN]
    head = ["batch", "texts", PLAIN, *drafted, "texts differ"]
    if rival:
        head += [f"{rival_name} plain", f"{rival_name} head", "our plain over it", "our best over its head"]
    lines = [head]
    for batch in dict.fromkeys(row["batch"] for row in rows):
        at = {row["setup"]: row for row in rows if row["batch"] == batch}
        cells = [str(batch), str(next(iter(at.values()))["texts"])]
        cells += [_cell(at.get(name), name != PLAIN) for name in (PLAIN, *drafted)]
        cells.append(str(sum(row["differing"] for row in at.values())))
        if rival:
            cells += _beside(at, next((one for one in rival if one.batch == batch), None))
        lines.append(cells)
    widths = [max(len(cells[i]) for cells in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in lines)


def _cell(row: Row | None, over_plain: bool) -> str:
    if row is None:
        return "-"
    if not over_plain:
        return f"{row['tokens_per_s']:.0f}"
    within = row["x_interval"]
    spread = "" if within is None else f" ({within[0]:.2f}-{within[1]:.2f})"
    return f"{row['tokens_per_s']:.0f} = {row['x_plain']:.2f}x{spread}"


def _beside(at: Mapping[str, Row], other: RivalRow | None) -> list[str]:
    if other is None:
        return ["-"] * 4
    ours = at[PLAIN]["tokens_per_s"] if PLAIN in at else None
    best = max(row["tokens_per_s"] for row in at.values())
    return [
        "-" if other.plain is None else f"{other.plain:.0f}",
        "-" if other.head is None else f"{other.head:.0f}",
        "-" if other.plain is None or ours is None else f"{ours / other.plain:.2f}x",
        "-" if other.head is None else f"{best / other.head:.2f}x",
    ]


def draw(rows: Sequence[Row], file: Path, title: str, rival: Sequence[RivalRow] = (), rival_name: str = "vLLM") -> None:
    """Tokens/s, and the time that one sequence waits for a token, against the batch size."""
    pyplot = load_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    for setup in dict.fromkeys(row["setup"] for row in rows):
        some = [row for row in rows if row["setup"] == setup]
        sizes, rates = [row["batch"] for row in some], [row["tokens_per_s"] for row in some]
        if all(row["interval"] is not None for row in some):
            low = [row["tokens_per_s"] - row["interval"][0] for row in some]
            high = [row["interval"][1] - row["tokens_per_s"] for row in some]
            left.errorbar(sizes, rates, yerr=[low, high], marker="o", capsize=3, label=setup)
        else:
            left.plot(sizes, rates, marker="o", label=setup)
        right.plot(sizes, [row["ms_per_token"] for row in some], marker="o", label=setup)
    theirs = {"plain": [(one.batch, one.plain) for one in rival], "head": [(one.batch, one.head) for one in rival]}
    for name, points in theirs.items():
        if pairs := [(batch, rate) for batch, rate in points if rate is not None]:
            label = f"{rival_name} {name}"
            left.plot(*zip(*pairs, strict=True), marker="x", linestyle="--", label=label)
            waits = [(batch, 1e3 * batch / rate) for batch, rate in pairs]
            right.plot(*zip(*waits, strict=True), marker="x", linestyle="--", label=label)
    for axes, says in ((left, "tokens/s, whole calls"), (right, "ms per token of one sequence")):
        axes.set(xscale="log", yscale="log", xlabel="sequences at once", ylabel=says)
        ticks = [*dict.fromkeys(row["batch"] for row in rows)]
        axes.set_xticks(ticks, [str(size) for size in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=140)
    pyplot.close(figure)
