"""The document of a table: for every cell and method its speed-up, tokens per round, time drafting and equal texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.measure.bench.alternate import Contender, Run, differences
from forerun.measure.bench.figures import Figures, interval_of
from forerun.measure.bench.settings import PLAIN, Cell
from lab.spec.measure import Session

LAW = "law"  # of texts that have the plain loop's law and not its tokens


def cell_document(cell: Cell, runs: Sequence[Run], contenders: Sequence[Contender]) -> dict[str, Any]:
    """What was measured under one temperature and verifier."""
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
    """Everything so far, as plain JSON values."""
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
