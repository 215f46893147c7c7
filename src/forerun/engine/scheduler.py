"""Scheduler: which sequences wait, are read and run, and who is read next.

Every change of these lists can be repeated where it was interrupted: the engine then calls it again, or puts the
sequences of the round back into the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import TypeGuard

from forerun.engine.sequence import SequenceState
from forerun.models.base import StartsWithPrompts, Target

EARLY = 8  # places of a batch to one prompt that is read before a place is free: it then starts at once


class Scheduler:
    """First come, first served: what fits the batch and the KV cache."""

    def __init__(self, target: Target, max_batch: int) -> None:
        self.target, self.max_batch = target, max_batch
        self.waiting: deque[SequenceState] = deque()
        self.reading: list[
            SequenceState
        ] = []  # whose prompts are partly cached, or wholly and no place is free
        self.running: list[SequenceState] = []
        # a GPU reads a prompt beside the others nearly for nothing; on a CPU those that write would wait for it
        self.reads_early = target.device.type == "cuda"
        self.limit: int | None = None  # sequences at once, since a round failed; None = max_batch

    @property
    def has_prompts(self) -> bool:
        return bool(self.waiting or self.reading)

    @property
    def has_places(self) -> bool:
        """Could one more be read and run at once?"""
        return len(self.running) + len(self.reading) + len(self.waiting) < self.max_batch

    @property
    def could_start(self) -> int:
        """Requests that wait, or are being read, and for which there are places."""
        return min(self.max_batch - len(self.running), len(self.waiting) + len(self.reading))

    def unread_rows(self) -> int:
        """Tokens of the prompts of these that are not cached."""
        rows = sum([len(seq.tokens) - 1 - self.target.cached_tokens(seq) for seq in self.reading])
        some = islice(self.waiting, max(0, self.could_start - len(self.reading)))
        return rows + sum([len(seq.source) + len(seq.tokens) - 1 for seq in some])

    def find(self, seq_id: int) -> SequenceState | None:
        every = (*self.running, *self.reading, *self.waiting)
        return next((seq for seq in every if seq.id == seq_id), None)

    def next_readers(self, rows: int) -> list[SequenceState]:
        """Whose prompts are read next: those half read, then of the queue what fits rows, batch and slots."""
        old, new = [seq for seq in self.reading if not self._is_read(seq)], list[SequenceState]()
        most = self.limit or self.max_batch + (self.max_batch // EARLY if self.reads_early else 0)
        most -= len(self.running) + len(self.reading)
        rows -= sum(len(seq.tokens) - 1 - self.target.cached_tokens(seq) for seq in old)
        for seq in islice(self.waiting, max(0, most)):
            lengths = [len(each.tokens) for each in (*new, seq)]
            if rows <= 0 or not self.target.has_room(*lengths):
                break
            new.append(seq)
            rows -= len(seq.source) + len(seq.tokens) - 1
        return [*old, *new]

    def begin(self, readers: Sequence[SequenceState]) -> None:
        """Those of `next_readers` that waited are read from now on."""
        if not readers:
            return
        known = {seq.id for seq in self.reading}
        new = [seq for seq in readers if seq.id not in known]
        for _ in new:
            self.waiting.popleft()
        self.reading = [*self.reading, *new]

    def start_those_read(self) -> None:
        """Sequences whose prompts are cached run from now on, as far as there are places."""
        if self.reading:
            self.start([seq for seq in self.reading if self._is_read(seq)][: self._places])

    @property
    def _places(self) -> int:
        return max(0, (self.limit or self.max_batch) - len(self.running))

    def start(self, seqs: Sequence[SequenceState]) -> None:
        """These run from now on."""
        if seqs:
            self.running = [*self.running, *(seq for seq in seqs if seq not in self.running)]
            self.reading = [seq for seq in self.reading if seq not in seqs]

    def starters(self, readers: Sequence[SequenceState], nodes: int, rows: int) -> list[SequenceState]:
        """Readers who can start with the pass that reads the rest of their prompts, where so many nodes are scored."""
        target = self.target
        if not readers or not _starts_with_prompts(target):
            return []
        unread = [len(seq.tokens) - 1 - self.target.cached_tokens(seq) for seq in readers]
        rows, found = target.prompt_rows(nodes, rows, sum(unread)), list[SequenceState]()
        for seq, count in zip(readers[: self._places], unread, strict=False):
            rows -= count
            if rows < 0:
                break
            found.append(seq)
        return found

    def _is_read(self, seq: SequenceState) -> bool:
        return self.target.cached_tokens(seq) == len(seq.tokens) - 1

    def drop_finished(self) -> None:
        self.running = [seq for seq in self.running if not seq.finished]
        self.reading = [seq for seq in self.reading if not seq.finished]
        self.waiting = deque(seq for seq in self.waiting if not seq.finished)
        if self.limit is not None:  # a sequence has ended: try one more at once
            self.limit = self.limit + 1 if self.limit < self.max_batch else None

    def queue_again(self, seqs: Sequence[SequenceState]) -> None:
        """Back to the front of the queue; those that failed most come first."""
        hit = {seq.id for seq in seqs}
        again = sorted(seqs, key=lambda seq: -seq.failures)
        self.running = [seq for seq in self.running if seq.id not in hit]
        self.reading = [seq for seq in self.reading if seq.id not in hit]
        self.waiting = deque([*again, *(seq for seq in self.waiting if seq.id not in hit)])


def _starts_with_prompts(target: Target) -> TypeGuard[StartsWithPrompts]:
    return _kind_starts_with_prompts(type(target))


@cache
def _kind_starts_with_prompts(kind: type) -> bool:
    """Asked once: to compare a class with a protocol takes long."""
    return issubclass(kind, StartsWithPrompts)
