"""Should you draft, with what, and how much? An answer for one model, one machine and one's own prompts.

From start to end: load, gather evidence, conclude; and, if asked to, hold the prediction against the clock on
prompts that it was not made from.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from forerun.advise.answer import document
from forerun.advise.evidence import Evidence, gather, prospects, spread
from forerun.bench.contenders import load, own_contender
from forerun.bench.machine import is_busy, load_average, machine_facts
from forerun.bench.measure import Group, Prompt, Run, alternate, warm_up
from forerun.bench.run import tokenise
from forerun.bench.settings import PLAIN, Cell, Settings, Way
from forerun.bench.stats import Pair, bootstrap_ratio
from forerun.bench.suites import load_suite
from forerun.control.cost import CostModel
from forerun.errors import InvalidInput
from forerun.llm import LLM


def run_advisor(settings: Settings, with_check: bool = False) -> dict[str, Any]:
    """The whole answer as one document."""
    limit = settings.limit if not with_check or settings.limit is None else 2 * settings.limit
    items = load_suite(settings.suite, settings.tasks, limit)
    before = load_average()
    llm, cost = load(settings)
    found = conclude(llm, cost, tokenise(llm, items, settings), settings, with_check)
    facts = machine_facts()
    load_now = {"load_before": before, "busy": is_busy(before, facts["cores"])}
    return {**found, "conditions": {**facts, **settings.as_document(), **load_now}}


def conclude(
    llm: LLM, cost: CostModel, prompts: Sequence[Prompt], settings: Settings, with_check: bool
) -> dict[str, Any]:
    """The answer for a model that is loaded."""
    started = perf_counter()
    used, held_back = split(prompts) if with_check else (list(prompts), [])
    evidence = gather(llm, cost, used, settings)
    found = document(evidence, settings.model, settings.draft_model, llm.engine.target)
    if with_check:
        found["check"] = check(llm, evidence, held_back, settings)
    return {**found, "seconds": round(perf_counter() - started, 1)}


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
    llm: LLM, evidence: Evidence, held_back: Sequence[Prompt], settings: Settings, repeats: int = 2
) -> dict[str, Any]:
    """The prediction for batch 1, made without these prompts, against what the clock says on them."""
    best = prospects(evidence, 1)[0]
    cell = Cell(temperature=settings.temperatures[0])
    way = Way(best.drafter, best.drafter, best.budget or None)
    contenders = [own_contender(llm, settings, cell, one) for one in (Way(PLAIN, "none"), way)]
    groups = [Group.of([prompt]) for prompt in held_back]
    warm_up(contenders, groups[0], min(8, settings.max_tokens))
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    for run in alternate(contenders, groups, settings.max_tokens, repeats):
        runs[run.contender].append(run)
    by_prompt: dict[str, list[Pair]] = {}
    base = {run.key[1:]: run for run in runs[PLAIN]}
    for run in runs[way.name]:
        other = base[run.key[1:]]
        pair = Pair(run.tokens, run.seconds, other.tokens, other.seconds)
        by_prompt.setdefault(run.prompt, []).append(pair)
    measured = bootstrap_ratio(list(by_prompt.values()))
    return {
        "drafter": best.drafter,
        "budget": best.budget,
        "prompts": len(held_back),
        "predicted": spread(best.speedup),
        "measured": spread(measured),
        "error": round(best.speedup.value / measured.value - 1.0, 4),
        "equal": all(run.texts == base[run.key[1:]].texts for run in runs[way.name]),
    }
