"""DeviceEagle: the EAGLE-3 drafter on a GPU; greedy sequences are drafted on the device, others by EagleDrafter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from forerun.drafters.eagle.config import default_layers
from forerun.drafters.eagle.cuda.draft_graphs import MOST, DeviceDraft
from forerun.drafters.eagle.cuda.draft_plan import UNKNOWN, DraftShape, best_draft_shape
from forerun.drafters.eagle.cuda.feature_fusion import make_net, why_not
from forerun.drafters.eagle.files import read_head
from forerun.errors import ForerunError
from forerun.models.base import Target
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.cuda.target import CudaDecoder
from forerun.offers import Offer
from forerun.types import Budget, Needs, Scores, Seq, TreeBatch, Verdict

if TYPE_CHECKING:
    from forerun.drafters.base import Drafter

log = logging.getLogger(__name__)

UNMEASURED = 2e-4  # seconds per level


class DeviceEagle:
    """Implements forerun.drafters.base.Drafter over a draft on the device and, for other sequences, a plain one.

    A sequence keeps its drafter: greedy ones the device, those that are sampled, or whose verifier couples by noise,
    the plain drafter, which is loaded for the first of them. If the device fails (a kernel that does not compile, a
    graph that cannot be captured), all sequences are drafted plainly from then on.
    """

    def __init__(
        self,
        draft: DeviceDraft,
        make_plain: Callable[[], Drafter],
        rates: Sequence[Sequence[float]] = UNKNOWN,
    ) -> None:
        self.draft, self._make_plain, self._rates = draft, make_plain, rates or UNKNOWN
        self.needs = Needs(tuple(sorted(set(draft.feature_fusion.layers))))
        self._plain: Drafter | None = None
        self._proven = False  # the device has drafted before
        self._failed = False
        self._choices: dict[Hashable, DraftShape] = {}

    def offer(self, seq: Seq) -> Offer:
        """A level; before the first capture, about the time to read the head's weights."""
        if self._failed or not seq.params.is_greedy:
            return self.plain.offer(seq)
        return Offer((self.draft.seconds or UNMEASURED,))

    @property
    def plain(self) -> Drafter:
        if self._plain is None:
            self._plain = self._make_plain()
        return self._plain

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        if self._failed:
            return self.plain.propose(seqs, budgets)
        parts: list[TreeBatch] = []
        order: list[int] = []
        routes = [self._route(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]
        makers = {"idle": _lone_roots, "device": self._grow, "plain": self._propose_plainly}
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
        ours = [b for b, seq in enumerate(seqs) if seq.params.is_greedy]
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

    def _route(self, seq: Seq, budget: Budget) -> str:
        if not seq.params.is_greedy:
            return "plain"
        return "device" if budget.runs and self.draft.is_ready(seq, budget.depth) else "idle"

    def _grow(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        """Trees of one form: what every budget allows, and what one pass over all of them takes."""
        nodes, depth, width = map(
            min, zip(*((one.nodes, one.depth, one.width) for one in budgets), strict=True)
        )
        nodes = min(nodes, MAX_ROWS // len(seqs) - 1)
        if len(seqs) > MOST or nodes < 1:
            return _lone_roots(seqs, budgets)
        ends = depth >= min(seq.max_length - len(seq.tokens) for seq in seqs) - 1
        if (price := budgets[0].price) is not None and not ends:
            nodes, depth, width = self._best_shape(nodes, depth, width, price, budgets[0].level)
        unread = [] if self._proven else [self.draft.unread(seq) for seq in seqs]
        try:
            grown = self.draft.propose(seqs, nodes, depth, width, ends=ends)
        except Exception as error:  # Triton, its assembler and the driver may raise anything
            self._fail(error)
            for seq, rows in zip(seqs, unread, strict=False):
                if rows is not None:
                    self._hand_over(seq, rows)
            return self.plain.propose(seqs, budgets)
        self._proven = self._proven or grown is not None
        return _lone_roots(seqs, budgets) if grown is None else grown

    def _best_shape(
        self, nodes: int, depth: int, width: int, price: tuple[float, ...], level: float
    ) -> DraftShape:
        """The shape that pays best at the controller's prices; computed again only when these have changed."""
        key = (
            nodes,
            depth,
            width,
            round(level, 2),
            tuple(round(price[min(n, len(price) - 1)], 1) for n in (8, 24, 59)),
        )
        if key not in self._choices:
            self._choices[key] = best_draft_shape(self._rates, (nodes, depth, width), price, level)
        return self._choices[key]

    def _observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        try:
            self.draft.observe(seqs, trees, scores, verdict)
        except Exception as error:  # as above
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """From now on draft plainly; running sequences whose rows the device has read get no more drafts."""
        self._failed = True
        reason = (str(error).splitlines() or [""])[0]
        log.warning(
            "drafting on the device failed, so the head runs plainly: %s: %s", type(error).__name__, reason
        )
        log.debug("where it failed", exc_info=error)

    def _hand_over(self, seq: Seq, rows: Tensor) -> None:
        """Let the plain drafter observe all rows of a sequence [T, F], as one prompt."""
        chain = TreeBatch.chains([seq.tokens[: len(rows)]])
        layers = self.draft.feature_fusion.layers
        hidden = dict(zip(layers, rows.chunk(len(layers), -1), strict=True))
        verdict = Verdict.whole_chain(chain, [seq.tokens[len(rows)]])
        self.plain.observe([seq], chain, Scores(None, hidden), verdict)

    def _propose_plainly(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        return self.plain.propose(seqs, budgets)


def on_device(folder: Path, target: Target, make_plain: Callable[[], Drafter]) -> DeviceEagle | None:
    """A drafter that drafts on the target's device, where head and target allow it."""
    if not isinstance(target, CudaDecoder):
        return None
    config, weights = read_head(folder)
    if why_not(config, target):
        return None
    if not config.layers:
        config = replace(config, layers=default_layers(target.config.layers))
    target.shared().must_fit(config.target_width, config.vocab_size, config.target)
    try:
        draft = DeviceDraft(*make_net(config, weights, target), capture=target.kernels == "triton")
    except ForerunError:
        raise
    except Exception as error:  # no memory for its buffers, no working Triton: neither stops generation
        log.warning("no drafts on the device, so the head runs plainly: %s: %s", type(error).__name__, error)
        return None
    return DeviceEagle(draft, make_plain, config.rates)


def _lone_roots(seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
    return TreeBatch.chains([seq.tokens[-1:] for seq in seqs])
