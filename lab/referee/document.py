"""The result document of the referee's runs: the shape of all documents in benchmarks/, tables made of reports."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from forerun.measure.machine import machine_facts
from forerun.referee.evidence import FALSE_ALARMS, smallest_found
from forerun.referee.suite import chosen_checks

Report = Mapping[str, Any]


def framed(question: str, command: str, conditions: str, raw: Any, tables: Mapping[str, Any], commit: str) -> Report:
    """A document of benchmarks/."""
    facts = machine_facts()
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return {
        "question": question,
        "command": command,
        "commit": (commit or str(facts["commit"]))[:7],
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{gpu}{facts['cores']} cores ({facts['cpu']}), python {facts['python']}, torch {facts['torch']}",
        "conditions": conditions,
        "raw_samples": raw,
        "tables": tables,
    }


def slim(report: Report) -> dict[str, Any]:
    """A report of `forerun verify --json` without its plots."""
    checks = [{key: value for key, value in each.items() if key not in ("trace", "bars")} for each in report["checks"]]
    return {**report, "checks": checks}


def tables(raw: Sequence[Report]) -> dict[str, Any]:
    """Of runs `{engine, version, started, report}`: one row each, and one row per check that did not pass."""
    found = {
        "runs": {
            "columns": {
                "engine": ["engine"], "passed": ["passed", "d"], "failed": ["failed"], "skipped": ["skipped", "d"],
                "tokens": ["tokens", ",d"], "bias": ["bias that would show", ".1f%"], "started": ["started with"],
                "command": ["command"],
            },
            "rows": [_run(each) for each in raw],
        }
    }  # fmt: skip
    if rows := [row for each in raw for row in _findings(each)]:
        columns = {"engine": ["engine"], "check": ["check"], "result": ["result"], "found": ["found"]}
        found["findings"] = {"columns": columns, "rows": rows}
    return found


def _run(each: Report) -> dict[str, Any]:
    report = each["report"]
    checks = report["checks"]
    by = {status: [one["name"] for one in checks if one["status"] == status] for status in ("pass", "fail", "skip")}
    law = [one for one in checks if one["name"] == "law.temperature_1" and one["status"] == "pass"]
    alarms = FALSE_ALARMS / sum(one.bets for one in chosen_checks())
    row = {
        "engine": f"{each['engine']} ({each['version']})",
        "passed": len(by["pass"]),
        "failed": ", ".join(f"`{name}`" for name in by["fail"]) or "none",
        "skipped": len(by["skip"]),
        "tokens": report["tokens"],
        "started": f"`{each['started']}`" if each["started"] else "in process",
        "command": f"`{report['command']}`",
    }
    return row | ({"bias": round(100 * smallest_found(law[0]["tokens"], alarms, 18), 1)} if law else {})


def _findings(each: Report) -> list[dict[str, str]]:
    rows: dict[tuple[str, str], list[str]] = {}
    for one in each["report"]["checks"]:
        if one["status"] != "pass":
            rows.setdefault((one["status"], _told(one)), []).append(f"`{one['name']}`")
    results = {"fail": "failed", "skip": "skipped"}
    return [
        {"engine": each["engine"], "check": ", ".join(names), "result": results[status], "found": told}
        for (status, told), names in sorted(rows.items())
    ]


def _told(one: Report) -> str:
    said = " ".join(str(one["detail"]).split())
    if one["p_value"] is not None:
        said += f" (p-value {one['p_value']:.1g})"
    elif one["counterexample"]:
        got, due = (str(one["counterexample"].get(key))[:80] for key in ("got", "due"))
        said += f": `{got}` where `{due}` was due"
    return re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1", said).replace("|", "\\|")
