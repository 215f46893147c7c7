"""Where the seconds of a benchmark's rounds went, by task and drafter (python -m forerun.bench.cpu.rounds FOLDER).

FOLDER is what `--out` of `forerun bench` or `python -m forerun.bench.cpu` wrote; runs that were cut short count as far
as they came. For each task and drafter: the speed over plain on the same prompts and repeats, milliseconds of a text by
part (`prompt`: all that lies outside of rounds), and what passes took by the nodes that they held. Passes over one node
are told apart by what came before them: behind a pause, which a draft is, weights come from farther away.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from forerun.bench.settings import PLAIN
from forerun.engine.clock import PARTS
from forerun.errors import ForerunError, InvalidInput

BEHIND_PLAIN, BEHIND_DRAFT = "1 behind a plain round", "1 behind a drafted round"
HOST = ("draft", "verdict", "host")  # parts of a round beside its pass


@dataclass(slots=True)
class Sums:
    """Texts of one task by one contender."""

    speedups: list[float] = field(default_factory=list)  # over plain, a text each
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    passes: dict[str, list[float]] = field(default_factory=dict)  # seconds by nodes of the pass
    beside: dict[str, list[float]] = field(default_factory=dict)  # seconds beside the pass, drafted or not
    texts: int = 0
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, run: Mapping[str, Any], plain_seconds: float | None) -> None:
        """A text and its rounds."""
        self.texts += 1
        self.tokens += sum(map(len, run["texts"]))
        if plain_seconds is not None:
            self.speedups.append(plain_seconds / run["seconds"])
        for part in PARTS[1:]:
            self.parts[part] += sum(one[part] for one in run["passes"])
        self.parts["prompt"] += run["seconds"] - run["decode_seconds"]
        before = 0
        for spent, (drafted, _, accepted) in zip(run["passes"], run["drafts"][0], strict=False):
            self.rounds += 1
            self.drafted += drafted
            self.accepted += accepted
            kind = str(1 + drafted) if drafted else BEHIND_DRAFT if before else BEHIND_PLAIN
            self.passes.setdefault(kind, []).append(spent["pass"])
            beside = "drafted" if drafted else "plain"
            self.beside.setdefault(beside, []).append(sum(spent[part] for part in HOST))
            before = drafted

    def as_document(self) -> dict[str, Any]:
        """Plain JSON values; seconds become milliseconds."""
        texts = max(1, self.texts)
        return {
            "texts": self.texts,
            "x_plain": round(_geometric(self.speedups), 4) if self.speedups else None,
            "x_plain_lowest": round(min(self.speedups), 4) if self.speedups else None,
            "tokens_per_round": round(self.tokens / max(1, self.rounds), 3),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "ms_a_text": {part: round(1e3 * spent / texts, 2) for part, spent in self.parts.items()},
            "pass_ms": {kind: _figures(values) for kind, values in sorted(self.passes.items())},
            "beside_ms": {kind: _figures(values) for kind, values in sorted(self.beside.items())},
        }


def _figures(seconds: Sequence[float]) -> dict[str, float]:
    """How many, their median and their mean in milliseconds."""
    return {"n": len(seconds), "p50": round(1e3 * median(seconds), 3), "mean": round(1e3 * mean(seconds), 3)}


def _geometric(ratios: Sequence[float]) -> float:
    return math.exp(mean(map(math.log, ratios)))


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Whole lines of a log, texts written alone."""
    file = folder / "rounds.jsonl"
    if not file.is_file():
        raise InvalidInput(f"there is no {file}; name a folder that --out of a benchmark wrote")
    runs = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            run = json.loads(line)
        except ValueError:
            continue  # cut off while it was written
        if run["batch"] == 1 and run["decode_seconds"] is not None:
            runs.append(run)
    return runs


def add_up(runs: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Sums]]:
    """By task, all of them together first, and by contender."""
    runs = list(runs)
    plain = {(run["prompt"], run["repeat"]): run["seconds"] for run in runs if run["contender"] == PLAIN}
    found: dict[str, dict[str, Sums]] = {"all": {}}
    for run in runs:
        seconds = plain.get((run["prompt"], run["repeat"]))
        for task in ("all", run["task"]):
            found.setdefault(task, {}).setdefault(run["contender"], Sums()).add(run, seconds)
    return found


def show(task: str, each: Mapping[str, Mapping[str, Any]]) -> None:
    """A task's contenders in three lines each."""
    for name, row in each.items():
        parts = " ".join(f"{part} {spent:.1f}" for part, spent in row["ms_a_text"].items())
        passes, beside = (_medians(row[kind]) for kind in ("pass_ms", "beside_ms"))
        print(
            f"{task}: {name}, x plain {row['x_plain']} (lowest text {row['x_plain_lowest']}), "
            f"{row['tokens_per_round']} tokens/round, {row['accepted']} of {row['drafted']} nodes accepted\n"
            f"    ms a text: {parts}\n    median ms of a pass: {passes}\n    beside it: {beside}"
        )


def _medians(figures: Mapping[str, Mapping[str, float]]) -> str:
    return ", ".join(f"{kind}: {one['p50']:.2f} (n={one['n']})" for kind, one in figures.items())


def main(words: Sequence[str] | None = None) -> int:
    """Print x plain by task, one task's rounds, and the document of all."""
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.cpu.rounds")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", default="all", help="whose rounds to print; the document has every task's")
    flags = parser.parse_args(words)
    try:
        sums = add_up(read_runs(flags.folder))
    except ForerunError as error:
        parser.error(str(error))
    document = {
        task: {name: one.as_document() for name, one in sorted(each.items())} for task, each in sums.items()
    }
    for task, each in document.items():
        print(
            f"{task:<16}",
            "  ".join(f"{name} {row['x_plain']}" for name, row in each.items() if name != PLAIN),
        )
    show(flags.task, document.get(flags.task, {}))
    print(json.dumps({"benchmark": "cpu_rounds", "tasks": document}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
