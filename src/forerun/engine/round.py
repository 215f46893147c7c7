"""Rounds that are under way: the timeline of an engine, and when the next round must be launched.

`Timeline` has the rounds that were launched and not read yet, and the change of state under way:

    OPEN       members are held; a fault undoes them
    LAUNCHED   the pass runs; a later round may overlap it (`Timeline.depth`)
    DECIDED    the verdict was read; a fault undoes the round, and drops the round behind it
    WRITTEN    tokens are known (`Change.advances`); a fault completes the round

`LaunchDeadline` says how long an OPEN round may wait for further requests.

`outcome_of` computes the outcome of a round before anything is written: pure, so that a fault in it changes nothing.

`CaptureTurns` says when graphs that were left for later are captured. While the engine is idle: one after another, and
requests that come wait for one at most. Before a batch that somebody waits for as a whole, if it takes long: all that
the batch needs. Beside texts under way: one now and then. Where no thread runs an idle engine, all that one sequence
needs is captured before its first round. No capture lies in a round, so none is booked as drafting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.core.errors import CannotSample
from forerun.core.request import ALWAYS
from forerun.core.tree import committed_tokens
from forerun.core.types import (
    CUT,
    Branch,
    Budget,
    Event,
    FinishReason,
    Laws,
    Round,
    RoundPlan,
    Scores,
    TokenLogprob,
    TreeBatch,
    TreeForm,
    Verdict,
    traits_of,
)
from forerun.engine.scheduler import NOTHING_READ, Chunk, Scheduler
from forerun.engine.sequence import Advance, Detokenizer, SequenceState
from forerun.engine.stats import RoundClock, RoundCounts, captures_awaited
from forerun.models.base import CapturesLater, Target

log = logging.getLogger(__name__)
# sequences of a round, and their places in the round before; -1 = none
Seats = list[tuple[SequenceState, int]]


class Change:
    """A change of state under way: undone until its advances are known, completed from then on."""

    __slots__ = ("advances", "seqs")

    def __init__(self, seqs: Sequence[SequenceState], advances: list[Advance] | None = None) -> None:
        self.seqs, self.advances = seqs, advances  # some sequences may be named twice

    def members(self) -> list[SequenceState]:
        """Its sequences, each of them once."""
        return [*{seq.id: seq for seq in self.seqs}.values()]


class LaunchedRound(NamedTuple):
    """A round whose pass was launched: its result can be read."""

    change: Change  # what is completed or undone when it is read
    seqs: list[SequenceState]
    readers: list[SequenceState]  # whose prompts are prefilled by the same pass
    trees: TreeBatch
    scores: Scores
    clock: RoundClock
    plan: RoundPlan
    chunk: Chunk = NOTHING_READ  # of the readers' prompts

    def after(self, clock: RoundClock) -> LaunchedRound | None:
        """This round once the round before it has been closed; None = all of its sequences ended with that."""
        if all(seq.finished is not None for seq in self.seqs):
            return None
        members = [seq for seq in self.change.seqs if seq.finished is None]
        return self._replace(change=Change(members), clock=clock)

    def without_ended(self, verdict: Verdict) -> tuple[list[SequenceState], TreeBatch, Scores, Verdict]:
        """Its sequences, trees, scores and verdict, less the sequences that ended before it was read."""
        for seq in self.seqs:
            if seq.finished is not None:
                break
        else:
            return self.seqs, self.trees, self.scores, verdict
        kept = [b for b, seq in enumerate(self.seqs) if seq.finished is None]
        seqs, trees = [self.seqs[b] for b in kept], self.trees.kept(kept)
        return seqs, trees, self._scores_of(kept), verdict.kept(kept)

    @property
    def loses_logprobs(self) -> bool:
        """Would a pass behind it overwrite what its log-probabilities are yet to be computed from?"""
        return self.scores.logprobs is None and any([one.wants_logprobs for one in traits_of(self.seqs)])  # noqa: C419

    def starters(self, seqs: Sequence[SequenceState]) -> int:
        """How many of these start with this round: its pass completes their prompts. They are the last ones."""
        read = {seq.id for seq in self.readers}
        return sum([seq.id in read for seq in seqs]) if read else 0

    def _scores_of(self, kept: Sequence[int]) -> Scores:
        """Scores of some trees, without logits; those of a form stay whole (`DeviceOutcome.trees`)."""
        if self.trees.form is not None:
            return self.scores
        hidden = {layer: rows_of(rows, kept) for layer, rows in self.scores.hidden.items()}
        rows = self.scores.kept
        some = None if rows is None else lambda: [rows()[b] for b in kept]
        return replace(self.scores, logits=None, hidden=hidden, kept=some)


class Timeline:
    """The rounds of an engine that are under way, oldest first; every change of it can be repeated if interrupted.

    `depth` says how far rounds overlap: 0 = each is read and written before the next is launched; 1 = the next is
    launched before the events of the last are returned; 2 = the next is launched before the last is even read.
    """

    def __init__(self, scheduler: Scheduler, forget: Callable[[SequenceState], None], depth: int = 0) -> None:
        """`forget` frees everything that target, drafters and controller hold for a sequence."""
        self.scheduler, self._forget, self.depth = scheduler, forget, depth
        self.first: LaunchedRound | None = None  # launched, not read
        self.second: LaunchedRound | None = None  # launched behind it
        self.change: Change | None = None
        self.events: list[Event] = []  # of rounds that were completed; not returned yet

    @property
    def is_idle(self) -> bool:
        return self.first is None and self.second is None and self.change is None

    def open(self, seqs: Sequence[SequenceState]) -> Change:
        """A change of these sequences begins; a fault undoes it."""
        self.change = Change(seqs)
        return self.change

    def launched(self, launched: LaunchedRound) -> None:
        """OPEN -> LAUNCHED; the change ends last, so that whatever interrupts a launch undoes it."""
        self.first = launched
        self.change = None

    def read(self, launched: LaunchedRound) -> Change:
        """LAUNCHED -> DECIDED: the oldest round is being read and written."""
        self.change, self.first = launched.change, None
        return launched.change

    def close(self, clock: RoundClock) -> LaunchedRound | None:
        """WRITTEN -> closed: the round behind it is the oldest now. Returns that one if all its sequences ended."""
        behind, self.second = self.second, None
        if behind is not None:
            self.first = behind.after(clock)
        return behind if behind is not None and self.first is None else None

    def end(self, advance: Advance) -> None:
        """End a sequence, wherever it is."""
        self.change = Change([advance.seq], [advance])
        self.repair()

    def send_back(self, seq: SequenceState) -> None:
        """Preempt a running sequence: it queues again with the tokens that it has."""
        self._undo([seq])
        self.change = Change(self.scheduler.running)

    def repair(self) -> None:
        """Complete or undo a change that was interrupted. May itself be interrupted and repeated."""
        change = self.change
        if change is None:
            return
        if change.advances is None:
            self._undo(change.members())
            return
        for advance in change.advances:
            advance.seq.take(advance)
        self.complete(change.advances)

    def complete(self, advances: Sequence[Advance]) -> None:
        """The tokens of a change were written: free the sequences that ended, and keep the events."""
        events, ended = self.events.copy(), False
        for advance in advances:
            if advance.finished is not None:
                self._forget(advance.seq)
                ended = True
            if advance.event is not None:
                events.append(advance.event)
        if ended:
            self.scheduler.drop_finished()
        self.events, self.change = events, None

    def interrupt(self) -> None:
        """A KeyboardInterrupt or the like: what was written stays, the rest is undone."""
        self.second = None
        self.repair()

    def fail(self, error: Exception) -> None:
        """Undo the round and try again with half as many sequences; a sequence that fails twice, alone, ends."""
        change = self.change
        if change is None:
            raise error  # no round was under way: trying again would fail again
        self.second = None
        if change.advances is not None:
            log.warning("a round was completed, but an observer of it failed: %r", error)
            self.repair()
            return
        seqs = change.members()
        for seq in seqs:
            seq.note_failure()
        self.repair()
        self.scheduler.limit = max(1, len(seqs) // 2)
        if len(seqs) == 1 and seqs[0].failures > 1:
            self.end(seqs[0].ended("error", error))
        else:
            log.warning("a round of %d sequences failed and is repeated: %r", len(seqs), error)

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def _undo(self, seqs: Sequence[SequenceState]) -> None:
        """Free what these sequences hold and queue them again, in front: their prompts now include what they wrote."""
        for seq in seqs:
            self._forget(seq)
        self.scheduler.queue_again(seqs)
        self.change = self.first = self.second = None


SPARE = 1e-3  # seconds between the end of a launch and the end of the round before it, at least
LAUNCHES = 2.0  # times the mean time of a launch, kept for the next launch
SMOOTH = 0.1  # weight of the last launch in that mean
LONGER = 1.02  # growth per round of the shortest time seen, so that old minima fade
LATE = 2e-4  # seconds: a host that waits less than this for the device was late itself
SURE = 0.9  # of the seconds that prompts are expected to add to a round
QUIET = 16  # rounds without a change of sequences, after which a launch no longer waits


class LaunchDeadline:
    """How long the next round may wait for requests before it is launched behind the one under way.

    A round that overlaps an unread one could be launched as soon as that one starts. But a client that has its answer
    sends the next request a moment later, and a request that comes after the launch waits for a whole round more. The
    device needs the next round only when it has finished the one under way. When that is, earlier rounds of the same
    kind without prompts have shown, by the device's own clock: the shortest recent one counts, because a launch that
    is too early costs one request a round, and a launch that is too late costs every sequence. What prompts add is
    known from `PrefillRows`. Where no sequence has joined or left for some rounds and no prompt is read, or the host
    was late itself, nothing waits.
    """

    def __init__(self) -> None:
        self._shortest: dict[Hashable, float] = {}  # seconds of rounds on the device, by kind
        self._launching = 0.0  # seconds of a launch
        self._began = 0.0  # when the round under way did
        self._least: float | None = None  # seconds that it takes, at least
        self._reads = False  # does it surely read prompts?
        self._quiet = QUIET
        self._seqs: list[SequenceState] = []

    def note_launch(self, seconds: float) -> None:
        known = self._launching or seconds
        self._launching = known + SMOOTH * (seconds - known)

    def note_start(self, launched: LaunchedRound, now: float) -> None:
        """A round was launched behind nothing: it begins now, or later."""
        self._begin(launched, now)

    def note_prompts(self, seconds: float, now: float) -> None:
        """A pass over prompts alone begins now, and takes about `seconds`; 0 = unknown."""
        self._began, self._reads, self._least = now, True, SURE * seconds if seconds else None

    def note_read(self, done: LaunchedRound, behind: LaunchedRound | None, waited: float, now: float) -> None:
        """A round was read after the host waited `waited` seconds; the round launched behind it begins."""
        kind, scores = _kind_of(done), done.scores
        taken = None if scores.seconds is None else scores.seconds()
        if taken is not None and scores.read is None:
            taken += done.trees.draft_seconds
            self._shortest[kind] = min(taken, LONGER * self._shortest.get(kind, taken))
        self._least = None
        if behind is not None:
            self._begin(behind, now)
            if waited <= LATE:  # the start of the next round is not known
                self._least = None

    def _begin(self, launched: LaunchedRound, now: float) -> None:
        self._quiet = self._quiet + 1 if launched.seqs == self._seqs else 0
        self._seqs, self._began = launched.seqs, now
        reading = launched.chunk.seconds
        self._reads, self._least = reading > 0.0, self._shortest.get(_kind_of(launched), 0.0 if reading else None)
        if self._least is not None:
            self._least += SURE * reading

    def left(self, now: float) -> float:
        """Seconds for which the next step may wait for requests; 0 or less = it should not."""
        if self._least is None or (self._quiet >= QUIET and not self._reads):
            return 0.0
        return self._began + self._least - SPARE - LAUNCHES * self._launching - now


def _kind_of(one: LaunchedRound) -> Hashable:
    """Rounds of one kind take equally long, but for the prompts that they prefill."""
    return one.trees.form or len(one.seqs) // 8


def rows_of(rows: Tensor, which: Sequence[int]) -> Tensor:
    """Some rows, ascending: as a few slices, since sending row numbers to a device would wait for it."""
    ends = [i for i in range(1, len(which)) if which[i] != which[i - 1] + 1]
    pieces = pairwise((0, *ends, len(which)))
    return torch.cat([rows[which[low] : which[high - 1] + 1] for low, high in pieces if low < high])


def seats_behind(last: LaunchedRound, running: Sequence[SequenceState]) -> Seats:
    """All running sequences but those that one more token ends."""
    if last.seqs == running:  # the usual case
        return [(seq, b) for b, seq in enumerate(running) if len(seq.tokens) + 1 < seq.max_length]
    places = {seq.id: tree for tree, seq in enumerate(last.seqs)}
    seats = [(seq, places.get(seq.id, -1)) for seq in running]
    return [(seq, tree) for seq, tree in seats if tree < 0 or len(seq.tokens) + 1 < seq.max_length]


def with_starters(trees: TreeBatch, form: TreeForm, roots: Sequence[int]) -> TreeBatch:
    """These trees, and one more behind them for each root, with the nodes of the first tree.

    The host sends no array, because that would wait for the device.
    """
    columns, nodes = (trees.tokens, trees.parents), form.nodes
    tokens, parents = (torch.cat((each, each[:nodes].repeat(len(roots)))) for each in columns)
    for place, root in enumerate(roots, start=len(trees)):
        tokens[place * nodes].fill_(root)
    follows = None if trees.follows is None else (*trees.follows, *[-1] * len(roots))
    starts, seconds = form.starts(len(trees) + len(roots)), trees.draft_seconds
    return TreeBatch(tokens, parents, starts, form=form, draft_seconds=seconds, follows=follows)


def cut_budgets(
    seqs: Sequence[SequenceState], planned: Sequence[Budget], reaches: Sequence[int] | None = None
) -> list[Budget]:
    """The controller's budgets, or a request's own: no sequence drafts more than it can still take.

    `reaches`: the target's (`Target.reaches`).
    """
    budgets = []
    for b, (seq, plan) in enumerate(zip(seqs, planned, strict=True)):
        own = seq.request.budget
        allowed = plan if own is None else _always(own)
        if not allowed.nodes:
            budgets.append(allowed)
            continue
        depth = min(allowed.depth, seq.room - 1)
        if reaches is not None:
            depth = min(depth, reaches[b] - len(seq.tokens))
        nodes = allowed.nodes if depth > 0 else 0
        fits = (nodes, depth) == (allowed.nodes, allowed.depth)  # the usual case
        budgets.append(allowed if fits else replace(allowed, nodes=nodes, depth=depth))
    return budgets


@lru_cache(maxsize=64)
def _always(budget: Budget) -> Budget:
    """A request's own budget holds for all of its rounds."""
    return replace(budget, repeats=ALWAYS)


def plan_of(budgets: Sequence[Budget], trees: TreeBatch) -> RoundPlan:
    """The plan of a round with these budgets: for how many further rounds they hold, and who drafts."""
    first, repeats = budgets[0], budgets[0].repeats
    drafts = first.nodes > 0
    if len(budgets) > 1 and not all([budget is first for budget in budgets]):  # noqa: C419 - the usual cases
        repeats = min([budget.repeats for budget in budgets])
        drafts = any([budget.nodes for budget in budgets])  # noqa: C419
    return RoundPlan("trees" if trees.form is not None else "lookup" if drafts else "plain", repeats)


# Verifiers.logprobs
LogprobsOf = Callable[[Laws, SequenceState, int, Sequence[int], Sequence[int]], tuple[TokenLogprob, ...]]


def outcome_of(
    seqs: Sequence[SequenceState],
    trees: TreeBatch,
    laws: Laws,
    verdict: Verdict,
    logprobs_of: LogprobsOf,
    clock: dict[str, float],
    seconds: float,
    prompt_rows: int = 0,
    followed: bool = False,
    ahead: int = 0,
    started: int = 0,
) -> tuple[list[Advance], Round]:
    """What each sequence gets, and what controllers observe: `clock` has the seconds of the round by part.

    The last `started` sequences start with this round: their trees were not drafted.
    """
    paths, bonus = verdict.to_host()
    if trees.is_plain() and not laws.impossible:
        nothing = (0,) * len(seqs)
        done = Round(tuple(seqs), nothing, nothing, nothing, clock, prompt_rows, followed, 0, ahead, started)
        return _plain_advances(seqs, laws, bonus, logprobs_of, seconds), done
    (tokens, parents), starts, drafted = trees.to_host(), trees.starts, trees.drafted()
    advances, accepted = list[Advance](), list[int]()
    counted: dict[tuple[int, int, int, int], RoundCounts] = {}  # in a large batch many are alike
    drafted_for = len(seqs) - started
    for b in range(drafted_for, len(seqs)):  # what was not accepted there was not drafted
        drafted[b] = len(paths[b]), len(paths[b])
    columns = zip(seqs, committed_tokens(trees, verdict), paths, starts, drafted, strict=False)
    for b, (seq, fresh, path, first, (nodes, depth)) in enumerate(columns):
        error = None
        if laws.impossible:
            fresh, error = _up_to_impossible(fresh, _nodes(first, path), laws.impossible)
        taken, detokenizer, text, finished = _extended(seq, fresh)
        if error is not None:
            finished, error = (finished, None) if finished else ("error", error)  # it may have ended before
            text += detokenizer.take(final=True)
        if taken < len(fresh):
            fresh = fresh[:taken]
        kept = min(len(path), taken)
        accepted.append(kept)
        alike = taken, nodes, depth, kept
        if (counts := counted.get(alike)) is None:
            counts = counted[alike] = RoundCounts(*alike, seconds)
        logprobs: tuple[TokenLogprob, ...] = ()
        if seq.params.logprobs is not None:
            logprobs = logprobs_of(laws, seq, first, [0, *path][: len(fresh)], fresh) if fresh else ()
        event = Event(seq.id, tuple(fresh), kept, text, logprobs, finished, error)
        if seq.request.shows_rejected and nodes and b < drafted_for:
            own = slice(first, starts[b + 1])
            branches = rejected_branches(tokens[own], parents[own], path, kept)
            event = replace(event, rejected=branches)
        places = len(seq.rounds), counts, len(seq.events)
        advances.append(Advance(seq, len(seq.tokens), fresh, detokenizer, *places, event, finished, error))
    trees_of = tuple([one[0] for one in drafted]), tuple([one[1] for one in drafted]), tuple(accepted)
    rows = 0 if trees.form is None else trees.form.rows
    return advances, Round(tuple(seqs), *trees_of, clock, prompt_rows, followed, rows, ahead, started)


def _nodes(first: int, path: Sequence[int]) -> list[int]:
    """Root and path among the nodes of all trees."""
    return [first, *[first + node for node in path]]


def _plain_advances(
    seqs: Sequence[SequenceState], laws: Laws, bonus: Sequence[int], logprobs_of: LogprobsOf, seconds: float
) -> list[Advance]:
    """One token for each, in few steps: with many sequences, most rounds are plain."""
    counts, advances = RoundCounts(1, 0, 0, 0, seconds), list[Advance]()
    for b, (seq, token) in enumerate(zip(seqs, bonus, strict=True)):
        length, fresh, finished, usual = len(seq.tokens), [token], None, None
        if length + 1 < seq.max_length and token not in seq.stop_ids:
            usual = seq.detokenizer.behind(fresh)
        if usual is not None:
            detokenizer, text = usual
        else:
            _, detokenizer, text, finished = _extended(seq, fresh)
        logprobs = logprobs_of(laws, seq, b, (0,), fresh) if seq.params.logprobs is not None else ()
        event = Event(seq.id, (token,), 0, text, logprobs, finished)
        places = len(seq.rounds), counts, len(seq.events)
        advances.append(Advance(seq, length, fresh, detokenizer, *places, event, finished))
    return advances


def _extended(seq: SequenceState, fresh: list[int]) -> tuple[int, Detokenizer, str, FinishReason | None]:
    """How many of these tokens it takes, the detokenizer then, the text that they add, and why it ends."""
    if len(seq.tokens) + len(fresh) < seq.max_length and seq.stop_ids.isdisjoint(fresh):
        usual = seq.detokenizer.behind(fresh)
        if usual is not None:
            return len(fresh), *usual, None
    taken, detokenizer, finished = seq.extended(fresh)
    return taken, detokenizer, detokenizer.take(finished is not None), finished


def _up_to_impossible(
    fresh: list[int], nodes: list[int], impossible: Mapping[int, CannotSample]
) -> tuple[list[int], Exception | None]:
    """The tokens before the first node that no token can follow; token i was drawn after nodes[i]."""
    for i, node in enumerate(nodes):
        if node in impossible:
            return fresh[:i], impossible[node]
    return fresh, None


def rejected_branches(
    tokens: Sequence[int], parents: Sequence[int], path: Sequence[int], accepted: int
) -> tuple[Branch, ...]:
    """What of one tree was not accepted: a branch for each leaf, from where it leaves the accepted path."""
    kept = {0: 0} | {node: depth for depth, node in enumerate(path[:accepted], start=1)}
    inner = {parent for parent, token in zip(parents, tokens, strict=True) if token != CUT}
    branches = []
    for leaf in range(1, len(tokens)):
        if leaf in inner or leaf in kept or tokens[leaf] == CUT:
            continue
        node, found = leaf, list[int]()
        while node not in kept:
            found.append(tokens[node])
            node = parents[node]
        branches.append(Branch(kept[node], tuple(reversed(found))))
    return tuple(branches)


log = logging.getLogger(__name__)
SHARE, FIRST_SHARE = 0.05, 0.25  # of the time of texts under way, at most; the latter while nothing can be drafted
WORTH_CAPTURES = 2048  # rounds of a batch that a caller waits for: seconds, as captures of one batch size take


class CaptureTurns:
    def __init__(self, target: Target, settle: Callable[[], None], now: Callable[[], float]) -> None:
        """`settle` finishes the rounds that were launched: captures run in the same buffers."""
        self._later = target.later if isinstance(target, CapturesLater) else None
        self._settle, self._now, self._due = settle, now, 0.0
        self.has_thread = False  # does somebody run the engine while it is idle?

    @property
    def waiting(self) -> int:
        """Captures that were left for later."""
        return 0 if self._later is None else len(self._later)

    @property
    def missing(self) -> int:
        """Of these, the captures for one sequence."""
        return 0 if self._later is None else self._later.left(1)

    def leave_to_thread(self) -> None:
        """A thread runs the engine from now on, until `has_thread` is taken back."""
        self.has_thread = True
        if self.missing:
            log.info("%s", captures_awaited(self.missing))

    def when_idle(self) -> bool:
        """Make one; False = there is nothing to do now."""
        return self._later is not None and bool(len(self._later)) and self._one(None, waits=False)

    def before(self, batch: int) -> None:
        """Make all that a batch of this size needs, and wait for its kernels."""
        while self._later is not None and self._later.wants(batch):
            self._one(batch, waits=True)

    def up_to(self, batch: int) -> None:
        """Make all that batches up to this size need: of what is timed, the last texts are alone."""
        for size in range(1, batch + 1):
            self.before(size)

    def beside(self, batch: int) -> None:
        """Make one for a batch that is being written, if one is due."""
        if self._later is None or not len(self._later):
            return
        if not self.has_thread:
            self.before(1)
        if not batch:
            return
        if self._now() >= self._due and self._later.wants(batch, waits=False):
            self._one(batch, waits=False)

    def _one(self, batch: int | None, waits: bool) -> bool:
        assert self._later is not None, "asked before"
        self._settle()
        started, share = self._now(), FIRST_SHARE if self._later.is_first(batch) else SHARE
        made = self._later.next(batch, waits)
        ended = self._now()
        self._due = ended + (ended - started) / share
        return made
