"""The loop. Plain decoding, chains, trees, any drafter and any verifier run through `Engine.step`.

engine.submit(Request(prompt)); while engine.busy: events = engine.step()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from time import perf_counter

from forerun.control.base import Controller
from forerun.engine.detokenize import Decodes, Detokenizer
from forerun.engine.metrics import EngineStats
from forerun.engine.routing import DrafterPool, VerifierPool
from forerun.engine.sequence import SequenceState
from forerun.errors import InvalidInput, PromptTooLong
from forerun.models.base import Target
from forerun.noise import Noise, fresh_seed
from forerun.types import Budget, Event, Laws, Request, Round, TokenLogprob, TreeBatch, Verdict
from forerun.verify.warp import token_logprobs, warp

PROMPT_ROWS = 4096  # tokens of several prompts that one step takes in: whoever writes already waits for them


class Engine:
    """Writes many texts at once with one target; requests join and leave between rounds."""

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

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[Event]:
        """One round for everybody: admit, plan, propose, score, warp, verify, commit, observe, emit."""
        self._admit()
        seqs = self.running
        if not seqs:
            return []
        with self._release_on_error(seqs):
            clock = Stopwatch()
            budgets = self._plan(seqs)
            trees = self.drafters.propose(seqs, budgets)
            clock.lap("draft")
            scores = self.target.score(seqs, trees, self.drafters.needs(seqs))
            clock.lap("target")
            laws = warp(scores.required_logits, seqs, trees)
            noise = Noise([seq.seed for seq in seqs], [len(seq.tokens) for seq in seqs])
            verdict = self.verifiers.verify(seqs, trees, laws, noise, scores.greedy)
            clock.lap("verify")
            clock.move(
                trees.device_seconds, "verify", "draft"
            )  # the device drafted while nobody waited for it
            self.target.commit(seqs, trees, verdict)
            self.drafters.observe(seqs, trees, scores, verdict)
            events = self._emit(seqs, trees, laws, verdict, clock)
        self.running = [seq for seq in seqs if not seq.finished]
        return events

    def submit(self, request: Request) -> int:
        """Queue a request; its id names it in events."""
        self._check(request)
        params = request.params
        drafter = request.drafter or self.default_drafter
        self.drafters.get(drafter)  # an unknown or unloadable one is the caller's error, now
        verifier = request.verifier or self.default_verifier
        if verifier == "auto":
            verifier = "exact" if params.seed is None else "coupled"
        eos = frozenset() if params.ignore_eos else self.stop_ids
        seq = SequenceState(
            id=self._next_id,
            request=request,
            seed=fresh_seed() if params.seed is None else params.seed,
            max_length=min(len(request.prompt) + params.max_tokens, self.max_length),
            stop_ids=eos | frozenset(params.stop_token_ids),
            drafter=drafter,
            verifier=verifier,
            shares_noise=self.verifiers.get(verifier).shares_noise,
            detokenizer=Detokenizer(self.tokenizer, params.stop),
            tokens=list(request.prompt),
            prompt_length=len(request.prompt),
        )
        self._next_id += 1
        self.waiting.append(seq)
        return seq.id

    def abort(self, seq_id: int) -> None:
        """Drop a request, queued or running; unknown ids are ignored."""
        for queue in (self.waiting, self.running):
            for seq in [seq for seq in queue if seq.id == seq_id]:
                queue.remove(seq)
                seq.finished = "aborted"
                self._forget(seq)

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
        if not group and self.waiting and not self.running:
            limit = f"a request of {self.waiting.popleft().max_length} tokens does not fit the KV cache"
            raise InvalidInput(f"{limit}; raise kv_slots or lower max_tokens")
        if not group:
            return
        for _ in group:
            self.waiting.popleft()
        self.running += group
        with self._release_on_error(group):
            trees, scores = self.target.prefill(group, self.drafters.needs(group))
            verdict = Verdict.whole_chain(trees, [seq.tokens[-1] for seq in group])
            self.drafters.observe(group, trees, scores, verdict)

    def _next_group(self) -> list[SequenceState]:
        """The head of the queue: what fits the batch, the slots and, but for one long prompt, PROMPT_ROWS."""
        group: list[SequenceState] = []
        rows = 0
        for seq in islice(self.waiting, max(0, self.max_batch - len(self.running))):
            rows += len(seq.tokens)
            lengths = [each.max_length for each in (*group, seq)]
            if (group and rows > PROMPT_ROWS) or not self.target.has_room(*lengths):
                break
            group.append(seq)
        return group

    @contextmanager
    def _release_on_error(self, seqs: Sequence[SequenceState]) -> Iterator[None]:
        """A round that fails half-way leaves caches that no longer match their texts: end those texts."""
        try:
            yield
        except BaseException:
            for seq in list(seqs):
                self.abort(seq.id)
            raise

    def _plan(self, seqs: Sequence[SequenceState]) -> list[Budget]:
        """The controller's budgets, or a request's own, cut to what the sequence can still take."""
        planned = self.controller.plan(seqs)
        budgets = []
        for seq, plan in zip(seqs, planned, strict=True):
            wish = seq.request.budget or plan
            depth = min(wish.depth, seq.room - 1)
            nodes = wish.nodes if depth > 0 else 0
            budgets.append(replace(wish, nodes=nodes, depth=depth))
        return budgets

    def _emit(
        self, seqs: Sequence[SequenceState], trees: TreeBatch, laws: Laws, verdict: Verdict, clock: Stopwatch
    ) -> list[Event]:
        """Append what was committed, end what has ended, and tell the controller what the round came to."""
        paths, bonus = verdict.to_host()
        (tokens, _), depths = trees.to_host(), trees.host_depths()
        events, deepest, accepted = [], [], []
        for b, seq in enumerate(seqs):
            first, end = trees.starts[b], trees.starts[b + 1]
            path = paths[b]
            taken = seq.append([*(tokens[first + node] for node in path), bonus[b]])
            kept = min(len(path), taken)
            deepest.append(max(depths[first:end]))
            accepted.append(kept)
            seq.stats.count(taken, end - first - 1, deepest[b], kept)
            nodes = [first, *(first + node for node in path)][:taken]
            events.append(self._event(seq, nodes, kept, laws))
        clock.lap("rest")
        drafted = tuple(size - 1 for size in trees.sizes())
        outcome = Round(tuple(seqs), drafted, tuple(deepest), tuple(accepted), clock.seconds)
        self.controller.observe(outcome)
        self.stats.count(sum(len(event.tokens) for event in events), clock.seconds)
        for seq in seqs:
            if seq.finished:
                self._forget(seq)
        return events

    def _event(self, seq: SequenceState, nodes: list[int], accepted: int, laws: Laws) -> Event:
        """What the round added to a sequence; nodes[i] is the node whose law token i was drawn from."""
        fresh = tuple(seq.tokens[len(seq.tokens) - len(nodes) :])
        logprobs: tuple[TokenLogprob, ...] = ()
        if seq.params.logprobs is not None:
            logprobs = token_logprobs(laws, nodes, fresh, seq.params.logprobs)
        text = seq.detokenizer.take(final=seq.finished is not None)
        return Event(seq.id, fresh, accepted, text, logprobs, seq.finished)

    def _forget(self, seq: SequenceState) -> None:
        self.target.release(seq)
        self.drafters.forget(seq)
        self.controller.forget(seq)


class Stopwatch:
    """Seconds per part of a round."""

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._now, self._last = now, now()

    def lap(self, part: str) -> None:
        """Book the time since the last lap under a name."""
        now = self._now()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def move(self, seconds: float, part: str, other: str) -> None:
        """Book so much of one part, as far as it has it, under another."""
        seconds = min(seconds, self.seconds[part])
        self.seconds[part] -= seconds
        self.seconds[other] += seconds
