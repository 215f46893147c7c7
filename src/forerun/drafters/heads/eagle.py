"""EagleDrafter: EAGLE-1 (a chain, or a tree of one shape), EAGLE-2 (a tree that follows confidence), EAGLE-3.

Each sequence has a KV cache of its own for the head, one slot per row. Before a draft, the rows of tokens committed
since the last one are run with the target's *true* features and kept; the rows of the draft itself are written behind
them, seen by their own descendants only, and dropped. So a draft never depends on earlier drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from forerun.core.clock import WALL, Clock
from forerun.core.errors import InvalidInput
from forerun.core.offer import Offer
from forerun.core.types import Budget, Needs, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.base import Drafter, Parts, lone_roots
from forerun.drafters.heads.base import (
    UNMEASURED,
    Calibration,
    Meter,
    ObservedRows,
    head_dtype,
    is_drawn,
    is_ready,
    observe_rows,
    wants_sampling,
)
from forerun.drafters.heads.eagle_head import EagleConfig, EagleHead, Kind, default_layers, read_head
from forerun.drafters.heads.eagle_native import NativeHead, NativeRunner, WholeDraft
from forerun.drafters.heads.eagle_runner import TorchRunner
from forerun.drafters.heads.growth import Ranks, Steps, Tree, grow_ranked, lay_out, sample_trees
from forerun.models.base import Target

PROMPT = 32  # more rows than this at once are a prompt's
READING = 0.15  # of a level: what a row of a prompt takes, until one was read
# How often EAGLE-1's first ranks are right, by level: what a head without measured rates is drafted with.
_RATES = ((0.6, 0.15, 0.07, 0.04, 0.03), *[(0.5, 0.13, 0.06, 0.035, 0.025)] * 7)


class Runner(Protocol):
    """Runs a head on one kind of device: keeps its KV cache of each sequence, and starts drafts."""

    def begin(self, seqs: Sequence[Seq], sequences: Sequence[ObservedRows], budgets: Sequence[Budget]) -> RunnerSteps:
        """Run the observed rows of these sequences through the head; the result drafts for them."""
        ...

    def draft(self, seq: Seq, observed: ObservedRows, budget: Budget, calibration: Calibration) -> WholeDraft | None:
        """The same and the tree itself in one go; None where only `begin` will do."""
        ...

    def forget(self, seq_id: int) -> None: ...


class RunnerSteps(Steps, Protocol):
    """The draft of one batch: to be asked for logits, or only for the likeliest tokens."""

    levels: int  # passes of the head so far, the first one included

    def ranks(self, seqs: Sequence[Seq]) -> Ranks: ...


def runner_for(head: EagleHead | NativeHead) -> Runner:
    return NativeRunner(head) if isinstance(head, NativeHead) else TorchRunner(head)


class EagleDrafter:
    """EAGLE heads; `dynamic` trees follow the head's confidence, static ones the measured rates of its ranks."""

    kind: Kind = "eagle"
    dynamic = False

    def __init__(self, head: EagleHead | NativeHead, *, sampled: bool = False, clock: Clock = WALL) -> None:
        self.head, self.sampled = head, sampled
        config = head.config
        self.needs = Needs(tuple(sorted(set(config.layers))), match_length=0, may_run=True)
        self._sequences: dict[int, ObservedRows] = {}
        self._runner = runner_for(head)
        self._first, self._further = Meter(clock), Meter(clock)  # levels: the first reads new rows too, and costs more
        self._reading = 0.0  # seconds per row of a prompt
        self._expected: dict[int, float] = {}  # tokens of the last draft that should be accepted
        self._rates = None if self.dynamic else config.rates or _RATES
        self._offer = Offer()  # the last one, which often holds for the next round too

    @classmethod
    def read(cls, folder: Path) -> tuple[EagleConfig, dict[str, Tensor]]:
        return read_head(folder, kind=cls.kind)

    @classmethod
    def load(cls, folder: Path, target: Target) -> EagleHead | NativeHead:
        return load_head(folder, target, cls.kind)

    @classmethod
    def build(cls, parts: Parts) -> Drafter:
        """On a GPU drafting stays on the device, in trees that follow the head's confidence, where that can be."""
        folder, sampled = parts.head_folder(cls.kind), wants_sampling(parts.speculative, parts.target.can)

        def plain() -> Drafter:
            return cls(cls.load(folder, parts.target), sampled=sampled, clock=parts.target.can.clock)

        if not parts.target.can.captures:
            return plain()
        from forerun.drafters.device.eagle import on_device

        return on_device(
            folder, parts.target, plain, read=cls.read, sampled=sampled,
            max_batch=parts.max_batch, max_length=parts.max_length,
        ) or plain()  # fmt: skip

    def offer(self, seq: Seq) -> Offer:
        """A level, and the rows of a prompt that it has not read; a dynamic tree stops where confidence is low."""
        first, observed = self._first.seconds or UNMEASURED, self._sequences.get(seq.id)
        levels = first, self._further.seconds or first
        unread = len(observed.tokens) if observed is not None else 0
        start = unread * (self._reading or READING * first) if unread > PROMPT else 0.0
        chosen, expected, last = not self._draws(seq), self._expected.get(seq.id), self._offer
        if (levels, start, chosen, expected) != (last.seconds, last.start, last.chosen, last.expected):
            last = Offer(levels, start, chosen=chosen, stops=self.dynamic and chosen, expected=expected)
            self._offer = last
        return last

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        if len(seqs) == 1 and self._rates is None:
            if not budgets[0].nodes:
                return lone_roots(seqs)
            tree = self._draft_alone(seqs[0], budgets[0])
            if tree is not None:
                return TreeBatch.trees([tree])
        trees = [([seq.tokens[-1]], [-1]) for seq in seqs]
        rows = [[-1] for _ in seqs]
        laws: list[Tensor] = []
        limit = self.head.config.max_length
        live = [
            b
            for b, seq in enumerate(seqs)
            if is_ready(self._sequences.get(seq.id), seq, budgets[b]) and len(seq.tokens) + budgets[b].depth <= limit
        ]
        chosen = [b for b in live if not self._draws(seqs[b])]
        drawn = [b for b in live if self._draws(seqs[b])]
        if chosen:
            some, limits = [seqs[b] for b in chosen], [budgets[b] for b in chosen]
            steps = self._begin(some, limits)
            for b, tree in zip(chosen, self._grow(steps, some, limits), strict=True):
                trees[b], rows[b] = tree, [-1] * len(tree[0])
            self._further.stop(steps.levels - 1)
        if drawn:
            some, limits = [seqs[b] for b in drawn], [budgets[b] for b in drawn]
            steps = self._begin(some, limits)
            grown, came_from, laws = sample_trees(steps, some, limits, self.head.vocabulary)
            for b, tree, sources in zip(drawn, grown, came_from, strict=True):
                trees[b], rows[b] = tree, sources
            self._first.stop(steps.levels)
        return lay_out(trees, rows, laws)

    def _draft_alone(self, seq: Seq, budget: Budget) -> Tree | None:
        """One sequence's tree of chosen nodes in one go, as in most rounds on a CPU; None where that cannot be."""
        observed = self._sequences.get(seq.id)
        if not is_ready(observed, seq, budget) or len(seq.tokens) + budget.depth > self.head.config.max_length:
            return [seq.tokens[-1]], [-1]
        assert observed is not None
        if self._draws(seq) or len(observed.tokens) > PROMPT:
            return None
        self._first.start()
        found = self._runner.draft(seq, observed, budget, self.head.config.calibration)
        if found is None:
            return None
        spent = self._first.elapsed()
        self._first.note(spent * found.first, 1)
        self._further.note(spent * (1.0 - found.first), found.levels - 1)
        self._expected[seq.id] = found.expected
        return found.tree

    def _draws(self, seq: Seq) -> bool:
        return self.sampled and is_drawn(seq)

    def _begin(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> RunnerSteps:
        """Read the new rows of these sequences; reading a prompt is not booked as a level."""
        sequences = [self._sequences[seq.id] for seq in seqs]
        unread = sum(len(observed.tokens) for observed in sequences)
        self._first.start()
        steps = self._runner.begin(seqs, sequences, budgets)
        if unread > PROMPT * len(sequences):
            self._reading = self._first.elapsed() / unread
            self._first.start()
        return steps

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        observe_rows(self._sequences, self.head.config.layers, seqs, trees, scores, verdict)

    def forget(self, seq: Seq) -> None:
        self._sequences.pop(seq.id, None)
        self._expected.pop(seq.id, None)
        self._runner.forget(seq.id)

    def _grow(self, steps: RunnerSteps, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> list[Tree]:
        calibration = self.head.config.calibration
        ranks, between = steps.ranks(seqs), self._after_first_level
        trees, expected = grow_ranked(ranks, seqs, budgets, calibration, self._rates, between)
        self._expected |= {seq.id: tokens for seq, tokens in zip(seqs, expected, strict=True)}
        return trees

    def _after_first_level(self) -> None:
        self._first.stop(1)
        self._further.start()


def load_head(folder: Path, target: Target, kind: Kind | None = None) -> EagleHead | NativeHead:
    """A head from its folder, for this target; layers that the file does not name are the usual ones."""
    config, weights = read_head(folder, kind=kind)
    shared = target.shared()
    if not config.layers:
        if shared is None or not shared.layers:
            raise InvalidInput(f"{folder} does not say which hidden layers its head reads; add them to config.json")
        config = replace(config, layers=default_layers(len(shared.layers)))
    if NativeHead.supports(config, target.device):
        return NativeHead(config, weights, shared)
    return EagleHead(config, weights, shared, dtype=head_dtype(target, shared), device=target.device)


class Eagle2Drafter(EagleDrafter):
    """Any EAGLE-1 or HASS head."""

    dynamic = True


class Eagle3Drafter(EagleDrafter):
    """EAGLE-3 and 3.1 heads; a width of 1 makes a chain, more a dynamic tree."""

    kind: Kind = "eagle3"
    dynamic = True
