"""OnDevice: a Drafter over a DeviceDrafter, and DeviceDraft: what heads and draft models have in common there.

With each draft go the target's pass over its trees, the commit of the path and the copy of its hidden rows. What is
captured are all forms of the menu, for every batch size up to a largest; there are two of each where contexts may be
long. All of it can be left for later (forerun.models.cuda.graphs): until then texts are written plainly. Nothing is
captured inside of a round, unless a budget asks for another form.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor

from forerun.core.errors import ForerunError
from forerun.core.offer import NEVER, Form, Offer
from forerun.core.tree import ints_of
from forerun.core.types import Budget, Needs, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.base import Drafter, lone_roots
from forerun.drafters.device.plan import MOST, DraftJob, DraftMenu, form_of
from forerun.drafters.device.protocol import DeviceDrafter, Seats, Unread
from forerun.models.base import Target
from forerun.models.cuda.compile.together import Compiling
from forerun.models.cuda.graphs import Replays
from forerun.models.cuda.target import CudaDecoder

log = logging.getLogger(__name__)
progress = logging.getLogger("forerun.progress")  # what the command line shows while a model is loaded

LEVELS = Form(5, 5, 1)  # the form whose time per level is offered to controllers that do not read menus
# of a batch that must draft for all of it to share a form: trees nobody asked for widen the pass
SHARED = 0.75

Going = Sequence[tuple[Seq, Sequence[int]]]  # sequences, and the tokens that they get now


@dataclass(frozen=True, slots=True)
class Launched:
    """A draft that is under way: whose trees lie in the device's buffer, in this order."""

    trees: dict[tuple[int, int], int]  # by sequence and root: -1 = only the device knows it
    form: Form
    drafted: frozenset[int]  # sequences whose trees are not those of padding


class DeviceDraft(ABC):
    """A DeviceDrafter whose trees lie in one buffer; the next draft starts as soon as a round was read.

    It starts in the form of the last: the device drafts while the host ends the round. Sequences whose prompts were
    read meanwhile are drafted for with the others. If a sequence then leaves, its tree is dropped; if another joins, it
    alone is drafted for; another form is drafted anew.
    """

    def __init__(self, menu: DraftMenu, graphs: Replays, trees: Tensor) -> None:
        """`trees`: [2, MAX_ROWS] tokens and parents, where drafts leave their trees."""
        self.menu, self.replays, self.trees = menu, graphs, trees
        self._ahead: Launched | None = None  # a draft that was started before it was asked for
        self._proposed: list[tuple[TreeBatch, Launched]] = []  # what is being verified: two where one follows

    needs = Needs()

    @abstractmethod
    def is_ready(self, seq: Seq) -> bool: ...
    @abstractmethod
    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None: ...
    @abstractmethod
    def forget(self, seq: Seq) -> None: ...
    @abstractmethod
    def _prepare(self, target: CudaDecoder, max_length: int) -> int:
        """Capture what is the same for all forms; the length of context up to which it drafts."""

    @abstractmethod
    def _capture(self, target: CudaDecoder | None, bucket: int, form: Form, farthest: int) -> None:
        """Capture and time a draft in contexts up to `farthest`; with a target, its pass over the trees too."""

    @abstractmethod
    def _start(self, going: Going, form: Form) -> frozenset[int]:
        """Draft behind these; whose trees are not those of padding."""

    @abstractmethod
    def _follow(self, seats: Seats, form: Form, behind: Unread) -> TreeBatch | None: ...

    def rest(self, seats: Seats, behind: Unread) -> None:  # noqa: B027
        """Nothing of the pass is needed."""

    def launch(self, seats: Seats, form: Form | None, behind: Unread | None = None) -> TreeBatch | None:
        """See forerun.drafters.device.protocol.DeviceDrafter."""
        if behind is not None:
            last = form if behind.trees.form is None else form or form_of(behind.trees.form)
            fits = len(seats) <= MOST and self._holds(seats)
            return self._follow(seats, last, behind) if last is not None and fits else None
        assert form is not None, "a form is known unless the draft follows another"
        seqs = [seq for seq, _ in seats]
        if not self.menu.knows(form, len(seqs)):  # not on the menu: the budget insists on it
            farthest = max(len(seq.tokens) for seq in seqs)
            self._rehearse(None, DraftJob(self.menu.bucket(form, len(seqs)), form, (farthest,)))
        wanted = {(seq.id, seq.tokens[-1]): i for i, seq in enumerate(seqs)}
        ahead, self._ahead = self._ahead, None  # none where something was captured: that overwrites its trees
        if ahead is None or ahead.form != form or not any(one in ahead.trees for one in wanted):
            drafted = self._start([(seq, ()) for seq in seqs], form)
        else:
            drafted = ahead.drafted
            if [*ahead.trees] != [*wanted]:
                drafted |= self._rearrange(ahead.trees, seqs, form)
        return self._propose(Launched(wanted, form, drafted))

    def _propose(self, launched: Launched, follows: tuple[int, ...] | None = None) -> TreeBatch:
        form, count = launched.form, len(launched.trees)
        trees, seconds = self.menu.trees(form, count), self.menu.drafting(form, count)
        tokens, parents = self.trees[:, : count * trees.nodes]
        starts = trees.starts(count)
        batch = TreeBatch(tokens, parents, starts, form=trees, draft_seconds=seconds, follows=follows)
        self._proposed = [*(self._proposed[-1:] if follows else ()), (batch, launched)]
        return batch

    def _rearrange(self, known: dict[tuple[int, int], int], seqs: Sequence[Seq], form: Form) -> frozenset[int]:
        """The trees that are there, without those of sequences that left, and new ones for those that joined."""
        nodes, drafted = form.nodes + 1, frozenset[int]()
        trees = self.trees[:, : len(known) * nodes].view(2, -1, nodes)
        missing = [seq for seq in seqs if (seq.id, seq.tokens[-1]) not in known]
        if missing:
            trees = trees.clone()
            drafted = self._start([(seq, ()) for seq in missing], form)
            fresh = self.trees[:, : len(missing) * nodes].view(2, -1, nodes)
            trees = torch.cat((trees, fresh), 1)
        places = known | {(seq.id, seq.tokens[-1]): len(known) + i for i, seq in enumerate(missing)}
        order = ints_of([places[seq.id, seq.tokens[-1]] for seq in seqs], trees.device)
        self.trees[:, : len(seqs) * nodes].view(2, -1, nodes).copy_(trees.index_select(1, order))
        return drafted

    def _go_ahead(self, going: Going, form: Form) -> None:
        """Start the next draft now, for all of these that do not end here."""
        going = [(seq, fresh) for seq, fresh in going if _goes_on(seq, fresh)][:MOST]
        if going and self.menu.knows(form, len(going)) and self._holds(going):
            wanted = {(seq.id, fresh[-1] if fresh else seq.tokens[-1]): i for i, (seq, fresh) in enumerate(going)}
            self._ahead = Launched(wanted, form, self._start(going, form))

    def _holds(self, some: Sequence[tuple[Seq, object]]) -> bool:
        return self.menu.holds(max([len(seq.tokens) for seq, _ in some]))

    def _drop_ahead(self, seqs: Sequence[Seq]) -> None:
        """A round of these was read: a draft that was started for them has become useless."""
        if self._ahead is not None:
            started = {seq_id for seq_id, _ in self._ahead.trees}
            if any([seq.id in started for seq in seqs]):  # noqa: C419 - quicker
                self._ahead = None

    def rehearse(
        self,
        target: Target,
        max_batch: int,
        max_length: int,
        at_once: int = MOST,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """See forerun.drafters.device.protocol.DeviceDrafter. Progress is logged."""
        if not self.replays.capture:
            return
        assert isinstance(target, CudaDecoder), "other targets have no graphs"
        now = target.can.clock
        started, reach = now(), self._prepare(target, max_length)
        jobs = self.menu.jobs(max_batch, reach)
        soon = [job for job in jobs if job.bucket <= max(at_once, 0 if self._compiles else jobs[0].bucket)]
        if soon and (begun := self._compile(target, soon)):
            begun.finish()
        for i, job in enumerate(soon):
            progress.info("capturing drafts for batches of %d: %d of %d", job.bucket, i + 1, len(soon))
            self._rehearse(target, job)
        self.menu.complete_to = jobs[-1].bucket
        if soon:
            log.info("captured %d drafts and the passes over their trees in %.1f s", len(soon), now() - started)
        self._leave_for_later(target, jobs[len(soon) :], failed)

    @property
    def _compiles(self) -> bool:
        """Can kernels be compiled without drafting? If not, captures compile them one by one: never beside texts."""
        return False

    def _compile(self, target: CudaDecoder, jobs: Sequence[DraftJob]) -> Compiling | None:
        """Begin to compile the kernels of these side by side, if that can be done."""
        return None

    def _leave_for_later(
        self, target: CudaDecoder, jobs: Sequence[DraftJob], failed: Callable[[Exception], None]
    ) -> None:
        """Unless this drafter is dropped meanwhile, or the first of these fails."""
        this, lost = ref(self), list[Exception]()

        def compile_some(some: Sequence[DraftJob]) -> Compiling | None:
            draft = this()
            return None if draft is None or lost else draft._compile(target, some)

        def capture(job: DraftJob) -> None:
            draft = this()
            if draft is not None and not lost:
                draft._rehearse(target, job)

        def lose(error: Exception) -> None:
            lost.append(error)
            failed(error)

        for bucket, beyond in dict.fromkeys((job.bucket, job.beyond) for job in jobs):
            some = [job for job in jobs if (job.bucket, job.beyond) == (bucket, beyond)]
            smaller = max((one for one in self.menu.buckets if one < bucket), default=0)
            far = f" behind more than {beyond} tokens" * bool(beyond)
            whom = "one sequence" if bucket == 1 else f"batches of {bucket} sequences"
            target.later.add(
                f"drafts for {whom}{far}", range(smaller + 1, bucket + 1), partial(compile_some, some),
                [partial(capture, job) for job in some], lose if not (smaller or beyond) else None,
            )  # fmt: skip
        if jobs:
            log.info("%d drafts are captured when they are needed, or when nothing is written", len(jobs))

    def _rehearse(self, target: CudaDecoder | None, job: DraftJob) -> None:
        self._proposed, self._ahead = [], None  # whose trees are overwritten, also where it fails
        for farthest in job.reaches:
            self._capture(target, job.bucket, job.form, farthest)
        self.menu.note_captured(job.bucket, job.form, job.beyond)


def _goes_on(seq: Seq, fresh: Sequence[int]) -> bool:
    return len(seq.tokens) + len(fresh) < seq.max_length and not seq.stop_ids.intersection(fresh)


Draft = TypeVar("Draft", bound=DeviceDrafter)


class OnDevice(Generic[Draft]):
    """Implements forerun.drafters.base.Drafter over a draft on the device and, for other sequences, a plain one.

    A sequence keeps its drafter. The device drafts tokens that are chosen, which any verifier accepts by the target's
    law, under shared noise where the verifier couples by it. The plain drafter, loaded for the first that needs it,
    drafts for all others that are sampled, where drafts are to be sampled too (`sampled`), and for those that the
    device cannot draft for (`excludes`). If the device fails (a kernel that does not compile, a graph that cannot be
    captured), all sequences are drafted plainly from then on; those that it has read rows of are written to their end
    without drafts.
    """

    def __init__(
        self,
        draft: Draft,
        make_plain: Callable[[], Drafter],
        *,
        sampled: bool = False,
        excludes: Callable[[Seq], bool] = lambda seq: False,
        stops: bool = False,
    ) -> None:
        """`stops`: the draft leaves out nodes by the price of a budget."""
        self.draft, self._make_plain, self._sampled, self._excludes = draft, make_plain, sampled, excludes
        self.needs, self._stops = draft.needs, stops
        self._plain: Drafter | None = None
        self._failed = False
        self._latest: Form | None = None  # of the last draft
        self._offer = Offer()  # the same for every sequence

    def offer(self, seq: Seq) -> Offer:
        """The menu of forms; and a level, for controllers that plan each sequence alone."""
        if self._failed or not self._grows(seq):
            return self.plain.offer(seq)
        menu = self.draft.menu
        if not menu.holds(len(seq.tokens)):
            return NEVER
        level = menu.seconds(LEVELS, 1) / LEVELS.depth
        if level != self._offer.level:
            self._offer = Offer((level,), menu=menu, stops=self._stops)
        return self._offer

    def device(self, seqs: Sequence[Seq]) -> DeviceDrafter | None:
        return None if self._failed else self.draft

    @property
    def plain(self) -> Drafter:
        if self._plain is None:
            self._plain = self._make_plain()
        return self._plain

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        """Where most of a batch drafts, all of it shares a form; others are drafted for apart."""
        if self._failed:
            return self.plain.propose(seqs, budgets)
        routes = [self._route(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]
        drafting = routes.count("device")
        if "plain" not in routes and drafting >= max(1, SHARED * len(seqs)):
            return self._grow(seqs, budgets, self._shared_form(seqs, budgets))
        parts: list[TreeBatch] = []
        order: list[int] = []
        makers = {"idle": _lone_roots, "device": self._grow_apart, "plain": self._propose_plainly}
        for name, propose in makers.items():
            which = [b for b, route in enumerate(routes) if route == name]
            if which:
                parts.append(propose([seqs[b] for b in which], [budgets[b] for b in which]))
                order += which
        return TreeBatch.join(parts, order)

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        if self._failed:
            self.plain.observe(seqs, trees, scores, verdict)
            return
        ours = [b for b, seq in enumerate(seqs) if self._grows(seq)] if self._sampled else range(len(seqs))
        if len(ours) == len(seqs):
            self._observe(seqs, trees, scores, verdict)
            return
        others = [b for b in range(len(seqs)) if b not in ours]
        for which, observe in ((ours, self._observe), (others, self.plain.observe)):
            if which:
                nodes = trees.nodes_of(which)
                hidden = {layer: rows[nodes.to(rows.device)] for layer, rows in scores.hidden.items()}
                cut = Verdict(verdict.paths[which], verdict.accepted[which], verdict.bonus[which])
                observe([seqs[b] for b in which], trees.select(which), Scores(None, hidden), cut)

    def forget(self, seq: Seq) -> None:
        self.draft.forget(seq)
        if self._plain is not None:
            self._plain.forget(seq)

    def _grows(self, seq: Seq) -> bool:
        chosen = seq.params.is_greedy or seq.shares_noise or not self._sampled
        return chosen and not self._excludes(seq)

    def _route(self, seq: Seq, budget: Budget) -> str:
        if not self._grows(seq):
            return "plain"
        ready = budget.runs and self.draft.menu.holds(len(seq.tokens)) and self.draft.is_ready(seq)
        return "device" if ready else "idle"

    def _grow(self, seqs: Sequence[Seq], budgets: Sequence[Budget], form: Form | None) -> TreeBatch:
        """Trees of one form for all of these sequences, or none where no form fits."""
        if form is None:
            return _lone_roots(seqs, budgets)
        self.draft.menu.take_price(budgets[0].price)
        try:
            grown = self.draft.launch([(seq, -1) for seq in seqs], form)
        except Exception as error:  # Triton, its assembler and the driver may raise anything
            self._fail(error)
            return self.plain.propose(seqs, budgets)
        assert grown is not None, "it follows no unread round"
        self._latest = form
        return grown

    def _grow_apart(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        """For a part of a batch, in a form that is captured and within all budgets."""
        return self._grow(seqs, budgets, self._captured_form(len(seqs), _within(budgets)))

    def _captured_form(self, sequences: int, most: Form) -> Form | None:
        """The largest form within some sizes that needs no new graph."""
        menu = self.draft.menu
        form = menu.fitting(sequences, *most.sizes)
        if form is None or menu.knows(form, sequences):
            return form
        within = (
            one for one in menu.forms if all(map(int.__le__, one.sizes, form.sizes)) and menu.knows(one, sequences)
        )
        return max(within, default=None)

    def _shared_form(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> Form | None:
        """What every budget allows; budgets that were cut because a sequence ends do not count.

        Where all were cut it is the form of the menu that was cut, or the last one, if that has no more nodes: the
        sequence is cut behind it, and a smaller form would have to be captured.
        """
        menu = self.draft.menu
        drafting = [(seq, budget) for seq, budget in zip(seqs, budgets, strict=True) if budget.runs]
        whole = [budget for seq, budget in drafting if budget.depth < seq.max_length - len(seq.tokens) - 1]
        most = _within(whole or [budget for _, budget in drafting])
        if not whole:
            meant = [one for one in menu.forms if (one.nodes, one.width) == (most.nodes, most.width)]
            for one in (*meant, self._latest):
                if one is not None and one.nodes <= most.nodes and menu.knows(one, len(seqs)):
                    return one
            return self._captured_form(len(seqs), most)
        form = menu.fitting(len(seqs), *most.sizes)
        if form is not None and form in menu.forms and len(seqs) <= menu.complete_to:
            return self._captured_form(len(seqs), form)  # which may not be on the menu of so many
        return form

    def _observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        try:
            self.draft.observe(seqs, trees, scores, verdict)
        except Exception as error:  # as above
            self._fail(error)
            self.plain.observe(seqs, trees, scores, verdict)

    def _fail(self, error: Exception) -> None:
        """From now on draft plainly."""
        self._failed = True
        reason = (str(error).splitlines() or [""])[0]
        log.warning(
            "drafting on the device failed; these sequences are decoded plainly: %s: %s", type(error).__name__, reason
        )
        log.debug("where it failed", exc_info=error)

    def _propose_plainly(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        return self.plain.propose(seqs, budgets)


def built(
    make: Callable[[], OnDevice[Draft]], target: Target, max_batch: int, max_length: int
) -> OnDevice[Draft] | None:
    try:
        drafter = make()
        this = ref(drafter)

        def fail(error: Exception) -> None:
            if (failed := this()) is not None:
                failed._fail(error)

        drafter.draft.rehearse(target, max_batch, max_length, at_once=0, failed=fail)
    except ForerunError:
        raise
    except Exception as error:  # no memory for its buffers, no working Triton: neither stops generation
        log.warning("the head cannot draft on the GPU, so the host drafts: %s: %s", type(error).__name__, error)
        return None
    return drafter


def _within(budgets: Sequence[Budget]) -> Form:
    """The sizes that all of these allow."""
    return Form(*map(min, zip(*((one.nodes, one.depth, one.width) for one in budgets), strict=True)))


def _lone_roots(seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
    return lone_roots(seqs)
