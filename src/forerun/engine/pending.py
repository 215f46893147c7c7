"""Rounds that are under way: what is completed or undone where one was interrupted, and a round that was launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forerun.engine.round_clock import RoundClock
from forerun.engine.sequence import Advance, SequenceState
from forerun.types import Scores, TreeBatch


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
