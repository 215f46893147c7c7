"""`forerun bench`: measures drafters against plain decoding, and whether the text was equal.

Prints tables, then one line of JSON (docs/benchmarking.md lists its keys); `--html` writes the report
as a page. Exit code 1 when a text that must be equal was not.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.flags import DEFAULT_MODEL, HELP, JsonFile, TraceFile
from forerun.cli.outputs import STDOUT, interruption, write_document
from forerun.core.errors import InvalidInput

if TYPE_CHECKING:
    from forerun.measure.bench.settings import Settings

Model = Annotated[str, typer.Option("--model", "-m", help=HELP["model"])]
Prompts = Annotated[
    str,
    typer.Option(
        help="Your prompts: a JSONL file with 'prompt' or 'messages', or Spec-Bench's; builtin is ours."
    ),
]
Tasks = Annotated[str, typer.Option(help="Only these tasks of the prompts, by comma.")]
DraftModel = Annotated[str | None, typer.Option(help="A second model, or a trained head, to draft with.")]


def bench(
    model: Model = DEFAULT_MODEL,
    draft_model: DraftModel = None,
    prompts: Prompts = "builtin",
    tasks: Tasks = "",
    drafters: Annotated[
        str,
        typer.Option(
            help="By comma; auto is the default, ngram:8 drafts 8 nodes a round, eagle3=DIR is a head."
        ),
    ] = "auto",
    verifiers: Annotated[str, typer.Option(help="By comma.")] = "auto",
    temperatures: Annotated[str, typer.Option(help="By comma.")] = "0",
    batches: Annotated[str, typer.Option(help="Sequences written at once, by comma.")] = "1",
    limit: Annotated[int, typer.Option(help="Prompts per task; 0 is all.")] = 2,
    max_tokens: Annotated[int, typer.Option(help="New tokens per text at most.")] = 64,
    repeats: Annotated[int, typer.Option(help="How often each prompt is measured.")] = 2,
    max_budget: Annotated[
        int | None, typer.Option(help="Drafted nodes per round at most; default: what may pay.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the texts, where the temperature is not 0.")] = 0,
    peers: Annotated[
        str, typer.Option(help="By comma: transformers[_lookup|_assisted], llama_cpp[_lookup_3|_lookup_10].")
    ] = "",
    url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server to measure beside: http://HOST:PORT.")
    ] = None,
    all_turns: Annotated[bool, typer.Option("--all-turns", help="Answer the later turns of chats.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help=HELP["ignore_eos"])] = False,
    dtype: Annotated[str, typer.Option(help=HELP["dtype"])] = "auto",
    device: Annotated[str, typer.Option(help=HELP["device"])] = "auto",
    threads: Annotated[int | None, typer.Option(help=HELP["threads"])] = None,
    out: Annotated[
        Path | None, typer.Option(help="Keep raw rounds in this folder; the same command resumes from there.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as one HTML file.")] = None,
    json_file: JsonFile = None,
    trace: TraceFile = None,
) -> None:
    """Measure drafters against plain decoding, and say whether the text was equal."""
    from forerun.measure.bench.batches import parse_batches
    from forerun.measure.bench.settings import Settings, parse_setups

    settings = Settings(
        model=model, draft_model=draft_model, suite=prompts, tasks=words(tasks), setups=parse_setups(words(drafters)),
        verifiers=words(verifiers), temperatures=numbers(temperatures, "temperatures"),
        batches=tuple(parse_batches(batches, "--batches")), limit=limit or None, max_tokens=max_tokens,
        repeats=repeats, budget=max_budget, seed=seed, peers=words(peers), url=url, all_turns=all_turns,
        ignore_eos=ignore_eos, dtype=dtype, device=device, threads=threads,
    )  # fmt: skip
    measure(settings, out, html, json_file, trace)


def measure(
    settings: Settings, out: Path | None, html: Path | None, json_file: Path | None, trace: Path | None = None
) -> None:
    """Run, show, and end with the exit code that says whether the texts were equal."""
    from forerun.measure.bench.run import run
    from forerun.measure.report.terminal import show

    with nullcontext() if out is None else interruption(out):
        result = run(settings, out, trace=trace)
    if json_file != STDOUT:
        show(result)
    if html is not None:
        from forerun.measure.report.html import write_report

        write_report(result, html)
    print_document(result, json_file)
    raise typer.Exit(0 if result["equal"] else 1)


def print_document(document: dict[str, Any], file: Path | None) -> None:
    """The last line of stdout, and the same in a file if one is named; a terminal has shown the tables instead."""
    if write_document(file, document):
        return
    if not sys.stdout.isatty():
        print(json.dumps(document))
    elif file is None:
        print("All figures as JSON: --json FILE, or into a pipe.", file=sys.stderr)


def words(text: str) -> tuple[str, ...]:
    """Names by comma."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def numbers(text: str, flag: str) -> tuple[float, ...]:
    """Numbers by comma."""
    try:
        found = tuple(float(word) for word in words(text))
    except ValueError:
        raise InvalidInput(f"--{flag} {text!r} is not a list of numbers; write --{flag} 0,1") from None
    if not found:
        raise InvalidInput(f"--{flag} is empty; write --{flag} 0,1")
    return found
