"""Queues: what an engine shows of its scheduler."""

from __future__ import annotations

from collections import deque

from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import SequenceState


class Queues:
    """The sequences of an engine, by what happens to them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    @property
    def max_batch(self) -> int:
        return self.scheduler.max_batch

    @max_batch.setter
    def max_batch(self, most: int) -> None:
        self.scheduler.max_batch = most

    @property
    def waiting(self) -> deque[SequenceState]:
        return self.scheduler.waiting

    @property
    def reading(self) -> list[SequenceState]:
        """Those whose prompts are partly cached."""
        return self.scheduler.reading

    @property
    def running(self) -> list[SequenceState]:
        return self.scheduler.running

    def find(self, seq_id: int) -> SequenceState | None:
        """The sequence behind an id while it is queued, read or running."""
        return self.scheduler.find(seq_id)

    def enqueue(self, seq: SequenceState) -> None:
        """Put a sequence into the queue; a repeated call, after an interrupt, changes nothing."""
        if not self.waiting or self.waiting[-1] is not seq:
            self.waiting.append(seq)
