"""Rounds that are under way: what is completed or undone where one was interrupted, and a round that was launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forerun.engine.round_clock import RoundClock
from forerun.engine.sequence import Advance, SequenceState
from forerun.types import Scores, TreeBatch, Verdict


class Pending:
    """A change of state that is under way: until its advances are known it is undone, from then on completed."""

    __slots__ = ("advances", "seqs")

    def __init__(self, seqs: Sequence[SequenceState], advances: list[Advance] | None = None) -> None:
        self.seqs, self.advances = seqs, advances


class Launched(NamedTuple):
    """A round whose pass was launched: its result can be read."""

    pending: Pending
    seqs: list[SequenceState]
    readers: list[SequenceState]  # whose prompts are read in the same pass
    trees: TreeBatch
    scores: Scores
    clock: RoundClock
    repeats: int  # further rounds that may start before this one is known

    def begun(self, clock: RoundClock) -> Launched | None:
        """The round before it has ended: what is left of this one. None = all of its sequences ended with that."""
        going = [seq for seq in self.pending.seqs if seq.finished is None]
        if all(seq.finished is not None for seq in self.seqs):
            return None
        return self._replace(pending=Pending(going), clock=clock)

    def without_ended(self, verdict: Verdict) -> tuple[list[SequenceState], TreeBatch, Verdict]:
        """Its sequences, trees and verdict, less those that had ended before it was known."""
        for seq in self.seqs:
            if seq.finished is not None:
                break
        else:
            return self.seqs, self.trees, verdict
        going = [b for b, seq in enumerate(self.seqs) if seq.finished is None]
        return [self.seqs[b] for b in going], self.trees.kept(going), verdict.kept(going)
