"""One picture of a server under load: tokens a second, and the time to the first token, over the rate of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.measure.report.plots import load_pyplot


def plot(document: dict[str, Any], file: Path) -> None:
    """Draw what `measure` found, a line for each mode."""
    pyplot = load_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    facts = document["conditions"]
    rows = [row for row in document["rows"] if row["clients"] is None] or document["rows"]
    by = "rate" if rows[0]["clients"] is None else "clients"
    for mode in dict.fromkeys(row["mode"] for row in rows):
        own = [row for row in rows if row["mode"] == mode]
        rates = [row[by] for row in own]
        left.plot(rates, [row["tokens_per_second"] for row in own], marker="o", label=f"speculation {mode}")
        right.plot(rates, [row["ttft"]["p99"] for row in own], marker="o", label=f"speculation {mode}")
    for axes, says in ((left, "tokens per second"), (right, "seconds to the first token, p99")):
        axes.set_xlabel("requests per second that come in" if by == "rate" else "clients at once")
        axes.set_ylabel(says)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle(f"{document['model']}, {facts['cpu']}, {facts['date'][:10]}")
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
