"""`forerun data make`: makes training data, written by the target itself."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forerun.cli.loading import check_model, short_name
from forerun.cli.outputs import check_folder, interruption
from forerun.cli.train import with_options
from forerun.train.options import DataOptions

if TYPE_CHECKING:
    from forerun.train.data.make import DataProgress, Write

HELP: Mapping[str, str] = {
    "target": "The model that writes: a known name, a .gguf file, a Hugging Face folder, or a hub id.",
    "out": "Where the shards go; an interrupted run resumes there.",
    "prompts": "A file of prompts (.txt lines, or .jsonl); may be given several times.",
    "passages": "A folder filled earlier, whose answers long prompts are made of; may be given several times.",
    "wrapped": "How many prompts to make of passages at most (0: one of each).",
    "own_prompts": "How many prompts the target is asked to write itself.",
    "openings": "How these begin, in turn; may be given several times; default: the target's choice.",
    "temperatures": "Each prompt is answered once at each, by comma; default: 0,0.7,1.",
    "max_prompt": "Tokens of a prompt at most, template included; 0 is 160, or half of --max-length if that is less.",
    "max_length": "Tokens of prompt and answer at most.",
    "max_answer": "Tokens of an answer at most; 0 is what --max-length leaves.",
    "batch": "Sequences written at once.",
    "shard_tokens": "Tokens per shard.",
    "seed": "Seed of all random draws.",
    "device": "auto, cpu, cuda or one of several: cuda:1.",
}

data = typer.Typer(no_args_is_help=True, help="Texts to train drafters on.")


@data.callback()
def _data() -> None:
    """Texts to train drafters on."""


OnRay = Annotated[bool, typer.Option("--ray", help="Write with workers on a Ray cluster: the same shards.")]
Workers = Annotated[int, typer.Option(help="With --ray: workers, each with the target in memory.")]
Gpus = Annotated[float, typer.Option(help="With --ray: GPUs of a worker.")]


@with_options(DataOptions, HELP)
def make(given: Mapping[str, Any], ray: OnRay = False, workers: Workers = 2, gpus: Gpus = 0.0) -> None:
    """Have the target write prompts and answer them at several temperatures."""
    options = DataOptions(**given)
    check_model(options.target)
    check_folder("--out", Path(options.out))
    console = Console(stderr=True)
    with console.status(f"loading {short_name(options.target)}"):
        from forerun.train.data.make import make_data
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, Any] = {}
        loading = bar.add_task(f"loading {short_name(options.target)}", total=None)

        def show(at: DataProgress) -> None:
            bar.update(loading, visible=False)
            if at.stage not in tasks:
                tasks[at.stage] = bar.add_task(at.stage, total=at.total)
            bar.update(tasks[at.stage], completed=at.done, description=f"{at.stage} · {at.tokens} tokens")

        with _many(options, workers, gpus) if ray else nullcontext() as write, interruption(options.out):
            folder = make_data(options, show, bar.console.print, write)
    print(f"texts are in {folder}")


def _many(options: DataOptions, workers: int, gpus: float) -> AbstractContextManager[Write]:
    from forerun.train.data.ray_workers import ray_writer

    return ray_writer(options, workers, gpus)


data.command()(make)
