"""LayerSkipDrafter: drafts with the target's own layers, some of them left out (self-speculation).

Either the first layers alone draft, with the LM head, or an exit adapter in front of it, behind the last of them (early
exit: LayerSkip, Elhoushi et al. 2024; Kangaroo, Liu et al. 2024), or some attentions and MLPs are skipped (Draft &
Verify, Zhang et al. 2023; SWIFT, Xia et al. 2024). Which ones is said by a plan: a file of `forerun layers search`
or of `forerun train early-exit` (forerun.drafters.layer_plan).

It has no weights and no KV cache of its own: it reads the keys and values that the target has of the committed tokens.
After an early exit a CPU's pass over the draft starts where the draft left off, so that the first layers compute each
drafted token once. On a GPU draft steps are captured when the drafter is built (forerun.models.cuda.part).
"""

from __future__ import annotations

from forerun.drafters.base import Parts
from forerun.drafters.draft_model import ModelDrafter
from forerun.drafters.layer_plan import LayerPlan, default_plan, read_plan
from forerun.errors import InvalidInput
from forerun.models.base import Target


class LayerSkipDrafter(ModelDrafter):
    """Some of the target's layers as a draft model."""

    @classmethod
    def build(cls, parts: Parts) -> LayerSkipDrafter:
        given, shared = parts.speculative.draft_layers, parts.target.shared()
        layers = len(shared.layers) if shared is not None else 0
        plan = default_plan(layers) if given is None else read_plan(given, layers)
        part = draft_part(parts.target, plan)
        part.warm_up(cls.needs, parts.max_batch, parts.max_length or parts.target.max_length)
        return cls(part, parts.target.vocab_size)


def draft_part(target: Target, plan: LayerPlan) -> Target:
    """The part of a target that drafts under a plan."""
    shared = target.shared()
    if shared is None or shared.partial is None:
        raise InvalidInput(
            "the drafter 'layer_skip' needs a target whose layers can run apart: our own decoders; "
            f"{type(target).__name__} on {target.device.type} cannot"
        )
    adapter = plan.adapter
    if adapter is not None:
        adapter.must_fit(shared.width)
    return shared.partial(plan.layers, None if adapter is None else adapter.to(shared.dtype, target.device))
