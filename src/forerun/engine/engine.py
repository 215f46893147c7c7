"""Engine: the decoding loop. Plain decoding, chains, trees, any drafter and any verifier run through `Engine.step`.

    engine.submit(Request(prompt)); while engine.busy: events = engine.step()

A round happens whole or not at all. Its result is computed first (`Advance`) and then written; a write that was
interrupted is repeated. A round that fails before that is rolled back: its sequences free their KV cache and queue
again with the tokens that they have, which are then prefilled like a prompt. One thread at a time: see driver.py.

A request waits for admission, its prompt is prefilled in chunks (`PrefillRows`), then it runs.

Overlap. Where the target can (`Abilities.overlap`), a round is launched before the verdict on the last one is read
(`_follow`). Behind a plain round the device finds the next roots itself (`Greedy.next_roots`); behind trees that were
grown on the device, the drafter goes on from its own verdict (`DeviceDrafter.launch`). Sequences that have joined are
in the same pass. Everything a pass writes lies behind what is committed: a round can be forgotten at any time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from forerun.control.base import Controller, plans_ahead, sees_prompts
from forerun.core.request import Budget, Event, Request, TokenLogprob, fresh_seed
from forerun.core.tree import TreeBatch, Verdict
from forerun.core.types import Adapters, Needs, Prompts, RoundPlan, Scores, traits_of
from forerun.drafters.device.protocol import Unread
from forerun.engine.round import (
    CaptureTurns,
    Change,
    LaunchDeadline,
    LaunchedRound,
    Seats,
    Timeline,
    cut_budgets,
    outcome_of,
    plan_of,
    seats_behind,
    with_starters,
)
from forerun.engine.routing import DrafterPool
from forerun.engine.scheduler import NONE_WAIT, PrefillRows, Scheduler, find_room, no_room_for
from forerun.engine.sequence import Decodes, Detokenizer, SequenceState, Tokens, check_request, compiled, find_adapter
from forerun.engine.stats import EngineStats, RoundClock
from forerun.models.base import Target
from forerun.verify.base import CompilesGrammars, Verifiers

log = logging.getLogger(__name__)

NOT_DRAFTED = Budget(0, 0)
SCORED_ROWS = 128  # of a prompt whose log-probabilities are asked for, in a pass


class Engine:
    """Decodes many sequences at once with one target; requests join and leave between rounds."""

    def __init__(
        self,
        target: Target,
        drafters: DrafterPool,
        verifiers: Verifiers,
        controller: Controller,
        grammars: CompilesGrammars,
        *,
        default_drafter: str,
        default_verifier: str,
        stop_ids: frozenset[int],
        tokenizer: Decodes | None = None,
        max_batch: int = 8,
        max_length: int | None = None,
        prompt_rows: int | None = None,
        adapters: Adapters | None = None,
        sibling: Callable[[str], Engine] | None = None,
    ) -> None:
        """`sibling` makes another engine around the same target, with a controller and drafters of its own."""
        self.target, self.drafters, self.verifiers, self.controller = target, drafters, verifiers, controller
        self.grammars, self.adapters, self.sibling = grammars, adapters, sibling
        self.default_drafter, self.default_verifier = default_drafter, default_verifier
        self.stop_ids, self.tokenizer, self._next_id = stop_ids, tokenizer, 0
        longest = min(target.max_length, max_length or target.max_length)
        # a text that the KV cache could not hold would wait for room that never comes, and others behind it
        self.max_length = longest if target.slots is None else min(longest, target.slots)
        self.scheduler = Scheduler(target, max_batch)
        self.can = can = target.can
        self.prefill_rows = PrefillRows(can.prefill, target.pass_rows, prompt_rows)
        self.stats = EngineStats(now=can.clock, awaited=can.awaited)
        self.timeline = Timeline(self.scheduler, self._forget, can.overlap)
        self.deadline = LaunchDeadline()
        self.captures = CaptureTurns(target, self.settle, self.stats.now)
        self._waiting_prompts = NONE_WAIT  # what the controller was told last
        self._scored: dict[int, list[TokenLogprob | None]] = {}  # of prompts, as far as they are read

    # ---- the loop

    def step(self) -> list[Event]:
        """One round for all sequences: plan, propose, score, warp, verify, commit, observe, emit.

        A request that cannot go on ends with an event of its own, whose `error` says why; an interrupt is raised.
        Either way other sequences are not affected: what was written stays, and the failed round is repeated.
        """
        line = self.timeline
        try:
            line.repair()
            if self._scored and (scored := self.scheduler.next_scored()) is not None:
                self.settle()
                self._score_prompt(scored)
            self.captures.beside(len(self.running))
            if line.first is None:
                self._open()
                if self.spare_seconds() > 0.0:
                    return []  # requests may come before the next round is launched
            if (last := line.first) is not None:
                if line.depth > 1:
                    self._follow(last)
                self._close(last)
                if line.first is None and line.depth:
                    self._open(reads=False)
        except Exception as error:
            line.fail(error)
        except BaseException:
            line.interrupt()
            raise
        return line.take_events()

    def settle(self) -> None:
        """Finish every round that was launched. Their events are returned by the next step."""
        line = self.timeline
        try:
            line.repair()
            while line.first is not None:
                self._close(line.first)
        except Exception as error:
            line.fail(error)

    def spare_seconds(self) -> float:
        """How long the next step may wait for requests before it must launch; 0 or less = it should not."""
        if self.timeline.depth < 2 or not self.scheduler.has_places:
            return 0.0
        return self.deadline.left(self.stats.now())

    def _open(self, reads: bool = True) -> None:
        """Launch a round of all running sequences, if there are any; where there are none, prefill prompts first."""
        scheduler = self.scheduler
        scheduler.start_those_read()
        self._queue_outgrown()
        if reads and not scheduler.running and scheduler.has_prompts:
            self._prefill()
            scheduler.start_those_read()
        if scheduler.running and self.timeline.first is None:
            self._plan_and_launch(scheduler.running)

    def _queue_outgrown(self) -> None:
        """Texts that are too long for what is cached of them (`Target.reaches`) are read anew."""
        if (reaches := self.target.reaches(self.running)) is None:
            return
        for seq, reach in zip(self.running, reaches, strict=True):
            if len(seq.tokens) > reach:
                self.timeline.send_back(seq)
        self.timeline.change = None

    def _plan_and_launch(self, seqs: list[SequenceState]) -> None:
        """Plan, propose and score."""
        clock, scheduler, whole = self.stats.clock(), self.scheduler, seqs
        self.timeline.open(seqs)
        self.drafters.gather(seqs)
        rows = self._prefill_share(len(seqs))
        budgets = cut_budgets(seqs, self.controller.plan(seqs), self.target.reaches(seqs))
        if not self.target.make_room(seqs, [1 + budget.nodes for budget in budgets]):
            seqs, budgets = find_room(self.target, seqs, budgets, self.reading, self._preempt)
        readers, rows = scheduler.next_chunk(self.prefill_rows, rows)
        if readers or seqs is not whole:
            self.timeline.open([*seqs, *readers])
            self._begin(readers, rows, seqs)
        trees = self.drafters.propose(seqs, budgets)
        clock.lap("draft")
        seqs, trees = self._with_starters(seqs, trees, readers, rows)
        self._launch(seqs, trees, readers, rows, budgets, clock)

    def _launch(
        self,
        seqs: list[SequenceState],
        trees: TreeBatch,
        readers: list[SequenceState],
        rows: int,
        budgets: Sequence[Budget],
        clock: RoundClock,
    ) -> None:
        """Launch the pass of the round that is open."""
        change = self.timeline.change
        assert change is not None, "a round is opened before it is launched"
        scores = self._score(seqs, trees, readers, rows)
        clock.lap("pass")
        plan, chunk = plan_of(budgets, trees), self.scheduler.known_chunk(self.prefill_rows, readers)
        launched = LaunchedRound(change, seqs, readers, trees, scores, clock, plan, chunk)
        if self.timeline.depth > 1:
            self.deadline.note_start(launched, self.stats.now())
        self.timeline.launched(launched)

    def _close(self, launched: LaunchedRound) -> None:
        """Verify, commit, observe and emit; all of it or nothing."""
        line, seqs, readers, trees, scores, clock = self.timeline, *launched[1:6]
        change = line.read(launched)
        clock.lap("host")
        laws, verdict = self.verifiers.decide(seqs, trees, scores)
        clock.lap("verdict")
        if line.depth > 1:
            self.deadline.note_read(launched, line.second, clock.seconds["verdict"], self.stats.now())
        clock.settle(trees, scores)
        seqs, trees, scores, verdict = launched.without_ended(verdict)
        self.target.commit(seqs, trees, verdict)
        rows = self._note_prefill(readers, scores.read[0], clock.started) if scores.read is not None else 0
        if line.second is not None and scores.logits is not None:
            scores = replace(scores, logits=None)  # the pass of the round behind may have written there
        self.drafters.observe(seqs, trees, scores, verdict)
        spent = self.stats.now() - clock.started
        followed, started = launched.trees.follows is not None, launched.starters(seqs)
        parts = clock.seconds, spent, rows, followed, clock.ahead, started
        advances, outcome = outcome_of(seqs, trees, laws, verdict, self.verifiers.logprobs, *parts)
        change.advances = advances  # from here on the round has happened
        tokens = 0
        for advance in advances:
            advance.seq.take(advance)
            tokens += len(advance.tokens)
        clock.end()
        self.controller.observe(outcome)
        line.complete(advances)
        if launched.seqs[0] not in readers:  # else no running sequence has waited for these prompts
            self.prefill_rows.observe(spent, rows, launched.chunk.before)
        self.stats.count(outcome, tokens, clock)
        for advance in advances:
            if (adapter := advance.seq.adapter) and advance.counts and adapter.name in (self.adapters or ()):
                self.stats.count_adapter(adapter.name, advance.counts)
        if line.second is not None:
            dropped = line.close(self.stats.clock(behind=clock))
            if dropped is not None and dropped.scores.read is not None:  # its prompts were read all the same
                self._note_prefill(dropped.readers, dropped.scores.read[0], dropped.clock.started)

    def _score(
        self, seqs: Sequence[SequenceState], trees: TreeBatch, readers: Sequence[SequenceState], rows: int
    ) -> Scores:
        """The pass of a round; it also prefills `rows` rows of the readers' prompts, which drafters observe at once."""
        needs = self._needs([*seqs, *readers] if readers else seqs)
        scores = self.target.score(seqs, trees, needs, Prompts(readers, rows) if readers else None)
        if scores.read is not None:
            self._observe_prompts(readers, *scores.read)
        return self.drafters.keep_rows(seqs, self.verifiers.send_logprobs(seqs, trees, scores))

    def _needs(self, seqs: Sequence[SequenceState]) -> Needs:
        needs = self.drafters.needs(seqs)
        # asked of encoder-decoders alone: no other target makes use of it
        if self.target.source_rules is not None and seqs and self.verifiers.reads_largest_only(seqs):
            return replace(needs, largest_only=True)
        return needs

    # ---- overlap: the round behind one that was not read

    def _follow(self, last: LaunchedRound) -> None:
        """Launch the round behind; where that fails, every round is read before the next from then on."""
        try:
            started = self.stats.now()
            self.timeline.second = self._next_round(last)
            self.deadline.note_launch(self.stats.now() - started)
        except Exception as error:
            self.timeline.depth = 1
            log.warning("rounds no longer overlap, because one failed that was launched early: %r", error)
            raise

    def _next_round(self, last: LaunchedRound) -> LaunchedRound | None:
        """Launch the round behind one that was not read; None = it must be read first.

        Whatever interrupts it undoes the last round too: the timeline holds both meanwhile.
        """
        known, scheduler = last.scores.greedy, self.scheduler
        if known is None or (known.next_roots is None and last.trees.form is None) or last.loses_logprobs:
            return None
        scheduler.start_those_read()  # whose prompts the last pass has completed
        seats = seats_behind(last, self.running)
        seqs, joined = [seq for seq, _ in seats], [seq for seq, tree in seats if tree < 0]
        others = [*last.seqs, *joined]
        if len(joined) == len(seats) or not self._device_decides(others, known.sampled):
            return None
        both = [*last.change.seqs, *joined]  # some of these were read in the last pass: they are named twice
        self.timeline.open(both)
        share = self._prefill_share(len(seqs))
        plan = self._next_plan(last, seqs)
        if plan is None:
            return None
        trees = self._grown(last, seats, plan) if (grows := plan.kind == "trees") else None
        if trees is None and (grows or not self._has_room(last, seats, 1)):
            return None
        readers, share = scheduler.next_chunk(self.prefill_rows, share)
        if trees is not None:
            starters, trees = self._in_padding(others, trees, readers, share, known.sampled)
        else:
            starters = scheduler.starters(readers, len(seqs) + len(readers), share)
            if starters and not self._device_decides([*others, *starters], known.sampled):
                starters = []
            trees = self._roots(last, [*seats, *[(seq, -1) for seq in starters]])
        if trees is None:
            return None
        self.timeline.open([*both, *readers])
        self._begin(readers, share, seqs)
        scheduler.start(starters)
        seqs = [*seqs, *starters]
        scores = self._score(seqs, trees, readers, share)
        change, chunk = Change([*seqs, *readers]), scheduler.known_chunk(self.prefill_rows, readers)
        return LaunchedRound(change, seqs, readers, trees, scores, last.clock, plan, chunk)

    def _next_plan(self, last: LaunchedRound, seqs: Sequence[SequenceState]) -> RoundPlan | None:
        """The plan of the next round, if it is known before the last one is read."""
        controller, plan, grown = self.controller, last.plan, last.plan.kind == "trees"
        if not grown and self.drafters.never_draft(seqs):
            return plan.again()
        planned = seqs
        if any([one.has_budget for one in traits_of(seqs)]):  # noqa: C419
            planned = [seq for seq in seqs if seq.request.budget is None]
        whole = len(planned) == len(seqs)
        if not plans_ahead(controller) or (grown and not planned):  # a request's own budget always holds
            stands = plan.repeats > 0 and (grown or (whole and plan.kind == "plain"))
            return plan.again() if stands else None
        if grown:
            return controller.follow(planned, plan, lambda: whole and self._switches(seqs))
        if not whole:
            return None
        last.clock.lap("host")
        following = controller.follow(seqs, plan, lambda: self._switches(seqs))
        last.clock.lap("draft")  # look-ups are made beside the device
        return following

    def _switches(self, seqs: Sequence[SequenceState]) -> bool:
        """Can the drafter of these sequences go on in another form than that of the round under way?"""
        device = self.drafters.device(seqs)
        return device is not None and device.menu.switches

    def _grown(self, last: LaunchedRound, seats: Seats, plan: RoundPlan) -> TreeBatch | None:
        """Trees of the last form, or of another, where there is room for them."""
        wanted, form, unread = plan.form, last.trees.form, Unread(last.trees, last.scores.hidden)
        nodes = 1 + wanted.nodes if wanted is not None else 1 if form is None else form.nodes
        device = self.drafters.device([seq for seq, _ in seats])
        if device is None or not self._has_room(last, seats, nodes):
            return None
        if form is None and last.scores.greedy is not None and last.scores.greedy.hand_on is not None:
            last.scores.greedy.hand_on()
        return device.launch(seats, wanted, unread)

    def _roots(self, last: LaunchedRound, seats: Seats) -> TreeBatch | None:
        """Lone roots, behind others or behind trees."""
        known = last.scores.greedy
        if known is None or known.next_roots is None:
            return None
        device = None if last.trees.form is None else self.drafters.device([seq for seq, _ in seats])
        if device is not None:
            device.rest(seats, Unread(last.trees, last.scores.hidden))
        return known.next_roots(seats)

    def _has_room(self, last: LaunchedRound, seats: Seats, nodes: int) -> bool:
        """Is there room for `nodes` nodes of each, behind all that the last round may add?"""
        form = last.trees.form
        added = 1 if form is None else form.depth + 1
        rows = [nodes + (added if tree >= 0 else 0) for _, tree in seats]
        return self.target.make_room([seq for seq, _ in seats], rows)

    def _with_starters(
        self, seqs: list[SequenceState], trees: TreeBatch, readers: Sequence[SequenceState], rows: int
    ) -> tuple[list[SequenceState], TreeBatch]:
        """A round with the readers whose prompts its pass completes: their first tokens come with that pass.

        In a plain round a root is one row more. Beside trees from the host no sequence starts.
        """
        starters = list[SequenceState]()
        if trees.form is not None:
            starters, trees = self._in_padding(seqs, trees, readers, rows)
        elif trees.is_plain():
            starters = self.scheduler.starters(readers, len(seqs) + len(readers), rows)
            if starters:
                trees = TreeBatch.chains([seq.tokens[-1:] for seq in (*seqs, *starters)])
        self.scheduler.start(starters)
        return [*seqs, *starters] if starters else seqs, trees

    def _in_padding(
        self,
        others: Sequence[SequenceState],
        trees: TreeBatch,
        readers: Sequence[SequenceState],
        rows: int,
        sampled: bool = True,
    ) -> tuple[list[SequenceState], TreeBatch]:
        """Prefilled sequences that start beside trees of a form, in place of its padding, and the trees of all.

        Forms have trees for 8, 12 or 16 sequences, not for 9: a starter's tree costs nothing there. Its nodes were not
        drafted; what is accepted of them, by chance, is all that counts as drafted. There are no starters where the
        device could not decide about them and `others`: the next round is to overlap this one.
        """
        form, device = trees.form, self.drafters.device(others) if readers and trees.form else None
        if form is None or device is None or not device.menu.switches:
            return [], trees
        starters = self.scheduler.starters(readers, form.rows, rows)[: form.trees - len(trees)]
        has_room = self.target.has_room(*[len(seq.tokens) + form.nodes for seq in starters])
        if not starters or not has_room or not self._device_decides([*others, *starters], sampled):
            return [], trees
        return starters, with_starters(trees, form, [seq.tokens[-1] for seq in starters])

    def _device_decides(self, seqs: Sequence[SequenceState], sampled: bool) -> bool:
        """Does the device decide about all of these (`sampled`: it samples), and does one drafter serve them?"""
        if len({seq.drafting for seq in seqs}) > 1 or not self.drafters.are_gathered(seqs):
            return False
        traits = traits_of(seqs)
        if not all(self.verifiers.is_exact(one.verifier) for one in traits):
            return False
        greedy = all(one.is_plain_greedy for one in traits)
        return greedy or (sampled and self.verifiers.device_decides(seqs))

    # ---- prompts

    def _prefill(self) -> None:
        """No sequence runs: prefill, in whole passes where no other is expected, and start whoever is read."""
        scheduler = self.scheduler
        seqs, rows = scheduler.next_readers(self.target.pass_rows), self.target.pass_rows
        if not scheduler.is_alone(seqs):
            seqs, rows = scheduler.next_chunk(self.prefill_rows, self._prefill_share(0))
        if not seqs:
            if scheduler.next_scored() is None:
                self.timeline.end(no_room_for(next(scheduler.in_turn())))
            return
        clock = self.stats.clock()
        self.timeline.open(seqs)
        self._begin(seqs, rows)
        starters, roots = self._with_starters([], TreeBatch.chains([]), seqs, rows)
        if starters:  # no drafter has seen them yet: the controller is not asked, and plans no trial in vain
            self._launch(starters, roots, seqs, rows, [NOT_DRAFTED] * len(starters), clock)
            return
        chains, scores = self.target.prefill(seqs, self._needs(seqs), rows)
        chunk = scheduler.known_chunk(self.prefill_rows, seqs)
        self.deadline.note_prompts(chunk.seconds and chunk.seconds + self.prefill_rows.plain, self.stats.now())
        self._observe_prompts(seqs, chains, scores)
        self.stats.count_prompts(scores, self._note_prefill(seqs, chains, clock.started), clock)
        self.timeline.change = None

    def _score_prompt(self, seq: SequenceState) -> None:
        """Prefill a part of a prompt whose log-probabilities are asked for: as a chain, because trees have logits."""
        clock, target = self.stats.clock(), self.target
        self.timeline.open([seq])
        self.scheduler.begin([seq])
        at, needs = target.cached_tokens(seq), Needs(self._needs([seq]).hidden_layers)
        part, so_far = seq.tokens[at:-1][:SCORED_ROWS], replace(seq, tokens=Tokens(seq.tokens[: at + 1]))
        if not at:
            target.prefill([so_far], needs)
            self._scored[seq.id] = [None]
        if part and not target.make_room([so_far], [len(part)]):
            self._preempt(seq)
            self.timeline.change = None
            return
        if part:
            chain, after = TreeBatch.chains([part], target.device), seq.tokens[at + 1 : at + 1 + len(part)]
            scores, verdict = target.score([so_far], chain, needs), Verdict.whole_chain(chain, after[-1:])
            self._scored[seq.id] += self.verifiers.prompt_logprobs(scores, seq, after)
            target.commit([so_far], chain, verdict)
            rows = self._note_prefill([seq], chain, clock.started)
            self.drafters.observe([seq], chain, Scores(None, scores.hidden), verdict)
            self.stats.count_prompts(scores, rows, clock)
        if len(self._scored[seq.id]) == len(seq.tokens):
            seq.note_prompt_logprobs(self._scored.pop(seq.id))
        self.timeline.change = None

    def _begin(self, readers: Sequence[SequenceState], rows: int, beside: Sequence[SequenceState] = ()) -> None:
        """The coming pass reads parts of these prompts."""
        self.drafters.gather(readers, beside)
        self.scheduler.begin(readers, rows)

    def _prefill_share(self, running: int) -> int:
        """Rows of prompts in the coming round. The controller is told how many wait for prefill."""
        rows, waiting = 0, NONE_WAIT
        if self.scheduler.has_prompts:
            rows = self.prefill_rows.rows(running, self.scheduler.left_behind(self.prefill_rows.rows()))
            waiting = self.scheduler.waiting_prompts(rows)
        if waiting is not self._waiting_prompts:  # else none wait, as before
            self._waiting_prompts = waiting
            if sees_prompts(self.controller):
                self.controller.note_waiting(waiting)
        return rows

    def _observe_prompts(self, seqs: Sequence[SequenceState], chains: TreeBatch, scores: Scores) -> None:
        """Show chunks of prompts to the drafters: chains accepted whole, with the prompt's next token as bonus."""
        following = [seq.tokens[self.target.cached_tokens(seq)] for seq in seqs]
        self.drafters.observe(seqs, chains, scores, Verdict.whole_chain(chains, following))

    def _note_prefill(self, seqs: Sequence[SequenceState], chains: TreeBatch, started: float) -> int:
        """Chunks of these prompts were prefilled since `started`; returns the rows that were computed."""
        found, stats, seconds = 0, self.stats, self.stats.now() - started
        for seq in seqs:
            if not seq.prompt_seconds:
                reused = self.target.reused_tokens(seq)
                found += reused - len(seq.source)  # the encoder computed these
                seq.note_reuse(reused)
                stats.count_prompt(len(seq.source) + len(seq.tokens), reused)
            seq.note_prompt(started, seconds)
        return chains.nodes - found

    # ---- requests

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_prompts or self.running or self.timeline.events)

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
        """Sequences whose prompts are partly cached."""
        return self.scheduler.reading

    @property
    def running(self) -> list[SequenceState]:
        return self.scheduler.running

    def find(self, seq_id: int) -> SequenceState | None:
        """The sequence behind an id while it is queued, prefilled or running."""
        return self.scheduler.find(seq_id)

    def submit(self, request: Request) -> int:
        seq = self.prepare(request)
        self.enqueue(seq)
        return seq.id

    def prepare(self, request: Request) -> SequenceState:
        """The sequence of a request, if it can be served; a drafter that it is the first to ask for is built."""
        source = self.target.source_rules
        check_request(request, self.target.vocab_size, self.max_length, self.tokenizer is not None, source)
        request = compiled(self.grammars, request)
        params = request.params
        if params.prompt_logprobs is not None:  # every row of its prompt is computed
            request = replace(request, cache_salt=None)
        start = request.prompt if source is None else (source.start,)
        drafter = self.drafters.name_for(request, self.default_drafter)
        if not self.drafters.has(drafter):
            self.settle()  # graphs of a drafter are captured by passes in the same buffers: no other is under way
        drafter = self.drafters.name_beside(request, drafter)  # an unknown or unloadable one is the caller's error
        verifier = request.verifier or self.default_verifier
        if verifier == "auto":
            verifier = "exact" if params.seed is None and not self.can.decides else "coupled"
        rules = None if source is None else source.laws
        seq = SequenceState(
            id=self._next_id,
            request=request,
            seed=fresh_seed() if params.seed is None else params.seed,
            max_length=min(len(start) + params.max_tokens, self.max_length),
            stop_ids=(frozenset() if params.ignore_eos else self.stop_ids) | frozenset(params.stop_token_ids),
            drafter=drafter,
            verifier=verifier,
            shares_noise=self.verifiers.get(verifier).shares_noise,
            detokenizer=Detokenizer(self.tokenizer, params.stop),
            traits=self.verifiers.traits(params, rules, verifier, request.budget is not None),
            tokens=Tokens(start),
            prompt_length=len(start),
            drafting=drafter,
            made=self.stats.now(),
            source_rules=source,
            adapter=None if request.adapter is None else find_adapter(self.adapters, request.adapter),
        )
        self._next_id += 1
        return seq

    def enqueue(self, seq: SequenceState) -> None:
        if not self.drafters.has(seq.drafting):  # it was the head of an adapter that has been unloaded meanwhile
            seq.draft_with()
        if seq.scores_prompt:
            self._scored[seq.id] = []
        self.scheduler.enqueue(seq)

    def abort(self, seq_id: int) -> None:
        seq, first = self.find(seq_id), self.timeline.first
        if first is None or seq in first.change.seqs:
            self.settle()  # then it may have ended
            seq = self.find(seq_id)
        if seq is not None:
            self.timeline.end(seq.ended("aborted"))

    def _preempt(self, seq: SequenceState) -> None:
        seq.note_preemption()
        self.timeline.send_back(seq)
        self.stats.preemptions += 1

    def _forget(self, seq: SequenceState) -> None:
        if seq.finished is not None:
            self._scored.pop(seq.id, None)
        self.target.release(seq)
        self.drafters.forget(seq)
        self.controller.forget(seq)
