"""Run `forerun advise`: whether to draft, with what, and how much, for one model, machine and set of prompts.

From start to end: load, gather evidence, conclude; and, if asked to, compare the prediction with a measurement on
prompts that it was not made from.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from forerun.api.llm import LLM
from forerun.build.engine import choose_drafter, needs_head
from forerun.control.cost import CostModel
from forerun.core.errors import InvalidInput
from forerun.core.params import SpeculativeConfig
from forerun.measure.advise.answer import Setup, document
from forerun.measure.advise.evidence import Evidence, gather, prospects
from forerun.measure.bench.alternate import Group, Prompt, alternate, warm_up
from forerun.measure.bench.contenders import load, own_contender
from forerun.measure.bench.figures import Figures
from forerun.measure.bench.run import tokenise
from forerun.measure.bench.settings import PLAIN, Cell, DrafterSetup, Settings
from forerun.measure.bench.suites import load_suite, suite_size
from forerun.measure.machine import is_busy, load_average, machine_facts
from forerun.models.load import checkpoint as loading


def run_advisor(settings: Settings, with_check: bool = False) -> dict[str, Any]:
    limit = settings.limit if not with_check or settings.limit is None else 2 * settings.limit
    items = load_suite(settings.suite, settings.tasks, limit, settings.model)
    given = suite_size(settings.suite, settings.tasks)
    before = load_average()
    llm, cost = load(settings)
    found = conclude(llm, cost, tokenise(llm, items, settings), settings, with_check)
    facts = machine_facts()
    load_now = {"load_before": before, "busy": is_busy(before, facts["cores"])}
    found["prompts"] = {"read": len(items), "given": given}
    return {**found, "conditions": {**facts, **settings.as_document(), **load_now}}


def conclude(
    llm: LLM, cost: CostModel, prompts: Sequence[Prompt], settings: Settings, with_check: bool
) -> dict[str, Any]:
    started = perf_counter()
    used, held_back = split(prompts) if with_check else (list(prompts), [])
    evidence = gather(llm, cost, used, settings)
    found = document(evidence, setup_of(llm, evidence, settings), llm.engine.target)
    if with_check:
        by_batch = {batch: check(llm, evidence, held_back, settings, batch) for batch in settings.batches}
        found["check"] = {
            **by_batch[settings.batches[0]],
            "by_batch": {str(batch): one for batch, one in by_batch.items()},
        }
    return {**found, "seconds": round(perf_counter() - started, 1)}


def setup_of(llm: LLM, evidence: Evidence, settings: Settings) -> Setup:
    """What was measured, as a user would ask for it; `auto` is what the engine does where nothing is named."""
    given = (("dtype", "auto"), ("device", "auto"), ("threads", None))
    values = settings.as_document()
    flags = [word for key, default in given if values[key] != default for word in (f"--{key}", str(values[key]))]
    return Setup(
        settings.model,
        llm.engine.default_drafter,
        settings.draft_model,
        heads_in_use(settings.model, evidence) if settings.draft_model is None else {},
        tuple(flags),
        llm.engine.target.device.type,
    )


def heads_in_use(model: str, evidence: Evidence) -> dict[str, str]:
    """The folders of the heads that come with the package, by the drafters that ran them."""
    found = {}
    for name in filter(needs_head, evidence.draftings):
        chosen = choose_drafter(SpeculativeConfig(drafter=name), loading.open_checkpoint(model))
        if chosen.draft_model is not None:
            found[name] = chosen.draft_model
    return found


def split(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Every other prompt of each task is held back."""
    used, held_back = [], []
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        mine = [prompt for prompt in prompts if prompt.task == task]
        used += mine[::2]
        held_back += mine[1::2]
    if not held_back:
        raise InvalidInput(f"{len(prompts)} prompts leave none to check with; give two or more of a task")
    return used, held_back


def check(
    llm: LLM, evidence: Evidence, held_back: Sequence[Prompt], settings: Settings, batch: int = 1, repeats: int = 2
) -> dict[str, Any]:
    """The prediction for a batch size, made without these prompts, against what is measured on them."""
    best = prospects(evidence, batch)[0]
    cell = Cell(temperature=settings.temperatures[0], batch=batch)
    setup = DrafterSetup(best.drafter, best.drafter, best.budget or None)
    contenders = [own_contender(llm, settings, cell, one) for one in (DrafterSetup(PLAIN, "none"), setup)]
    groups = in_batches(held_back, batch)
    warm_up(contenders, groups[0], min(8, settings.max_tokens))
    figures = Figures(list(alternate(contenders, groups, settings.max_tokens, repeats)))
    measured = figures.speedup(setup.name, PLAIN)
    base = {run.key[1:]: run.texts for run in figures.of(PLAIN)}
    return {
        "batch": batch,
        "drafter": best.drafter,
        "budget": best.budget,
        "prompts": len(held_back),
        "predicted": best.speedup.as_document(),
        "measured": measured.as_document(),
        "error": round(best.speedup.value / measured.value - 1.0, 4),
        "equal": all(run.texts == base[run.key[1:]] for run in figures.of(setup.name)),
    }


def in_batches(prompts: Sequence[Prompt], batch: int) -> list[Group]:
    """Groups of so many prompts each; where they do not suffice, the first ones come again."""
    rounds = -(-len(prompts) // batch)
    again = [prompts[i % len(prompts)] for i in range(rounds * batch)]
    return [Group.of(again[first : first + batch]) for first in range(0, len(again), batch)]
