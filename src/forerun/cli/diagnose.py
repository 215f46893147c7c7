"""`forerun diagnose`: finds why acceptance is low or the output differs. Exit code 1 where something is wrong."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from forerun.cli.bench import DraftModel, Model, Prompts
from forerun.cli.flags import DEFAULT_MODEL, HELP, JsonFile
from forerun.cli.outputs import write_document


def diagnose(
    model: Model = DEFAULT_MODEL,
    draft_model: DraftModel = None,
    drafter: Annotated[
        str, typer.Option(help="The drafter to check; NAME:8 drafts 8 nodes a round.")
    ] = "auto",
    against: Annotated[str, typer.Option(help="What to compare it with; none is plain decoding.")] = "none",
    prompts: Prompts = "builtin",
    limit: Annotated[
        int | None,
        typer.Option(help="Prompts per task; 0 is all. Default: all of a file of yours, 1 of ours."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens per text at most.")] = 64,
    temperature: Annotated[float, typer.Option(help=HELP["temperature"])] = 0.0,
    verifier: Annotated[str, typer.Option(help=HELP["verifier"])] = "auto",
    dtype: Annotated[str, typer.Option(help=HELP["dtype"])] = "auto",
    device: Annotated[str, typer.Option(help=HELP["device"])] = "auto",
    threads: Annotated[int | None, typer.Option(help=HELP["threads"])] = None,
    json_file: JsonFile = None,
) -> None:
    """Find out why acceptance is low or the output different."""
    from forerun.measure.bench.settings import DrafterSetup, Settings

    setup = DrafterSetup.parse(drafter)
    if limit is None:
        limit = 1 if prompts == "builtin" else 0
    settings = Settings(
        model=model, draft_model=draft_model, suite=prompts, limit=limit or None, max_tokens=max_tokens,
        temperatures=(temperature,), verifiers=(verifier,), dtype=dtype, device=device, threads=threads,
        setups=(setup,),
    )  # fmt: skip
    from forerun.measure.diagnose import run_diagnosis

    with Console(stderr=True).status(f"checking {model}"):
        found = run_diagnosis(settings, setup, DrafterSetup.parse(against))
    if not write_document(json_file, found):
        console = Console(highlight=False, soft_wrap=True)
        styles = {"fine": "green", "look": "yellow", "bad": "red"}
        for finding in found["findings"]:
            step = f"; {finding['next_step']}" if finding["next_step"] else ""
            mark = Text(f"{finding['verdict']:<5}", styles[finding["verdict"]])
            console.print(mark, Text(f"{finding['about']:<12}{finding['found']}{step}"), sep="")
    raise typer.Exit(0 if found["ok"] else 1)
