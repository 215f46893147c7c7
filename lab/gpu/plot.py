"""Plot of t(n): the time of a pass over n nodes, for every shape and kind of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.measure.report.plots import load_pyplot


def draw_passes(document: Mapping[str, Any], file: Path) -> None:
    """One panel per shape, one line per batch size and kind; dotted: reading the weights at the copy rate."""
    pyplot = load_pyplot()
    names = list(dict.fromkeys(shape["shape"] for shape in document["shapes"]))
    if not names:
        return
    figure, panels = pyplot.subplots(1, len(names), figsize=(4.6 * len(names), 3.8), squeeze=False)
    for panel, name in zip(panels[0], names, strict=True):
        for shape in (shape for shape in document["shapes"] if shape["shape"] == name):
            for batch in dict.fromkeys(row["batch"] for row in shape["passes"]):
                rows = [row for row in shape["passes"] if row["batch"] == batch]
                label = f"{shape['weights']} weights, batch {batch}"
                panel.plot(
                    [row["nodes"] for row in rows], [row["pass_ms"] for row in rows], marker="o", label=label
                )
            panel.axhline(shape["weights_ms"], linestyle=":", color="grey", linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_ylim(bottom=0)
        panel.set(title=f"{name} shape", xlabel="nodes per sequence", ylabel="ms per pass")
        panel.legend(fontsize=7)
    gpu = document["conditions"].get("gpu", "")
    figure.suptitle(f"One pass on {gpu}, {document['context']} tokens of context", fontsize=10)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
