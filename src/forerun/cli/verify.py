"""`forerun verify TARGET`: checks an engine's speculative decoding; `make-model` and `self-test` belong to it.

Exit code 1 when a check failed, or none could run. Nothing here imports torch for a URL.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from forerun.cli.flags import JsonFile, check_file, check_folder, write_document, write_file
from forerun.cli.show import ProgressLine
from forerun.core.errors import InvalidInput

if TYPE_CHECKING:
    from forerun.referee.ask import Target
    from forerun.referee.suite import Report, Result
    from forerun.referee.tables import Pair


_TIMEOUT = 120.0  # seconds that a server may take for an answer


class _Verify(TyperGroup):
    """`forerun verify TARGET` is `forerun verify run TARGET`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = [*self.commands, "-h", "--help"]
        return super().parse_args(ctx, ["run", *args] if args and args[0] not in known else args)


verify = typer.Typer(
    cls=_Verify, no_args_is_help=True, help="Check an engine's speculative decoding: forerun verify TARGET."
)
Tokens = Annotated[int, typer.Option(help="Generated tokens at most, over all checks.")]
Seconds = Annotated[float, typer.Option(help="Seconds at most, over all checks.")]
TargetName = Annotated[
    str, typer.Argument(help="http://HOST:PORT, a model's folder, or package.module:function.", metavar="TARGET")
]
TableFolder = Annotated[
    Path | None, typer.Option(help="Folder of `make-model`: the engine serves its target, and the law is known.")
]
Drafter = Annotated[str | None, typer.Option(help="For a model's folder: Forerun's drafter.")]
DraftModel = Annotated[str | None, typer.Option(help="For a model's folder: a draft model, or the folder of a head.")]
DraftSettings = Annotated[
    str, typer.Option(help="For a model's folder: Forerun's other speculative settings, as JSON.")
]
Off = Annotated[
    str | None, typer.Option(help='Fields of a request that switch speculation off: \'{"speculative": "off"}\'.')
]
Rename = Annotated[
    str, typer.Option(help='Other names of fields: \'{"repetition_penalty": "repeat_penalty"}\' for llama.cpp.')
]
Modules = Annotated[list[str] | None, typer.Option("--with", help="A module that registers more checks.")]


@verify.command("run")
def run(
    target: TargetName,
    table: TableFolder = None,
    engine: Annotated[str, typer.Option(help="For a model's folder: forerun or transformers.")] = "forerun",
    drafter: Drafter = None,
    draft_model: DraftModel = None,
    settings: DraftSettings = '{"controller": "fixed", "budget": 4}',
    plain: Annotated[str | None, typer.Option(help="URL of the same model without speculation.")] = None,
    off: Off = None,
    model: Annotated[str | None, typer.Option(help="The model's name on the server; default: its first.")] = None,
    extra: Annotated[str, typer.Option(help="JSON fields to send with every request.")] = "{}",
    rename: Rename = "{}",
    only: Annotated[list[str] | None, typer.Option(help="Only checks whose names begin with this; repeatable.")] = None,
    with_module: Modules = None,
    tokens: Tokens = 60_000,
    seconds: Seconds = 180.0,
    slowest: Annotated[float, typer.Option(help="How many times the time of plain decoding drafting may take.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts and of the requests' seeds.")] = 0,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report as one HTML page.")] = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write the report as JUnit XML, for CI.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Check an engine's speculative decoding; each failure has a p-value or a counterexample, and a command."""
    from forerun.referee.suite import Budget, chosen_checks, run_suite

    for flag, file in (("--html", html), ("--junit", junit)):
        if file is not None:
            check_file(flag, file)
    for module in with_module or ():
        _import(module)
    checks = chosen_checks(only or ())
    pair = None if table is None else _pair(table)
    found = _target(target, engine, pair, model, plain, _fields("--off", off) if off else None,
                    _fields("--extra", extra), _fields("--rename", rename),
                    _fields("--settings", settings) | {"drafter": drafter, "draft_model": draft_model},
                    seconds)  # fmt: skip
    with ProgressLine(lambda: shown[0]) as line:
        shown = ["starting"]

        def progress(step: Result | str) -> None:
            shown[0] = step if isinstance(step, str) else shown[0]

        report = run_suite(found, pair, Budget(tokens, seconds), checks, seed, slowest, progress=progress)
        line.stop()
    report = replace(report, command=shlex.join(["forerun", *sys.argv[1:]]))
    _write(report, html, junit, json_file)
    if not report.passed:
        raise typer.Exit(1)


@verify.command("make-model")
def make_model(
    out: Annotated[Path, typer.Argument(help="A folder to write: target/, draft/, eagle3/, table.json.")],
    seed: Annotated[int, typer.Option(help="Seed of the tables.")] = 0,
    half: Annotated[bool, typer.Option("--half", help="Write float16 weights; the law is the same.")] = False,
    gguf: Annotated[bool, typer.Option("--gguf", help="Also write target.gguf and draft.gguf, for llama.cpp.")] = False,
) -> None:
    """Write a small Llama checkpoint whose law is known, with a draft model and an EAGLE-3 head."""
    from forerun.referee.checkpoint import make_model
    from forerun.referee.tables import make_pair

    check_folder("OUT", out)
    made = make_model(out, make_pair(seed), "float16" if half else "float32", gguf)
    print(f"{made.target}: serve this, e.g. forerun serve --model {made.target} --draft-model {made.draft}")
    print(f"then: forerun verify http://127.0.0.1:8000 --table {out}")


@verify.command("self-test")
def self_test(
    bug: Annotated[list[str] | None, typer.Option(help="Only these planted bugs; repeatable.")] = None,
    tokens: Tokens = 60_000,
    seconds: Seconds = 180.0,
    json_file: JsonFile = None,
) -> None:
    """Run all checks on a small engine with planted bugs: each must be found, and none where none is planted."""
    from forerun.referee.planted import BUGS, Planted
    from forerun.referee.suite import Budget, run_suite
    from forerun.referee.tables import make_pair

    pair, rows = make_pair(), {}
    for name in bug or ("", *BUGS):
        engine = Planted(pair, frozenset([name] if name else ()))
        report = run_suite(engine, pair, Budget(tokens, seconds))
        rows[name or "none planted"] = [each.name for each in report.failed]
        print(f"{name or 'none planted':26} {report.seconds:5.1f} s  {', '.join(rows[name or 'none planted']) or '-'}",
              file=sys.stderr)  # fmt: skip
    write_document(json_file, rows)
    if any(bool(found) == (name == "none planted") for name, found in rows.items()):
        raise typer.Exit(1)


def _import(module: str) -> None:
    sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise InvalidInput(f"--with {module!r}: {error}") from None


def _fields(flag: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{flag} {text!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidInput(f"{flag} {text!r} is no JSON object; write '{{\"name\": value}}'")
    return found


def _pair(folder: Path) -> Pair:
    from forerun.referee.tables import Pair

    file = folder / "table.json"
    if not file.is_file():
        raise InvalidInput(f"--table {str(folder)!r} has no table.json; make one with `forerun verify make-model`")
    return Pair.load(file)


def _target(
    name: str, engine: str, pair: Pair | None, model: str | None, plain: str | None, off: dict[str, Any] | None,
    extra: dict[str, Any], names: dict[str, str], drafting: dict[str, Any], seconds: float,
) -> Target:  # fmt: skip
    from forerun.referee import targets
    from forerun.referee.ask import symbol_ids

    ids = {} if pair is None else symbol_ids(pair.target)
    if name.startswith(("http://", "https://")):
        key = os.environ.get("OPENAI_API_KEY")
        served = targets.UrlTarget(name, model, ids, plain, off, key, extra, names, timeout=min(_TIMEOUT, seconds))
        served.check()
        return served
    if Path(name).expanduser().exists() and engine == "transformers":
        return targets.TransformersTarget(name, drafting["draft_model"], ids)
    if Path(name).expanduser().exists() and engine == "forerun":
        given = {key: value for key, value in drafting.items() if value is not None}
        return targets.ForerunTarget(name, {"speculative_config": given}, ids)
    if ":" in name:
        sys.path.insert(0, os.getcwd())
        return targets.CallableTarget(targets.load_function(name), ids, path=name)
    if engine not in ("forerun", "transformers"):
        raise InvalidInput(f"--engine {engine!r} is unknown; use forerun or transformers")
    raise InvalidInput(f"target {name!r} is no URL, no folder and no module:function; see forerun verify --help")


def _write(report: Report, html: Path | None, junit: Path | None, json_file: Path | None) -> None:
    from forerun.referee.report import as_document, as_html, as_junit

    if html is not None:
        write_file("--html", html, as_html(report))
    if junit is not None:
        write_file("--junit", junit, as_junit(report))
    if not write_document(json_file, as_document(report)):
        _print(report)


def _print(report: Report) -> None:
    from rich.table import Table

    from forerun.cli.show import table_console
    from forerun.referee.report import told

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("check", "result", "p-value", "tokens", "found"):
        table.add_column(heading, justify="right" if heading in ("p-value", "tokens") else "left")
    colours = {"pass": "green", "fail": "bold red", "skip": "dim"}
    for each in report.results:
        p_value = "" if each.finding.p_value is None else f"{each.finding.p_value:.2g}"
        status = f"[{colours[each.status]}]{each.status}[/]"
        table.add_row(each.name, status, p_value, str(each.tokens), each.finding.detail.replace("[", "\\["))
    console = table_console()
    console.print(table)
    for each in report.failed:
        console.print("\n" + told(each), markup=False, highlight=False, soft_wrap=True)
    run_of = f"{report.tokens} tokens in {report.seconds:.0f} s"
    rate = f"a right engine fails in at most {report.false_alarms:g} of runs"
    console.print(f"\n{report.target}: {report.verdict}; {run_of}; {rate}", soft_wrap=True)
