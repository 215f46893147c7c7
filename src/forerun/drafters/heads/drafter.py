"""What the drafters of heads have in common: one draft of chosen and drawn trees, and the hidden rows that they keep.

`RowsDrafter` reads every row of a text, those of a prompt at once; `LastRowDrafter` the last one alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.core.clock import WALL, Clock
from forerun.core.types import Budget, Needs, Offer, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.heads.base import UNMEASURED, Calibration, Meter, ObservedRows, is_drawn, is_ready, observe_rows
from forerun.drafters.heads.growth import Drawn, Ranks, Tree, grow_ranked, lay_out

PROMPT = 32  # more rows than this at once are a prompt's


class HeadDrafter:
    """Trees of chosen tokens, or drawn from the head's laws where that is wanted."""

    sampled = False  # are nodes drawn, where the verifier can test them?
    levels = 1 << 10  # that the head can draft

    def __init__(self) -> None:
        self._sequences: dict[int, ObservedRows] = {}

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        trees = [([seq.tokens[-1]], [-1]) for seq in seqs]
        rows, laws = [[-1] for _ in seqs], list[Tensor]()
        live = self._ready(seqs, budgets)
        for drawn in (False, True):
            which = [b for b in live if self._draws(seqs[b]) == drawn]
            if not which:
                continue
            some, limits = [seqs[b] for b in which], [budgets[b].cut(self.levels) for b in which]
            if drawn:
                grown, sources, laws = self._draw(some, limits)
            else:
                grown = self._choose(some, limits)
                sources = [[-1] * len(tree[0]) for tree in grown]
            for b, tree, came_from in zip(which, grown, sources, strict=True):
                trees[b], rows[b] = tree, came_from
        return lay_out(trees, rows, laws)

    def forget(self, seq: Seq) -> None:
        self._sequences.pop(seq.id, None)

    def _choose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> list[Tree]:
        """Trees of chosen tokens, of sequences that have all rows."""
        raise NotImplementedError

    def _draw(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> Drawn:
        """Trees that are drawn (growth.sample_trees), if `sampled` may be set."""
        raise NotImplementedError

    def _draws(self, seq: Seq) -> bool:
        return self.sampled and is_drawn(seq)

    def _ready(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> list[int]:
        """Which of these can be drafted for."""
        return [b for b, seq in enumerate(seqs) if is_ready(self._sequences.get(seq.id), seq, budgets[b])]


class RowsDrafter(HeadDrafter):
    """A head that reads every row of these layers; a draft depends on the last `depends_on`."""

    row_share: float  # of a level: what a row of a prompt takes, until one was read

    def __init__(self, layers: Sequence[int], depends_on: int | None, meter: Meter) -> None:
        """`depends_on`: None = on all. `meter`: of what comes first in a draft."""
        super().__init__()
        self._layers, self._depends_on, self._first = layers, depends_on, meter
        self._reading = 0.0  # seconds per row of a prompt
        self._expected: dict[int, float] = {}  # tokens of the last draft that should be accepted

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        observe_rows(self._sequences, self._layers, seqs, trees, scores, verdict)
        if self._depends_on is not None:
            for seq in seqs:
                self._sequences[seq.id].keep_last(self._depends_on)

    def forget(self, seq: Seq) -> None:
        super().forget(seq)
        self._expected.pop(seq.id, None)

    def _start_of(self, seq: Seq, level: float) -> float:
        """Seconds of reading what was not read of a prompt."""
        observed = self._sequences.get(seq.id)
        unread = len(observed.tokens) if observed is not None else 0
        return unread * (self._reading or self.row_share * level) if unread > PROMPT else 0.0

    def _note_reading(self, unread: int, sequences: int, is_timed: bool = True) -> None:
        """So many rows were read since the clock was started: those of prompts are not booked as a level."""
        if unread > PROMPT * sequences:
            if is_timed:
                self._reading = self._first.elapsed() / unread
            self._first.start()

    def _grow_ranked(
        self, ranks: Ranks, seqs: Sequence[Seq], budgets: Sequence[Budget], calibration: Calibration, *more: Any
    ) -> list[Tree]:
        """See growth.grow_ranked; what is expected of the trees is kept for the next offers."""
        trees, expected = grow_ranked(ranks, seqs, budgets, calibration, *more)
        self._expected |= {seq.id: tokens for seq, tokens in zip(seqs, expected, strict=True)}
        return trees


class LastRowDrafter(HeadDrafter):
    """Keeps the last hidden row alone, and measures what a level costs."""

    needs = Needs((-1,), match_length=0, may_run=True, last_row=True)
    one_pass = False  # do all levels of a draft come from one pass?

    def __init__(self, clock: Clock = WALL) -> None:
        super().__init__()
        self._meter = Meter(clock)

    def offer(self, seq: Seq) -> Offer:
        """What a level takes, or the pass that makes all of them; a millisecond until a draft was timed."""
        seconds = self._meter.seconds or UNMEASURED
        levels = (seconds, 0.0) if self.one_pass else (seconds,)
        return Offer(levels, chosen=not self._draws(seq), key=id(self))

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        if -1 not in scores.hidden:  # nothing is drafted behind this round
            for seq, path in zip(seqs, verdict.to_host()[0], strict=True):
                observed = self._sequences.setdefault(seq.id, ObservedRows())
                observed.seen, observed.features = observed.seen + 1 + len(path), []
            return
        observe_rows(self._sequences, (-1,), seqs, trees, scores, verdict)
        for seq in seqs:  # only the last row counts
            observed = self._sequences[seq.id]
            if observed.features:
                observed.features, observed.tokens = [observed.features[-1][-1:].clone()], []

    def _ready(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> list[int]:
        return [b for b in super()._ready(seqs, budgets) if self._sequences[seqs[b].id].features]

    def _last_rows(self, seqs: Sequence[Seq], dtype: torch.dtype) -> Tensor:
        return torch.cat([self._sequences[seq.id].features[0] for seq in seqs]).to(dtype)  # [B, D]
