"""No drafting: every tree is its root, which is plain decoding in the same loop."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.quotes import Quote
from forerun.types import Budget, Needs, Scores, Seq, TreeBatch, Verdict


class NoDrafter:
    """Has nothing to say, at no cost."""

    needs = Needs()
    cost = 0.0

    def quote(self, seq: Seq) -> Quote:
        return Quote(chosen=False)  # there is nothing to choose

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        return TreeBatch.chains([[seq.tokens[-1]] for seq in seqs])

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        pass

    def forget(self, seq: Seq) -> None:
        pass
