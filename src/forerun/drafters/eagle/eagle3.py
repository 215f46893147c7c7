"""EAGLE-3: a head on the inputs of three layers with a vocabulary of its own; a chain, or a tree that grows."""

from __future__ import annotations

from forerun.drafters.base import Drafter, Parts
from forerun.drafters.eagle.config import Kind
from forerun.drafters.eagle.drafter import EagleDrafter
from forerun.drafters.head_drafter import wants_sampling


class Eagle3Drafter(EagleDrafter):
    """EAGLE-3 and 3.1 heads; a width of 1 makes a chain, more a dynamic tree."""

    kind: Kind = "eagle3"
    dynamic = True

    @classmethod
    def build(cls, parts: Parts) -> Drafter:
        """On a GPU drafting stays on the device, as far as head and target allow it."""
        if parts.target.device.type == "cuda":
            from forerun.drafters.eagle.cuda.drafter import on_device

            folder = parts.head_folder(cls.kind)
            drafter = on_device(
                folder,
                parts.target,
                lambda: super(Eagle3Drafter, cls).build(parts),
                sampled=wants_sampling(parts.speculative),
                max_batch=parts.max_batch,
                max_length=parts.max_length,
            )
            if drafter is not None:
                return drafter
        return super().build(parts)
