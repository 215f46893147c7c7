"""`forerun drafters`: lists the drafters, checks trained heads, and exchanges them with other engines."""

from __future__ import annotations

import ast
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from forerun.cli.flags import DEFAULT_MODEL, JsonFile
from forerun.cli.outputs import write_document
from forerun.cli.show import table_console
from forerun.core import registry
from forerun.core.registry import DrafterSpec
from forerun.heads import heads_in_the_box

drafters = typer.Typer(invoke_without_command=True)


AUTO = (
    "The default: by --draft-model, else ngram with a head of the package where that pays; without a head suffix on a "
    "GPU where a plain pass takes 3 ms or more, else ngram (`forerun doctor` says)."
)


@drafters.callback()
def list_drafters(
    context: typer.Context,
    json_file: JsonFile = None,
) -> None:
    """List the drafters that --drafter takes, and the trained heads that come with the package.

    Two drafters are composed by name: ngram+eagle3.
    """
    if context.invoked_subcommand is not None:
        return
    specs = sorted(registry.drafters.specs(), key=lambda spec: spec.name)
    specs = [replace(spec, says=spec.says or first_line(spec.where)) for spec in specs]
    heads = heads_in_the_box()
    boxed = [{"name": head.path.name, "kind": head.kind, "target": head.target} for head in heads]
    rows = [{**asdict(spec), "best": spec.best} for spec in specs]
    if write_document(json_file, {"drafters": rows, "aliases": registry.drafters.aliases, "heads": boxed}):
        return
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_row("auto", AUTO, "")
    for spec in specs:
        table.add_row(spec.name, spec.says, needs_in_words(spec))
    table_console().print(table)
    for old, name in registry.drafters.aliases.items():
        print(f"old name {old}: {name}")
    for head in heads:
        print(f"head {head.path.name}: {head.kind} for {head.target}, {head.size / 1e6:.1f} MB")


def needs_in_words(spec: DrafterSpec) -> str:
    """What --draft-model must name for it."""
    if spec.needs == "head":
        return f"needs a head: {', '.join(spec.formats)}"
    return "needs a second model" if spec.needs == "checkpoint" else ""


@drafters.command()
def check(
    folder: Annotated[Path, typer.Argument(help="The folder of a trained head.", show_default=False)],
    target: Annotated[str, typer.Option(help="The model it is to draft for.")] = DEFAULT_MODEL,
    json_file: JsonFile = None,
) -> None:
    """Validate a head before use: files, shapes, vocabulary, layers, and what it accepts on a few prompts."""
    with Console(stderr=True).status(f"checking {folder}"):
        from forerun.train.check import check_head

        report = check_head(folder, target)
    if not write_document(json_file, {**asdict(report), "verdict": report.verdict}):
        print(f"{folder}: {report.about}\n{report.verdict}")
    if not report.fits:
        raise typer.Exit(2)


@drafters.command("export")
def export_drafter(
    folder: Annotated[Path, typer.Argument(help="The folder of a trained head.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    to: Annotated[str, typer.Option(help="Who will read it: vllm, sglang, speculators or eagle.")],
    target: Annotated[str, typer.Option(help="The model that it drafts for.")] = DEFAULT_MODEL,
    budget: Annotated[int, typer.Option(min=1, help="Tokens per draft in the printed flag.")] = 5,
    target_name: Annotated[
        str,
        typer.Option(
            help="What the other engine calls that model: a hub id, or a folder of safetensors.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Write a head as another engine reads it, check it by reading it back, and print how to use it there."""
    with Console(stderr=True).status(f"writing {out}"):
        from forerun.train.export import export_head, rows_of_target

        rows, embedded = rows_of_target(target), rows_of_target(target, embedding=True)
        flag = export_head(folder, out, to, rows, embed_rows=embedded, tokens=budget, target_name=target_name)
    print(f"{out} is written and reads back as it should. Use it with:\n{flag}")
    if to == "speculators" and not target_name:
        print(
            "It loads the target too: say where from, a hub id or a folder of safetensors, with --target-name."
        )


@drafters.command("import")
def import_drafter(
    folder: Annotated[
        Path, typer.Argument(help="The folder of the other engine's head.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    source: Annotated[
        str, typer.Option("--from", help="Who wrote it: vllm, sglang, speculators or eagle.")
    ] = "eagle",
    pickle: Annotated[
        bool, typer.Option("--pickle", help="Read .pt and .bin files too (weights only).")
    ] = False,
) -> None:
    """Take a head over from another engine, as safetensors that every command here reads."""
    from forerun.train.export import import_head

    import_head(folder, out, source, pickle=pickle)
    print(f"written to {out}; try `forerun drafters check {out}`")


def first_line(where: str) -> str:
    """The first line of a module, read and not imported: importing it would import torch."""
    try:
        spec = find_spec(where.partition(":")[0])
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return "from another package"
    doc = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0]
