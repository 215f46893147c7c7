"""Engine: the decoding loop. Plain decoding, chains, trees, any drafter and any verifier run through `Engine.step`.

    engine.submit(Request(prompt)); while engine.busy: events = engine.step()

A round happens whole or not at all. Its result is computed first (`Advance`) and then written; a write that was
interrupted is repeated. A round that fails before that is rolled back: its sequences free their KV cache and queue
again with the tokens that they have, which are then read like a prompt. One thread at a time: forerun.engine.driver.

On a GPU a round is launched as soon as the last one is written, or even before its verdict is read
(forerun.engine.following). Events are returned, and new requests taken, while the device works; the next step finishes
the round.

A request waits, its prompt is read, then it runs. Prompts are read in chunks: alone while no sequence runs, else in the
pass that scores the trees of the running ones, so few rows at a time that rounds hardly take longer (`PromptRows`).
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.control.base import Controller
from forerun.engine.budgets import NOT_DRAFTED, cut_budgets, standing
from forerun.engine.detokenize import Decodes
from forerun.engine.following import follow
from forerun.engine.late_launch import LateLaunch
from forerun.engine.metrics import EngineStats
from forerun.engine.outcome import outcome_of
from forerun.engine.pending import Launched, Pending
from forerun.engine.preemption import find_room, no_room_for
from forerun.engine.prompt_rows import PromptRows, note_prompts, prompt_share
from forerun.engine.recovery import Recovery
from forerun.engine.requests import new_sequence
from forerun.engine.round_clock import RoundClock
from forerun.engine.routing import DrafterPool, VerifierPool
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import SequenceState
from forerun.engine.starting import with_starters
from forerun.models.base import Target
from forerun.types import Budget, Event, Prompts, Request, Scores, TreeBatch, Verdict
from forerun.verify.grammar.compiled import Grammars


class Engine(Recovery):
    """Decodes many sequences at once with one target; requests join and leave between rounds."""

    def __init__(
        self,
        target: Target,
        drafters: DrafterPool,
        verifiers: VerifierPool,
        controller: Controller,
        *,
        default_drafter: str,
        default_verifier: str,
        stop_ids: frozenset[int],
        tokenizer: Decodes | None = None,
        max_batch: int = 8,
        max_length: int | None = None,
        prompt_rows: int | None = None,
    ) -> None:
        super().__init__(Scheduler(target, max_batch))
        self.target, self.drafters, self.verifiers, self.controller = target, drafters, verifiers, controller
        self.default_drafter, self.default_verifier = default_drafter, default_verifier
        self.stop_ids, self.tokenizer, self._next_id = stop_ids, tokenizer, 0
        longest = min(target.max_length, max_length or target.max_length)
        # a text that the KV cache could not hold would wait for room that never comes, and others behind it
        self.max_length = longest if target.slots is None else min(longest, target.slots)
        self.grammars = Grammars(tokenizer, target.vocab_size, stop_ids)
        self.prompt_rows = PromptRows(target.device.type, target.pass_rows, prompt_rows)
        self.stats = EngineStats()
        # launch a round before the events of the last are returned; and even before its verdict is read
        self.launches_ahead = self.follows_unread = target.device.type == "cuda"
        self.late_launch = LateLaunch()

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_prompts or self.running or self._unread)

    def step(self) -> list[Event]:
        """One round for all sequences: plan, propose, score, warp, verify, commit, observe, emit.

        A request that cannot go on ends with an event of its own, whose `error` says why; an interrupt is raised.
        Either way other sequences are not affected: what was written stays, and the failed round is repeated.
        """
        try:
            if self._pending is not None:
                self._recover()
            if self._ahead is None:
                self._start_round()
                if self.follows_unread and self.late_launch.left(self) > 0.0:
                    return []  # requests may come before the next round is launched
            if (launched := self._ahead) is not None:
                if self.follows_unread:
                    self._following = follow(self, launched)  # before this one is read
                self._finish(launched)
                if self._ahead is None and self.launches_ahead:
                    self._start_round(reads=False)
        except Exception as error:
            self._after_failure(error)
        except BaseException:
            self._following = None
            self._recover()
            raise
        events, self._unread = self._unread, []
        return events

    def settle(self) -> None:
        """Finish every round that was launched. Their events are returned by the next step."""
        try:
            self._recover()
            while self._ahead is not None:
                self._finish(self._ahead)
        except Exception as error:
            self._after_failure(error)

    def _start_round(self, reads: bool = True) -> None:
        """Launch a round of all running sequences, if there are any; where there are none, read prompts first."""
        scheduler = self.scheduler
        scheduler.start_those_read()
        if reads and not scheduler.running and scheduler.has_prompts:
            self._read()
            scheduler.start_those_read()
        if scheduler.running and self._ahead is None:
            self._launch(scheduler.running)

    def _launch(self, seqs: list[SequenceState]) -> None:
        """Plan, propose and score."""
        clock, scheduler, whole = self.stats.clock(), self.scheduler, seqs
        self._pending = Pending(seqs)
        rows = prompt_share(scheduler, self.prompt_rows, self.controller, len(seqs))
        budgets = cut_budgets(seqs, self.controller.plan(seqs))
        if not self.target.make_room(seqs, [1 + budget.nodes for budget in budgets]):
            seqs, budgets = find_room(self.target, seqs, budgets, self.reading, self._send_back)
        readers = scheduler.next_readers(rows) if rows else []
        if readers or seqs is not whole:
            self._pending = Pending([*seqs, *readers])
            scheduler.begin(readers)
        trees = self.drafters.propose(seqs, budgets)
        clock.lap("draft")
        seqs, trees = with_starters(self, seqs, trees, readers, rows)
        self._score_round(seqs, trees, readers, rows, budgets, clock)

    def _score_round(
        self,
        seqs: list[SequenceState],
        trees: TreeBatch,
        readers: list[SequenceState],
        rows: int,
        budgets: Sequence[Budget],
        clock: RoundClock,
    ) -> None:
        """Launch the pass of the pending round."""
        assert self._pending is not None
        scores = self.score(seqs, trees, readers, rows)
        clock.lap("pass")
        self._ahead = Launched(self._pending, seqs, readers, trees, scores, clock, *standing(budgets))
        if self.follows_unread:
            self.late_launch.note_start(self._ahead, self.stats.now())
        self._pending = None  # last: whatever interrupts a launch undoes it

    def hold(self, seqs: Sequence[SequenceState]) -> None:
        """Undo the rounds of these sequences if what is done next is interrupted."""
        self._pending = Pending(seqs)

    def score(
        self, seqs: Sequence[SequenceState], trees: TreeBatch, readers: Sequence[SequenceState], rows: int
    ) -> Scores:
        """The pass of a round, which also reads `rows` rows of the readers' prompts; drafters observe these at once."""
        needs = self.drafters.needs([*seqs, *readers] if readers else seqs)
        scores = self.target.score(seqs, trees, needs, Prompts(readers, rows) if readers else None)
        if scores.read is not None:
            self._observe_prompts(readers, *scores.read)
        return scores

    def _finish(self, launched: Launched) -> None:
        """Verify, commit, observe and emit; all of it or nothing."""
        pending, seqs, readers, trees, scores, clock = launched[:6]
        self._pending, self._ahead = pending, None
        clock.lap("host")
        laws, verdict = self.verifiers.decide(seqs, trees, scores)
        clock.lap("verdict")
        if self.follows_unread:
            self.late_launch.note_read(launched, self._following, clock.seconds["verdict"], self.stats.now())
        clock.settle(trees, scores)
        seqs, trees, scores, verdict = launched.without_ended(verdict)
        self.target.commit(seqs, trees, verdict)
        rows = note_prompts(self, readers, scores.read[0], clock.started) if scores.read is not None else 0
        self.drafters.observe(seqs, trees, scores, verdict)
        spent = self.stats.now() - clock.started
        parts = clock.seconds, spent, rows, launched.trees.follows is not None, clock.ahead
        advances, outcome = outcome_of(seqs, trees, laws, verdict, *parts)
        pending.advances = advances  # from here on the round has happened
        tokens = 0
        for advance in advances:
            advance.seq.take(advance)
            tokens += len(advance.tokens)
        clock.end()
        self.controller.observe(outcome)
        self._complete(advances)
        if launched.seqs[0] not in readers:  # else no running sequence has waited for these prompts
            self.prompt_rows.observe(spent, rows)
        self.stats.count(outcome, tokens, clock)
        following, self._following = self._following, None
        if following is not None:
            self._ahead, read = following.begun(self.stats.clock(behind=clock)), following.scores.read
            if self._ahead is None and read is not None:  # its prompts were read all the same
                note_prompts(self, following.readers, read[0], following.clock.started)

    def submit(self, request: Request) -> int:
        """Queue a request; its id names it in events."""
        seq = self.prepare(request)
        self.enqueue(seq)
        return seq.id

    def prepare(self, request: Request) -> SequenceState:
        """The sequence of a request, if it can be served; nothing else is changed."""
        seq = new_sequence(self, request, self._next_id)
        self._next_id += 1
        return seq

    def abort(self, seq_id: int) -> None:
        """Drop a request, queued or running; unknown ids are ignored."""
        seq = self.find(seq_id)
        if self._ahead is None or seq in self._ahead.pending.seqs:
            self.settle()  # then it may have ended
            seq = self.find(seq_id)
        if seq is not None:
            self._end(seq.ended("aborted"))

    def _read(self) -> None:
        """No sequence runs: read as many rows of prompts as a pass takes at best, and start those that it completes."""
        rows, scheduler = self.target.pass_rows, self.scheduler
        seqs = scheduler.next_readers(rows)
        if not seqs:
            self._end(no_room_for(self.waiting[0]))
            return
        clock, self._pending = self.stats.clock(), Pending(seqs)
        scheduler.begin(seqs)
        starters, roots = with_starters(self, [], TreeBatch.chains([]), seqs, rows)
        if starters:  # nobody can draft for them yet: the controller is not asked, and plans no trial in vain
            self._score_round(starters, roots, seqs, rows, [NOT_DRAFTED] * len(starters), clock)
            return
        chains, scores = self.target.prefill(seqs, self.drafters.needs(seqs), rows)
        self._observe_prompts(seqs, chains, scores)
        self.stats.count_prompts(scores, note_prompts(self, seqs, chains, clock.started), clock)
        self._pending = None

    def _observe_prompts(self, seqs: Sequence[SequenceState], chains: TreeBatch, scores: Scores) -> None:
        """Show chunks of prompts to the drafters: chains accepted whole, with the prompt's next token as bonus."""
        following = [seq.tokens[self.target.cached_tokens(seq)] for seq in seqs]
        self.drafters.observe(seqs, chains, scores, Verdict.whole_chain(chains, following))
