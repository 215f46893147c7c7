"""EAGLE-2: EAGLE-1's head, with a tree that grows where the head is confident."""

from __future__ import annotations

from forerun.drafters.eagle.drafter import EagleDrafter


class Eagle2Drafter(EagleDrafter):
    """Any EAGLE-1 or HASS head."""

    dynamic = True
