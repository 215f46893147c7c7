"""CapturedHeads: base of drafters with heads on the last row, whose drafts are captured on a GPU and replayed.

A graph holds for one number of sequences and one form of drafts, with shared noise or without. The usual forms for one
sequence are captured and timed when heads are loaded.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.drafters.captured import MOST, NOT_CAPTURED, CapturedCalls
from forerun.drafters.draft_law import Noised, has_noise
from forerun.drafters.head_drafter import LastRowDrafter, rehearse
from forerun.params import SamplingParams
from forerun.types import Budget, Seq, TreeBatch

if TYPE_CHECKING:
    from forerun.drafters.eagle.cuda.draft_noise import DraftNoise
    from forerun.drafters.medusa import HeadSet

log = logging.getLogger(__name__)

# rows [B, D], roots [B] and noise -> what the host reads
HeadWork = Callable[[Tensor, Tensor, Noised], tuple[Tensor, ...]]


class CapturedHeads(LastRowDrafter, ABC):
    """Replays drafts of chosen tokens, once `capture` was called."""

    def __init__(self, heads: HeadSet) -> None:
        super().__init__()
        self.heads = heads
        self._calls: CapturedCalls | None = None
        self._noise: DraftNoise | None = None

    @abstractmethod
    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch: ...

    def capture(self, budgets: Sequence[Budget]) -> None:
        """From now on what a draft computes is captured; drafts of one sequence with these budgets at once."""
        from forerun.drafters.eagle.cuda.draft_noise import DraftNoise

        heads, self._calls = self.heads, CapturedCalls()
        self._noise = DraftNoise(heads.vocabulary.ids)
        row = torch.zeros(1, heads.config.width, dtype=heads.dtype, device=heads.device)
        try:
            for heat in (1.0, 0.0):
                rehearse(self, self._sequences, row, 1, budgets, SamplingParams(temperature=heat))
        except Exception as error:  # no working Triton, no memory: neither stops generation
            log.warning(NOT_CAPTURED, type(error).__name__, error)
            self._calls = None

    @property
    def captures(self) -> int:
        """Graphs that were captured so far."""
        return 0 if self._calls is None else self._calls.made

    def _replays(self, seqs: Sequence[Seq]) -> bool:
        """Can their draft be captured? A temperature without shared noise changes confidences alone: seldom used."""
        if self._calls is None or len(seqs) > MOST:
            return False
        return all(seq.params.is_greedy or has_noise(seq) for seq in seqs)

    def _replay(
        self, seqs: Sequence[Seq], hidden: Tensor, form: tuple[int, ...], levels: int, work: HeadWork
    ) -> tuple[Tensor, ...]:
        """The work of a draft of this form, from the last rows [B, D] of these sequences."""
        from forerun.drafters.eagle.cuda.draft_noise import settings_of

        calls, noise = self._calls, self._noise
        assert calls is not None
        assert noise is not None
        noise.send([settings_of(seq) for seq in seqs])
        behind = [(seq.tokens[-1], len(seq.tokens) - 2) for seq in seqs]  # noise counts from the last row
        roots, positions = torch.tensor(behind, device=self.heads.device).t().contiguous()

        def run(hidden: Tensor, roots: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            return work(hidden, roots, noise.of(positions, levels))

        return calls.call((len(seqs), noise.is_on, *form), run, hidden, roots, positions.int())

    def _stop_clock(self, levels: int, captures: int) -> None:
        """So many levels were drafted; a draft that captured a graph says nothing of what drafts take."""
        self._meter.stop(levels if self.captures == captures else 0)
