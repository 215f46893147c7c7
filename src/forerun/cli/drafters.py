"""`forerun drafters` (lists, checks and exchanges heads), `layers` for layer_skip, `corpus` for suffix."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from forerun.cli.bench import DtypeName, MaxTokens, Model, Prompts, Threads
from forerun.cli.flags import DEFAULT_MODEL, HELP, JsonFile, check_file, write_document
from forerun.cli.loading import check_model, short_name
from forerun.cli.show import counted, table_console
from forerun.core import registry
from forerun.core.registry import DrafterSpec
from forerun.heads import heads_in_the_box
from forerun.measure.bench.settings import Settings, parse_setups

drafters = typer.Typer(invoke_without_command=True)
Head = Annotated[
    Path,
    typer.Argument(
        help="A trained head: its folder, or the name of one that comes with the package.", show_default=False
    ),
]


AUTO = (
    "The default: by --draft-model, else ngram with a head of the package where that pays; without a head suffix on a "
    "GPU where a plain pass takes 3 ms or more, else ngram (`forerun doctor` says)."
)


@drafters.callback()
def list_drafters(context: typer.Context, json_file: JsonFile = None) -> None:
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
        print(f"old name {old}: now {name}")
    for head in heads:
        print(f"head {head.path.name}: {head.kind} for {head.target}, {head.size / 1e6:.1f} MB")


def needs_in_words(spec: DrafterSpec) -> str:
    """What --draft-model must name for it."""
    if spec.needs == "head":
        return f"needs a head: {', '.join(spec.formats)}"
    return "needs a second model" if spec.needs == "checkpoint" else ""


def head_folder(head: Path) -> Path:
    """The folder of a head that is named by its folder, or as `forerun drafters` lists those of the package."""
    return next(
        (known.path for known in heads_in_the_box() if known.path.name == str(head) and not head.exists()), head
    )


@drafters.command()
def check(
    folder: Head,
    target: Annotated[str, typer.Option(help="The model that the drafter drafts for.")] = DEFAULT_MODEL,
    json_file: JsonFile = None,
) -> None:
    """Validate a head before use: files, shapes, vocabulary, layers, and what it accepts on a few prompts."""
    with Console(stderr=True).status(f"checking {folder}"):
        from forerun.train.export import check_head

        report = check_head(head_folder(folder), target)
    if not write_document(json_file, {**asdict(report), "verdict": report.verdict}):
        print(f"{folder}: {report.about}\n{report.verdict}")
    if not report.fits:
        raise typer.Exit(2)


@drafters.command("export")
def export_drafter(
    folder: Head,
    out: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    to: Annotated[str, typer.Option(help="Engine that will read it: vllm, sglang, speculators or eagle.")],
    target: Annotated[str, typer.Option(help="The model that the head drafts for.")] = DEFAULT_MODEL,
    budget: Annotated[int, typer.Option(min=1, help="Tokens per draft in the printed flag.")] = 5,
    target_name: Annotated[
        str,
        typer.Option(
            help="The model's name in the other engine: a hub id, or a folder of safetensors.", show_default=False
        ),
    ] = "",
) -> None:
    """Write a head as another engine reads it, check it by reading it back, and print how to use it there."""
    with Console(stderr=True).status(f"writing {out}"):
        from forerun.train.export import export_head, rows_of_target

        rows, embedded = rows_of_target(target), rows_of_target(target, embedding=True)
        flag = export_head(
            head_folder(folder), out, to, rows, embed_rows=embedded, tokens=budget, target_name=target_name
        )
    print(f"{out} is written and reads back as it should. Use it with:\n{flag}")
    if to == "speculators" and not target_name:
        print("It loads the target too: say where from, a hub id or a folder of safetensors, with --target-name.")


@drafters.command("import")
def import_drafter(
    folder: Annotated[Path, typer.Argument(help="The folder of the other engine's head.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    source: Annotated[
        str, typer.Option("--from", help="Engine that wrote it: vllm, sglang, speculators or eagle.")
    ] = "eagle",
    pickle: Annotated[bool, typer.Option("--pickle", help="Read .pt and .bin files too (weights only).")] = False,
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


layers = typer.Typer(no_args_is_help=True, help="Find layers of a model that draft for it (layer_skip).")
Limit = Annotated[int, typer.Option(help="Prompts per task that are answered; 0 is all.")]


@layers.callback()
def _layers() -> None:
    """Find layers of a model that draft for it (layer_skip)."""


@layers.command()
def search(
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write the plan to.", show_default=False)],
    prompts: Prompts = "builtin",
    model: Model = DEFAULT_MODEL,
    seconds: Annotated[float, typer.Option(help="Seconds to search, without the time for the texts.")] = 120.0,
    limit: Limit = 2,
    max_tokens: MaxTokens = 48,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    dtype: DtypeName = "auto",
    threads: Threads = None,
) -> None:
    """Search on your prompts; --drafter layer_skip --draft-layers PLAN then drafts with what was found."""
    check_model(model)
    check_file("--out", out)
    settings = _settings(model, prompts, limit, max_tokens, dtype, threads, seed)
    with Console(stderr=True).status(f"searching layers of {short_name(model)}"):
        from forerun.drafters.model.layer_skip import write_plan
        from forerun.measure.advise.layers import run_search

        plan, count = run_search(settings, seconds)
        write_plan(out, plan, count)
    left_out = f"{len(plan.layers.without_attention)} attentions and {len(plan.layers.without_mlp)} MLPs left out"
    what = left_out if plan.layers.skips else "whole"
    print(f"{out}: the first {plan.layers.end} layers, {what}; {plan.notes['candidates']} candidates")
    print(_in_words(plan.notes))


@layers.command()
def measure(
    draft_layers: Annotated[str, typer.Argument(help="A plan, or a number of first layers.", show_default=False)],
    prompts: Prompts = "builtin",
    model: Model = DEFAULT_MODEL,
    limit: Limit = 2,
    max_tokens: MaxTokens = 48,
    dtype: DtypeName = "auto",
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """Say how much of what a plan drafts would be accepted, and what that would gain."""
    check_model(model)
    settings = _settings(model, prompts, limit, max_tokens, dtype, threads, 0)
    with Console(stderr=True).status(f"measuring layers of {model}"):
        from forerun.measure.advise.layers import run_measure

        found = run_measure(settings, draft_layers)
    if not write_document(json_file, found):
        print(_in_words(found))


def _settings(
    model: str, prompts: str, limit: int, max_tokens: int, dtype: str, threads: int | None, seed: int
) -> Settings:
    return Settings(
        model=model, suite=prompts, limit=limit or None, max_tokens=max_tokens, dtype=dtype, threads=threads,
        device="cpu", setups=parse_setups(["none"]), seed=seed,
    )  # fmt: skip


def _in_words(found: Mapping[str, Any]) -> str:
    accepted = ", ".join(f"{share:.2f}" for share in found["accepted"])
    gain = found["predicted_speedup"]
    pays = "" if gain > 1.0 else ": plain decoding is faster here"
    return (
        f"accepted up to depth 1, 2, ...: {accepted} ({found['windows']} places in {found['prompts']} texts); "
        f"{found['tokens_per_round']:.2f} tokens per round with {found['depth']} drafted, predicted {gain:.2f}x{pays}"
    )


corpus = typer.Typer(no_args_is_help=True, help="Build the text index that the drafter suffix searches.")


@corpus.callback()
def _corpus() -> None:
    """Build the text index that the drafter suffix searches."""


@corpus.command()
def build(
    files: Annotated[
        list[Path], typer.Argument(help="Texts: one per file, or one per line of a .jsonl.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write the index to.", show_default=False)],
    model: Annotated[str, typer.Option("--model", "-m", help=HELP["model"])] = DEFAULT_MODEL,
) -> None:
    """Index texts in the tokens of a model; --corpus FILE then looks them up."""
    check_model(model)
    check_file("--out", out)
    with Console(stderr=True).status("indexing"):
        from forerun.drafters.lookup.suffix_index import read_documents, write_corpus
        from forerun.models.load.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(model)
        tokenizer = checkpoint.tokenizer()
        started = perf_counter()
        documents = (tokenizer.encode(text, add_special=False) for text in read_documents(files))
        count = write_corpus(out, documents, tokenizer.vocab_size, checkpoint.name)
    print(f"{count} tokens of {counted(len(files), 'file')} are in {out} ({perf_counter() - started:.1f} s)")
