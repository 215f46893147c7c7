"""Scheduler: admission, prefill and preemption. Which sequences wait, are prefilled and run, and what comes next.

Every change of the scheduler's lists can be repeated if it was interrupted: the engine calls it again, or puts the
sequences of the round back into the queue.

`PrefillRows` sets how many rows of prompts share a pass with the trees of running sequences. A round with prompts may
take about twice as long as one without: a running text is hardly delayed, and weights that are read for the trees
serve the prompts too. The cost of rows is learnt from the rounds themselves: a row deep in a long prompt takes several
times as long as one at its start, so fewer of them are read at a time. Where many requests would wait behind the pass,
it takes two or four times as many rows (`PrefillPace.more`): a batch that fills slowly costs more than longer rounds.

Requests wait in the order of their priority, then of their arrival. So that none waits for ever, every `TURN`-th
admission that passes over an older request goes to the oldest one instead. That request has aged: from then on no
priority is above its own.

Prompts that do not all fit a pass are read by urgency, then those of which much less is left first, so that a short
one waits for a pass of a long document and not for all of it; where it starts with its pass, the document waits for
that one. Where others leave the document less than a quarter of the rows, it comes first in every `READ_TURN`-th pass.
A prompt that is alone is read in whole passes; once one was overtaken, such passes take no longer than a round for
`COMPANY` passes, because more may come.

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
from itertools import accumulate, islice, takewhile
from typing import NamedTuple, TypeGuard

from forerun.control.base import WaitingPrompts
from forerun.core.errors import InvalidInput
from forerun.core.types import Budget
from forerun.engine.sequence import TURN, Advance, SequenceState
from forerun.models.base import PrefillPace, StartsWithPrompts, Target

log = logging.getLogger(__name__)

EARLY = 8  # places of a batch per prompt that is prefilled before a place is free: it then starts at once
LONG_BEFORE = 16  # tokens before a row that count as one that is left to read
READ_TURN = 4  # passes after which the prompt that was begun first is read first
COMPANY = 128  # passes over prompts alone that are no longer than rounds, once a prompt was overtaken
SLOWER = 1.0  # plain rounds that the prompts of a round may add, at their start
PACE = 0.2  # weight of the last round in the mean
FAR = 8192  # tokens before a row: the unit in which its further cost is learnt
DEEPER = 2.0  # times the seconds that as many rows take at the start of a prompt
FEWEST = 16  # rows, however long a prompt; or a quarter of those before any pass was timed
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
        self._overtaken = -1, 0  # the prompt begun first, if others took its rows, and passes since its turn
        self.company = 0  # passes for which others are expected beside a prompt that is alone
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

    def unread_rows(self) -> list[int]:
        """Tokens of the prompts of these that are not cached."""
        some = islice(self.waiting, max(0, self.could_start - len(self.reading)))
        return [*map(self._unread, self.reading), *[len(seq.source) + len(seq.tokens) - 1 for seq in some]]

    def left_behind(self, rows: int) -> int:
        """How many of these would still wait behind a pass with `rows` rows of prompts."""
        return sum([behind > rows for behind in accumulate(sorted(self.unread_rows()))])

    def waiting_prompts(self, rows: int) -> WaitingPrompts:
        """What the controller is told of requests that wait while the coming pass prefills up to `rows` rows."""
        return WaitingPrompts(self.could_start, sum(self.unread_rows()), rows, self.target.pass_rows)

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
        left, rests = [self._unread(seq) for seq in old], [self._rest(seq) for seq in old]
        for seq in islice((seq for seq in self.in_turn() if not seq.scores_prompt), max(0, most)):
            size = len(seq.source) + len(seq.tokens) - 1
            if sum([some for some, rest in zip(left, rests, strict=True) if _scale(rest) <= _scale(size)]) >= rows:
                continue
            if not self.target.has_room(*[len(each.tokens) for each in (*new, seq)]):
                break
            new.append(seq)
            left.append(size)
            rests.append(size)
        found = [*old, *new]
        if len(found) > 1 and sum(rests) > rows and self._overtaken != (old[0].id if old else -1, READ_TURN - 1):
            found.sort(key=lambda seq: (*_rank(seq)[:2], _scale(self._rest(seq))))
        return found

    def _half_read(self) -> list[SequenceState]:
        return [seq for seq in self.reading if not self._is_read(seq) and not seq.scores_prompt]

    def _unread(self, seq: SequenceState) -> int:
        return len(seq.tokens) - 1 - self.target.cached_tokens(seq)

    def _rest(self, seq: SequenceState) -> int:
        """What is left of a prompt; more than that at the end of a long one, where a row takes longer."""
        return self._unread(seq) + self.target.cached_tokens(seq) // LONG_BEFORE

    def is_alone(self, readers: Sequence[SequenceState]) -> bool:
        """Nobody runs: has nobody overtaken a prompt of late, and do these readers not?"""
        old = self._half_read()
        return not self.company and (not old or not readers or readers[0] is old[0])

    def next_chunk(self, pace: PrefillRows, rows: int) -> tuple[list[SequenceState], int]:
        """Whose prompts the coming pass reads and how many rows, where it may take `rows` at the start of a prompt."""
        readers = self.next_readers(rows) if rows else []
        count, rows = pace.within([(self._unread(seq), self.target.cached_tokens(seq)) for seq in readers], rows)
        return readers[:count], rows

    def known_chunk(self, pace: PrefillRows, readers: Sequence[SequenceState]) -> Chunk:
        """What was planned last, once it is launched and the prefix cache was asked."""
        chunk, pace.planned = pace.planned, NOTHING_READ
        reused = any([self.target.reused_tokens(seq) for seq in readers])  # noqa: C419 - quicker
        return chunk._replace(new=0.0) if reused else chunk

    def next_scored(self) -> SequenceState | None:
        """Whose prompt is read next for its log-probabilities: it is half read, or there are a place and slots."""
        for seq in self.reading:
            if seq.scores_prompt:
                return seq
        new = next((seq for seq in self.in_turn() if seq.scores_prompt), None)
        has_place = len(self.running) + len(self.reading) < (self.limit or self.max_batch)
        return new if new is not None and has_place and self.target.has_room(len(new.tokens)) else None

    def begin(self, readers: Sequence[SequenceState], rows: int = 0) -> None:
        """Those of `next_readers` that waited are read from now on, `rows` rows of all of them."""
        if not readers:
            return
        self.company = max(0, self.company - (not self.running))
        if old := self._half_read():
            ahead = [self._unread(seq) for seq in takewhile(lambda seq: seq is not old[0], readers)]
            passes = self._overtaken[1] if self._overtaken[0] == old[0].id else 0
            starved = 4 * sum(ahead) > 3 * rows and old[0] in readers  # else it waits for one pass at most
            self._overtaken = old[0].id, (passes + starved) * bool(ahead)
            self.company = COMPANY if ahead else self.company
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


class Chunk(NamedTuple):
    """What a pass reads of prompts."""

    rows: int
    before: float  # tokens before its rows, on average
    begun: float  # seconds that it adds for prompts of which a part was read
    new: float  # and for others, unless a part of these is found in the prefix cache

    def behind(self, rows: int, before: int, seconds: float) -> Chunk:
        """With rows of one more prompt."""
        count = self.rows + rows
        mean = (self.rows * self.before + rows * before) / max(1, count)
        return Chunk(count, mean, self.begun + seconds * (before > 0), self.new + seconds * (before == 0))

    @property
    def seconds(self) -> float:
        return self.begun + self.new


NOTHING_READ = Chunk(0, 0.0, 0.0, 0.0)


class PrefillRows:
    """The largest chunk of prompts whose round stays within its time; `fixed` = always that many rows."""

    def __init__(self, pace: PrefillPace, most: int, fixed: int | None = None) -> None:
        self._most, self._fixed, self._more = most, fixed, pace.more
        self._rows = min(most, pace.start)  # at the start of a prompt
        self._least = min(self._rows, pace.least)
        self.plain = 0.0  # seconds of a round without prompts, a running mean
        # seconds that a row adds at the start of a prompt, and more behind every FAR tokens
        self._row, self._far = 0.0, 0.0
        self._fewest = max(FEWEST, pace.start // 4)
        self.planned, self._waits = NOTHING_READ, False  # has a long prompt waited for this chunk?

    def rows(self, running: int = 1, waiting: int = 0) -> int:
        """Of the coming round, at the start of prompts; `waiting` requests will wait behind it."""
        if not waiting:
            return self._fixed or self._rows
        more = [waiting >= max(count, share * running) for count, share in self._more]
        return self._fixed or min(self._most, self._rows << sum(more))

    def within(self, parts: Sequence[tuple[int, int]], rows: int) -> tuple[int, int]:
        """How many of these prompts a pass reads, and how many rows: at most `rows`, fewer deep in a prompt.

        Of each prompt, tokens that are not read yet and tokens before these. Where shorter ones end in the pass, a long
        one waits for the next.
        """
        found, longest, left, chunk = 0, 0, DEEPER * rows * self._row, NOTHING_READ
        waited, self._waits = self._waits, False
        for count, (unread, before) in enumerate(parts):
            each = self._row + self._far * before / FAR
            some = min(unread, rows - found, int(left / each) if each and not self._fixed else rows)
            ends = some == unread
            if count and not ends and _scale(longest) < _scale(unread) and not waited and not self._fixed:
                self._waits, self.planned = True, chunk
                return count, max(1, found)
            some = min(unread, max(some, min(rows, self._fewest) - found))
            found, left, longest = found + some, left - some * each, max(longest, unread)
            chunk = chunk.behind(some, before, some * each)
            if not ends:
                break
        self.planned = chunk
        return len(parts), rows if not parts or ends else found

    def observe(self, seconds: float, rows: int, before: float = 0.0) -> None:
        """A round with `rows` rows of prompts, behind so many tokens, took `seconds`. One pause changes little."""
        if not rows:
            known = self.plain or seconds
            self.plain = known + PACE * (min(seconds, 2.0 * known) - known)
            return
        row, far = self._row or SLOWER * self.plain / self._rows, before / FAR
        each = row + self._far * far
        if not self.plain or 2 * rows * each < self._rows * row:  # a short rest of a prompt says little
            return
        error = (min(max((seconds - self.plain) / rows, each / 2), 2 * each) - each) / (1.0 + far * far)
        self._row = min(max(row + error, 1e-9), 2.0 * SLOWER * self.plain / self._least)
        self._far = max(self._far + far * error, 0.0)
        self._rows = _rounded(min(self._most, max(self._least, SLOWER * self.plain / self._row)))


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
