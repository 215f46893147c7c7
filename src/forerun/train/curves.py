"""Training curves of one or several runs, as a plot or as JSON: loss, simulated tokens per round on held-back text.

python -m forerun.train.curves runs/eagle3 runs/hass --by minutes --plot curves.png --json curves.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.core.errors import InvalidInput, MissingDependency

AXES = {  # what a run is plotted against: the log's entry, its share of a unit, the unit
    "step": ("step", 1.0, "step"),
    "tokens": ("tokens", 1e-6, "million tokens of answers seen"),
    "minutes": ("trained_seconds", 1 / 60, "minutes of training"),
}
SMOOTH = 0.97  # share of the past in the running mean of a loss


def read_curve(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run, as its log has them."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().split("\n") if line]


def places(folder: Path, rows: Sequence[Mapping[str, Any]], by: str) -> list[float]:
    """Where the rows of a run's log lie on an axis."""
    key, unit, _ = AXES[by]
    if any(key not in row for row in rows):
        raise InvalidInput(f"the log in {folder} is of an older version, without {key!r}; use --by step")
    return [row[key] * unit for row in rows]


def smoothed(values: Sequence[float]) -> list[float]:
    """A running mean that starts at the first value."""
    kept, mean = [], values[0]
    for value in values:
        mean = SMOOTH * mean + (1 - SMOOTH) * value
        kept.append(mean)
    return kept


def draw(folders: Sequence[Path], file: Path, by: str = "step") -> None:
    """Acceptance of the first level, and chain and tree (upper bound) of every run, against one of `AXES`."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingDependency("plots need matplotlib; install it with: pip install 'forerun[bench]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4.2), layout="constrained")
    for i, folder in enumerate(folders):
        steps = read_curve(folder)
        left.plot(places(folder, steps, by), smoothed([s["acceptance"] for s in steps]), label=folder.name)
        tested = [s for s in steps if s["tokens_per_round"] is not None]
        at = places(folder, tested, by)
        chain, tree = ([s[key] for s in tested] for key in ("tokens_per_round", "tree_tokens_per_round"))
        right.plot(at, chain, f"C{i}o-", markersize=4, label=f"{folder.name}, chain")
        right.plot(at, tree, f"C{i}o:", markersize=4, label=f"{folder.name}, any of the likeliest 10")
        values = [s.get("walked_tokens_per_round") for s in tested]
        walked = [(place, value) for place, value in zip(at, values, strict=True) if value]
        if walked:
            right.plot(
                *zip(*walked, strict=True), f"C{i}s--", markersize=4, label=f"{folder.name}, through other texts"
            )
    left.set(xlabel=AXES[by][2], ylabel="overlap of the laws at the first level", title="While training (smoothed)")
    right.set(xlabel=AXES[by][2], ylabel="tokens per round", title="Simulated on held-back text")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    right.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))  # colours hold for both panels
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def evaluations(folder: Path) -> dict[str, Any]:
    """What a run was measured at, step by step, and what it learnt from; JSON."""
    kept = folder / "provenance.json"
    made = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    keys = (
        "step",
        "tokens",
        "trained_seconds",
        "loss",
        "lr",
        "tokens_per_round",
        "tree_tokens_per_round",
        "walked_tokens_per_round",
    )
    tested = [row for row in read_curve(folder) if row["tokens_per_round"] is not None]
    known = {key: made[key] for key in ("commit", "device", "data_hash", "arguments") if key in made}
    return {"run": folder.name, **known, "curve": [{key: row.get(key) for key in keys} for row in tested]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m forerun.train.curves", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="run folders of `forerun train`")
    parser.add_argument("--by", choices=AXES, default="step", help="what the plot is against; JSON has all")
    parser.add_argument("--plot", type=Path, help="the image file to write")
    parser.add_argument("--json", type=Path, help="the JSON file to write")
    given = parser.parse_args(arguments)
    if given.plot is None and given.json is None:
        parser.error("name a file to write: --plot FILE or --json FILE")
    if given.plot is not None:
        draw(given.folders, given.plot, given.by)
        sys.stdout.write(f"{given.plot}\n")
    if given.json is not None:
        found = {"runs": [evaluations(folder) for folder in given.folders]}
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(f"{given.json}\n")


if __name__ == "__main__":
    main()
