"""The Spec-Bench table in one command: `python -m forerun.bench.spec` (`make bench-spec`).

    python -m forerun.bench.spec --suite SPEC_BENCH.jsonl --heads HASS,DFLASH --json spec.json --plot spec.png

Every drafter of the package on every task of a suite, at T=0 and T=1, batch 1, the controller deciding how much to
draft, whole calls timed, all of them alternating with our plain loop on the same prompts: speed-up, tokens per round,
share of the time spent drafting, parameters, minutes of training, texts equal to the plain loop's. On a GPU the default
model is inflated to the shape of an 8B model with its heads; on a CPU it keeps its own shape (`--shape`). A method that
fails is a row with its error. The document is written after every prompt, so that a run that is cut short loses
nothing; the tables come last.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from forerun.auto_drafter import choose_lookup
from forerun.bench.gpu.inflated import INFLATED, OWN
from forerun.bench.machine import is_busy, load_average, machine_facts
from forerun.bench.measure import Prompt
from forerun.bench.run import prompt_ids
from forerun.bench.run_log import RunLog
from forerun.bench.settings import Cell, Settings
from forerun.bench.spec.document import document_of
from forerun.bench.spec.load import Builder, Shape, load_llm
from forerun.bench.spec.measure import Limits, Session
from forerun.bench.spec.methods import Given, Method, every_method, find_method, given_heads
from forerun.bench.spec.table import lines_of
from forerun.bench.suites import TASKS, Item, load_suite
from forerun.build import choose_drafter
from forerun.control.cost import CostModel
from forerun.drafters.base import Parts
from forerun.errors import ForerunError, InvalidInput
from forerun.llm import LLM
from forerun.models.inflate import PRESETS
from forerun.models.load import checkpoint as loading
from forerun.models.load.checkpoint import Checkpoint
from forerun.models.load.opening import opening_of
from forerun.params import SpeculativeConfig

SPEC_BENCH = TASKS[:6]  # the tasks that others report


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m forerun.bench.spec", description=(__doc__ or "").split("\n")[0]
    )
    add, defaults = parser.add_argument, Settings()
    add("--model", default=defaults.model, help="known name, GGUF file, folder or hub id")
    add("--shape", choices=[*PRESETS, OWN], help="shape to inflate it to; default: 8b on a GPU, else own")
    add("--device", help="cuda or cpu; default: a GPU where there is one")
    add("--suite", default="builtin", help="prompts: builtin, or a JSONL file such as Spec-Bench's")
    add(
        "--tasks", default="", help="only these tasks, by comma; default: Spec-Bench's six that the suite has"
    )
    add("--limit", type=int, default=2, help="prompts per task")
    add("--max-tokens", type=int, default=128, help="new tokens per text at most")
    add("--repeats", type=int, default=1, help="how often each prompt is measured")
    add("--methods", default="", help="only these, by comma, as `forerun bench` names drafters; default: all")
    add(
        "--also", default="", help="beside them, by comma: eagle3:24:5:6 is a tree of 24, five deep, six wide"
    )
    add("--heads", default="", help="folders of trained heads, by comma; default: those in the package")
    add("--draft-models", default="", help="second models, smallest first, by comma: one or two")
    add("--layers", help="a plan for layer_skip (`forerun layers search`); default: two thirds of the layers")
    add("--temperatures", default="0,1", help="by comma")
    add(
        "--verifiers",
        default="exact,coupled",
        help="above T=0, by comma: exact, block, coupled (equal texts)",
    )
    add("--seed", type=int, default=0, help="of the texts above T=0")
    add("--time-limit", type=float, help="seconds after which no further text is begun, loading included")
    add("--method-seconds", type=float, default=60.0, help="seconds after which a method is not called again")
    add("--context", type=int, default=4096, help="tokens of a sequence at most; longer prompts are left out")
    add("--dtype", default=defaults.dtype, help="of the own shape: auto, gguf, q8, bfloat16 or float32")
    add("--threads", type=int, help="CPU threads; default: one per core")
    add("--out", type=Path, metavar="DIR", help="keep every round there; the same command resumes")
    add("--json", type=Path, metavar="PATH", help="write the document there, while it is measured")
    add("--plot", type=Path, metavar="PATH", help="draw speed-up and tokens per round there, as PNG")
    add("--show", type=Path, metavar="PATH", help="measure nothing: print and draw this document again")
    return parser.parse_args(words)


def settings_of(flags: argparse.Namespace, items: Sequence[Item], methods: Sequence[Method]) -> Settings:
    return Settings(
        model=f"{flags.model} {flags.shape}", suite=flags.suite, limit=flags.limit, max_tokens=flags.max_tokens,
        tasks=tuple(dict.fromkeys(item.task for item in items)), setups=tuple(one.setup for one in methods),
        temperatures=tuple(_numbers(flags.temperatures)), verifiers=names_in(flags.verifiers),
        repeats=flags.repeats, seed=flags.seed, dtype=flags.dtype, device=flags.device, threads=flags.threads,
    )  # fmt: skip


def cells_of(settings: Settings) -> list[Cell]:
    """Verifiers differ above T=0 alone: greedy texts are the same under all of them."""
    return [
        Cell("auto" if temperature == 0.0 else verifier, temperature)
        for temperature in settings.temperatures
        for verifier in (settings.verifiers[:1] if temperature == 0.0 else settings.verifiers)
    ]


def items_of(flags: argparse.Namespace) -> list[Item]:
    """The prompts; of a suite with more tasks than Spec-Bench's, those six."""
    found = load_suite(flags.suite, names_in(flags.tasks), flags.limit)
    listed = [item for item in found if flags.tasks or item.task in SPEC_BENCH]
    return listed or found


def measure(flags: argparse.Namespace, items: Sequence[Item], folder: Path) -> dict[str, Any]:
    """Load, build, measure; the document is written as it grows."""
    started = perf_counter()
    checkpoint = loading.open_checkpoint(flags.model)
    given = Given(given_heads(names_in(flags.heads), checkpoint), names_in(flags.draft_models), flags.layers)
    named = names_in(flags.methods)
    methods = [find_method(name, given) for name in named] if named else every_method(given)
    methods += [find_method(name, given) for name in names_in(flags.also)]
    settings = settings_of(flags, items, methods)
    log, facts = RunLog(flags.out, settings), conditions_of(flags)
    shape = Shape(flags.shape, flags.device, flags.context, flags.dtype, flags.threads)
    llm = load_llm(checkpoint, shape)
    prompts, long = prompts_of(llm, items, flags)
    builder = Builder(llm, shape, folder, say=lambda line: _say(started, line))
    builder.build_all(methods)
    ready = [method for method in methods if method.name in builder.built]
    facts |= {"prompts": len(prompts), "left_out": long, "auto": auto_of(checkpoint, llm, flags)}
    facts["load_seconds"] = round(perf_counter() - started, 1)
    limits = Limits(flags.time_limit, flags.method_seconds)
    session = Session(llm, settings, cells_of(settings), ready, builder.facts, log, limits, started)

    def save() -> dict[str, Any]:
        now = {"seconds": round(perf_counter() - started, 1), "load_after": load_average()}
        document = document_of(session, {**facts, **now})
        if flags.json is not None:
            _write(flags.json, document)
        return document

    session.measure(prompts, lambda: _say(started, f"{save()['texts']} texts"))
    return save()


def prompts_of(llm: LLM, items: Sequence[Item], flags: argparse.Namespace) -> tuple[list[Prompt], list[str]]:
    """Prompts as tokens, and the ids of those that are too long."""
    found = [Prompt(item.id, item.task, prompt_ids(llm, list(item.messages))) for item in items]
    fitting = [one for one in found if len(one.ids) + flags.max_tokens <= llm.engine.max_length]
    if not fitting:
        raise InvalidInput(f"no prompt of the suite fits --context {flags.context}; raise it")
    return fitting, [one.id for one in found if one not in fitting]


def auto_of(checkpoint: Checkpoint, llm: LLM, flags: argparse.Namespace) -> str:
    """The method that is the default on this device."""
    if flags.shape == OWN:
        return llm.engine.default_drafter
    chosen, target = choose_drafter(SpeculativeConfig(), checkpoint, flags.device), llm.engine.target
    if chosen.drafter != "auto" or chosen.draft_model is not None:
        return chosen.drafter
    parts = Parts(target, None, chosen, opening=opening_of(target, llm.tokenizer))
    return choose_lookup(parts, partial(CostModel.measure, target)).drafter


def conditions_of(flags: argparse.Namespace) -> dict[str, Any]:
    """The machine and the settings, before anything is loaded."""
    before, facts = load_average(), machine_facts()
    return {
        **facts, "model": Path(flags.model).name, "device": flags.device, "suite": Path(flags.suite).stem,
        "seed": flags.seed,
        "shape": "its own shape" if flags.shape == OWN else f"{flags.shape} shape, {INFLATED}",
        "max_tokens": flags.max_tokens, "limit": flags.limit, "repeats": flags.repeats, "load_before": before,
        "busy": is_busy(before, facts["cores"]),
        "gpu": torch.cuda.get_device_name() if flags.device.startswith("cuda") else None,
        "timed": "whole calls, prompt included; nothing is learnt from one prompt for the next",
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a text differs, 2 for a user's error."""
    flags = parse(words)
    flags.device = flags.device or ("cuda" if torch.cuda.is_available() else "cpu")
    flags.shape = flags.shape or (OWN if flags.device == "cpu" else "8b")
    try:
        if flags.show is not None:
            document = json.loads(flags.show.read_text(encoding="utf-8"))
        else:
            items = items_of(flags)  # a mistake there shows before minutes are spent
            with TemporaryDirectory() as folder:
                document = measure(flags, items, Path(folder))
        if flags.plot is not None:
            from forerun.bench.spec.plot import draw

            draw(document, flags.plot)
    except ForerunError as error:
        print(f"forerun: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines_of(document)), flush=True)
    return 0 if document["equal"] else 1


def _write(file: Path, document: dict[str, Any]) -> None:
    """Whole or not at all: what was written before stays until the new text is there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".part")
    fresh.write_text(json.dumps(document) + "\n", encoding="utf-8")
    fresh.replace(file)


def _say(started: float, line: str) -> None:
    print(f"{perf_counter() - started:6.1f} s  {line}", file=sys.stderr, flush=True)


def names_in(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in names_in(text)]
    except ValueError:
        raise InvalidInput(f"--temperatures {text!r} are not numbers by comma, as 0,1") from None
