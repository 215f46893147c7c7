"""UnpagedTarget: the questions about memory, answered for targets that count slots, share none and keep none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from forerun.core.request import SourceRules
from forerun.core.types import Needs, Seq
from forerun.models.base import Abilities


class UnpagedTarget(ABC):
    """The part of forerun.models.base.Target that is about room, where a token cached is a slot used."""

    slots: int | None
    _promised: int  # slots for the trees of the coming round; 0 again once they are committed

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def used_slots(self) -> int: ...

    @property
    def can(self) -> Abilities:
        return Abilities.of(self.device)

    @property
    def cached_slots(self) -> int:
        return 0

    @property
    def source_rules(self) -> SourceRules | None:
        return None

    def reused_tokens(self, seq: Seq) -> int:
        return 0

    def warm_up(self, needs: Needs, max_batch: int, max_length: int) -> None:
        """There is nothing to prepare."""
        return

    def has_room(self, *lengths: int) -> bool:
        return self.slots is None or self.used_slots + self._promised + sum(lengths) <= self.slots

    def make_room(self, seqs: Sequence[Seq], rows: Sequence[int]) -> bool:
        self._promised = 0
        fits = self.has_room(*rows)
        self._promised = sum(rows) if fits else 0
        return fits
