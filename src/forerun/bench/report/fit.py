"""Tables that stay readable on a narrow terminal: one that is too wide is turned, rows for columns.

A figure that is cut off (`1.04 (0.98-...`) is worse than none. Where neither form fits, the narrower one is printed in
its own width, and the terminal wraps its lines.
"""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_ANY = 10_000  # columns: more than any table wants


def print_table(console: Console, table: Table) -> None:
    """Print it in the form that fits."""
    if _width(console, table) > console.width:
        table = min(table, turned(table), key=lambda form: _width(console, form))
    if (needed := _width(console, table)) > console.width:
        console = Console(file=console.file, width=needed, force_terminal=console.is_terminal)
    console.print(table)


def turned(table: Table) -> Table:
    """The same cells, rows for columns; what was the first column is the header."""
    columns = [[column.header, *column.cells] for column in table.columns]
    made = Table(title=table.title, box=table.box, title_justify=table.title_justify)
    for place, header in enumerate(columns[0]):
        made.add_column(header, justify="right" if place else "left", no_wrap=True)
    for column in columns[1:]:
        made.add_row(*column)
    return made


def _width(console: Console, table: Table) -> int:
    """What its lines take if nothing is wrapped or cut; a title may wrap."""
    bare = Table(box=table.box)
    bare.columns = table.columns
    return Measurement.get(console, console.options.update(width=_ANY), bare).maximum
