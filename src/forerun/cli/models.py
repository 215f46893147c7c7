"""`forerun models`: lists models; `pull` downloads one, `path` prints its file. `forerun quantize` rounds one."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from forerun.cli.flags import STDOUT, JsonFile, write_document
from forerun.cli.show import table_console
from forerun.core.errors import ForerunError, InvalidInput, UnknownName
from forerun.measure.report.tables import figure_table, print_table
from forerun.models.load.catalog import cache_folder, find_known, known_models
from forerun.models.load.catalog import pull as pull_model
from forerun.models.load.quantized.scheme import describe

if TYPE_CHECKING:
    from forerun.measure.quality import Source

models = typer.Typer(invoke_without_command=True)
_FEW_TOKENS = 1000  # the text of ours has more
_MANY_CHANGES = 0.15  # of the likeliest tokens: more is worth a warning


@dataclass(frozen=True, slots=True)
class Listed:
    name: str
    size: int | None  # bytes
    licence: str | None
    path: str | None  # None = not on this machine
    about: str
    drafting: str | None = None  # where it gains with a head that comes with the package


@models.callback()
def list_models(context: typer.Context, json_file: JsonFile = None) -> None:
    """List the models that are known or already on this machine."""
    if context.invoked_subcommand is not None:
        return
    found = [*_known(), *_files(), *_from_hub()]
    if write_document(json_file, [asdict(model) for model in found]):
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("name", "size", "licence", "present"):
        table.add_column(heading, justify="right" if heading == "size" else "left")
    table.add_column("")
    for model in found:
        present = "yes" if model.path else "no"
        about = f"{model.about} · [green]{model.drafting}[/]" if model.drafting else model.about
        table.add_row(model.name, in_units(model.size), model.licence or "-", present, about)
    console = table_console()
    console.print(table)
    if absent := [model.name for model in found if model.path is None]:
        console.print(f"to get one: forerun models pull {absent[0]}", style="dim")


@models.command()
def pull(
    name: Annotated[str, typer.Argument(help="A known model's name.")],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing unless it fails.")] = False,
) -> None:
    """Download a known model into the cache."""
    if any(model.name == name and model.path for model in known_models()):
        if not quiet:
            print(f"{name} is already on this machine: {find_known(name)}")
        return
    with _bar(hidden=quiet) as bar:
        task = bar.add_task(name, total=None)
        path = pull_model(name, lambda done, total: bar.update(task, completed=done, total=total))
    if not quiet:
        print(f"{name} is now on this machine: {path}")


@models.command()
def path(name: Annotated[str, typer.Argument(help="A known model's name.")]) -> None:
    """Print where a known model's file is."""
    found = find_known(name)
    if found is None:
        known = ", ".join(model.name for model in known_models())
        raise UnknownName(f"unknown model {name!r}; known: {known}")
    print(found)


class Format(StrEnum):
    fp8 = "fp8"
    int8 = "int8"
    w4 = "w4"


def quantize(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, or a hub id.", metavar="MODEL")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not exist, or be empty.", metavar="OUT")],
    to: Annotated[
        Format, typer.Option(help="Format of the layers' matrices; other weights are copied.", show_default=False)
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(help="Measure on your prompts, sent as chats: a JSONL file with 'prompt' or 'messages'."),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Choose the scales of w4 on these prompts (same form; use other prompts than for --prompts)."
        ),
    ] = None,
    no_report: Annotated[bool, typer.Option("--no-report", help="Do not measure the quality of the result.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Write a checkpoint with rounded weights (compressed-tensors), and measure what that costs in quality."""
    from forerun.models.load.checkpoint import open_checkpoint
    from forerun.models.load.quantized.writing import check_out, write_rounded

    check_out(out)
    texts = None if no_report else _texts(prompts, model)
    sizes = {} if calibrate is None else _input_sizes(model, to, calibrate)
    with _ended_tidily(), _bar(hidden=False) as bar:
        task = bar.add_task(f"writing {out.name}", total=None)
        write_rounded(
            open_checkpoint(model),
            out,
            to.value,
            lambda done, total: bar.update(task, completed=done, total=total),
            sizes,
        )
    size = sum(file.stat().st_size for file in out.iterdir())
    if json_file != STDOUT:
        print(f"{out}: {in_units(size)}, {_format(out)}")
    document: dict[str, Any] = {"model": model, "out": str(out), "to": to.value, "bytes": size}
    if texts is not None:
        document["quality"] = _measured(model, out, texts)
    if not write_document(json_file, document) and texts is not None:
        show_quality(document["quality"], to.value)


@contextmanager
def _ended_tidily() -> Iterator[None]:
    """SIGTERM and a closed terminal end the command as Ctrl-C does: the part that is written is removed."""
    names = [signal.SIGTERM] if sys.platform == "win32" else [signal.SIGTERM, signal.SIGHUP]
    usual = [each for each in names if signal.getsignal(each) is signal.SIG_DFL]  # nohup ignores one of them
    for each in usual:
        signal.signal(each, _end)
    try:
        yield
    finally:
        for each in usual:
            signal.signal(each, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)  # as shells count it


def _texts(prompts: Path | None, model: str) -> list[Source]:
    """What the quality is measured on; a file that cannot be read is reported before anything is written."""
    from forerun.measure.bench.suites import prompt_ids
    from forerun.measure.quality import read_conversations, read_text
    from forerun.models.load.checkpoint import open_checkpoint

    if prompts is None:
        return [read_text()]
    found, tokenizer = read_conversations(prompts, model), open_checkpoint(model).tokenizer()
    for conversation in found:
        if not isinstance(conversation, str):
            prompt_ids(tokenizer, conversation)  # templates refuse some
    return found


def _input_sizes(model: str, to: Format, prompts: Path) -> Mapping[str, Any]:
    from forerun.measure.quality import input_sizes
    from forerun.models.load.checkpoint import open_checkpoint

    if to is not Format.w4:
        raise InvalidInput(f"--calibrate is for w4; the scales of {to.value} follow from the weights alone")
    with Console(stderr=True).status("reading the prompts, in float32 on the CPU"):
        return input_sizes(open_checkpoint(model), _texts(prompts, model))


def _measured(model: str, out: Path, texts: list[Source]) -> dict[str, Any]:
    from forerun.measure.quality import measure_rounded

    with Console(stderr=True).status("measuring the quality, in float32 on the CPU"):
        try:
            return measure_rounded(model, str(out), texts)
        except (ForerunError, MemoryError) as error:
            raise InvalidInput(f"{out} is complete, but its quality cannot be measured: {error}") from None


def show_quality(found: Mapping[str, Any], to: str) -> None:
    title = f"{found['tokens']} tokens, {found['window']} at a time, against the original"
    table = figure_table(title, "", "perplexity", "same likeliest token", "mean KL, nats")
    for name, figures in (("original", found["original"]), (to, found["rounded"])):
        table.add_row(name, f"{figures['perplexity']:.3f}", f"{figures['agreement']:.2%}", f"{figures['kl']:.2g}")
    console = table_console()
    print_table(console, table)
    if found["tokens"] < _FEW_TOKENS:
        console.print(
            f"{found['tokens']} tokens say little about quality; give prompts of {_FEW_TOKENS} or more in all"
        )
    elif (changed := 1.0 - found["rounded"]["agreement"]) > _MANY_CHANGES:
        cure = "int8 and fp8 stay closer to it" if to == "w4" else "measure it on your own prompts with --prompts"
        console.print(f"{changed:.0%} of the likeliest tokens are no longer the original's: texts will differ; {cure}")


def in_units(size: int | None) -> str:
    if size is None:
        return "-"
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _bar(hidden: bool) -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=hidden or not console.is_terminal, transient=True)


def _known() -> Iterator[Listed]:
    for model in known_models():
        path = str(model.path) if model.path else None
        yield Listed(model.name, model.size, model.licence, path, model.description, model.gain or None)


def _files() -> Iterator[Listed]:
    known = {model.path for model in known_models()}
    for file in sorted((cache_folder() / "models").glob("*.gguf")):
        if file not in known:
            yield Listed(str(file), file.stat().st_size, None, str(file), "a file in the cache")


def _from_hub() -> Iterator[Listed]:
    """Models in the hub's own cache that we could run."""
    for folder in sorted(_hub_cache().glob("models--*")):
        snapshots = [file.parent for file in folder.glob("snapshots/*/config.json")]
        runnable = next((one for one in snapshots if any(one.glob("*.safetensors"))), None)
        if runnable is not None:
            name = folder.name.removeprefix("models--").replace("--", "/", 1)
            size = sum(file.stat().st_size for file in folder.glob("blobs/*"))
            yield Listed(name, size, None, str(runnable), ", ".join(filter(None, ("from the hub", _format(runnable)))))


def _format(folder: Path) -> str:
    """The format of quantised weights, or why they cannot be read; empty where they are plain."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "config.json cannot be read"
    return describe(config) if isinstance(config, dict) else ""


def _hub_cache() -> Path:
    """Where huggingface_hub keeps its files, by its own rules, without importing it."""
    if chosen := os.environ.get("HF_HUB_CACHE"):
        return Path(chosen).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(home).expanduser() / "hub"
