"""Measure a profile on this machine: a short batch sweep of the real engine, plain and with its drafter.

`Contention` says how much slower a process is because others use the same cores: what its threads ran and waited.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from statistics import fmean

from forerun.api.llm import LLM
from forerun.build.load import memory_here
from forerun.core.errors import UnsupportedModel
from forerun.core.params import KvDtype, SamplingParams
from forerun.measure.bench.batches import PLAIN, Call, Setup, Sweep, Text
from forerun.measure.bench.suites import load_suite
from forerun.measure.machine import is_busy, load_average, machine_facts
from forerun.measure.plan.advice import Memory, Point, Profile, points_of

PROMPTS = 8
PER_PLACE = 2  # texts for each place in a batch
LONG, LONGEST = 2047, 8192  # tokens of the longest prompt that is timed on a CPU, and at most on a GPU


def setups_for(llm: LLM) -> dict[str, Setup]:
    name = llm.engine.default_drafter
    return {PLAIN: Setup("none"), f"{name}, adaptive": Setup(name)}


class QuietSweep(Sweep):
    """A batch sweep in the time that it would take with the cores to itself, where the system tells that."""

    def write(self, setup: Setup, batch: int, prompts: Sequence[Text], params: SamplingParams) -> Call:
        contention = Contention()
        call = super().write(setup, batch, prompts, params)
        slower = contention.slowdown()
        call.marks = [(call.started + (at - call.started) / slower, new) for at, new in call.marks]
        call.parts = {part: spent / slower for part, spent in call.parts.items()}
        return call


def measure(
    llm: LLM, *, batches: Sequence[int] = (1, 2, 4, 8), max_tokens: int = 48, repeats: int = 1, prompt: int = 0
) -> Profile:
    """Times of this model, here and now; about a minute on a small model and a quiet machine.

    `prompt` is how long prompts are going to be.
    """
    busy = is_busy(load_average(), 1)
    sweep = QuietSweep(llm.engine, prompts_of(llm), max_tokens)
    size, found = llm.engine.max_batch, list[tuple[Point, ...]]()
    try:
        for _ in range(repeats):
            rows = sweep.measure(setups_for(llm), batches, lambda batch: max(PROMPTS, PER_PLACE * batch))
            found.append(points_of(rows))
        square = prompt_square(sweep, prompt)
    finally:
        llm.engine.max_batch = size
    facts = machine_facts()
    machine = str(facts.get("gpu") or facts.get("cpu") or "this machine")
    when = datetime.now(UTC).isoformat(timespec="seconds")
    waits = ", in which threads' waits for a core are taken out" if busy else ""
    source = f"measured here, {when}, commit {facts.get('commit')}, {'busy' if busy else 'quiet'} machine{waits}"
    usual = square * fmean(map(len, sweep.prompts))  # of a token's time in the sweep
    points = tuple(
        replace(point, prompt_seconds=max(0.0, point.prompt_seconds - usual))
        for point in (map(_mean, *found) if repeats > 1 else found[0])
    )
    return Profile(machine, llm.name, source, points, prompt_square_seconds=square)


def memory_before(model: str, kv_dtype: KvDtype = "auto") -> Memory | None:
    """What this model will take of the memory that is free now; None where that is not known before it is loaded."""
    try:
        return Memory(*memory_here(model, kv_dtype), kv_dtype)
    except UnsupportedModel:
        return None


def prompt_square(sweep: Sweep, wanted: int) -> float:
    """Seconds of a prompt per square of its tokens: how much more a token of a long one takes than of a shorter one."""
    engine = sweep.engine
    longest = min(max(wanted, LONG), LONGEST) if engine.target.can.captures else LONG
    longest = min(longest, engine.max_length - 1)
    each, params = [], SamplingParams(max_tokens=1)
    for tokens in (lengths := (longest // 4, longest)):
        if tokens < 1:
            return 0.0
        text = list(chain.from_iterable(sweep.prompts))
        prompt = tuple((text * (tokens // len(text) + 1))[:tokens])
        call = sweep.write(Setup("none"), 1, [prompt], params)
        each.append(call.parts.get("prompt", 0.0) / tokens)
    return max(0.0, each[1] - each[0]) / (lengths[1] - lengths[0])


def _mean(*same: Point) -> Point:
    return replace(
        same[0],
        decode_seconds=fmean(point.decode_seconds for point in same),
        prompt_seconds=fmean(point.prompt_seconds for point in same),
        tokens_per_round=fmean(point.tokens_per_round for point in same),
        error=max(point.error for point in same) / math.sqrt(len(same)),
    )


def prompts_of(llm: LLM, count: int = PROMPTS) -> list[tuple[int, ...]]:
    items = load_suite(None)
    chosen = [items[i * len(items) // count] for i in range(min(count, len(items)))]
    return [tuple(llm.tokenizer.chat_ids(list(item.messages), True)) for item in chosen]


class Contention:
    """Of this process, from one look to the next; 1.0 where the system does not tell (only Linux does)."""

    def __init__(self) -> None:
        self._folder = Path("/proc") / str(os.getpid()) / "task"
        self._last = self._now()

    def slowdown(self) -> float:
        """Since the last look: time that its busiest thread ran or would have run, over the time that it ran.

        The busiest one is the engine's: threads that wake up for a moment wait long for little.
        """
        before, self._last = self._last, self._now()
        spent = [
            (run - before.get(thread, (0, 0))[0], wait - before.get(thread, (0, 0))[1])
            for thread, (run, wait) in self._last.items()
        ]
        ran, waited = max(spent, default=(0, 0))
        return (ran + waited) / ran if ran > 0 else 1.0

    def _now(self) -> dict[str, tuple[int, int]]:
        found = {}
        for file in self._folder.glob("*/schedstat"):
            try:
                run, wait, _ = file.read_text().split()
            except (OSError, ValueError):  # a thread that has just ended
                continue
            found[file.parent.name] = int(run), int(wait)
        return found
