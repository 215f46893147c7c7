"""`forerun advise`: predicts whether drafting pays on your prompts, model and machine, and how to set it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from forerun.cli.bench import DraftModel, Model, Prompts, Tasks, words
from forerun.cli.flags import DEFAULT_MODEL, HELP, JsonFile
from forerun.cli.loading import progress_shown, short_name
from forerun.cli.outputs import write_document
from forerun.cli.show import table_console
from forerun.core.errors import InvalidInput

Drafters = Annotated[
    str,
    typer.Option(
        help="Only these, by comma; default: all that can be built here.",
        show_default=False,
    ),
]
OURS, YOURS = 2, 24  # prompts per task: ours are of eight tasks, a user's mostly of one


def advise(
    model: Model = DEFAULT_MODEL,
    draft_model: DraftModel = None,
    drafters: Drafters = "",
    prompts: Prompts = "builtin",
    tasks: Tasks = "",
    limit: Annotated[
        int | None,
        typer.Option(
            help=f"Prompts per task that are written; 0 is all; default: {OURS} of ours, {YOURS} of yours.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens per text at most.")] = 64,
    temperature: Annotated[float, typer.Option(help=HELP["temperature"])] = 0.0,
    max_budget: Annotated[int, typer.Option(help="Drafted nodes per round at most.")] = 8,
    dtype: Annotated[str, typer.Option(help=HELP["dtype"])] = "auto",
    device: Annotated[str, typer.Option(help=HELP["device"])] = "auto",
    threads: Annotated[int | None, typer.Option(help=HELP["threads"])] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Hold half of the prompts back and measure the prediction on them."),
    ] = False,
    check_batches: Annotated[
        str, typer.Option(help="With --check: sequences at once to measure with, by comma.")
    ] = "1",
    json_file: JsonFile = None,
) -> None:
    """Say whether drafting pays on your prompts, with what, and up to which load."""
    from forerun.measure.bench.settings import Settings, parse_setups

    if limit is None:
        limit = OURS if prompts == "builtin" else YOURS
    settings = Settings(
        model=model, draft_model=draft_model, suite=prompts, tasks=words(tasks), limit=limit or None,
        max_tokens=max_tokens, temperatures=(temperature,), budget=max_budget, dtype=dtype, device=device,
        threads=threads, setups=parse_setups(words(drafters) or ["auto"]),
        batches=_batches(check, check_batches),
    )  # fmt: skip
    from forerun.measure.advise.answer import in_words
    from forerun.measure.advise.run import run_advisor
    from forerun.measure.report.fit import print_line, print_table

    name = short_name(model)
    status = Console(stderr=True).status(f"measuring {name}")
    with status, progress_shown(lambda said: status.update(f"measuring {name}: {said}")):
        found = run_advisor(settings, check)
    if write_document(json_file, found):
        return
    console = table_console()
    print_table(console, _table(found))
    for line in in_words(found):
        print_line(console, line)


def _batches(check: bool, sizes: str) -> tuple[int, ...]:
    from forerun.measure.bench.batches import parse_batches

    if sizes != "1" and not check:
        raise InvalidInput(f"--check-batches {sizes} measures nothing without --check; add it")
    return tuple(parse_batches(sizes, "--check-batches"))


def _table(found: Mapping[str, Any]) -> Table:
    """Predicted speed-ups, a column for each batch size."""
    title = "Predicted speed-up by batch size (95% interval; 1.00 alone: nothing would be drafted)"
    table = Table(title=title, box=None, title_justify="left")
    table.add_column("")
    for batch in found["by_batch"]:
        table.add_column(batch, justify="right")
    for name in found["by_batch"]["1"]:
        cells = [rows[name]["speedup"] for rows in found["by_batch"].values()]
        table.add_row(name, *(_cell(cell) for cell in cells))
    return table


def _cell(found: Mapping[str, Any]) -> str:
    """A predicted speed-up; one prompt gives no interval."""
    from forerun.measure.bench.stats import Spread

    return str(Spread(found["value"], found["low"], found["high"]))
