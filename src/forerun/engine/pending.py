"""Rounds that are under way: what is completed or undone where one was interrupted, and a round that was launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.engine.round_clock import RoundClock
from forerun.engine.sequence import Advance, SequenceState
from forerun.types import Scores, TreeBatch, Verdict


class Pending:
    """A change of state that is under way: until its advances are known it is undone, from then on completed."""

    __slots__ = ("advances", "seqs")

    def __init__(self, seqs: Sequence[SequenceState], advances: list[Advance] | None = None) -> None:
        self.seqs, self.advances = seqs, advances  # some sequences may be named twice

    def members(self) -> list[SequenceState]:
        """Its sequences, each of them once."""
        return [*{seq.id: seq for seq in self.seqs}.values()]


class Launched(NamedTuple):
    """A round whose pass was launched: its result can be read."""

    pending: Pending
    seqs: list[SequenceState]
    readers: list[SequenceState]  # whose prompts are read in the same pass
    trees: TreeBatch
    scores: Scores
    clock: RoundClock
    repeats: int  # further rounds that may start before this one is known
    may_draft: bool  # was anybody of it to draft? Else it is plain because it was planned so

    def begun(self, clock: RoundClock) -> Launched | None:
        """The round before it has ended: what is left of this one. None = all of its sequences ended with that."""
        going = [seq for seq in self.pending.seqs if seq.finished is None]
        if all(seq.finished is not None for seq in self.seqs):
            return None
        return self._replace(pending=Pending(going), clock=clock)

    def without_ended(self, verdict: Verdict) -> tuple[list[SequenceState], TreeBatch, Scores, Verdict]:
        """Its sequences, trees, scores and verdict, less those that had ended before it was known."""
        for seq in self.seqs:
            if seq.finished is not None:
                break
        else:
            return self.seqs, self.trees, self.scores, verdict
        going = [b for b, seq in enumerate(self.seqs) if seq.finished is None]
        seqs, trees = [self.seqs[b] for b in going], self.trees.kept(going)
        return seqs, trees, self._scores_of(going), verdict.kept(going)

    def _scores_of(self, going: Sequence[int]) -> Scores:
        """Scores of some trees; those of a form know their rows themselves (`TreeBatch.members`)."""
        if self.trees.form is not None:
            return self.scores
        # only their number: another pass has written there
        logits = self.scores.required_logits[: len(going)]
        hidden = {layer: rows_of(rows, going) for layer, rows in self.scores.hidden.items()}
        return replace(self.scores, logits=logits, hidden=hidden)


def rows_of(rows: Tensor, which: Sequence[int]) -> Tensor:
    """Some rows, ascending: as a few pieces, since to send their numbers to a device would wait for it."""
    ends = [i for i in range(1, len(which)) if which[i] != which[i - 1] + 1]
    pieces = pairwise((0, *ends, len(which)))
    return torch.cat([rows[which[low] : which[high - 1] + 1] for low, high in pieces if low < high])
