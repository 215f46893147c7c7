"""SparseKvDrafter: the target itself drafts, over a few pages of its own KV cache (self-speculation for long contexts).

A draft pass runs all layers and reads the start of the text, its end and some pages between them; the target's pass
then reads everything, and writes the keys and values of what was drafted anew (TriForce, Sun et al. 2024; MagicDec,
Chen et al. 2024). There is nothing to train and no second KV cache. It pays where reading the context takes most of
the time of a pass: long contexts, and large batches of them.
"""

from __future__ import annotations

from forerun.core.errors import InvalidInput
from forerun.core.offer import NEVER, Offer
from forerun.core.types import Budget, Needs, PlainSeq, Seq, TreeBatch
from forerun.drafters.base import Drafter, Parts
from forerun.drafters.model.draft_model import ModelDrafter
from forerun.models.attention import SparseContext
from forerun.models.base import HoldsUnread, LayerSubset, Target

LEAST_LONGER = 2  # times as long as what drafts read: on shorter contexts a draft pass costs about a whole one
PROBE, REPEATS = -1, 3  # a sequence that no engine has, and passes over it


class SparseKvDrafter(ModelDrafter):
    adapts = True

    def __init__(self, draft: Target, vocab_size: int, context: SparseContext, level: float | None = None) -> None:
        """`level`: seconds of a draft pass, where one was timed."""
        super().__init__(draft, vocab_size)
        self._least = LEAST_LONGER * context.tokens
        for _ in range(0 if level is None else 2):
            self._meter.note(level or 0.0, 1)

    @classmethod
    def build(cls, parts: Parts) -> Drafter:
        """On the target's device where that is our own GPU decoder, else token by token from the host."""
        context, shared = SparseContext(parts.speculative.draft_context), parts.target.shared()
        if shared is None or shared.partial is None:
            raise InvalidInput(
                "the drafter 'sparse_kv' needs a target whose KV cache has pages: our own decoders; "
                f"{type(parts.target).__name__} on {parts.target.device.type} has none"
            )
        length = parts.max_length or parts.target.max_length
        draft = shared.partial(LayerSubset(len(shared.layers)), context=context)
        if parts.target.can.captures and not parts.by_host:
            from forerun.drafters.device.sparse import on_device

            def by_host() -> Drafter:
                return cls(draft, parts.target.vocab_size, context)

            least = LEAST_LONGER * context.tokens
            drafter = on_device(parts.target, context, least, by_host, parts.max_batch, length)
            if drafter is not None:
                return drafter
        draft.warm_up(cls.needs, parts.max_batch, length)
        return cls(draft, parts.target.vocab_size, context, level_seconds(parts.target, draft, context))

    def offer(self, seq: Seq) -> Offer:
        """Nothing until most of the context would be left out; then a level costs the same however long it is."""
        return NEVER if len(seq.tokens) < self._least else super().offer(seq)

    def _depth(self, seq: Seq, budget: Budget) -> int:
        return super()._depth(seq, budget) if budget.runs else 0


def level_seconds(target: Target, draft: Target, context: SparseContext) -> float | None:
    """What a draft pass takes behind as much as it reads of a long context; None where there is no room to try."""
    length, now = context.tokens, draft.can.clock
    if not isinstance(target, HoldsUnread) or length >= target.max_length or not target.has_room(length + 1):
        return None
    probe, times = PlainSeq(PROBE, [0] * length, max_length=length + 1), list[float]()
    try:
        target.occupy(probe)
        for _ in range(REPEATS):
            started = now()
            logits = draft.score([probe], TreeBatch.chains([probe.tokens[-1:]], draft.device), Needs()).required_logits
            float(logits[-1, -1])  # wait for the device
            times.append(now() - started)
    finally:
        draft.release(probe)
        target.release(probe)
    return min(times)
