"""`forerun bench` measures drafters against plain decoding, `compare` two results, `quality` the number formats.

Prints tables, then one line of JSON (docs/benchmarking.md lists its keys). Exit code 1 when a text that must be equal
to plain decoding's was not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console

from forerun.cli.flags import (
    DEFAULT_MODEL,
    HELP,
    STDOUT,
    JsonFile,
    TraceFile,
    interruption,
    with_fields,
    write_document,
    write_file,
)
from forerun.cli.show import table_console
from forerun.core.errors import InvalidInput, UnknownName
from forerun.core.params import Dtype, KvDtype
from forerun.measure.bench.settings import Settings, parse_setups
from forerun.measure.report.tables import figure_table, print_table

Model = Annotated[str, typer.Option("--model", "-m", help=HELP["model"])]
Prompts = Annotated[
    str,
    typer.Option(
        help="A JSONL file with 'prompt' or 'messages', or Spec-Bench's; builtin is ours, long:4k,16k long ones."
    ),
]
MaxTokens = Annotated[int, typer.Option(help="New tokens per text at most.")]
DtypeName = Annotated[str, typer.Option(help=HELP["dtype"])]
Threads = Annotated[int | None, typer.Option(help=HELP["threads"])]
Temperature = Annotated[float, typer.Option(help=HELP["temperature"])]
Tasks = Annotated[str, typer.Option(help="Only these tasks of the prompts, by comma.")]
SHARED = {  # fields of Settings that are flags of several commands
    "draft_model": "A second model, or a trained head, to draft with.",
    "max_tokens": "New tokens per text at most.",
    **{name: HELP[name] for name in ("dtype", "device", "threads")},
}
_OWN = {
    "repeats": "How often each prompt is measured.",
    "budget": "Drafted nodes per round at most; default: what may pay.",
    "seed": "Seed of the texts, above temperature 0.",
    "url": "An OpenAI-compatible server to measure beside: http://HOST:PORT.",
    "all_turns": "Answer the later turns of chats.",
    **{name: HELP[name] for name in ("ignore_eos", "kv_dtype")},
}


@with_fields(Settings, SHARED | _OWN)
def bench(
    given: Mapping[str, Any],
    model: Model = DEFAULT_MODEL,
    prompts: Prompts = "builtin",
    tasks: Tasks = "",
    drafters: Annotated[
        str,
        typer.Option(
            help="By comma: auto is the default drafter, ngram:8 drafts 8 nodes a round, eagle3=DIR is a head."
        ),
    ] = "auto",
    verifiers: Annotated[str, typer.Option(help="By comma.")] = "auto",
    temperatures: Annotated[str, typer.Option(help="By comma.")] = "0",
    batches: Annotated[str, typer.Option(help="Sequences written at once, by comma.")] = "1",
    limit: Annotated[int, typer.Option(help="Prompts per task; 0 is all.")] = 2,
    peers: Annotated[
        str, typer.Option(help="By comma: transformers[_lookup|_assisted], llama_cpp[_lookup_3|_lookup_10].")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Keep raw rounds in this folder; the same command resumes from there.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as one HTML file.")] = None,
    json_file: JsonFile = None,
    trace: TraceFile = None,
) -> None:
    """Measure drafters against plain decoding, and say whether the text was equal."""
    from forerun.measure.bench.batches import parse_batches

    settings = Settings(
        model=model, suite=prompts, tasks=words(tasks), setups=parse_setups(words(drafters)), peers=words(peers),
        verifiers=words(verifiers), temperatures=numbers(temperatures, "temperatures"),
        batches=tuple(parse_batches(batches, "--batches")), limit=limit or None, **given,
    )  # fmt: skip
    from forerun.measure.bench.run import run
    from forerun.measure.report.terminal import show

    with nullcontext() if out is None else interruption(out):
        result = run(settings, out, trace=trace)
    if json_file != STDOUT:
        show(result)
    if html is not None:
        from forerun.measure.report.html import render

        write_file("--html", html, render(result))
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
    try:
        found = tuple(float(word) for word in words(text))
    except ValueError:
        raise InvalidInput(f"--{flag} {text!r} is not a list of numbers; write --{flag} 0,1") from None
    if not found:
        raise InvalidInput(f"--{flag} is empty; write --{flag} 0,1")
    return found


def compare(
    before: Annotated[Path, typer.Argument(help="A result that `forerun bench --json` wrote.")],
    after: Annotated[Path, typer.Argument(help="The result to compare with it.")],
    json_file: JsonFile = None,
) -> None:
    """Compare two results, and say whether a change is more than noise."""
    from forerun.measure.bench import compare as comparing
    from forerun.measure.bench.compare import read_result

    found = comparing.compare(read_result(before), read_result(after))
    if write_document(json_file, found):
        return
    console = table_console()
    for table in comparing.tables(found):
        print_table(console, table)
    for side, names in (("before", found["only_before"]), ("after", found["only_after"])):
        if names:
            console.print(f"only {side}: {', '.join(names)}")
    for side, equal in zip(("before", "after"), found["equal"], strict=True):
        if not equal:
            console.print(f"{side}: a text differed from plain decoding", style="red")


_FORMATS: tuple[Dtype, ...] = ("gguf", "q8", "bfloat16", "float32")  # that our kernels have on a CPU


def quality(
    model: Model = DEFAULT_MODEL,
    dtypes: Annotated[
        str, typer.Option(help=f"Number formats, by comma: {', '.join(_FORMATS)}.")
    ] = "gguf,q8,bfloat16,float32",
    kv_dtypes: Annotated[
        str, typer.Option(help="KV cache formats to compare with the default one, by comma.")
    ] = "int8",
    kv_device: Annotated[
        str, typer.Option(help="Where KV cache formats are measured: cpu, or cuda (needed for fp8).")
    ] = "cpu",
    text: Annotated[
        Path | None, typer.Option(help="A text to measure on; default: a built-in one of several kinds.")
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens per window of the text.")] = 256,
    threads: Threads = None,
    skip_memory: Annotated[
        bool,
        typer.Option("--skip-memory", help="Skip the memory figures, which load each format again in a fresh process."),
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure the quality and memory of number formats, against float32."""
    names = cast("tuple[Dtype, ...]", words(dtypes))
    if not names:
        raise UnknownName(f"--dtypes is empty; known: {', '.join(_FORMATS)}")
    if strange := [name for name in names if name not in _FORMATS]:
        raise UnknownName(f"unknown number format {strange[0]!r}; known: {', '.join(_FORMATS)}")
    unknown = [name for name in words(kv_dtypes) if name not in get_args(KvDtype)]
    if unknown:
        raise UnknownName(f"unknown KV cache format {unknown[0]!r}; known: {', '.join(get_args(KvDtype))}")
    import torch

    from forerun.measure.machine import machine_facts
    from forerun.measure.memory import resident
    from forerun.measure.quality import measure_kv, measure_quality, read_text

    if threads:
        torch.set_num_threads(threads)
    with Console(stderr=True).status("loading") as status:
        found = measure_quality(
            model, names, read_text(text), window, lambda name: status.update(f"{name}: reading the text")
        )
        status.update("the KV cache: reading the text")
        found["kv"] = measure_kv(model, words(kv_dtypes), read_text(text), window, kv_device)
        for name, figures in found["modes"].items():
            if not skip_memory and "why_not" not in figures:
                status.update(f"{name}: memory of a fresh process")
                figures["memory"] = resident(model, name, threads)
    about = {"model": model, "text": "ours" if text is None else str(text), **machine_facts()}
    document = {"benchmark": "quality", **found, "conditions": about}
    if json_file != STDOUT:
        _show(document)
    print_document(document, json_file)


def _show(document: dict[str, Any]) -> None:
    console = table_console()
    read = f"{document['tokens']} tokens, {document['window']} at a time, against"
    laws = ("perplexity", "same likeliest token", "mean KL, nats")
    table = figure_table(f"{read} float32", "", *laws, "MB above torch", "MB of the model")
    for name, figures in _loaded(console, document["modes"]):
        memory = figures.get("memory")
        held = [f"{memory[key]:.0f}" for key in ("above_torch_mb", "model_mb")] if memory else ["-", "-"]
        table.add_row(name, *_laws(figures), *held)
    print_table(console, table)
    if document.get("kv"):
        table = figure_table(f"{read} the usual KV cache", "KV cache", *laws, "bytes a token")
        for name, figures in _loaded(console, document["kv"]):
            table.add_row(name, *_laws(figures), str(figures["bytes_per_token"]))
        print_table(console, table)


def _loaded(console: Console, found: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What could be measured; of the rest it is said why not."""
    for name, figures in found.items():
        if "why_not" in figures:
            console.print(f"{name} left out: {figures['why_not']}", soft_wrap=True, markup=False)
        else:
            yield name, figures


def _laws(figures: dict[str, Any]) -> tuple[str, str, str]:
    return f"{figures['perplexity']:.3f}", f"{figures['agreement']:.2%}", f"{figures['kl']:.2g}"
