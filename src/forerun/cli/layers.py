"""`forerun layers`: finds the layers of a model with which the drafter `layer_skip` drafts, and measures a choice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from forerun.cli.bench import Model, Prompts
from forerun.cli.flags import DEFAULT_MODEL, HELP, JsonFile
from forerun.cli.loading import check_model, short_name
from forerun.cli.outputs import check_file, write_document

if TYPE_CHECKING:
    from forerun.measure.bench.settings import Settings

layers = typer.Typer(no_args_is_help=True, help="Layers of a model that draft for it (layer_skip).")
Limit = Annotated[int, typer.Option(help="Prompts per task that are written; 0 is all.")]
MaxTokens = Annotated[int, typer.Option(help="New tokens per text at most.")]
Dtype = Annotated[str, typer.Option(help=HELP["dtype"])]
Threads = Annotated[int | None, typer.Option(help=HELP["threads"])]


@layers.callback()
def _layers() -> None:
    """Layers of a model that draft for it (layer_skip)."""


@layers.command()
def search(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the plan goes.", show_default=False)],
    prompts: Prompts = "builtin",
    model: Model = DEFAULT_MODEL,
    seconds: Annotated[float, typer.Option(help="How long to search, texts not counted.")] = 120.0,
    limit: Limit = 2,
    max_tokens: MaxTokens = 48,
    seed: Annotated[int, typer.Option(help="Of the random exchanges.")] = 0,
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:
    """Search on your prompts; --drafter layer_skip --draft-layers PLAN then drafts with what was found."""
    check_model(model)
    check_file("--out", out)
    settings = _settings(model, prompts, limit, max_tokens, dtype, threads, seed)
    with Console(stderr=True).status(f"searching layers of {short_name(model)}"):
        from forerun.drafters.model.layer_skip import write_plan
        from forerun.measure.advise.layer_search import count_layers, run_search

        plan = run_search(settings, seconds)
        write_plan(out, plan, count_layers(model))
    left_out = (
        f"{len(plan.layers.without_attention)} attentions and {len(plan.layers.without_mlp)} MLPs left out"
    )
    what = left_out if plan.layers.skips else "whole"
    print(f"{out}: the first {plan.layers.end} layers, {what}; {plan.notes['candidates']} candidates")
    print(_in_words(plan.notes))


@layers.command()
def measure(
    draft_layers: Annotated[
        str, typer.Argument(help="A plan, or a number of first layers.", show_default=False)
    ],
    prompts: Prompts = "builtin",
    model: Model = DEFAULT_MODEL,
    limit: Limit = 2,
    max_tokens: MaxTokens = 48,
    dtype: Dtype = "auto",
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """Say how much of what a plan drafts would be accepted, and what that would gain."""
    check_model(model)
    settings = _settings(model, prompts, limit, max_tokens, dtype, threads, 0)
    with Console(stderr=True).status(f"measuring layers of {model}"):
        from forerun.measure.advise.layer_search import run_measure

        found = run_measure(settings, draft_layers)
    if not write_document(json_file, found):
        print(_in_words(found))


def _settings(
    model: str, prompts: str, limit: int, max_tokens: int, dtype: str, threads: int | None, seed: int
) -> Settings:
    from forerun.measure.bench.settings import Settings, parse_setups

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
