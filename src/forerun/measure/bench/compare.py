"""Compare two benchmark results: what changed, and whether the change is more than noise.

Only ratios are compared as such: they were measured within one process. Speeds of two runs differ by whatever
the machine did meanwhile, so they are shown and not judged. `read_result` checks a document's schema version and keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from forerun.core.errors import InvalidInput
from forerun.measure.report.tables import figure_table
from forerun.measure.report.terminal import number

ALL = "all tasks"
_CONDITIONS = (
    "model", "draft_model", "device", "dtype", "threads", "cpu", "suite", "prompts", "max_tokens", "budget",
    "batch", "sampling", "torch", "forerun", "commit", "busy",
)  # fmt: skip


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Speed-ups of every drafter that both have, by task; `change` is after by before."""
    shared = [name for name in after["by_task"] if name in before["by_task"]]
    return {
        "by_task": {name: _drafter(before, after, name) for name in shared},
        "tokens_per_second": {
            name: [source["contenders"][name]["tokens_per_second"] for source in (before, after)]
            for name in after["contenders"]
            if name in before["contenders"]
        },
        "only_before": sorted(set(before["by_task"]) - set(shared)),
        "only_after": sorted(set(after["by_task"]) - set(shared)),
        "equal": [before["equal"], after["equal"]],
        "conditions": {
            key: [before["conditions"].get(key), after["conditions"].get(key)]
            for key in _CONDITIONS
            if before["conditions"].get(key) != after["conditions"].get(key)
        },
    }


def _drafter(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> dict[str, Any]:
    rows = {ALL: (before["speedup"][name], after["speedup"][name])}
    for task, cell in after["by_task"][name].items():
        if task in before["by_task"][name]:
            rows[task] = (before["by_task"][name][task], cell)
    return {task: _change(*pair) for task, pair in rows.items()}


def _change(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """A change counts where the two intervals do not touch; one prompt has none, and says nothing."""
    known = all(side["low"] is not None for side in (before, after))
    clear = known and (after["low"] > before["high"] or after["high"] < before["low"])
    better = after["speedup"] > before["speedup"]
    unclear = "within noise" if known else "one prompt: no interval"
    return {
        "before": before["speedup"],
        "after": after["speedup"],
        "change": round(after["speedup"] / before["speedup"], 4),
        "verdict": ("better" if better else "worse") if clear else unclear,
    }


def tables(found: Mapping[str, Any]) -> list[Table]:
    shown = []
    colours = {"better": "green", "worse": "red"}
    for name, rows in found["by_task"].items():
        table = figure_table(f"{name}: x plain", "", "before", "after", "after/before", "")
        for task, row in rows.items():
            cells = [number(row[key]) for key in ("before", "after", "change")]
            table.add_row(task, *cells, row["verdict"], style=colours.get(row["verdict"], "dim"))
        shown.append(table)
    if found["conditions"]:
        table = figure_table("Conditions that differ", "", "before", "after")
        for key, pair in found["conditions"].items():
            table.add_row(key, *map(str, pair))
        shown.append(table)
    return shown


SCHEMA = 2  # 2: 95% intervals may be null, `intervals` replaces the spread of repeats, acceptance has counts
REQUIRED = (
    "schema",
    "t",
    "contenders",
    "by_task",
    "speedup",
    "ratios",
    "intervals",
    "equal",
    "cells",
    "samples",
    "conditions",
)


def read_result(path: Path) -> dict[str, Any]:
    """A result from a file that holds the document, or a whole output that ends with it."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InvalidInput(f"cannot read {str(path)!r}: {error.strerror}; give a file that --json wrote") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{str(path)!r} is not UTF-8 text; give a file that --json wrote") from None
    try:
        found = json.loads(text if text.startswith("{") else text.rpartition("\n")[2])
    except ValueError:
        raise InvalidInput(f"{str(path)!r} does not end with JSON; give a file that --json wrote") from None
    missing = [key for key in REQUIRED if not isinstance(found, dict) or key not in found]
    if missing:
        raise InvalidInput(f"{str(path)!r} is no benchmark result: {missing[0]!r} is missing; run forerun bench")
    if found["schema"] != SCHEMA:
        raise InvalidInput(f"{str(path)!r} has schema {found['schema']} and this version reads {SCHEMA}; measure again")
    result: dict[str, Any] = found
    return result
