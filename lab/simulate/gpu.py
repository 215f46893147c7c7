"""SimulatedGPU: a target and a head that take a GPU's time by a clock that is counted, never measured.

Passes take t(rows), rounded up to the sizes that passes have there; drafts and the head's reading of prompts take their
own time in the same stream; the host's work takes time too, and is hidden while the device is busy. What goes into a
pass is decided by the code that decides it on a GPU (forerun.models.cuda.chunks), and rounds are launched before the
last was read by the real engine (forerun.engine.engine). How many tokens of a tree are accepted is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.core.offer import Form, Offer
from forerun.core.types import (
    Budget,
    Greedy,
    Needs,
    Prompts,
    Scores,
    Seq,
    TreeBatch,
    TreeForm,
    Verdict,
    first_rows,
)
from forerun.drafters.base import BaseDrafter, lone_roots
from forerun.drafters.device.plan import ROOM, bucket_of, form_of, forms_for, trees_of
from forerun.drafters.device.protocol import Seats, Unread
from forerun.models.base import Target
from forerun.models.cuda.chunks import beside_trees, least_rows, rows_beside
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.shared import SharedWeights
from lab.simulate.device import CountedTokens, next_roots
from lab.simulate.menu import level_rate
from lab.simulate.speeds import SimulatedForms, Speeds

WORDS = 1009


@dataclass(slots=True)
class SimulatedClock:
    """Seconds, as far as they were counted."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds

    def wait_until(self, when: float) -> None:
        self.seconds = max(self.seconds, when)


@dataclass(slots=True)
class SimulatedGPU(CountedTokens):
    """Implements forerun.models.base.Target."""

    clock: SimulatedClock
    speeds: Speeds
    rate: float = 0.7  # how likely the head's likeliest token is right
    vocab_size: int = WORDS
    max_length: int = 1 << 16
    slots: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pass_rows: int = MAX_ROWS
    passes: list[tuple[int, int]] = field(default_factory=list)  # rows of trees and of prompts, of every pass
    _free_at: float = 0.0  # when the device has nothing to do
    _logits: Tensor = field(default_factory=lambda: torch.zeros(1, WORDS))

    def shared(self) -> SharedWeights | None:
        return None

    def busy_for(self, seconds: float) -> None:
        """More work in the device's stream."""
        self._free_at = max(self.clock.seconds, self._free_at) + seconds

    def finish(self) -> None:
        """Wait until the device has done all that was launched."""
        self.clock.wait_until(self._free_at)

    def host_works(self, sequences: int) -> None:
        self.clock.seconds += self.speeds.host + self.speeds.host_row * sequences

    def commit(self, seqs: Sequence[Seq], trees: TreeBatch, verdict: Verdict) -> None:
        CountedTokens.commit(self, seqs, trees, verdict)
        self.host_works(len(seqs))

    def prompt_rows(self, nodes: int, rows: int, waiting: int) -> int:
        return rows_beside(nodes, rows, waiting)

    def _run(self, nodes: int, prompts: int) -> float:
        """Launch a pass; when it ends."""
        if nodes + prompts:
            self.passes.append((nodes, prompts))
            self.busy_for(self.speeds.of_pass(nodes + prompts))
        return self._free_at

    def _fresh(self, seqs: Sequence[Seq]) -> list[list[int]]:
        return [seq.tokens[self._cached.get(seq.id, 0) : -1] for seq in seqs]

    def _keep(self, seqs: Sequence[Seq], fresh: Sequence[list[int]]) -> TreeBatch:
        for seq, tokens in zip(seqs, fresh, strict=True):
            self._cached[seq.id] = self._cached.get(seq.id, 0) + len(tokens)
        return TreeBatch.chains(fresh)

    def prefill(self, seqs: Sequence[Seq], needs: Needs, rows: int | None = None) -> tuple[TreeBatch, Scores]:
        read = self._keep(seqs, first_rows(self._fresh(seqs), MAX_ROWS if rows is None else rows))
        self.host_works(len(seqs))
        started = max(self.clock.seconds, self._free_at)
        taken = self._run(0, read.nodes) - started
        return read, Scores(None, seconds=lambda: taken)

    def score(
        self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None
    ) -> Scores:
        self.host_works(len(seqs))
        fresh, starting = list[list[int]](), set[int]()
        if prompts is not None:
            starting = {seq.id for seq in prompts.seqs}
            fresh = self._fresh(prompts.seqs)
            fresh = beside_trees(fresh, trees, prompts.rows, least_rows(prompts.seqs, fresh, seqs))
        nodes, beside = len(seqs) if trees.form is None else trees.form.rows, sum(map(len, fresh))
        started = max(self.clock.seconds, self._free_at)
        end = self._run(nodes, beside)
        taken = end - started
        known = Greedy(
            verdict=lambda: self._decide(seqs, trees, end, starting),
            next_roots=next_roots,
        )
        read = None if prompts is None else (self._keep(prompts.seqs, fresh), Scores(None))
        return Scores(self._logits.expand(trees.nodes, -1), {}, known, read, seconds=lambda: taken)

    def _decide(self, seqs: Sequence[Seq], trees: TreeBatch, end: float, starting: set[int]) -> Verdict:
        self.clock.wait_until(end)
        form = trees.form
        if form is None:
            return Verdict.of([()] * len(seqs), [self._word(seq, 0) for seq in seqs], self.device)
        parents = [-1, *range(form.depth), *[0] * (form.nodes - form.depth - 1)]
        tokens, paths, bonus = list[int](), list[range](), list[int]()
        for seq in seqs:
            count = 0 if seq.id in starting else self._accepted(seq, form)
            right = [self._word(seq, depth) for depth in range(count)]
            tokens += [seq.tokens[-1], *right, *[0] * (form.nodes - 1 - count)]
            paths.append(range(1, count + 1))
            bonus.append(self._word(seq, count))
        trees.note_host(tokens, parents * len(seqs))
        return Verdict.of(paths, bonus, self.device)

    def _word(self, seq: Seq, depth: int) -> int:
        return 1 + (seq.id * 7919 + (len(seq.tokens) + depth) * 104729) % (WORDS - 1)

    def _accepted(self, seq: Seq, form: TreeForm) -> int:
        each = level_rate(form_of(form), self.rate)
        count = 0
        while count < form.depth and _chance(seq.id, len(seq.tokens) + count) < each:
            count += 1
        return count


class SimulatedHead(BaseDrafter):
    """Trees that the simulated device grows, behind unread ones too."""

    def __init__(self, gpu: SimulatedGPU) -> None:
        self.gpu, self.menu = gpu, SimulatedForms(gpu.speeds, gpu.rate)
        self._offer = Offer(menu=self.menu)
        self._unread: dict[int, int] = {}  # rows of prompts by sequence
        self._waits: dict[int, int] = {}  # and for how many rounds

    def offer(self, seq: Seq) -> Offer:
        return self._offer

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        most = max(budgets, key=lambda one: (one.nodes, one.depth))  # others were cut because a sequence ends
        if not most.nodes:
            return lone_roots(seqs)
        self._read(seqs)
        listed = [one for one in forms_for(bucket_of(len(seqs))) if one.nodes <= most.nodes]
        return self._grow(max(listed), len(seqs), None)

    def device(self, seqs: Sequence[Seq]) -> SimulatedHead:
        return self

    def launch(self, seats: Seats, form: Form | None, behind: Unread | None = None) -> TreeBatch | None:
        assert behind is not None, "else it proposes"
        if form is None:
            assert behind.trees.form is not None
            form = form_of(behind.trees.form)
        return self._behind(seats, form)

    def is_ready(self, seq: Seq) -> bool:
        return True

    def rest(self, seats: Seats, behind: Unread) -> None:
        """It keeps no rows."""

    def rehearse(self, target: Target, max_batch: int, max_length: int) -> None:
        """Nothing is captured."""

    def _behind(self, going: Seats, form: Form) -> TreeBatch | None:
        if form not in forms_for(bucket_of(len(going))):
            return None
        self._read([seq for seq, _ in going])
        return self._grow(form, len(going), tuple(tree for _, tree in going))

    def _grow(self, form: Form, count: int, follows: tuple[int, ...] | None) -> TreeBatch:
        bucket = bucket_of(count)
        seconds = self.gpu.speeds.of_draft(form, bucket)
        self.gpu.busy_for(seconds)
        trees = trees_of(form, bucket)
        rows = torch.zeros(count * trees.nodes, dtype=torch.long)
        starts = trees.starts(count)
        return TreeBatch(rows, rows, starts, form=trees, draft_seconds=seconds, follows=follows)

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Prompts are read before the first draft behind them, or when a sequence has no places for more rows."""
        if scores.logits is None:
            for seq, rows in zip(seqs, trees.sizes(), strict=True):
                self._unread[seq.id], self._waits[seq.id] = self._unread.get(seq.id, 0) + rows, 0
            return
        waiting = [seq for seq in seqs if seq.id in self._unread]
        for seq in waiting:
            self._waits[seq.id] += 1
        if any(self._waits[seq.id] > ROOM for seq in waiting):
            self._read(waiting)

    def _read(self, seqs: Sequence[Seq]) -> None:
        rows = sum(self._unread.pop(seq.id, 0) for seq in seqs)
        self.gpu.busy_for(self.gpu.speeds.of_reading(rows))

    def forget(self, seq: Seq) -> None:
        self._unread.pop(seq.id, None)


def _chance(seq_id: int, position: int) -> float:
    """A number below 1 for every position of every text, always the same."""
    mixed = (seq_id * 1_000_003 + position * 7_368_787 + 12_345) & 0xFFFFFFFF
    for _ in range(2):
        mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)) / 2**32
