"""Pace: how many tokens a sequence writes in the time of a plain pass, of late. What time is worth follows from it."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 0.97  # per round


@dataclass(slots=True)
class Pace:
    """Tokens and the plain passes that they took, with a memory."""

    written: float = 1.0
    passes: float = 1.0

    def add(self, tokens: float, passes: float) -> None:
        self.written = self.written * MEMORY + tokens
        self.passes = self.passes * MEMORY + passes

    def add_plain(self, rounds: int) -> None:
        """So many rounds of one token and one plain pass each."""
        memory = MEMORY**rounds
        more = (1.0 - memory) / (1.0 - MEMORY)
        self.written, self.passes = self.written * memory + more, self.passes * memory + more

    @property
    def rate(self) -> float:
        """Never below one: plain decoding writes that."""
        return max(1.0, self.written / self.passes)
