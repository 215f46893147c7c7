"""Count the prompts of a data run: how many are used, and why the others were dropped."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Prompts seen, and the dropped ones by reason."""

    seen: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def used(self) -> int:
        return self.seen - self.dropped.total()

    def count(self, reason: str | None) -> bool:
        """One more prompt; None = it is used."""
        self.seen += 1
        if reason is not None:
            self.dropped[reason] += 1
        return reason is None

    @property
    def in_words(self) -> str:
        """12 of 20 prompts are used; dropped: 6 that ..., 2 that ..."""
        head = f"{self.used} of {self.seen} prompts are used"
        parts = [f"{count} that {reason}" for reason, count in self.dropped.most_common()]
        return f"{head}; dropped: {', '.join(parts)}" if parts else head
