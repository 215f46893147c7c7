"""`forerun compare`: two benchmark results, before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.flags import JsonFile
from forerun.cli.outputs import write_document
from forerun.cli.show import table_console
from forerun.measure.report.fit import print_table


def compare(
    before: Annotated[Path, typer.Argument(help="A result that `forerun bench --json` wrote.")],
    after: Annotated[Path, typer.Argument(help="Another one.")],
    json_file: JsonFile = None,
) -> None:
    """Show what changed between two results, and whether it is more than noise."""
    from forerun.measure.bench import compare as comparing
    from forerun.measure.bench.schema import read_result

    found = comparing.compare(read_result(before), read_result(after))
    if write_document(json_file, found):
        return
    console = table_console()
    for table in comparing.tables(found):
        print_table(console, table)
    for side, names in (("before", found["only_before"]), ("after", found["only_after"])):
        if names:
            console.print(f"only {side}: {', '.join(names)}")
    for side, equal in zip(("before", "after"), found["equal"], strict=True):
        if not equal:
            console.print(f"{side}: a text differed from plain decoding", style="red")
