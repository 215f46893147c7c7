"""Measures the methods of a table: each prompt by all of them in turn, beside our plain loop, until time is up.

First one prompt of every task, then the next: a run that is cut short has all tasks. A method that raises, or whose
drafter is switched off, is not called again, and the others go on; so is one that has used up its share of time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

from forerun.api.llm import LLM
from forerun.measure.bench.alternate import (
    Contender,
    ContenderLost,
    Group,
    Prompt,
    Run,
    Write,
    Written,
    in_turn,
    measure_once,
    noting,
)
from forerun.measure.bench.contenders import is_comparable, own_contender
from forerun.measure.bench.run import RunLog
from forerun.measure.bench.settings import PLAIN, Cell, DrafterSetup, Settings
from lab.spec.load import brief_error, warnings_into
from lab.spec.methods import Method

SWITCHED_OFF = "is switched off"  # how the engine's log says that it goes on without a drafter
WARM_UP_TOKENS = 16
WARM_UP_TEXT = "Write three sentences about the sea, and then write them again."


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds; None = as many as it takes."""

    whole: float | None = None
    per_method: float | None = None


@dataclass(slots=True)
class Session:
    llm: LLM
    settings: Settings
    cells: Sequence[Cell]
    methods: Sequence[Method]  # those that were built
    facts: Mapping[str, dict[str, Any]]  # by method: errors and notes go there
    log: RunLog
    limits: Limits
    started: float  # when the command began: loading counts
    runs: dict[Cell, list[Run]] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)  # seconds by method
    cut: str = ""  # why the run ended early

    def measure(self, prompts: Sequence[Prompt], save: Callable[[], object]) -> None:
        """Every prompt in every cell; `save` is called after each prompt."""
        contenders = {cell: self._contenders(cell) for cell in self.cells}
        self.runs = {cell: [] for cell in contenders}
        self._warm_up(contenders)
        gc.collect()
        gc.freeze()  # a full collection, a tenth of a second, would fall into one text and not into another
        try:
            for repeat in range(self.settings.repeats):
                self._repeat(repeat, prompts, contenders, save)
        finally:
            gc.unfreeze()

    def _repeat(
        self,
        repeat: int,
        prompts: Sequence[Prompt],
        contenders: Mapping[Cell, Sequence[Contender]],
        save: Callable[[], object],
    ) -> None:
        for index, one in enumerate(one_of_each(prompts)):
            for cell, mine in contenders.items():
                for contender in in_turn(mine, repeat + index):
                    if not self.cut:
                        self._run(cell, contender, one, repeat)
            save()

    def contenders_of(self, cell: Cell) -> list[Contender]:
        wrote = {run.contender for run in self.runs[cell]}
        return [one for one in self._contenders(cell) if one.name in wrote]

    def paired(self, cell: Cell) -> list[Run]:
        plain = {run.key[1:] for run in self.runs[cell] if run.contender == PLAIN}
        return [run for run in self.runs[cell] if run.key[1:] in plain]

    def _contenders(self, cell: Cell) -> list[Contender]:
        alike = is_comparable(self.llm, cell)  # then all tokens are chosen
        methods = [method for method in self.methods if not (alike and method.chosen)]
        setups = [DrafterSetup(PLAIN, "none"), *(method.setup for method in methods)]
        found = [own_contender(self.llm, self.settings, cell, setup) for setup in setups]
        return [replace(one, write=self._guarded(one)) for one in found]

    def _guarded(self, contender: Contender) -> Write:
        """Whatever a method raises, or the engine logs of its drafter, loses that method and no other."""

        def write(prompts: Sequence[Sequence[int]], max_tokens: int) -> Written:
            said: list[str] = []
            try:
                with warnings_into(said):
                    written = contender.write(prompts, max_tokens)
            except Exception as error:
                raise ContenderLost(brief_error(error)) from error
            if contender.name in self.facts:
                notes = self.facts[contender.name]["notes"]
                notes += [line for line in said if line not in notes]
            for line in said:
                if SWITCHED_OFF in line:
                    raise ContenderLost(line)
            return written

        return write

    def _warm_up(self, contenders: Mapping[Cell, Sequence[Contender]]) -> None:
        """Everybody writes once, untimed, on a prompt that is not in the table."""
        one = Group.of([Prompt("warm-up", "warm-up", self.llm.encode(WARM_UP_TEXT))])
        tokens = min(WARM_UP_TOKENS, self.settings.max_tokens)
        for mine in contenders.values():
            for contender in mine:
                self._attempt(contender, partial(measure_once, contender, one, 0, tokens))

    def _run(self, cell: Cell, contender: Contender, one: Group, repeat: int) -> None:
        if contender.name != PLAIN and self._is_over(contender.name):
            return
        known = self.log.known(cell).get((contender.name, one.id, repeat))
        work = partial(measure_once, contender, one, repeat, self.settings.max_tokens)
        run = known or self._attempt(contender, work)
        if run is not None:
            self.log.add(cell, run)
            self.runs[cell].append(run)
            self.spent[contender.name] = self.spent.get(contender.name, 0.0) + run.seconds
        if self.limits.whole is not None and perf_counter() - self.started > self.limits.whole:
            self.cut = f"the time limit of {self.limits.whole:g} s"

    def _attempt(self, contender: Contender, work: Callable[[], Run]) -> Run | None:
        """What a contender wrote; None where it failed, now or before."""
        if contender.name != PLAIN and self.facts[contender.name]["error"]:
            return None
        lost: dict[str, str] = {}
        run: Run | None = None
        with noting(contender, lost):
            run = work()
        if lost and contender.name == PLAIN:  # nothing can be compared any more: what was measured is kept
            self.cut = f"an error of the plain loop: {lost[PLAIN]}"
        elif lost:
            self.facts[contender.name]["error"] = lost[contender.name]
        return run

    def _is_over(self, name: str) -> bool:
        most, spent = self.limits.per_method, self.spent.get(name, 0.0)
        if most is None or spent <= most:
            return False
        note = f"stopped after {most:g} s"
        if note not in self.facts[name]["notes"]:
            self.facts[name]["notes"].append(note)
        return True


def one_of_each(prompts: Sequence[Prompt]) -> Iterator[Group]:
    """Prompts one by one: the first of every task, then the second of every task."""
    tasks = list(dict.fromkeys(prompt.task for prompt in prompts))
    by_task = {task: [prompt for prompt in prompts if prompt.task == task] for task in tasks}
    for place in range(max(map(len, by_task.values()), default=0)):
        for mine in by_task.values():
            if place < len(mine):
                yield Group.of([mine[place]])
