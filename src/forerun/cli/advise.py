"""What to run: `forerun advise` predicts the gain of drafting, `diagnose` why it is low, `plan` counts replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.cli.bench import SHARED, Model, Prompts, Tasks, Temperature, words
from forerun.cli.flags import DEFAULT_MODEL, HELP, JsonFile, with_fields, write_document, write_file
from forerun.cli.loading import check_model, progress_shown, short_name
from forerun.cli.show import counted, table_console
from forerun.core.checks import as_real
from forerun.core.errors import InvalidInput
from forerun.core.params import KvDtype
from forerun.measure.bench.settings import DrafterSetup, Settings, parse_setups
from forerun.measure.plan.advice import PLAIN, Choice, Load, Profile, Range, built_in, fitting, read_profile
from forerun.measure.plan.advice import plan as make_plan
from forerun.measure.report.tables import figure_table, print_table

Drafters = Annotated[
    str, typer.Option(help="Only these drafters, by comma; default: all that can run here.", show_default=False)
]
OURS, YOURS = 2, 24  # prompts per task: ours are of eleven tasks, a user's mostly of one


@with_fields(Settings, SHARED)
def advise(
    given: Mapping[str, Any],
    model: Model = DEFAULT_MODEL,
    drafters: Drafters = "",
    prompts: Prompts = "builtin",
    tasks: Tasks = "",
    limit: Annotated[
        int | None,
        typer.Option(
            help=f"Prompts per task that are written; 0 is all; default: {OURS} of ours, {YOURS} of yours.",
            show_default=False,
        ),
    ] = None,
    temperature: Temperature = 0.0,
    max_budget: Annotated[int, typer.Option(help="Drafted nodes per round at most.")] = 8,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Hold half of the prompts back and compare the prediction with a measurement on them."
        ),
    ] = False,
    check_batches: Annotated[str, typer.Option(help="With --check: batch sizes to measure, by comma.")] = "1",
    json_file: JsonFile = None,
) -> None:
    """Say whether drafting pays on your prompts, with which drafter, and up to which load."""
    if limit is None:
        limit = OURS if prompts == "builtin" else YOURS
    settings = Settings(
        model=model, suite=prompts, tasks=words(tasks), limit=limit or None, temperatures=(temperature,),
        budget=max_budget, setups=parse_setups(words(drafters) or ["auto"]),
        batches=_batches(check, check_batches), **given,
    )  # fmt: skip
    from forerun.measure.advise.answer import in_words, run_advisor
    from forerun.measure.report.tables import print_line, print_table

    name = short_name(model)
    status = Console(stderr=True).status(f"measuring {name}")
    with status, progress_shown(lambda said: status.update(f"measuring {name}: {said}")):
        found = run_advisor(settings, check)
    if write_document(json_file, found):
        return
    console = table_console()
    print_table(console, _table(found))
    for line in in_words(found):
        print_line(console, line)


def _batches(check: bool, sizes: str) -> tuple[int, ...]:
    from forerun.measure.bench.batches import parse_batches

    if sizes != "1" and not check:
        raise InvalidInput(f"--check-batches {sizes} measures nothing without --check; add it")
    return tuple(parse_batches(sizes, "--check-batches"))


def _table(found: Mapping[str, Any]) -> Table:
    title = "Predicted speed-up by batch size (95% interval; 1.00 alone: nothing would be drafted)"
    table = figure_table(title, "", *found["by_batch"])
    for name in found["by_batch"]["1"]:
        cells = [rows[name]["speedup"] for rows in found["by_batch"].values()]
        table.add_row(name, *(_cell(cell) for cell in cells))
    return table


def _cell(found: Mapping[str, Any]) -> str:
    """A predicted speed-up; one prompt gives no interval."""
    from forerun.measure.bench.figures import Spread

    return str(Spread(found["value"], found["low"], found["high"]))


@with_fields(Settings, SHARED)
def diagnose(
    given: Mapping[str, Any],
    model: Model = DEFAULT_MODEL,
    drafter: Annotated[str, typer.Option(help="The drafter to check; NAME:8 drafts 8 nodes a round.")] = "auto",
    against: Annotated[str, typer.Option(help="What to compare it with; none is plain decoding.")] = "none",
    prompts: Prompts = "builtin",
    limit: Annotated[
        int | None, typer.Option(help="Prompts per task; 0 is all. Default: all of a file of yours, 1 of ours.")
    ] = None,
    temperature: Temperature = 0.0,
    verifier: Annotated[str, typer.Option(help=HELP["verifier"])] = "auto",
    json_file: JsonFile = None,
) -> None:
    """Find out why acceptance is low or a text differs."""
    setup = DrafterSetup.parse(drafter)
    if limit is None:
        limit = 1 if prompts == "builtin" else 0
    settings = Settings(
        model=model, suite=prompts, limit=limit or None, temperatures=(temperature,), verifiers=(verifier,),
        setups=(setup,), **given,
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


Prompt = Annotated[int, typer.Option(help="Tokens per prompt.")]
Answer = Annotated[int, typer.Option(help="Tokens per answer.")]
PlanModel = Annotated[str | None, typer.Option("--model", help="With --gpu: 8b. With --measure: any model.")]
Price = Annotated[float | None, typer.Option(help="Price of one machine or GPU per hour; default: cost in hours.")]
File = Annotated[Path | None, typer.Option(help="A file of --save, or the JSON of make bench-cpu or bench-gpu.")]


def plan(
    rate: Annotated[float, typer.Option(help="Requests a second, in all.")],
    prompt: Prompt,
    answer: Answer,
    gpu: Annotated[str | None, typer.Option(help="A GPU with recorded measurements: h200.")] = None,
    which: PlanModel = None,  # not `model`: 8b is no checkpoint
    file: File = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure on this machine first.")] = False,
    save: Annotated[Path | None, typer.Option(help="With --measure: file to keep the measurements in.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="With --measure: " + HELP["kv_dtype"])] = "auto",
    price: Price = None,
    first_seconds: Annotated[float, typer.Option(help="Seconds within which 99 of 100 answers begin.")] = 2.0,
    token_seconds: Annotated[float, typer.Option(help="Seconds per token of an answer, on average.")] = 0.1,
    json_file: JsonFile = None,
) -> None:
    """Plan a deployment: replicas, batch size and cost for a load, by simulation."""
    load = Load(rate, prompt, answer, first_seconds, token_seconds)
    if price is not None:
        as_real("price", price, low=5e-324, limit="a number above 0")
    if save is not None and not measure:
        raise InvalidInput("--save keeps what --measure finds; add --measure")
    if kv_dtype != "auto" and not measure:
        raise InvalidInput(f"--kv-dtype {kv_dtype} is a setting of what --measure loads; add --measure")
    profile = _profile(gpu, which, file, measure, save, load, kv_dtype)
    choices = make_plan(profile, load)
    document = {"what": "forerun-plan", "schema": 1, "load": asdict(load), "machine": profile.machine,
                "model": profile.model, "source": profile.source, "price": price,
                "choices": [{**asdict(c), "full_hours": asdict(c.full_hours)} for c in choices],
                "memory": None if profile.memory is None else asdict(profile.memory),
                "sequences_that_fit": fitting(profile, load)}  # fmt: skip
    if not write_document(json_file, document):
        _show(profile, choices, price, load)


def _profile(
    gpu: str | None, model: str | None, file: Path | None, measured: bool, save: Path | None, load: Load, kv_dtype: str
) -> Profile:
    if sum((gpu is not None, file is not None, measured)) != 1:
        raise InvalidInput("say where times come from: --gpu h200 --model 8b, --file FILE, or --measure")
    if gpu is not None:
        return built_in(gpu.lower(), (model or "8b").lower())
    if file is not None:
        return read_profile(file)
    name = model or DEFAULT_MODEL
    check_model(name)
    with Console(stderr=True).status(f"loading {short_name(name)}") as status:
        from forerun.api.llm import LLM
        from forerun.measure.plan.measure import measure, memory_before

        memory = memory_before(name, cast(KvDtype, kv_dtype))
        llm = LLM.load(name, max_length=max(2048, load.prompt + load.answer), kv_dtype=cast(KvDtype, kv_dtype))
        status.update(f"measuring {short_name(name)}: batches of 1 to 8, plain and drafted; about a minute")
        profile = replace(measure(llm, prompt=load.prompt), memory=memory)
    if save is not None:
        write_file("--save", save, profile.to_json())
    return profile


def _show(profile: Profile, choices: list[Choice], price: float | None, load: Load) -> None:
    unit = "cost of a million tokens" if price is not None else "hours for a million tokens"
    columns = ("drafter", "batch", "replicas", "tokens/s of one", unit, "at full load", "TTFT p99", "per token", "used")
    table = figure_table(f"{profile.model} on {profile.machine}", *columns)
    for choice in choices:
        note = "" if choice.reaches else " (too slow)"
        table.add_row(
            choice.setup + note, str(choice.batch), _range(choice.replicas, "{:.0f}"),
            _range(choice.capacity, "{:.0f}"), _range(choice.gpu_hours, "{:.3g}", price or 1.0),
            _range(choice.full_hours, "{:.3g}", price or 1.0),
            f"{choice.ttft_p99:.2f} s", f"{1e3 * choice.token_seconds:.1f} ms", f"{choice.used:.0%}",
        )  # fmt: skip
    console = table_console()
    print_table(console, table)
    lines = [_verdict(choices, price)]
    if profile.memory is not None:
        lines.append(f"Memory: {'; '.join(profile.memory.told([load.prompt + load.answer]))}.")
    if profile.guesses_prompts(load.prompt):
        lines.append("Prompts as long as these were not measured: a token of theirs counts as one of a short prompt.")
    lines.append(f"Brackets: as far as the intervals of what was measured reach. Source: {profile.source}.")
    for line in lines:
        console.print(line, soft_wrap=not console.is_terminal, markup=False)


def _verdict(choices: list[Choice], price: float | None) -> str:
    best, plain = choices[0], next(choice for choice in choices if choice.setup == PLAIN)
    if not best.reaches:
        return "No drafter reaches the times that were asked for; raise --first-seconds or --token-seconds."
    unit = "" if price is not None else " machine hours"
    cost, without = ((price or 1.0) * c.gpu_hours.value for c in (best, plain))
    drafts = "no speculation" if best.setup == PLAIN else f"the drafter {best.setup}"
    said = (
        f"Take {_replicas(best)} with {drafts}, {best.batch} sequences at once: {cost:.3g}{unit} for a million tokens"
    )
    if best.setup == PLAIN:
        return f"{said}; no drafter serves this load with less, or as cheaply and sooner."
    return (
        f"{said}, an answer in {best.answer_seconds:.3g} s. Plain decoding: {_replicas(plain)}, {without:.3g}{unit}, "
        f"an answer in {plain.answer_seconds:.3g} s. With {best.batch} at once all the time, one replica writes "
        f"{best.capacity.value / plain.capacity.value:.2f}x what plain decoding writes at its best."
    )


def _replicas(choice: Choice) -> str:
    return counted(round(choice.replicas.value), "replica")


def _range(figure: Range, form: str, times: float = 1.0) -> str:
    value, low, high = (form.format(times * each) for each in (figure.value, figure.low, figure.high))
    return value if low == high else f"{value} ({low}-{high})"
