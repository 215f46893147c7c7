"""Measure a profile on this machine: a short batch sweep of the real engine, plain and with its drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from forerun.bench.batches.sweep import PLAIN, Setup, Sweep
from forerun.bench.machine import is_busy, load_average, machine_facts
from forerun.bench.suites import load_suite
from forerun.control.fixed import budget_of
from forerun.llm import LLM
from forerun.plan.profile import Profile, points_of

PROMPTS = 8
PER_PLACE = 2  # texts for each place in a batch


def setups_for(llm: LLM, budgets: Sequence[int] = ()) -> dict[str, Setup]:
    """Plain, the default drafter as the controller has it, and with each fixed budget."""
    name = llm.engine.default_drafter
    made = {PLAIN: Setup("none"), f"{name}, adaptive": Setup(name)}
    return made | {f"{name}, always {n}": Setup(name, budget_of(n, width=1)) for n in budgets}


def measure(
    llm: LLM,
    *,
    batches: Sequence[int] = (1, 2, 4, 8),
    max_tokens: int = 48,
    setups: Mapping[str, Setup] | None = None,
    suite: str | None = None,
    say: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Profile:
    """Times of this model, here and now; about a minute on a small model."""
    busy = is_busy(load_average(), 1)
    sweep = Sweep(llm.engine, prompts_of(llm, suite), max_tokens)
    size = llm.engine.max_batch
    try:
        rows = sweep.measure(
            setups or setups_for(llm), batches, lambda batch: max(PROMPTS, PER_PLACE * batch), say
        )
    finally:
        llm.engine.max_batch = size
    facts = machine_facts()
    machine = str(facts.get("gpu") or facts.get("cpu") or "this machine")
    when = datetime.now(UTC).isoformat(timespec="seconds")
    source = f"measured here, {when}, commit {facts.get('commit')}, {'busy' if busy else 'quiet'} machine"
    return Profile(machine, llm.name, source, points_of(rows))


def prompts_of(llm: LLM, suite: str | None = None, count: int = PROMPTS) -> list[tuple[int, ...]]:
    """Prompts of all tasks of a suite, as tokens."""
    items = load_suite(suite)
    chosen = [items[i * len(items) // count] for i in range(min(count, len(items)))]
    return [tuple(llm.tokenizer.chat_ids(list(item.messages), True)) for item in chosen]
