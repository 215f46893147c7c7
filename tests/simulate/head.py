"""SimulatedHead: a drafter whose trees the simulated device grows, each draft and reading in the device's own time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forerun.core.types import Budget, Form, Offer, Scores, Seq, TreeBatch, Verdict, lone_roots
from forerun.drafters.base import BaseDrafter
from forerun.drafters.device.features import MOST_UNREAD
from forerun.drafters.device.plan import FORMS, ROOM, bucket_of, form_of, forms_for, trees_of
from forerun.drafters.device.protocol import Seats, Unread
from forerun.models.base import Target
from lab.simulate.device import SimulatedDevice
from lab.simulate.speeds import Speeds, accepted_of


@dataclass(frozen=True, slots=True)
class SimulatedForms:
    """The menu of a head on a GPU; implements forerun.drafters.device.protocol.DeviceMenu."""

    speeds: Speeds
    rate: float
    switches: bool = True
    complete_to: int = 0

    def fitting(self, batch: int, nodes: int, depth: int, width: int) -> Form | None:
        return Form(nodes, depth, width)

    def holds(self, length: int) -> bool:
        return True

    def knows(self, form: Form, batch: int) -> bool:
        return True

    def drafting(self, form: Form, batch: int) -> float:
        return self.speeds.of_draft(form, bucket_of(batch))

    @property
    def forms(self) -> tuple[Form, ...]:
        return FORMS

    def seconds(self, form: Form, batch: int) -> float:
        listed = form in forms_for(bucket_of(batch))
        return self.speeds.of_draft(form, bucket_of(batch)) if listed else math.inf

    def rows(self, form: Form, batch: int) -> int:
        return bucket_of(batch) * (form.nodes + 1)

    def expected(self, form: Form) -> float:
        return accepted_of(form, self.rate)


class SimulatedHead(BaseDrafter):
    """Trees that the simulated device grows, behind unread ones too."""

    def __init__(self, gpu: SimulatedDevice, rate: float) -> None:
        self.gpu, self.menu = gpu, SimulatedForms(gpu.speeds, rate)
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

    def rehearse(
        self, target: Target, max_batch: int, max_length: int, at_once: int = 0, failed: object = None
    ) -> None:
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
        return TreeBatch(rows, rows, trees.starts(count), form=trees, draft_seconds=seconds, follows=follows)

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Prompts are read before the first draft behind them, or when a sequence has no places for more rows."""
        if scores.logits is None:
            for seq, rows in zip(seqs, trees.sizes(), strict=True):
                self._unread[seq.id], self._waits[seq.id] = self._unread.get(seq.id, 0) + rows, 0
            if (many := sum(self._unread.values())) > MOST_UNREAD:
                self._unread.clear()
                self.gpu.busy_for(self.gpu.speeds.of_reading(many))
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
