"""Trace: every round as a JSON file for chrome://tracing or ui.perfetto.dev.

One track has the rounds, with their batch, draft and accepted tokens; one track per part has what each round spent on
it. On a GPU parts overlap; they are drawn one behind the other, as they are booked, and add up to the round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from forerun.engine.round_clock import PARTS
from forerun.errors import InvalidInput

if TYPE_CHECKING:
    from forerun.types import Round

TRACKS = {"rounds": 1, **{part: 2 + i for i, part in enumerate(PARTS)}}


class Trace:
    """Writes events as they come; readable from the first on, complete JSON once it is closed."""

    def __init__(self, file: Path) -> None:
        try:
            self._file: TextIO | None = file.open("w", encoding="utf-8")
        except OSError as error:
            raise InvalidInput(
                f"cannot write the trace {str(file)!r}: {error.strerror}; choose another file"
            ) from None
        self._first: float | None = None
        self._ended = float("-inf")  # the last round
        self._rounds = 0
        names = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": name}}
            for name, track in TRACKS.items()
        ]
        self._file.write("[\n" + ",\n".join(json.dumps(one) for one in names))

    def add_round(self, started: float, seconds: Mapping[str, float], outcome: Round, tokens: int) -> None:
        """A round that began then, and what it spent by part."""
        self._rounds += 1
        drafted = {
            "batch": len(outcome.seqs), "nodes": sum(outcome.drafted), "most_nodes": max(outcome.drafted),
            "depth": max(outcome.depths), "accepted": sum(outcome.accepted), "tokens": tokens,
            "prompt_rows": outcome.prompt_rows,
        }  # fmt: skip
        # rounds whose passes were run ahead in one call each have their share of it: none begins before the last ends
        started = max(started, self._ended)
        self._ended = started + sum(seconds.values())
        self._add("rounds", f"round {self._rounds}", started, sum(seconds.values()), drafted)
        at = started
        for part in PARTS:
            if seconds[part] > 0.0:
                self._add(part, part, at, seconds[part], {"round": self._rounds})
            at += seconds[part]

    def add_prompts(self, started: float, seconds: float, rows: int) -> None:
        """A pass over prompts alone; on a GPU its launch, while the pass itself is shown with the next round."""
        self._add("prompt", "prompts", started, seconds, {"prompt_rows": rows})

    def close(self) -> None:
        """Complete the file; a second call changes nothing."""
        if self._file is not None:
            self._file.write("\n]\n")
            self._file.close()
            self._file = None

    def _add(self, track: str, name: str, started: float, seconds: float, args: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        self._first = started if self._first is None else self._first
        event = {
            "name": name, "ph": "X", "pid": 1, "tid": TRACKS[track], "args": args,
            "ts": round(1e6 * (started - self._first), 3), "dur": round(1e6 * seconds, 3),
        }  # fmt: skip
        self._file.write(",\n" + json.dumps(event))
