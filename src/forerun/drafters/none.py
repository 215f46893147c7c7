"""NoDrafter: no drafting; every tree is its root, which is plain decoding in the same loop."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.drafters.base import BaseDrafter, lone_roots
from forerun.offers import NEVER, Offer
from forerun.types import Budget, Needs, Seq, TreeBatch


class NoDrafter(BaseDrafter):
    """Drafts nothing, at no cost."""

    needs = Needs(match_length=0)

    def offer(self, seq: Seq) -> Offer:
        return NEVER

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        return lone_roots(seqs)
