"""`forerun quality`: measures quality and memory of each number format.

Prints a table, then one line of JSON (docs/benchmarking.md lists its keys).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from forerun.cli.bench import Model, print_document, words
from forerun.cli.flags import DEFAULT_MODEL, HELP, JsonFile
from forerun.cli.outputs import STDOUT
from forerun.cli.show import table_console
from forerun.core.errors import UnknownName
from forerun.measure.report.fit import print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forerun.core.params import Dtype

_FORMATS: tuple[Dtype, ...] = ("gguf", "q8", "bfloat16", "float32")  # that our kernels have on a CPU


def quality(
    model: Model = DEFAULT_MODEL,
    dtypes: Annotated[
        str, typer.Option(help=f"Number formats, by comma: {', '.join(_FORMATS)}.")
    ] = "gguf,q8,bfloat16,float32",
    text: Annotated[
        Path | None, typer.Option(help="A text to predict; default: ours, of several kinds.")
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens of the text that are predicted together.")] = 256,
    threads: Annotated[int | None, typer.Option(help=HELP["threads"])] = None,
    skip_memory: Annotated[
        bool, typer.Option("--skip-memory", help="Do not load each format once more in a fresh process.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure each number format against float32 on a text, and what it takes in memory."""
    names = [_known(name) for name in words(dtypes)]
    if not names:
        raise UnknownName(f"--dtypes is empty; known: {', '.join(_FORMATS)}")
    document = measure(model, names, text, window, threads, skip_memory)
    if json_file != STDOUT:
        _show(document)
    print_document(document, json_file)


def measure(
    model: str, names: Sequence[Dtype], text: Path | None, window: int, threads: int | None, skip_memory: bool
) -> dict[str, Any]:
    """Everything, as one document."""
    import torch

    from forerun.measure.machine import cores, machine_facts
    from forerun.measure.memory import resident
    from forerun.measure.quality import measure_quality, read_text

    torch.set_num_threads(threads or cores())
    with Console(stderr=True).status("loading") as status:
        found = measure_quality(
            model, names, read_text(text), window, lambda name: status.update(f"{name}: reading the text")
        )
        for name, figures in found["modes"].items():
            if not skip_memory and "why_not" not in figures:
                status.update(f"{name}: memory of a fresh process")
                figures["memory"] = resident(model, name, threads)
    about = {"model": model, "text": "ours" if text is None else str(text), **machine_facts()}
    return {"benchmark": "quality", **found, "conditions": about}


def _known(name: str) -> Dtype:
    for known in _FORMATS:
        if name == known:
            return known
    raise UnknownName(f"unknown number format {name!r}; known: {', '.join(_FORMATS)}")


def _show(document: dict[str, Any]) -> None:
    console = table_console()
    title = f"{document['tokens']} tokens, {document['window']} at a time, against float32"
    table = Table(title=title, box=None, title_justify="left")
    table.add_column("")
    for column in (
        "perplexity",
        "same likeliest token",
        "mean KL, nats",
        "MB above torch",
        "MB of the model",
    ):
        table.add_column(column, justify="right")
    for name, figures in document["modes"].items():
        if "why_not" in figures:
            console.print(f"{name} left out: {figures['why_not']}", soft_wrap=True, markup=False)
            continue
        memory = figures.get("memory")
        held = [f"{memory[key]:.0f}" for key in ("above_torch_mb", "model_mb")] if memory else ["-", "-"]
        row = (f"{figures['perplexity']:.3f}", f"{figures['agreement']:.2%}", f"{figures['kl']:.2g}")
        table.add_row(name, *row, *held)
    print_table(console, table)
