"""RowReader: passes that read rows for keys and values alone: prompts, and rows that no draft starts from.

In a head of one layer keys and values depend on a row's input: such a pass needs tokens, positions and slots. In a head
of several, rows go through all layers but the last, so they attend to what their sequence has before them: then the
pass is planned as a target's is, each sequence a chain behind the rows that were read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from forerun.drafters.eagle.cuda.draft_plan import PLACES
from forerun.drafters.eagle.cuda.feature_fusion import FeatureFusion
from forerun.drafters.eagle.cuda.head import HeadNet
from forerun.models.cuda.graphs import Replays
from forerun.models.cuda.integers import SentInts
from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import (
    MAX_ROWS,
    Need,
    Plan,
    Rows,
    Size,
    Span,
    padding,
    plan_pass,
    round_up,
    splits_to,
)
from forerun.topology import chain_of

PASSES = (64, 128, 256, 512, MAX_ROWS)  # rows of a pass
Fill = Callable[[int, int], None]  # put so many rows, from a place among all on, into `RowReader.passing`


class RowReader:
    """Reads rows that were put into `passing`."""

    def __init__(self, net: HeadNet, fusion: FeatureFusion, replays: Replays, ints: SentInts) -> None:
        self.net, self.fusion, self._replays, self._ints = net, fusion, replays, ints
        with torch.inference_mode(False):
            shape = MAX_ROWS, fusion.feature_width
            self.passing = torch.zeros(shape, dtype=net.model.dtype, device=net.model.device)

    def read(self, spans: Sequence[Span], fill: Fill) -> None:
        """Rows of sequences, each behind those that were read; `fill` brings their features, in the same order."""
        low = 0
        for some in _cut(spans):
            count = sum(len(span.tokens) for span in some)
            fill(low, count)
            self.keep(some)
            low += count

    def rehearse(self) -> None:
        """Capture all passes; they write to no slot."""
        for rows in PASSES:
            self._run(padding(self._size(rows)))

    def keep(self, spans: Sequence[Span]) -> None:
        """Write keys and values of the first rows of `passing`."""
        if self.net.attends:
            self._run(plan_pass(spans, self.net.group_nodes, self._size_for))
            return
        rows = Rows()
        for span in spans:
            rows.add(span, self.net.group_nodes)
        count = len(rows.tokens)
        size = self._size(round_up(count, PASSES))
        ints = np.zeros((3, size.rows), dtype=np.int32)
        ints[2] = -1
        ints[:, :count] = rows.tokens, rows.positions, rows.slots
        self._run(Plan(size, count, ints))

    def _run(self, plan: Plan) -> None:
        self._ints.send(plan.ints)
        self._replays.do(("keep", plan.size), lambda: self._pass(plan.size))

    def _pass(self, size: Size) -> None:
        run = Run.of(size, self._ints.all)
        self.net.keep(run, self.fusion.fuse(self.passing[: size.rows]))

    def _size(self, rows: int) -> Size:
        """Of a pass: a group for every few rows of a sequence, and one for what is left of each sequence."""
        if not self.net.attends:
            return Size(rows, 0, 0)
        sequences = PLACES if rows == MAX_ROWS else rows // 8
        return Size(rows, rows // self.net.group_nodes + sequences, splits_to(self.net.model.max_length))

    def _size_for(self, need: Need) -> Size:
        return next(size for size in map(self._size, PASSES) if need.fits(size))


def _cut(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """The same rows, at most MAX_ROWS at once."""
    some, room = list[Span](), MAX_ROWS
    for span in spans:
        low = 0
        while low < len(span.tokens):
            tokens = span.tokens[low : low + room]
            some.append(Span(tokens, chain_of(len(tokens)), span.pages, span.length + low))
            low, room = low + len(tokens), room - len(tokens)
            if not room:
                yield some
                some, room = [], MAX_ROWS
    if some:
        yield some
