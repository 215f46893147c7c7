"""Tables and sentences that stay readable on a narrow terminal.

A figure that is cut off (`1.04 (0.98-...`) is worse than none: a table that is too wide is turned, rows for columns,
and where that does not fit either each row is a list. Sentences wrap between words; commands do not, so that they can
be copied, and nothing is wrapped into a pipe.
"""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_ANY = 10_000  # columns: more than any table wants


def figure_table(title: str, *columns: str) -> Table:
    """A table whose first column has names and whose others have figures."""
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print it in the first form that fits."""
    forms = (table, turned(table))
    found = next((form for form in forms if _width(console, form) <= console.width), None)
    if found is not None:
        console.print(found)
        return
    console.print(table.title)
    for name, *cells in zip(*([*column.cells] for column in table.columns), strict=True):
        console.print(Text.assemble("\n", name))
        for column, cell in zip(table.columns[1:], cells, strict=True):
            console.print(Text.assemble("  ", str(column.header), ": ", cell))


def print_line(console: Console, line: str) -> None:
    """A sentence, or a command to copy, which has flags."""
    console.print(line, soft_wrap=not console.is_terminal or " --" in line, markup=False, highlight=False)


def turned(table: Table) -> Table:
    """The same cells, rows for columns; what was the first column is the header."""
    columns = [[column.header, *column.cells] for column in table.columns]
    made = figure_table(str(table.title or ""), *map(str, columns[0]))
    made.box = table.box
    for column in columns[1:]:
        made.add_row(*column)
    return made


def _width(console: Console, table: Table) -> int:
    """What its lines take if nothing is wrapped or cut; a title may wrap."""
    bare = Table(box=table.box)
    bare.columns = table.columns
    return Measurement.get(console, console.options.update(width=_ANY), bare).maximum
