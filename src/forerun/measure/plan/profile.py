"""What was measured of one model on one machine: seconds per token by drafter and batch size, and of prompts.

A profile comes from a file (`forerun plan --measure --save FILE`, or the JSON of a batch sweep: `make bench-cpu`,
`make bench-gpu`), or from the figures in benchmarks/ that come with the package.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from forerun.core.errors import DamagedFile, InvalidInput, brief

PLAIN = "plain"
_GET_ONE = "make one with `forerun plan --measure --save FILE`"
BUILT_IN = (("h200", "8b"),)


@dataclass(frozen=True, slots=True)
class Point:
    """One drafter at one batch size, as it ran."""

    setup: str  # a drafter, and its budget where that was fixed
    batch: int
    decode_seconds: float  # per token that the whole batch wrote, without the time of prompts
    prompt_seconds: float  # per token of prompts that were read beside it
    tokens_per_round: float
    error: float  # half the width of the 95% interval, as a share
    context: float  # tokens of a sequence while it was measured


@dataclass(frozen=True, slots=True)
class Profile:
    """A model on a machine, and where its figures come from."""

    machine: str
    model: str
    source: str  # command, date, commit, conditions
    points: tuple[Point, ...]
    context_seconds: float = 0.0  # per sequence, round and token of context more than was measured

    @property
    def setups(self) -> list[str]:
        return list(dict.fromkeys(point.setup for point in self.points))

    def of(self, setup: str) -> list[Point]:
        """Its points by batch size."""
        return sorted((point for point in self.points if point.setup == setup), key=lambda p: p.batch)

    def max_batch(self, setup: str) -> int:
        return self.of(setup)[-1].batch

    def round_seconds(self, setup: str, batch: int, context: float) -> float:
        """One round of so many sequences, by straight lines between measured batch sizes."""
        points = self.of(setup)
        known = [point.decode_seconds * point.batch * point.tokens_per_round for point in points]
        base = _between([point.batch for point in points], known, batch)
        measured = _between([point.batch for point in points], [point.context for point in points], batch)
        return max(0.25 * base, base + self.context_seconds * batch * (context - measured))

    def tokens_per_round(self, setup: str, batch: int) -> float:
        points = self.of(setup)
        return _between([p.batch for p in points], [p.tokens_per_round for p in points], batch)

    def prompt_seconds(self, setup: str, batch: int) -> float:
        points = self.of(setup)
        return _between([p.batch for p in points], [p.prompt_seconds for p in points], batch)

    def error(self, setup: str) -> float:
        return max(point.error for point in self.of(setup))

    def to_json(self) -> str:
        return json.dumps({"what": "forerun-profile", "schema": 1, **asdict(self)}, indent=1) + "\n"


def _between(sizes: Sequence[int], values: Sequence[float], size: float) -> float:
    """By a straight line between the neighbours; outside, the nearest."""
    place = bisect_left(sizes, size)
    if place == 0:
        return values[0]
    if place == len(sizes):
        return values[-1]
    low, high = sizes[place - 1], sizes[place]
    share = (size - low) / (high - low)
    return values[place - 1] * (1 - share) + values[place] * share


def built_in(gpu: str, model: str) -> Profile:
    """The figures that come with the package."""
    if (gpu, model) not in BUILT_IN:
        known = ", ".join(f"--gpu {g} --model {m}" for g, m in BUILT_IN)
        raise InvalidInput(
            f"nothing is known of {model} on {gpu}; there is {known}; give --file, or --measure on that machine"
        )
    text = (files("forerun.measure.plan") / f"{gpu}-{model}.json").read_text(encoding="utf-8")
    return _of_profile(json.loads(text))


def read_profile(file: Path) -> Profile:
    """A profile of ours, or the batch sweep in a benchmark's JSON."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"cannot read {str(file)!r}: {error.strerror}; {_GET_ONE}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{str(file)!r} is not JSON ({brief(error)}); {_GET_ONE}") from None
    try:
        if isinstance(found, dict) and found.get("what") == "forerun-profile":
            return _of_profile(found)
        rows = next(_sweeps(found), None)
        if rows is None:
            raise InvalidInput(f"{file} holds no batch sweep; {_GET_ONE}")
        head = found if isinstance(found, dict) else {}
        machine = head.get("machine") or {}
        name = str(machine.get("gpu") or machine.get("cpu") or "this machine")
        source = f"{file.name}, {head.get('date', 'no date')}"
        return Profile(name, str(head.get("model", "?")), source, points_of(rows))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise DamagedFile(f"{file} is no profile: {type(error).__name__}: {brief(error)}") from None


def points_of(rows: Sequence[Mapping[str, Any]]) -> tuple[Point, ...]:
    """The rows of a batch sweep as points."""
    if not all("prompt_tokens" in row for row in rows):
        raise InvalidInput("the batch sweep does not say how long its prompts were; measure it again")
    return tuple(_point(row) for row in rows)


def _point(row: Mapping[str, Any]) -> Point:
    tokens, texts, prompts = float(row["tokens"]), int(row["texts"]), float(row["prompt_tokens"])
    in_prompts = 1e-3 * float(row["ms_by_part"].get("prompt", 0.0))
    rate, within = float(row["tokens_per_s"]), row.get("interval")
    error = 0.15 if within is None else (within[1] - within[0]) / 2 / rate
    return Point(
        str(row["setup"]), int(row["batch"]), max(1e-9, float(row["seconds"]) - in_prompts) / tokens,
        in_prompts / prompts, float(row["tokens_per_round"]), error, (prompts + tokens / 2) / texts,
    )  # fmt: skip


def _of_profile(found: Mapping[str, Any]) -> Profile:
    points = tuple(Point(**point) for point in found["points"])
    if not any(point.setup == PLAIN for point in points):
        raise InvalidInput("a profile needs points of the setup plain")
    if not all(point.decode_seconds > 0 and point.tokens_per_round >= 1 for point in points):
        raise InvalidInput("a profile has times above 0 and at least one token per round")
    return Profile(
        str(found["machine"]), str(found["model"]), str(found["source"]), points, float(found["context_seconds"])
    )


def _sweeps(found: Any) -> Iterator[list[dict[str, Any]]]:
    """Lists of rows of a batch sweep, wherever they are in a document."""
    wanted = {"batch", "setup", "tokens_per_s", "ms_by_part"}
    if isinstance(found, list) and found and all(isinstance(row, dict) and wanted <= set(row) for row in found):
        yield found
        return
    inside = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    for each in inside:
        yield from _sweeps(each)
