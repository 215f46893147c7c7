"""`forerun drafters`: who can guess ahead, in a line each."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

from rich.table import Table

from forerun import registry
from forerun.cli.show import table_console


def drafters() -> None:
    """List the drafters that --drafter takes."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    for name in registry.drafters.names():
        table.add_row(name, describe(registry.drafters.paths.get(name, "")))
    table_console().print(table)


def describe(path: str) -> str:
    """The first line of a part's module, read and not imported: importing it would import torch."""
    spec = find_spec(path.partition(":")[0]) if path else None
    if spec is None or spec.origin is None:
        return "from another package"
    doc = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0]
