"""Scheduler: admission, prefill and preemption. Which sequences wait, are prefilled and run, and what comes next.

Every change of the scheduler's lists can be repeated if it was interrupted: the engine calls it again, or puts the
sequences of the round back into the queue.

`PrefillRows` sets how many rows of prompts share a pass with the trees of running sequences. A round with prompts may
take about twice as long as one without: a running text is hardly delayed, and weights that are read for the trees
serve the prompts too. The cost of rows is learnt from the rounds themselves. Where many requests wait for free places,
rounds take two or four times as many rows (`PrefillPace.more`): a batch that fills slowly costs more than the longer
rounds.

Requests wait in the order of their priority, then of their arrival. So that none waits for ever, every `TURN`-th
admission that passes over an older request goes to the oldest one instead. That request has aged: from then on no
priority is above its own.

Prompts that do not all fit a pass are read by urgency, then those of which much less is left first, so that a short
one waits for a pass of a long document and not for all of it. Every `READ_TURN`-th such pass the document comes first.

`find_room` preempts: where the KV cache is full, the least urgent and then the youngest sequences give their slots to
the others. A preempted sequence keeps its tokens and its events and continues with the same text: the engine prefills
it again like a prompt, of which the prefix cache may still have the start.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import TypeGuard

from forerun.control.base import WaitingPrompts
from forerun.core.errors import InvalidInput
from forerun.core.types import Budget
from forerun.engine.sequence import TURN, Advance, SequenceState
from forerun.models.base import PrefillPace, StartsWithPrompts, Target

log = logging.getLogger(__name__)

EARLY = 8  # places of a batch per prompt that is prefilled before a place is free: it then starts at once
READ_TURN = 4  # passes after which the prompt that was begun first is read first
PARTS = 4  # of the largest pass, while others overtake a prompt
SLOWER = 1.0  # plain rounds that the prompts of a round may add
PACE = 0.2  # weight of the last round in the mean
NO_ROOM = "does not fit the KV cache; raise kv_slots or kv_memory, or lower max_tokens"
NONE_WAIT = WaitingPrompts()


class Scheduler:
    """By priority, then first come, first served: what fits the batch and the KV cache."""

    def __init__(self, target: Target, max_batch: int) -> None:
        self.target, self.max_batch = target, max_batch
        self.waiting: deque[SequenceState] = deque()  # sorted by `_rank`
        self.passes = 0  # admissions in a row that passed over an older request
        self.aged = 0  # requests that were admitted because they had waited longest
        # prompts that are partly cached, or wholly and no place is free
        self.reading: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self._overtaken = -1, 0  # the prompt begun first, if another was read before it, and passes since its turn
        self.reads_early = target.can.prefill.early
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
        rows = sum([self._unread(seq) for seq in self.reading])
        some = islice(self.waiting, max(0, self.could_start - len(self.reading)))
        return rows + sum([len(seq.source) + len(seq.tokens) - 1 for seq in some])

    def waiting_prompts(self, rows: int) -> WaitingPrompts:
        """What the controller is told of requests that wait while the coming pass prefills up to `rows` rows."""
        return WaitingPrompts(self.could_start, self.unread_rows(), rows, self.target.pass_rows)

    def enqueue(self, seq: SequenceState) -> None:
        """Put a sequence into the queue; a repeated call, after an interrupt, changes nothing."""
        if seq in self.waiting:
            return
        place, own = len(self.waiting), _rank(seq)
        while place and _rank(self.waiting[place - 1]) > own:
            place -= 1
        self.waiting.insert(place, seq)

    def in_turn(self) -> Iterator[SequenceState]:
        """The waiting requests in the order of admission: every `TURN`-th that would be passed over goes first."""
        if not self.waiting or self.waiting[0].rank == self.waiting[-1].rank:  # the usual case
            yield from self.waiting
            return
        left, old, passes = dict.fromkeys(self.waiting), deque(sorted(self.waiting, key=_arrival)), self.passes
        while left:
            while old[0] not in left:
                old.popleft()
            seq = next(iter(left)) if passes + 1 < TURN else old[0]
            passes = 0 if seq is old[0] else passes + 1
            del left[seq]
            yield seq

    @property
    def every(self) -> list[SequenceState]:
        return [*self.running, *self.reading, *self.waiting]

    def find(self, seq_id: int) -> SequenceState | None:
        return next((seq for seq in self.every if seq.id == seq_id), None)

    def next_readers(self, rows: int) -> list[SequenceState]:
        """Whose prompts are read next: those half read, then of the queue what fits rows, batch and slots.

        One of the queue need not wait for a prompt of which much more is left.
        """
        old, new = self._half_read(), list[SequenceState]()
        most = self.limit or self.max_batch + (self.max_batch // EARLY if self.reads_early else 0)
        most -= len(self.running) + len(self.reading)
        left = [self._unread(seq) for seq in old]
        for seq in islice((seq for seq in self.in_turn() if not seq.scores_prompt), max(0, most)):
            size = len(seq.source) + len(seq.tokens) - 1
            if sum([rest for rest in left if _scale(rest) <= _scale(size)]) >= rows:
                continue
            if not self.target.has_room(*[len(each.tokens) for each in (*new, seq)]):
                break
            new.append(seq)
            left.append(size)
        found = [*old, *new]
        if len(found) > 1 and sum(left) > rows and self._overtaken != (old[0].id if old else -1, READ_TURN - 1):
            found.sort(key=lambda seq: (*_rank(seq)[:2], _scale(self._unread(seq))))
        return found

    def _half_read(self) -> list[SequenceState]:
        return [seq for seq in self.reading if not self._is_read(seq) and not seq.scores_prompt]

    def _unread(self, seq: SequenceState) -> int:
        return len(seq.tokens) - 1 - self.target.cached_tokens(seq)

    def rows_alone(self) -> int:
        """Rows of a pass while nobody runs: fewer where others have overtaken the prompt, because more may come."""
        is_overtaken = any(seq.id == self._overtaken[0] for seq in self.reading)
        return max(1, self.target.pass_rows // (PARTS if is_overtaken else 1))

    def next_scored(self) -> SequenceState | None:
        """Whose prompt is read next for its log-probabilities: it is half read, or there are a place and slots."""
        for seq in self.reading:
            if seq.scores_prompt:
                return seq
        new = next((seq for seq in self.in_turn() if seq.scores_prompt), None)
        has_place = len(self.running) + len(self.reading) < (self.limit or self.max_batch)
        return new if new is not None and has_place and self.target.has_room(len(new.tokens)) else None

    def begin(self, readers: Sequence[SequenceState]) -> None:
        """Those of `next_readers` that waited are read from now on."""
        if not readers:
            return
        if old := self._half_read():
            first, passes = self._overtaken if self._overtaken[0] == old[0].id else (-1, 0)
            waits = readers[0] is not old[0]
            self._overtaken = (old[0].id, passes + 1) if waits else (first, 0)
        known = {seq.id for seq in self.reading}
        new = [seq for seq in readers if seq.id not in known]
        for seq in new:
            self._note_turn(seq)
            self.waiting.remove(seq)
        self.reading = [*self.reading, *new]

    def _note_turn(self, seq: SequenceState) -> None:
        """A waiting request is admitted: does it pass over an older one, or is it its turn, for it waited longest?"""
        first, last = self.waiting[0], self.waiting[-1]
        if first.rank == last.rank:
            self.passes = 0
        elif any(other.id < seq.id for other in self.waiting):
            self.passes += 1
        else:
            if seq is not first:
                seq.note_aged()
                self.aged += 1
            self.passes = 0

    def prefill_progress(self) -> tuple[int, int]:
        """Of the prompts being prefilled now: cached tokens, and tokens to cache in all. Any thread may ask."""
        reading = [*self.reading, *(seq for seq in self.running.copy() if not seq.rounds)]
        cached = sum(self.target.cached_tokens(seq) for seq in reading)
        return cached, sum(len(seq.tokens) - 1 for seq in reading)

    def start_those_read(self) -> None:
        """Sequences whose prompts are cached run from now on, as far as there are places."""
        if self.reading:
            self.start([seq for seq in self.reading if self._is_read(seq)][: self._places])

    @property
    def _places(self) -> int:
        return max(0, (self.limit or self.max_batch) - len(self.running))

    def start(self, seqs: Sequence[SequenceState]) -> None:
        if seqs:
            self.running = [*self.running, *(seq for seq in seqs if seq not in self.running)]
            self.reading = [seq for seq in self.reading if seq not in seqs]

    def starters(self, readers: Sequence[SequenceState], nodes: int, rows: int) -> list[SequenceState]:
        """Sequences in prefill that can start with the pass that completes their prompts and scores `nodes` nodes."""
        target = self.target
        if not readers or not _starts_with_prompts(target):
            return []
        unread = [self._unread(seq) for seq in readers]
        rows, found = target.prompt_rows(nodes, rows, sum(unread)), list[SequenceState]()
        for seq, count in zip(readers[: self._places], unread, strict=False):
            rows -= count
            if rows < 0:
                break
            found.append(seq)
        return found

    def _is_read(self, seq: SequenceState) -> bool:
        return self.target.cached_tokens(seq) == len(seq.tokens) - 1 and not seq.scores_prompt

    def drop_finished(self) -> None:
        self.running = [seq for seq in self.running if not seq.finished]
        self.reading = [seq for seq in self.reading if not seq.finished]
        self.waiting = deque(seq for seq in self.waiting if not seq.finished)
        if self.limit is not None:  # a sequence has ended: try one more at once
            self.limit = self.limit + 1 if self.limit < self.max_batch else None

    def queue_again(self, seqs: Sequence[SequenceState]) -> None:
        """Back into the queue; sequences that failed most come first."""
        hit = {seq.id for seq in seqs}
        self.running = [seq for seq in self.running if seq.id not in hit]
        self.reading = [seq for seq in self.reading if seq.id not in hit]
        others = [seq for seq in self.waiting if seq.id not in hit]
        self.waiting = deque(sorted([*seqs, *others], key=_rank))


def _rank(seq: SequenceState) -> tuple[int, float, int]:
    """Smaller = sooner."""
    return -seq.failures, seq.rank, seq.id


def _scale(rows: int) -> int:
    """Prompts of one scale, at most four times as long as each other, are read in the order in which they came."""
    return rows.bit_length() // 2


def _arrival(seq: SequenceState) -> int:
    return seq.id


def _starts_with_prompts(target: Target) -> TypeGuard[StartsWithPrompts]:
    return _kind_starts_with_prompts(type(target))


@cache
def _kind_starts_with_prompts(kind: type) -> bool:
    """Asked once: to compare a class with a protocol takes long."""
    return issubclass(kind, StartsWithPrompts)


class PrefillRows:
    """The largest chunk of prompts whose round stays within its time; `fixed` = always that many rows."""

    def __init__(self, pace: PrefillPace, most: int, fixed: int | None = None) -> None:
        self._most, self._fixed, self._more = most, fixed, pace.more
        self._rows = min(most, pace.start)
        self._least = min(self._rows, pace.least)
        self._plain = 0.0  # seconds of a round without prompts, a running mean

    def rows(self, running: int = 1, waiting: int = 0) -> int:
        """Of the coming round; `waiting` requests could start at once if their prompts were read."""
        if not waiting:
            return self._fixed or self._rows
        more = [waiting >= max(count, share * running) for count, share in self._more]
        return self._fixed or min(self._most, self._rows << sum(more))

    def observe(self, seconds: float, rows: int) -> None:
        """A round with `rows` rows of prompts took `seconds`. One pause of the machine changes little."""
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


def no_room_for(seq: SequenceState) -> Advance:
    """Ends a sequence that cannot be prefilled even if all others leave."""
    return seq.ended("error", InvalidInput(f"a request of {seq.max_length} tokens {NO_ROOM}"))


def find_room(
    target: Target,
    seqs: Sequence[SequenceState],
    budgets: Sequence[Budget],
    readers: Sequence[SequenceState],
    send_back: Callable[[SequenceState], None],
) -> tuple[list[SequenceState], list[Budget]]:
    """Room for a round of as many sequences as fit, the most urgent and then the oldest first.

    Of equally urgent ones, prompts under way are given up first. The last sequence does without a draft if it must.
    """
    left, others = dict(zip(seqs, budgets, strict=True)), list(readers)
    while not target.make_room(list(left), [1 + budget.nodes for budget in left.values()]):
        if others or len(left) > 1:
            among = [*others, *left] if len(left) > 1 else others
            victim = max(among, key=lambda seq: (seq.rank, seq not in left, seq.id))
            others = [seq for seq in others if seq is not victim]
            left.pop(victim, None)
            send_back(victim)
            log.info("the KV cache is full: sequence %d is preempted", victim.id)
        elif any(budget.nodes for budget in left.values()):
            left = {seq: replace(budget, nodes=0, depth=0) for seq, budget in left.items()}
        else:
            raise InvalidInput(f"a sequence {NO_ROOM}")
    return list(left), list(left.values())
