"""Prints the table: one Markdown table per temperature, and below it which methods could not run, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.measure.bench.alternate import Contender, Run, differences
from forerun.measure.bench.figures import Figures, Spread, interval_of
from forerun.measure.bench.settings import PLAIN, Cell
from lab.plots import load_pyplot
from lab.spec.measure import Session
from lab.spec.methods import LOOKUPS

LAW = "law"  # of texts that have the plain loop's law and not its tokens


def cell_document(cell: Cell, runs: Sequence[Run], contenders: Sequence[Contender]) -> dict[str, Any]:
    figures, found = Figures(runs), differences(runs, contenders)
    differing = {one.name: sum(d.contender == one.name for d in found) for one in contenders}
    rows = {}
    for one in contenders:
        mine = figures.of(one.name)
        if mine:
            rows[one.name] = _row(figures, one.name) | {
                "texts": len(mine),
                "equal": len(mine) - differing[one.name] if one.exact else LAW,
            }
    where = {"temperature": cell.temperature, "verifier": cell.verifier}
    return {**where, "tasks": figures.tasks, "methods": rows, "differing": len(found)}


def _row(figures: Figures, name: str) -> dict[str, Any]:
    tasks = [task for task in figures.tasks if figures.of(name, task)]
    spent = figures.seconds(name)
    whole = sum(run.seconds for run in figures.of(name))
    return {
        **_cell(figures, name, None),
        "tokens_per_second": round(figures.rate(name), 2),
        "drafting": None if spent is None else round(spent["draft"] / whole, 4),
        "by_task": {task: _cell(figures, name, task) for task in tasks},
    }


def _cell(figures: Figures, name: str, task: str | None) -> dict[str, Any]:
    spread, per_round = figures.speedup(name, PLAIN, task), figures.tokens_per_round(name, task)
    return {
        "speedup": round(spread.value, 4),
        "interval": interval_of(spread),
        "tokens_per_round": None if per_round is None else round(per_round, 3),
    }


def document_of(session: Session, conditions: Mapping[str, Any]) -> dict[str, Any]:
    cells = [
        cell_document(cell, runs, session.contenders_of(cell))
        for cell in session.runs
        if (runs := session.paired(cell))
    ]
    wrong = sum(cell["differing"] for cell in cells)
    return {
        "conditions": {**conditions, "cut": session.cut},
        "methods": {name: dict(facts) for name, facts in session.facts.items()},
        "cells": cells,
        "equal": not wrong,
        "texts": sum(map(len, session.runs.values())),
        "seconds_by_method": {name: round(spent, 2) for name, spent in session.spent.items()},
    }


def comparisons(cell: Mapping[str, Any], unfiled: Sequence[str]) -> dict[str, dict[str, float]]:
    """Speed by task of one method over another: suffix over n-gram, and each cascade over itself less one level.

    `unfiled` are the drafters that run no files.
    """
    rows = cell["methods"]
    pairs = [("suffix", "ngram"), *((name, part) for name in rows for part in parts_of(name, unfiled))]
    return {
        f"{one} / {other}": {
            task: round(found["speedup"] / rows[other]["by_task"][task]["speedup"], 3)
            for task, found in rows[one]["by_task"].items()
            if task in rows[other]["by_task"]
        }
        for one, other in pairs
        if one in rows and other in rows
    }


def parts_of(name: str, unfiled: Sequence[str]) -> list[str]:
    """A cascade's name without one of its levels, each in turn; its files go with their levels, its budget stays."""
    drafters, _, files = name.partition("=")
    drafters, colon, nodes = drafters.partition(":")
    levels = drafters.split(">")
    if len(levels) < 2:
        return []
    given = iter(files.split(";"))
    pairs = [(level, "" if level in unfiled else next(given, "")) for level in levels]
    found = []
    for i in range(len(pairs)):
        left = pairs[:i] + pairs[i + 1 :]
        kept = ";".join(file for _, file in left if file)
        found.append(">".join(level for level, _ in left) + colon + nodes + (f"={kept}" if kept else ""))
    return found


DASH = "-"


def lines_of(document: Mapping[str, Any]) -> Iterator[str]:
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
