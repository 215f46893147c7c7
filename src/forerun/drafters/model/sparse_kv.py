"""SparseKvDrafter: the target itself drafts, over a few pages of its own KV cache (self-speculation for long contexts).

A draft pass runs all layers and reads the start of the text, its end and some pages between them; the target's pass
then reads everything, and writes the keys and values of what was drafted anew (TriForce, Sun et al. 2024; MagicDec,
Chen et al. 2024). There is nothing to train and no second KV cache. It pays where reading the context takes most of
the time of a pass: long contexts, and large batches of them.
"""

from __future__ import annotations

from forerun.core.errors import InvalidInput
from forerun.core.offer import NEVER, Offer
from forerun.core.types import Budget, Seq
from forerun.drafters.base import Parts
from forerun.drafters.model.draft_model import ModelDrafter
from forerun.models.base import LayerSubset, Target
from forerun.models.pages import PAGE
from forerun.models.sparse import SparseContext

LEAST_LONGER = 2  # times as long as what drafts read: on shorter contexts a draft pass costs about a whole one


class SparseKvDrafter(ModelDrafter):
    adapts = True

    def __init__(self, draft: Target, vocab_size: int, context: SparseContext) -> None:
        super().__init__(draft, vocab_size)
        self._least = LEAST_LONGER * PAGE * context.pages

    @classmethod
    def build(cls, parts: Parts) -> SparseKvDrafter:
        context, shared = SparseContext(parts.speculative.draft_context), parts.target.shared()
        if shared is None or shared.partial is None:
            raise InvalidInput(
                "the drafter 'sparse_kv' needs a target whose KV cache has pages: our own decoders; "
                f"{type(parts.target).__name__} on {parts.target.device.type} has none"
            )
        draft = shared.partial(LayerSubset(len(shared.layers)), context=context)
        draft.warm_up(cls.needs, parts.max_batch, parts.max_length or parts.target.max_length)
        return cls(draft, parts.target.vocab_size, context)

    def offer(self, seq: Seq) -> Offer:
        """Nothing until most of the context would be left out; then a level costs the same however long it is."""
        return NEVER if len(seq.tokens) < self._least else super().offer(seq)

    def _depth(self, seq: Seq, budget: Budget) -> int:
        return super()._depth(seq, budget) if budget.runs else 0
