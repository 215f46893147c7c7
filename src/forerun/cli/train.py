"""`forerun data make` has a target write texts, `forerun train` trains a drafter for the target on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, Field, fields
from pathlib import Path
from time import monotonic, strftime
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forerun.cli.flags import check_folder, flag_of, interruption, plain, spelt, with_flags
from forerun.cli.loading import check_model, short_name
from forerun.train.data.folder import require_recordings, require_texts
from forerun.train.options import METHODS, DataOptions, TrainOptions, as_method, in_tuple

if TYPE_CHECKING:
    from forerun.train.data.make import DataProgress, Write
    from forerun.train.loop import Progress as TrainProgress
    from forerun.train.loop import Report

T = TypeVar("T")
SAY_EVERY = 5.0  # seconds between two lines where there is no bar


def with_options(owner: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every field of an option class; they reach it as one mapping of what was given."""
    hints = get_type_hints(owner)

    def flag(field: Field[Any]) -> inspect.Parameter:
        hint, default, said = hints[field.name], field.default, spelt(field.name)
        if bool in (hint, *get_args(hint)):
            said = f"{said}/--no-{said[2:]}"
        hint = list[str] if get_origin(hint) is tuple else hint  # `in_tuple` reads them
        number = isinstance(default, int | float) and not isinstance(default, bool)
        in_words = f"{default:g}" if number else None
        return flag_of(said, hint, field.metadata["help"], in_words, needed=default is MISSING)

    def given(values: dict[str, Any]) -> dict[str, Any]:
        chosen = {name: plain(value) for name, value in values.items() if value not in (None, [])}
        return {n: in_tuple(owner, n, v) if isinstance(v, list) else v for n, v in chosen.items()}

    flags = [flag(field) for field in fields(owner) if "help" in field.metadata]
    return lambda command: with_flags(command, flags, given)


@with_options(TrainOptions)
def train(
    given: Mapping[str, Any],
    method: Annotated[str, typer.Argument(help=f"{', '.join(METHODS)}, or refresh.", show_default=False)],
) -> None:
    """Train a drafter for a model.

    `refresh` trains a head further on texts that a server recorded (--data, of `serve --record`), compares it with the
    one before, and adds it to a folder of versions (--out, of `serve --heads`).
    """
    check_model(given["target"])
    console = Console(stderr=True)
    if method == "refresh":
        require_recordings(given["data"])
        with console.status(f"loading {short_name(given['target'])}"):
            from forerun.train.refresh import DEFAULTS, refresh
        steps = given.get("steps", DEFAULTS["steps"])
        print(_shown("refresh", given["target"], steps, console, lambda report, say: refresh(given, report, say)))
        return
    options = TrainOptions(method=as_method(method), **given)
    require_texts(options)
    with console.status(f"loading {short_name(options.target)}"):
        from forerun.train.run import train as run
    with interruption(options.out):
        measured = _shown(method, options.target, options.steps, console, lambda report, say: run(options, report, say))
    print(f"{options.out}: {measured.tokens_per_round:.3f} tokens per round on held-back text (simulated)")


def _shown(
    name: str, target: str, steps: int, console: Console, work: Callable[[Report, Callable[[str], None]], T]
) -> T:
    with ProgressShown(console, target) as progress:

        def show(at: TrainProgress) -> None:
            if at.tokens_per_round is not None:  # a line of its own: beside the bar it would be cut off
                said = f"step {at.step}: {at.tokens_per_round:.2f} tokens per round, as simulated"
                walked = at.walked_tokens_per_round
                other = "" if walked is None else f"; {walked:.3f} through other texts"
                progress.say(f"{said}; at most {at.tree_tokens_per_round:.2f} with trees{other}")
            words = f"loss {at.loss:.3f} · acceptance {at.acceptance:.2f} · {at.tokens_per_second:,.0f} tokens/s"
            progress.update(name, at.step, steps, words)

        return work(show, progress.say)


class ProgressShown:
    """Stages of a long run on stderr: a bar for each on a terminal, else a line every few seconds."""

    def __init__(self, console: Console, model: str) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
        )
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)
        self._loading = self._bars.add_task(f"loading {short_name(model)}", total=None)
        self._tasks, self._said = dict[str, Any](), monotonic()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def say(self, line: str) -> None:
        self._bars.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def update(self, stage: str, done: int, total: int, words: str) -> None:
        self._bars.update(self._loading, visible=False)
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, description=words)
        if self._bars.disable and (done == total or monotonic() - self._said >= SAY_EVERY):
            self._said = monotonic()
            self.say(f"{strftime('%H:%M:%S')} {stage} {done}/{total} · {words}")


data = typer.Typer(no_args_is_help=True, help="Write texts to train drafters on.")
OnRay = Annotated[bool, typer.Option("--ray", help="Write the same data with workers on a Ray cluster.")]
Workers = Annotated[int, typer.Option(help="With --ray: workers, each with the target in memory.")]
Gpus = Annotated[float, typer.Option(help="With --ray: GPUs of a worker.")]


@data.callback()
def _data() -> None:
    """Write texts to train drafters on."""


@data.command()
@with_options(DataOptions)
def make(given: Mapping[str, Any], ray: OnRay = False, workers: Workers = 2, gpus: Gpus = 0.0) -> None:
    """Have the target write prompts and answer them at several temperatures."""
    options = DataOptions(**given)
    check_model(options.target)
    check_folder("--out", Path(options.out))
    console = Console(stderr=True)
    with console.status(f"loading {short_name(options.target)}"):
        from forerun.train.data.make import make_data
    with ProgressShown(console, options.target) as progress:

        def show(at: DataProgress) -> None:
            progress.update(at.stage, at.done, at.total, f"{at.stage} · {at.tokens} tokens")

        with _many(options, workers, gpus) if ray else nullcontext() as write, interruption(options.out):
            folder = make_data(options, show, progress.say, write)
    print(f"texts are in {folder}")


def _many(options: DataOptions, workers: int, gpus: float) -> AbstractContextManager[Write]:
    from forerun.train.data.make import ray_writer

    return ray_writer(options, workers, gpus)
