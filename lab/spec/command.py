"""The Spec-Bench table in one command: `python -m lab spec` (`make bench-spec`).

    python -m lab spec --suite SPEC_BENCH.jsonl --heads HASS,DFLASH --json spec.json --plot spec.png

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
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from forerun.api.llm import LLM
from forerun.build.auto_drafter import choose_lookup
from forerun.build.engine import choose_drafter
from forerun.cli.bench import numbers, words
from forerun.control.cost import CostModel
from forerun.core.errors import InvalidInput
from forerun.core.params import SpeculativeConfig
from forerun.drafters.base import Parts
from forerun.measure.bench.alternate import Prompt
from forerun.measure.bench.run import RunLog
from forerun.measure.bench.settings import Cell, Settings
from forerun.measure.bench.suites import TASKS, Item, load_suite, prompt_ids
from forerun.models.load import checkpoint as loading
from forerun.models.load.checkpoint import Checkpoint
from forerun.models.load.tokenizer import opening_of
from lab.inflate.heads import INFLATED, OWN
from lab.inflate.model import PRESETS
from lab.runner import Document, Run, picture, share
from lab.spec.load import Builder, Shape, load_llm
from lab.spec.measure import Limits, Session
from lab.spec.methods import Given, Method, every_method, find_method, given_heads
from lab.spec.table import document_of, draw, lines_of

SPEC_BENCH = TASKS[:6]  # the tasks that others report


def add_flags(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, Settings()
    share(parser, model=defaults.model, device=None, suite="builtin", tasks="", limit=2, max_tokens=128)
    share(parser, repeats=1, seed=0, dtype=defaults.dtype, threads=None, plot=None)
    add("--shape", choices=[*PRESETS, OWN], help="shape to inflate it to; default: 8b on a GPU, else own")
    add("--methods", default="", help="only these, by comma, as `forerun bench` names drafters; default: all")
    add("--also", default="", help="beside them, by comma: eagle3:24:5:6 is a tree of 24, five deep, six wide")
    add("--heads", default="", help="folders of trained heads, by comma; default: those in the package")
    add("--draft-models", default="", help="second models, smallest first, by comma: one or two")
    add("--layers", help="a plan for layer_skip (`forerun layers search`); default: two thirds of the layers")
    add("--temperatures", default="0,1", help="by comma")
    add("--verifiers", default="exact,coupled", help="above T=0, by comma: exact, block, coupled (equal texts)")
    add("--time-limit", type=float, help="seconds after which no further text is begun, loading included")
    add("--method-seconds", type=float, default=60.0, help="seconds after which a method is not called again")
    add("--context", type=int, default=4096, help="tokens of a sequence at most; longer prompts are left out")
    add("--out", type=Path, metavar="FOLDER", help="keep every round there; the same command resumes")
    add("--show", type=Path, metavar="PATH", help="measure nothing: print and draw this document again")


def settle(flags: argparse.Namespace) -> None:
    """A GPU where there is one, and there the cost of an 8B."""
    flags.device = flags.device or ("cuda" if torch.cuda.is_available() else "cpu")
    flags.shape = flags.shape or (OWN if flags.device == "cpu" else "8b")


def settings_of(flags: argparse.Namespace, items: Sequence[Item], methods: Sequence[Method]) -> Settings:
    return Settings(
        model=f"{flags.model} {flags.shape}", suite=flags.suite, limit=flags.limit, max_tokens=flags.max_tokens,
        tasks=tuple(dict.fromkeys(item.task for item in items)), setups=tuple(one.setup for one in methods),
        temperatures=numbers(flags.temperatures, "temperatures"), verifiers=words(flags.verifiers),
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
    found = load_suite(flags.suite, words(flags.tasks), flags.limit)
    listed = [item for item in found if flags.tasks or item.task in SPEC_BENCH]
    return listed or found


def measure(run: Run) -> Document:
    flags = run.flags
    if flags.show is not None:
        found: Document = json.loads(flags.show.read_text(encoding="utf-8"))
        return found
    items = items_of(flags)  # a mistake there shows before minutes are spent
    with TemporaryDirectory() as folder:
        return measure_all(run, items, Path(folder))


def measure_all(run: Run, items: Sequence[Item], folder: Path) -> Document:
    flags, checkpoint = run.flags, loading.open_checkpoint(run.flags.model)
    given = Given(given_heads(words(flags.heads), checkpoint), words(flags.draft_models), flags.layers)
    named = words(flags.methods)
    methods = [find_method(name, given) for name in named] if named else every_method(given)
    methods += [find_method(name, given) for name in words(flags.also)]
    settings = settings_of(flags, items, methods)
    log, facts = RunLog(flags.out, settings), conditions_of(flags)
    shape = Shape(flags.shape, flags.device, flags.context, flags.dtype, flags.threads)
    llm = load_llm(checkpoint, shape)
    prompts, long = prompts_of(llm, items, flags)
    builder = Builder(llm, shape, folder, say=run.say)
    builder.build_all(methods)
    ready = [method for method in methods if method.name in builder.built]
    facts |= {"prompts": len(prompts), "left_out": long, "auto": auto_of(checkpoint, llm, flags)}
    facts["load_seconds"] = round(perf_counter() - run.started, 1)
    limits = Limits(flags.time_limit, flags.method_seconds)
    session = Session(llm, settings, cells_of(settings), ready, builder.facts, log, limits, run.started)

    def save() -> None:
        run.say(f"{run.save(document_of(session, facts))['texts']} texts")

    session.measure(prompts, save)
    return document_of(session, facts)


def prompts_of(llm: LLM, items: Sequence[Item], flags: argparse.Namespace) -> tuple[list[Prompt], list[str]]:
    found = [Prompt(item.id, item.task, prompt_ids(llm.tokenizer, item.messages)) for item in items]
    fitting = [one for one in found if len(one.ids) + flags.max_tokens <= llm.engine.max_length]
    if not fitting:
        raise InvalidInput(f"no prompt of the suite fits --context {flags.context}; raise it")
    return fitting, [one.id for one in found if one not in fitting]


def auto_of(checkpoint: Checkpoint, llm: LLM, flags: argparse.Namespace) -> str:
    if flags.shape == OWN:
        return llm.engine.default_drafter
    chosen, target = choose_drafter(SpeculativeConfig(), checkpoint, flags.device), llm.engine.target
    if chosen.drafter != "auto" or chosen.draft_model is not None:
        return chosen.drafter
    parts = Parts(target, None, chosen, opening=opening_of(target, llm.tokenizer))
    return choose_lookup(parts, partial(CostModel.measure, target)).drafter


def conditions_of(flags: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": Path(flags.model).name, "device": flags.device, "suite": Path(flags.suite).stem, "seed": flags.seed,
        "shape": "its own shape" if flags.shape == OWN else f"{flags.shape} shape, {INFLATED}",
        "max_tokens": flags.max_tokens, "limit": flags.limit, "repeats": flags.repeats,
        "gpu": torch.cuda.get_device_name() if flags.device.startswith("cuda") else None,
        "timed": "whole calls, prompt included; nothing is learnt from one prompt for the next",
    }  # fmt: skip


def show(document: Document, flags: argparse.Namespace) -> None:
    """One table for each temperature and verifier, and a plot where it was asked for."""
    if (file := picture(flags.plot)) is not None:
        draw(document, file)
    print("\n".join(lines_of(document)), flush=True)
