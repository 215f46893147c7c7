"""EAGLE-3: a head on the inputs of three layers with a vocabulary of its own; a chain, or a tree that grows."""

from __future__ import annotations

from forerun.drafters.eagle.config import Kind
from forerun.drafters.eagle.drafter import EagleDrafter


class Eagle3Drafter(EagleDrafter):
    """EAGLE-3 and 3.1 heads; a width of 1 makes a chain, more a dynamic tree."""

    kind: Kind = "eagle3"
    dynamic = True
