"""Another engine's figures on the same prompts and weights, from a JSON file: a list of batch sizes and tokens/s.

    [{"batch": 8, "plain": 1284.0, "head": 2317.0, "texts": 66, "equal": 29}, ...]

`texts` and `equal` may be left out: how many texts it wrote, and how many with drafts equal its own without.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class RivalRow:
    """One batch size."""

    batch: int
    plain: float | None  # tokens/s
    head: float | None
    texts: int | None = None
    equal: int | None = None


def read_rival(file: Path) -> list[RivalRow]:
    """The rows of such a file, by batch size."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        rows = [_row(one) for one in found]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        example = '[{"batch": 8, "plain": 1284.0, "head": 2317.0}]'
        raise InvalidInput(f"{str(file)!r} does not hold another engine's figures as {example}") from error
    return sorted(rows, key=lambda row: row.batch)


def _row(one: dict[str, Any]) -> RivalRow:
    texts = one.get("texts")
    count = len(texts) if isinstance(texts, list) else None if texts is None else int(texts)
    equal = one.get("equal")
    return RivalRow(
        int(one["batch"]),
        _rate(one.get("plain")),
        _rate(one.get("head")),
        count,
        None if equal is None else int(equal),
    )


def _rate(value: Any) -> float | None:
    if value is None:
        return None
    rate = float(value)
    if not 0.0 < rate < float("inf"):
        raise ValueError(f"a rate of {value}")
    return rate
