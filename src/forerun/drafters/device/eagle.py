"""Captures all graphs of drafts before texts are written: every form of the menu, for every batch size up to a largest.

With each draft go the target's pass over its trees, the commit of the path and the copy of its hidden rows. A graph
holds for contexts up to a length, so there are two of each where contexts may be long. Nothing is captured while texts
are written, unless a budget asks for a form that is not on the menu.

DeviceEagle: EAGLE drafters on a GPU; trees of chosen tokens are grown on the device, others by EagleDrafter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from torch import Tensor

from forerun.core.errors import ForerunError
from forerun.core.offer import Form, Menu, Offer
from forerun.core.types import Budget, Needs, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.device.eagle_graphs import DeviceDraft
from forerun.drafters.device.eagle_plan import BUCKETS, MOST, DraftMenu, bucket_of, forms_for
from forerun.drafters.device.features import DEEPEST
from forerun.drafters.device.fusion import make_net, why_not
from forerun.drafters.heads.eagle_head import EagleConfig, default_layers, read_head
from forerun.models.base import Target
from forerun.models.cuda.plan import SPLIT_SIZES, split_start, splits_to
from forerun.models.cuda.target import CudaDecoder

if TYPE_CHECKING:
    from forerun.drafters.base import Drafter, SwitchesForms


log = logging.getLogger(__name__)
progress = logging.getLogger("forerun.progress")  # what the command line shows while a model is loaded


def capture_menu(
    draft: DeviceDraft, target: CudaDecoder, needs: Needs, max_batch: int, max_length: int
) -> float:
    """Seconds that it took; 0 where nothing is captured. Progress is logged."""
    if not draft.replays.capture:
        return 0.0
    started, jobs = perf_counter(), jobs_of(max_batch, max_length)
    target.passes.compile(min(max_length, target.max_length))  # passes over trees share most of these kernels
    draft.rows.rehearse_reading()
    for i, (bucket, form, farthest) in enumerate(jobs):
        progress.info("capturing drafts for batches of %d: %d of %d", bucket, i + 1, len(jobs))
        trees = draft.rehearse(form, bucket, farthest)
        draft.rows.rehearse(target.rehearse(trees, needs, farthest), trees)
    draft.complete_to = jobs[-1][0]
    spent = perf_counter() - started
    log.info("captured %d drafts and the passes over their trees in %.1f s", len(jobs), spent)
    return spent


def jobs_of(max_batch: int, max_length: int) -> list[tuple[int, Form, int]]:
    """What is captured: batch sizes, forms, and the contexts that they hold for, the shortest last.

    The time of a draft is noted each time it is captured, so the last one, in a short context, counts.
    """
    reaches = contexts_of(max_length)[::-1]
    buckets = [bucket for bucket in BUCKETS if bucket <= bucket_of(min(max_batch, MOST))]
    return [(bucket, form, reach) for bucket in buckets for form in forms_for(bucket) for reach in reaches]


def contexts_of(max_length: int) -> list[int]:
    """One length for each number of splits that a pass may have."""
    found: dict[int, int] = {}
    for splits in SPLIT_SIZES:
        length = min(max_length + DEEPEST, split_start(splits) - 2 * DEEPEST)
        found.setdefault(splits_to(length), length)
    return list(found.values())


LEVELS = Form(5, 5, 1)  # the form whose time per level is offered to controllers that do not read menus
# of a batch that must draft for all of it to share a form: trees nobody asked for widen the pass
SHARED = 0.75


class DraftsOnDevice(Protocol):
    """What grows trees of chosen tokens on the device: a head (DeviceDraft) or a draft model (model.py)."""

    @property
    def menu(self) -> Menu: ...
    @property
    def needs(self) -> Needs: ...
    @property
    def complete_to(self) -> int: ...
    def is_ready(self, seq: Seq) -> bool: ...
    def fitting(self, sequences: int, nodes: int, depth: int, width: int) -> Form | None: ...
    def knows(self, form: Form, sequences: int) -> bool: ...
    def propose(self, seqs: Sequence[Seq], form: Form) -> TreeBatch: ...
    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None: ...
    def forget(self, seq: Seq) -> None: ...


Draft = TypeVar("Draft", bound=DraftsOnDevice)


class DeviceDrafter(Generic[Draft]):
    """Implements forerun.drafters.base.Drafter over a draft on the device and, for other sequences, a plain one.

    A sequence keeps its drafter. The device drafts tokens that are chosen, which any verifier accepts by the target's
    law, under shared noise where the verifier couples by it. The plain drafter, loaded for the first that needs it,
    drafts for all others that are sampled, where drafts are to be sampled too (`sampled`). If the device fails (a
    kernel that does not compile, a graph that cannot be captured), all sequences are drafted plainly from then on;
    those that it has read rows of are written to their end without drafts.
    """

    def __init__(
        self,
        draft: Draft,
        make_plain: Callable[[], Drafter],
        *,
        sampled: bool = False,
    ) -> None:
        self.draft, self._make_plain, self._sampled = draft, make_plain, sampled
        self.needs = draft.needs
        self._plain: Drafter | None = None
        self._failed = False
        self._latest: Form | None = None  # of the last draft
        self._offer = Offer()  # the same for every sequence

    def offer(self, seq: Seq) -> Offer:
        """The menu of forms; and a level, for controllers that plan each sequence alone."""
        if self._failed or not self._grows(seq):
            return self.plain.offer(seq)
        menu = self.draft.menu
        level = menu.seconds(LEVELS, 1) / LEVELS.depth
        if level != self._offer.level:
            self._offer = Offer((level,), menu=menu)
        return self._offer

    @property
    def switcher(self) -> SwitchesForms | None:
        """The draft on the device, where that can change its form behind unread rounds."""
        return self.draft if isinstance(self.draft, DeviceDraft) and not self._failed else None

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
        """Is this sequence drafted for on the device?"""
        return seq.params.is_greedy or seq.shares_noise or not self._sampled

    def _route(self, seq: Seq, budget: Budget) -> str:
        if not self._grows(seq):
            return "plain"
        return "device" if budget.runs and self.draft.is_ready(seq) else "idle"

    def _grow(self, seqs: Sequence[Seq], budgets: Sequence[Budget], form: Form | None) -> TreeBatch:
        """Trees of one form for all of these sequences, or none where no form fits."""
        if form is None:
            return _lone_roots(seqs, budgets)
        try:
            grown = self.draft.propose(seqs, form)
        except Exception as error:  # Triton, its assembler and the driver may raise anything
            self._fail(error)
            return self.plain.propose(seqs, budgets)
        self._latest = form
        return grown

    def _grow_apart(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        """For a part of a batch, in a form that is captured and within all budgets."""
        sizes = ((one.nodes, one.depth, one.width) for one in budgets)
        most = Form(*map(min, zip(*sizes, strict=True)))
        return self._grow(seqs, budgets, self._captured_form(len(seqs), most))

    def _captured_form(self, sequences: int, most: Form) -> Form | None:
        """The largest form within some sizes that needs no new graph."""
        form = self.draft.fitting(sequences, *most)
        if form is None or self.draft.knows(form, sequences):
            return form
        within = (
            one
            for one in self.draft.menu.forms
            if all(map(int.__le__, one, form)) and self.draft.knows(one, sequences)
        )
        return max(within, default=None)

    def _shared_form(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> Form | None:
        """What every budget allows; budgets that were cut because a sequence ends do not count.

        Where all were cut it is the form of the menu that was cut, or the last one, if that has no more nodes: the
        sequence is cut behind it, and a smaller form would have to be captured.
        """
        drafting = [(seq, budget) for seq, budget in zip(seqs, budgets, strict=True) if budget.runs]
        whole = [budget for seq, budget in drafting if budget.depth < seq.max_length - len(seq.tokens) - 1]
        sizes = [(one.nodes, one.depth, one.width) for one in whole or [budget for _, budget in drafting]]
        most = Form(*map(min, zip(*sizes, strict=True)))
        if not whole:
            meant = [
                one for one in self.draft.menu.forms if (one.nodes, one.width) == (most.nodes, most.width)
            ]
            for one in (*meant, self._latest):
                if one is not None and one.nodes <= most.nodes and self.draft.knows(one, len(seqs)):
                    return one
            return self._captured_form(len(seqs), most)
        form = self.draft.fitting(len(seqs), *most)
        if form is not None and form in self.draft.menu.forms and len(seqs) <= self.draft.complete_to:
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
            "drafting on the device failed, so it is done plainly: %s: %s", type(error).__name__, reason
        )
        log.debug("where it failed", exc_info=error)

    def _propose_plainly(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        return self.plain.propose(seqs, budgets)


class DeviceEagle(DeviceDrafter[DeviceDraft]):
    """EAGLE heads, and multi-token-prediction layers."""


def on_device(
    folder: Path,
    target: Target,
    make_plain: Callable[[], Drafter],
    *,
    read: Callable[[Path], tuple[EagleConfig, dict[str, Tensor]]] = read_head,
    sampled: bool = False,
    max_batch: int = 1,
    max_length: int | None = None,
) -> DeviceEagle | None:
    """A drafter that drafts on the target's device, where head and target allow it; its graphs are captured here."""
    if not isinstance(target, CudaDecoder):
        return None
    config, weights = read(folder)
    if why_not(config, target):
        return None
    if not config.layers:
        config = replace(config, layers=default_layers(target.config.layers))
    target.shared().must_fit(config.target_width, config.vocab_size, config.target)
    menu = DraftMenu(config.rates)
    try:
        draft = DeviceDraft(*make_net(config, weights, target), capture=target.kernels == "triton", menu=menu)
        drafter = DeviceEagle(draft, make_plain, sampled=sampled)
        capture_menu(draft, target, drafter.needs, max_batch, max_length or target.max_length)
    except ForerunError:
        raise
    except Exception as error:  # no memory for its buffers, no working Triton: neither stops generation
        log.warning("no drafts on the device, so the head runs plainly: %s: %s", type(error).__name__, error)
        return None
    return drafter


def _lone_roots(seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
    return TreeBatch.chains([seq.tokens[-1:] for seq in seqs])
