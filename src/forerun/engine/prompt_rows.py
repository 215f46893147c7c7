"""PromptRows: how many tokens of prompts share a round with the trees of running sequences.

A round with prompts in it may take about twice as long as one without: whoever is writing notices little, and weights
that are read for the trees serve the prompts too. What rows cost is learnt from the rounds themselves. Where so many
requests wait for places that are free that the batch would grow by a twelfth, or by a sixth (on a CPU by an eighth, or
by half), rounds take two or four times as many rows: a batch that fills slowly costs more than the longer rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeGuard

from forerun.control.base import Controller, SeesPrompts, WaitingPrompts
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import SequenceState
from forerun.types import TreeBatch

if TYPE_CHECKING:
    from forerun.engine.engine import Engine

LEAST = 16  # rows: a CPU does as many in nearly the time of one
START_CPU, START_GPU = 32, 256  # rows, before any round with prompts was timed; on a GPU the least, too
MANY_CPU = (4, 1 / 8), (8, 1 / 2)  # that wait: so many, and that share of those that run
MANY_GPU = (
    (2, 1 / 12),
    (6, 1 / 6),
)  # trees fill its passes, so that rows of prompts cost the same in larger ones
SLOWER = 1.0  # plain rounds that the prompts of a round may add
PACE = 0.2  # weight of the last round in the mean
_NONE_WAIT = WaitingPrompts()


class PromptRows:
    """The largest chunk whose round stays within its time; `fixed` = always so many rows."""

    def __init__(self, device: str, most: int, fixed: int | None = None) -> None:
        self._most, self._fixed = most, fixed
        self._rows = min(most, START_CPU if device == "cpu" else START_GPU)
        self._least = min(self._rows, LEAST if device == "cpu" else START_GPU)
        self._many = MANY_CPU if device == "cpu" else MANY_GPU
        self._plain = 0.0  # seconds of a round without prompts, a running mean
        self.told = _NONE_WAIT  # what the controller knows of those that wait

    def rows(self, running: int = 1, waiting: int = 0) -> int:
        """Of the coming round; `waiting` requests could start at once if their prompts were read."""
        if not waiting:
            return self._fixed or self._rows
        more = [waiting >= max(count, share * running) for count, share in self._many]
        return self._fixed or min(self._most, self._rows << sum(more))

    def observe(self, seconds: float, rows: int) -> None:
        """A round with so many rows of prompts took so long. One pause of the machine changes little."""
        if not rows:
            known = self._plain or seconds
            self._plain = known + PACE * (min(seconds, 2.0 * known) - known)
        elif self._plain and 2 * rows >= self._rows:  # a short rest of a prompt says little
            added = max(seconds - self._plain, 1e-9)
            scale = min(max(SLOWER * self._plain / added, 0.5), 2.0)
            self._rows = _rounded(min(self._most, max(self._least, rows * scale)))


def _rounded(rows: float) -> int:
    """Down to a multiple of 16, or of 64 from 128 on: passes of few different sizes."""
    step = 64 if rows >= 128 else 16
    return int(rows) // step * step


def prompt_share(scheduler: Scheduler, prompt_rows: PromptRows, controller: Controller, running: int) -> int:
    """Rows of prompts in the coming round. The controller hears what waits for them."""
    rows, told = 0, _NONE_WAIT
    if scheduler.waiting or scheduler.reading:
        requests = scheduler.could_start
        rows = prompt_rows.rows(running, requests)
        told = WaitingPrompts(requests, scheduler.unread_rows(), rows, scheduler.target.pass_rows)
    if told is not prompt_rows.told:  # else nothing waits, as before
        prompt_rows.told = told
        if _sees_prompts(controller):
            controller.note_waiting(told)
    return rows


def _sees_prompts(controller: Controller) -> TypeGuard[SeesPrompts]:
    return _kind_sees_prompts(type(controller))


@cache
def _kind_sees_prompts(kind: type) -> bool:
    """Asked once: to compare a class with a protocol took a quarter of the Python of a plain round."""
    return issubclass(kind, SeesPrompts)


def note_prompts(engine: Engine, seqs: Sequence[SequenceState], chains: TreeBatch, started: float) -> int:
    """Chunks of these prompts were read since then; returns the rows that were computed, those of sources included."""
    found, target, stats = 0, engine.target, engine.stats
    seconds = stats.now() - started
    for seq in seqs:
        if not seq.prompt_seconds:
            reused = target.reused_tokens(seq)
            found += reused - len(seq.source)  # the encoder computed these
            seq.note_reuse(reused)
            stats.count_prompt(len(seq.source) + len(seq.tokens), reused)
        seq.note_prompt(seconds)
    return chains.nodes - found
