"""Engine: the decoding loop. Plain decoding, chains, trees, any drafter and any verifier run through `Engine.step`.

    engine.submit(Request(prompt)); while engine.busy: events = engine.step()

A round happens whole or not at all. Its result is computed first (`Advance`) and then written, which can be
repeated where it was interrupted. A round that fails before that is rolled back by recomputation: its sequences give
their caches back and queue again with the tokens that they have. One thread at a time: see forerun.engine.driver.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from time import perf_counter

from forerun.control.base import Controller
from forerun.engine.detokenize import Decodes, Detokenizer
from forerun.engine.metrics import EngineStats, Stopwatch
from forerun.engine.outcome import outcome_of
from forerun.engine.routing import DrafterPool, VerifierPool
from forerun.engine.sequence import Advance, SequenceState, Tokens
from forerun.errors import InvalidInput, PromptTooLong
from forerun.models.base import Target
from forerun.noise import Noise, fresh_seed
from forerun.types import Budget, Event, Request, Verdict
from forerun.verify.warp import warp

log = logging.getLogger(__name__)

PROMPT_ROWS = 4096  # tokens of several prompts that one step prefills: running sequences wait for them


class Pending:
    """A change of state that is under way: until its advances are known it is undone, from then on completed."""

    __slots__ = ("advances", "seqs")

    def __init__(self, seqs: Sequence[SequenceState], advances: list[Advance] | None = None) -> None:
        self.seqs, self.advances = seqs, advances


class Engine:
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
    ) -> None:
        self.target, self.drafters, self.verifiers, self.controller = target, drafters, verifiers, controller
        self.default_drafter, self.default_verifier = default_drafter, default_verifier
        self.stop_ids, self.tokenizer, self.max_batch = stop_ids, tokenizer, max_batch
        self.max_length = min(target.max_length, max_length or target.max_length)
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.stats = EngineStats()
        self._next_id = 0
        self._pending: Pending | None = None
        self._unread: list[Event] = []  # of what was completed and not returned yet
        self._limit: int | None = None  # sequences at once, since a round failed; None = max_batch

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self._unread)

    def step(self) -> list[Event]:
        """One round for all sequences: admit, plan, propose, score, warp, verify, commit, observe, emit.

        A request that cannot go on ends with an event of its own, whose `error` says why; an interrupt is raised.
        Either way other sequences are not affected: what was written stays, and the failed round is repeated.
        """
        try:
            if self._pending is not None:
                self._recover()
            started = perf_counter()
            if self.waiting:
                self._admit()
            if self.running:
                self._round(self.running, started)
        except Exception as error:
            self._after_failure(error)
        except BaseException:
            self._recover()
            raise
        events, self._unread = self._unread, []
        return events

    def _round(self, seqs: list[SequenceState], started: float) -> None:
        clock = Stopwatch()
        pending = self._pending = Pending(seqs)
        budgets = self._plan(seqs)
        trees = self.drafters.propose(seqs, budgets)
        clock.lap("draft")
        scores = self.target.score(seqs, trees, self.drafters.needs(seqs))
        clock.lap("target")
        laws = warp(scores.required_logits, seqs, trees)
        noise = Noise([seq.seed for seq in seqs], [len(seq.tokens) for seq in seqs])
        verdict = self.verifiers.verify(seqs, trees, laws, noise, scores.greedy)
        clock.lap("verify")
        clock.move(trees.device_seconds, "verify", "draft")  # drafted while the host did other work
        self.target.commit(seqs, trees, verdict)
        self.drafters.observe(seqs, trees, scores, verdict)
        spent = perf_counter() - started
        advances, outcome = outcome_of(seqs, trees, laws, verdict, clock.seconds, spent)
        pending.advances = advances  # from here on the round has happened
        for advance in advances:
            advance.seq.take(advance)
        clock.lap("rest")
        self.controller.observe(outcome)
        self._complete(advances)
        self.stats.count(sum(len(advance.tokens) for advance in advances), clock.seconds)

    def submit(self, request: Request) -> int:
        """Queue a request; its id names it in events."""
        seq = self.prepare(request)
        self.enqueue(seq)
        return seq.id

    def prepare(self, request: Request) -> SequenceState:
        """The sequence of a request, if it can be served; nothing else is changed."""
        self._check(request)
        params = request.params
        drafter = request.drafter or self.default_drafter
        self.drafters.get(drafter)  # an unknown or unloadable one is the caller's error, now
        verifier = request.verifier or self.default_verifier
        if verifier == "auto":
            verifier = "exact" if params.seed is None else "coupled"
        eos = frozenset() if params.ignore_eos else self.stop_ids
        self._next_id += 1
        return SequenceState(
            id=self._next_id - 1,
            request=request,
            seed=fresh_seed() if params.seed is None else params.seed,
            max_length=min(len(request.prompt) + params.max_tokens, self.max_length),
            stop_ids=eos | frozenset(params.stop_token_ids),
            drafter=drafter,
            verifier=verifier,
            shares_noise=self.verifiers.get(verifier).shares_noise,
            detokenizer=Detokenizer(self.tokenizer, params.stop),
            tokens=Tokens(request.prompt),
            prompt_length=len(request.prompt),
            drafting=drafter,
        )

    def enqueue(self, seq: SequenceState) -> None:
        """Put a sequence into the queue; a repeated call, after an interrupt, changes nothing."""
        if not self.waiting or self.waiting[-1] is not seq:
            self.waiting.append(seq)

    def abort(self, seq_id: int) -> None:
        """Drop a request, queued or running; unknown ids are ignored."""
        self._recover()
        seq = self.find(seq_id)
        if seq is not None:
            self._end(seq.ended("aborted"))

    def find(self, seq_id: int) -> SequenceState | None:
        """The sequence behind an id while it is queued or running."""
        return next((seq for seq in (*self.running, *self.waiting) if seq.id == seq_id), None)

    def _check(self, request: Request) -> None:
        length, vocab = len(request.prompt), self.target.vocab_size
        if not length:
            raise InvalidInput("the prompt is empty; give at least one token")
        if length >= self.max_length:
            limit = f"the context of {self.max_length} leaves no room to answer; shorten it"
            raise PromptTooLong(f"the prompt has {length} tokens; {limit}")
        if not all(0 <= token < vocab for token in request.prompt):
            raise InvalidInput(f"a prompt token lies outside the vocabulary of {vocab}; check the tokenizer")
        params = request.params
        named = [*params.logit_bias, *(token for word in params.bad_words for token in word)]
        if not all(0 <= token < vocab for token in named):
            raise InvalidInput(f"logit_bias or bad_words name a token outside the vocabulary of {vocab}")
        if params.stop and self.tokenizer is None:
            raise InvalidInput("stop strings need a tokenizer; pass one or use stop_token_ids")

    def _admit(self) -> None:
        """Prefill queued requests in order, as many at once as there is room for."""
        group = self._next_group()
        if not group:
            if self.waiting and not self.running:
                seq = self.waiting[0]
                limit = f"a request of {seq.max_length} tokens does not fit the KV cache"
                self._end(seq.ended("error", InvalidInput(f"{limit}; raise kv_slots or lower max_tokens")))
            return
        started = perf_counter()
        self._pending = Pending(group)
        for _ in group:
            self.waiting.popleft()
        self.running = [*self.running, *group]
        trees, scores = self.target.prefill(group, self.drafters.needs(group))
        verdict = Verdict.whole_chain(trees, [seq.tokens[-1] for seq in group])
        self.drafters.observe(group, trees, scores, verdict)
        for seq in group:
            seq.note_prompt(perf_counter() - started)
        self._pending = None

    def _next_group(self) -> list[SequenceState]:
        """The head of the queue: what fits the batch, the slots and, but for one long prompt, PROMPT_ROWS."""
        group: list[SequenceState] = []
        rows, most = 0, min(self.max_batch, self._limit or self.max_batch)
        for seq in islice(self.waiting, max(0, most - len(self.running))):
            rows += len(seq.tokens)
            lengths = [each.max_length for each in (*group, seq)]
            if (group and rows > PROMPT_ROWS) or not self.target.has_room(*lengths):
                break
            group.append(seq)
        return group

    def _plan(self, seqs: Sequence[SequenceState]) -> list[Budget]:
        """The controller's budgets, or a request's own, cut to what the sequence can still take."""
        planned = self.controller.plan(seqs)
        budgets = []
        for seq, plan in zip(seqs, planned, strict=True):
            allowed = seq.request.budget or plan
            depth = min(allowed.depth, seq.room - 1)
            nodes = allowed.nodes if depth > 0 else 0
            fits = (nodes, depth) == (allowed.nodes, allowed.depth)  # the usual case
            budgets.append(allowed if fits else replace(allowed, nodes=nodes, depth=depth))
        return budgets

    def _end(self, advance: Advance) -> None:
        """End a sequence, wherever it is."""
        self._pending = Pending([advance.seq], [advance])
        self._recover()

    def _recover(self) -> None:
        """Complete or undo a change of state that was interrupted. Can itself be interrupted, and repeated."""
        pending = self._pending
        if pending is None:
            return
        if pending.advances is None:
            self._roll_back(pending.seqs)
            return
        for advance in pending.advances:
            advance.seq.take(advance)
        self._complete(pending.advances)

    def _complete(self, advances: Sequence[Advance]) -> None:
        """After a round was written: free the sequences that have ended, and return their events."""
        ended = [advance.seq for advance in advances if advance.finished is not None]
        for seq in ended:
            self._forget(seq)
        if ended:
            self.running = [seq for seq in self.running if not seq.finished]
            self.waiting = deque(seq for seq in self.waiting if not seq.finished)
            if self._limit is not None:  # a sequence has ended: try one more at once
                self._limit = self._limit + 1 if self._limit < self.max_batch else None
        fresh = [advance.event for advance in advances if advance.event is not None]
        self._unread, self._pending = [*self._unread, *fresh], None

    def _roll_back(self, seqs: Sequence[SequenceState]) -> None:
        """Free what these sequences hold and queue them again, in front: their prompts now include what they wrote."""
        for seq in seqs:
            self._forget(seq)
        hit = {seq.id for seq in seqs}
        again = sorted(seqs, key=lambda seq: -seq.failures)  # those that failed most come first
        self.running = [seq for seq in self.running if seq.id not in hit]
        self.waiting = deque([*again, *(seq for seq in self.waiting if seq.id not in hit)])
        self._pending = None

    def _after_failure(self, error: Exception) -> None:
        """Try again with half as many at once; a sequence that fails twice, alone, ends with the error."""
        pending = self._pending
        if pending is None:
            raise error  # no round was under way: trying again would fail again
        if pending.advances is not None:
            log.warning("a round was completed, but an observer of it failed: %r", error)
            self._recover()
            return
        seqs = list(pending.seqs)
        for seq in seqs:
            seq.note_failure()
        self._recover()
        self._limit = max(1, len(seqs) // 2)
        if len(seqs) == 1 and seqs[0].failures > 1:
            self._end(seqs[0].ended("error", error))
        else:
            log.warning("a round of %d sequences failed and is repeated: %r", len(seqs), error)

    def _forget(self, seq: SequenceState) -> None:
        self.target.release(seq)
        self.drafters.forget(seq)
        self.controller.forget(seq)
