"""Prints the table: one Markdown table per temperature, and below it which methods could not run, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forerun.measure.bench.settings import PLAIN
from forerun.measure.bench.stats import Spread
from forerun.measure.report.plots import load_pyplot
from lab.spec.document import comparisons
from lab.spec.methods import LOOKUPS

DASH = "-"


def lines_of(document: Mapping[str, Any]) -> Iterator[str]:
    """Everything that is printed."""
    yield conditions_line(document["conditions"])
    for cell in document["cells"]:
        yield ""
        yield f"{title_of(cell)}: x plain with its 95% interval; by task x plain, tokens per round"
        yield ""
        yield from _table(cell, document)
        for pair, ratios in comparisons(cell, LOOKUPS).items():
            yield ""
            yield f"{pair}: " + ", ".join(f"{task} {ratio:.2f}" for task, ratio in ratios.items())
    yield from _remarks(document)


def conditions_line(facts: Mapping[str, Any]) -> str:
    where = f"{facts['gpu']}" if facts.get("gpu") else f"{facts['cpu']}, {facts['threads']} threads"
    ended = f"; CUT SHORT by {facts['cut']}" if facts["cut"] else ""
    return (
        f"{facts['model']} ({facts['shape']}), {where}, {facts['date']}, commit {facts['commit']}; {facts['suite']}: "
        f"{facts['prompts']} prompts, {facts['max_tokens']} tokens, batch 1, {facts['repeats']} repeats, the "
        f"controller decides how much to draft, {facts['seconds']:.0f} s in all, {facts['load_seconds']:.0f} of them "
        f"loading{ended}"
    )


def title_of(cell: Mapping[str, Any]) -> str:
    """The temperature, and above 0 the verifier."""
    if cell["temperature"] == 0.0:
        return "T=0"
    return f"T={cell['temperature']:g}, {cell['verifier']} verification"


def _table(cell: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    tasks, auto = cell["tasks"], document["conditions"].get("auto")
    yield (
        "| method | parameters | training, min | x plain | tokens per round | drafting | texts equal | "
        + " | ".join(tasks)
        + " |"
    )
    yield "|---" * (7 + len(tasks)) + "|"
    for name in (PLAIN, *document["methods"]):
        facts = document["methods"].get(name, {"parameters": 0, "minutes": None})
        row = cell["methods"].get(name)
        if row is None and (not facts.get("error") or cell is not document["cells"][0]):
            continue  # not a row here, or the first table says that it could not run
        label = f"`{name}`" + (" (auto)" if name == auto else "") + (" *" if facts.get("error") else "")
        cells = [label, _millions(facts["parameters"]), _number(facts["minutes"], ".1f")]
        none = ["could not run", *[DASH] * (3 + len(tasks))]
        cells += none if row is None else _figures(row, tasks)
        yield "| " + " | ".join(cells) + " |"


def _figures(row: Mapping[str, Any], tasks: list[str]) -> list[str]:
    equal = row["equal"] if isinstance(row["equal"], str) else f"{row['equal']} of {row['texts']}"
    low, high = row["interval"] or (None, None)
    found = [str(Spread(row["speedup"], low, high)), _number(row["tokens_per_round"], ".2f")]
    found += [_number(row["drafting"], ".0%"), equal]
    for task in tasks:
        mine = row["by_task"].get(task)
        found.append(DASH if mine is None else f"{mine['speedup']:.2f}, {_number(mine['tokens_per_round'], '.2f')}")
    return found


def _remarks(document: Mapping[str, Any]) -> Iterator[str]:
    """What went wrong, method by method."""
    failed = {name: facts["error"] for name, facts in document["methods"].items() if facts["error"]}
    if failed:
        yield ""
        yield "* could not run, or not to the end:"
    for name, reason in failed.items():
        yield f"- `{name}`: {reason}"
    for name, facts in document["methods"].items():
        for note in facts["notes"]:
            if note != failed.get(name):
                yield f"- note on `{name}`: {note}"


def _millions(count: int) -> str:
    return DASH if not count else f"{count / 1e6:.1f}M" if count < 1e9 else f"{count / 1e9:.2f}B"


def _number(value: float | None, form: str) -> str:
    return DASH if value is None else format(value, form)


_THICK = 0.8  # of the bars of one method together


def draw(document: Mapping[str, Any], file: Path) -> None:
    """Bars for each method that wrote something, those of one temperature in one colour."""
    cells = document["cells"]
    names = [name for name in document["methods"] if any(name in cell["methods"] for cell in cells)]
    if not names:
        return
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(1, 2, figsize=(13, 1.6 + 0.42 * len(names)), sharey=True, layout="constrained")
    for panel, key, label in zip(panels, ("speedup", "tokens_per_round"), ("x plain", "tokens per round"), strict=True):
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
        f"{facts['model']} ({facts['shape']})\n{where}, {facts['date'][:10]}, commit {facts['commit']}", fontsize=10
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
