"""NoDrafter: no drafting; every tree is its root, which is plain decoding in the same loop."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.drafters.base import BaseDrafter
from forerun.offers import NEVER, Offer
from forerun.types import Budget, Seq, TreeBatch


class NoDrafter(BaseDrafter):
    """Drafts nothing, at no cost."""

    def offer(self, seq: Seq) -> Offer:
        return NEVER

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        count = len(seqs)
        return TreeBatch([seq.tokens[-1] for seq in seqs], [-1] * count, tuple(range(count + 1)))
