"""The log of a benchmark's runs in a folder, a line of JSON each, so that an interrupted benchmark resumes.

`settings.json` says what was asked for, `rounds.jsonl` has one line per sequence written: its tokens, and for every
round what was drafted, how deep, how much was accepted, and where the seconds went. A last line that was cut
off while it was written is measured again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forerun.core.errors import InvalidInput
from forerun.measure.bench.alternate import Run
from forerun.measure.bench.settings import Cell, Settings

_HARMLESS = ("repeats", "url")  # more of them may be asked for later


class RunLog:
    """Runs by cell; kept in a folder, or in memory only."""

    def __init__(self, folder: Path | None, settings: Settings) -> None:
        self._file = None if folder is None else folder / "rounds.jsonl"
        self._runs: dict[tuple[Cell, tuple[str, str, int]], Run] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            _agree(folder, settings)
            self._read()

    def known(self, cell: Cell) -> dict[tuple[str, str, int], Run]:
        """What was measured before, in this cell."""
        return {key: run for (where, key), run in self._runs.items() if where == cell}

    def add(self, cell: Cell, run: Run) -> None:
        """Keep a run, and write it to disk now."""
        if (cell, run.key) in self._runs:
            return
        self._runs[cell, run.key] = run
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_row(cell, run)) + "\n")

    def _read(self) -> None:
        assert self._file is not None
        if not self._file.is_file():
            return
        whole = []
        for line in self._file.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                cell, run = _parse(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue  # cut off by whatever ended the last attempt
            self._runs[cell, run.key] = run
            whole.append(line if line.endswith("\n") else line + "\n")
        self._file.write_text("".join(whole), encoding="utf-8")


def _agree(folder: Path, settings: Settings) -> None:
    """Runs under other settings must not be mixed with these."""
    file, ours = folder / "settings.json", settings.as_document()
    if file.is_file():
        try:
            theirs = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidInput(f"{file} is not readable; delete it or choose another --out") from error
        for key, value in ours.items():
            if key not in _HARMLESS and theirs.get(key) != value:
                raise InvalidInput(
                    f"{folder} was measured with {key}={theirs.get(key)!r} and now {value!r} is asked for; "
                    "choose another --out, or delete the folder"
                )
    file.write_text(json.dumps(ours, indent=1) + "\n", encoding="utf-8")


def _row(cell: Cell, run: Run) -> dict[str, Any]:
    return {
        "verifier": cell.verifier,
        "temperature": cell.temperature,
        "batch": cell.batch,
        "contender": run.contender,
        "prompt": run.prompt,
        "task": run.task,
        "repeat": run.repeat,
        "texts": run.texts,
        "seconds": run.seconds,
        "rounds": run.rounds,
        "decode_seconds": run.decode_seconds,
        "passes": [{part: round(spent, 7) for part, spent in one.items()} for one in run.passes],
        "drafts": run.drafts,
    }


def _parse(row: dict[str, Any]) -> tuple[Cell, Run]:
    drafts = tuple(tuple((n, depth, kept) for n, depth, kept in text) for text in row["drafts"])
    run = Run(
        row["contender"],
        row["prompt"],
        row["task"],
        row["repeat"],
        tuple(tuple(text) for text in row["texts"]),
        row["seconds"],
        row["rounds"],
        row["decode_seconds"],
        tuple(row["passes"]),
        drafts,
    )
    return Cell(row["verifier"], row["temperature"], row["batch"]), run
