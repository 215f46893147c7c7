"""Read a benchmark's JSON document: schema version and required keys. See docs/benchmarking.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forerun.core.errors import InvalidInput

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
        raise InvalidInput(
            f"cannot read {str(path)!r}: {error.strerror}; give a file that --json wrote"
        ) from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{str(path)!r} is not UTF-8 text; give a file that --json wrote") from None
    try:
        found = json.loads(text if text.startswith("{") else text.rpartition("\n")[2])
    except ValueError:
        raise InvalidInput(f"{str(path)!r} does not end with JSON; give a file that --json wrote") from None
    missing = [key for key in REQUIRED if not isinstance(found, dict) or key not in found]
    if missing:
        raise InvalidInput(
            f"{str(path)!r} is no benchmark result: {missing[0]!r} is missing; run forerun bench"
        )
    if found["schema"] != SCHEMA:
        raise InvalidInput(
            f"{str(path)!r} has schema {found['schema']} and this version reads {SCHEMA}; measure again"
        )
    result: dict[str, Any] = found
    return result
