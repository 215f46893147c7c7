"""Run a benchmark: load, measure every cell in turn, sum up. `forerun bench` and its presets call `run`.

The baseline is our own plain loop, in the same process and on the same prompts, a moment before or after. The
document that comes back is described in docs/benchmarking.md and checked by `forerun.measure.bench.compare`.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forerun.api.llm import LLM
from forerun.control.cost import CostModel
from forerun.core.errors import InvalidInput, PromptTooLong
from forerun.core.params import SamplingParams
from forerun.engine.stats import traced
from forerun.measure.bench.alternate import (
    TEXTS_PER_PLACE,
    Contender,
    Group,
    Prompt,
    Run,
    alternate,
    differences,
    group,
    warm_up,
    without_lost,
)
from forerun.measure.bench.compare import SCHEMA
from forerun.measure.bench.contenders import Engines, load, load_peers, own_contenders
from forerun.measure.bench.figures import Figures, samples, summarise
from forerun.measure.bench.settings import Cell, Settings
from forerun.measure.bench.suites import Item, load_suite, prompt_ids, suite_size
from forerun.measure.machine import is_busy, load_average, machine_facts, peak_memory, weight_bytes
from forerun.measure.peers.process import Peers
from forerun.models.base import Target
from forerun.models.native import library
from forerun.models.native.target import NativeDecoder

WARM_UP_TOKENS = 8
_CELL_KEYS = ("equal", "compared", "differing", "speedup", "by_task")


def run(
    settings: Settings, out: Path | None = None, name: str = "forerun", fixed: str = "", trace: Path | None = None
) -> dict[str, Any]:
    items = load_suite(settings.suite, settings.tasks, settings.limit, settings.model)
    run_log = RunLog(out, settings)
    before = load_average()  # before our own loading adds to it
    with Console(stderr=True).status(f"loading {Path(settings.model).name}"):
        llm, cost = load(settings)
        peers = load_peers(llm, settings)
    try:
        with traced(llm.engine.stats, trace):
            result = measure(llm, cost, peers, items, settings, run_log, fixed)
    finally:
        peers.close()
        gc.unfreeze()
    conditions = {
        **result["conditions"],
        "load_before": before,
        "busy": is_busy(before, result["conditions"]["cores"]),
        "suite_prompts": suite_size(settings.suite, settings.tasks),
    }
    return {"benchmark": name, **result, "conditions": conditions}


def measure(
    llm: LLM, cost: CostModel, peers: Peers, items: Sequence[Item], settings: Settings, run_log: RunLog, fixed: str = ""
) -> dict[str, Any]:
    facts = machine_facts()
    curve = {str(size): round(spent, 6) for size, spent in cost.seconds.items()}  # before rounds correct it
    prompts = tokenise(llm, items, settings)
    cells = [_Plan(cell, group(prompts, cell.batch)) for cell in settings.cells()]
    started, engines = perf_counter(), Engines(llm, cost)
    documents, first, lost = [], None, peers.left_out
    for plan in cells:
        asked = peers.contenders if plan.cell.batch == 1 and plan.cell.temperature == 0.0 else []
        contenders = [*asked, *own_contenders(engines, settings, plan.cell)]
        contenders, runs = without_lost(contenders, _with_progress(plan, contenders, settings, run_log, lost), lost)
        figures = Figures(runs, plan.groups)
        summary = summarise(figures, contenders, differences(runs, contenders), fixed)
        first = first or (figures, summary, contenders)
        documents.append(_cell_document(plan.cell, summary))
    assert first is not None  # settings have at least one cell
    figures, summary, contenders = first
    return {
        "schema": SCHEMA,
        "t": curve,
        **summary,
        "equal": all(cell["equal"] is not False for cell in documents),
        "cells": documents,
        "samples": samples(figures, settings.setups[0].name, llm.tokenizer) if settings.setups else [],
        "conditions": {
            **facts,
            **settings.as_document(),
            **_engine_facts(llm, cost, facts["copy_gb_per_s"]),
            "isa": {"forerun": own_isa(llm.engine.target), **peers.isa},
            "left_out": dict(lost),
            "threads": torch.get_num_threads(),
            "tasks": figures.tasks,
            "sampling": "greedy" if settings.temperatures == (0.0,) else "sampled",
            "batch": settings.batches[0],
            "timed": "whole calls, prompt included; each contender has its own engine, controller and drafters, "
            "which keep what they learn between its prompts",
            "texts_per_place": TEXTS_PER_PLACE,  # of a batch in one call, at least; prompts are repeated if too few
            "collector": "what is loaded is left out of garbage collections, as in generate, chat and serve",
            "reference": next((each.name for each in contenders if each.exact), contenders[0].name),
            "prompts": len(prompts),
            "prompt_tokens": sum(len(prompt.ids) for prompt in prompts),
            "load_after": load_average(),
            "seconds": round(perf_counter() - started, 1),
        },
    }


class _Plan(NamedTuple):
    cell: Cell
    groups: list[Group]


def _cell_document(cell: Cell, summary: dict[str, Any]) -> dict[str, Any]:
    where = {"verifier": cell.verifier, "temperature": cell.temperature, "batch": cell.batch}
    rates = {name: figures["tokens_per_second"] for name, figures in summary["contenders"].items()}
    return {**where, **{key: summary[key] for key in _CELL_KEYS}, "tokens_per_second": rates}


def _engine_facts(llm: LLM, cost: CostModel, copy_rate: float) -> dict[str, Any]:
    """Device, memory, and how much of the machine's bandwidth a plain pass uses by reading the weights once."""
    target = llm.engine.target
    read = weight_bytes(target)
    share = None if read is None or target.device.type != "cpu" else read / cost.pass_seconds(1) / copy_rate / 1e9
    return {
        "device": str(target.device),
        "default_drafter": llm.engine.default_drafter,
        # how the native kernels hold the weights; None = torch's
        "mode": target.mode if isinstance(target, NativeDecoder) else None,
        "memory": peak_memory(),
        "weight_bytes": read,
        "bandwidth_share": None if share is None else round(share, 3),
        "context": llm.engine.max_length,
    }


def tokenise(llm: LLM, items: Sequence[Item], settings: Settings) -> list[Prompt]:
    """Prompts as tokens; later turns, if asked for, follow on the answer of our plain loop, untimed."""
    prompts = []
    for item in items:
        messages = [dict(message) for message in item.messages]
        later = item.later_turns if settings.all_turns else ()
        prompts.append(Prompt(item.id, item.task, prompt_ids(llm.tokenizer, messages)))
        for number, turn in enumerate(later, start=2):
            params = SamplingParams(max_tokens=settings.max_tokens)
            answer = llm.generate(list(prompts[-1].ids), params, drafter="none").text
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
            prompts.append(Prompt(f"{item.id}/{number}", item.task, prompt_ids(llm.tokenizer, messages)))
    context, longest = llm.engine.max_length, max(prompts, key=lambda prompt: len(prompt.ids))
    if len(longest.ids) >= context and llm.engine.target.source_rules is None:
        said = f"prompt {longest.id} of the task {longest.task} has {len(longest.ids)} tokens"
        raise PromptTooLong(
            f"{said}, and the model's context holds {context}; choose shorter ones (--prompts, --tasks)"
        )
    return prompts


def own_isa(target: Target) -> str:
    """The instructions that our passes are computed with: the native kernels' or torch's, or the kind of GPU."""
    if target.device.type != "cpu":
        major, minor = torch.cuda.get_device_capability(target.device)
        return f"sm_{major}{minor}"
    native = isinstance(target, NativeDecoder)
    return library.isa() if native else f"torch {torch.backends.cpu.get_cpu_capability()}"


def _with_progress(
    plan: _Plan, contenders: Sequence[Contender], settings: Settings, run_log: RunLog, lost: dict[str, str]
) -> list[Run]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    known = run_log.known(plan.cell)
    total = len(contenders) * len(plan.groups) * settings.repeats
    runs = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(plan.cell.name, total=total)
        if len(known) < total:
            warm_up(contenders, plan.groups[0], min(WARM_UP_TOKENS, settings.max_tokens), lost)
            gc.collect()  # contenders have loaded models, heads and graphs by now; a full collection of these takes a
            gc.freeze()  # tenth of a second, as long as a whole text, and would fall into one call and not into another
        for done in alternate(contenders, plan.groups, settings.max_tokens, settings.repeats, known, lost):
            run_log.add(plan.cell, done)
            runs.append(done)
            progress.update(bar, advance=1, description=f"{done.task}: {done.contender}")
    return runs


_HARMLESS = ("repeats", "url")  # more of them may be asked for later


class RunLog:
    def __init__(self, folder: Path | None, settings: Settings) -> None:
        self._file = None if folder is None else folder / "rounds.jsonl"
        self._runs: dict[tuple[Cell, tuple[str, str, int]], Run] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            _agree(folder, settings)
            self._read()

    def known(self, cell: Cell) -> dict[tuple[str, str, int], Run]:
        return {key: run for (where, key), run in self._runs.items() if where == cell}

    def add(self, cell: Cell, run: Run) -> None:
        if (cell, run.key) in self._runs:
            return
        self._runs[cell, run.key] = run
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_row(cell, run)) + "\n")

    def _read(self) -> None:
        assert self._file is not None
        if not self._file.is_file():
            return
        whole = []
        for line in self._file.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                cell, run = _parse(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue  # cut off by whatever ended the last attempt
            self._runs[cell, run.key] = run
            whole.append(line if line.endswith("\n") else line + "\n")
        self._file.write_text("".join(whole), encoding="utf-8")


def _agree(folder: Path, settings: Settings) -> None:
    """Runs under other settings must not be mixed with these."""
    file, ours = folder / "settings.json", settings.as_document()
    if file.is_file():
        try:
            theirs = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidInput(f"{file} is not readable; delete it or choose another --out") from error
        for key, value in ours.items():
            if key not in _HARMLESS and theirs.get(key) != value:
                raise InvalidInput(
                    f"{folder} was measured with {key}={theirs.get(key)!r} and now {value!r} is asked for; "
                    "choose another --out, or delete the folder"
                )
    file.write_text(json.dumps(ours, indent=1) + "\n", encoding="utf-8")


def _row(cell: Cell, run: Run) -> dict[str, Any]:
    passes = [{part: round(spent, 7) for part, spent in one.items()} for one in run.passes]
    row = {**asdict(cell), **asdict(run), "passes": passes}
    del row["tokens"]  # counted
    return row


def _parse(row: dict[str, Any]) -> tuple[Cell, Run]:
    cell = Cell(**{each.name: row.pop(each.name) for each in fields(Cell)})
    texts, drafts = (tuple(tuple(map(_as_tuple, text)) for text in row[name]) for name in ("texts", "drafts"))
    return cell, Run(**{**row, "texts": texts, "drafts": drafts, "passes": tuple(row["passes"])})


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
