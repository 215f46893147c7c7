"""Detokenizer: tokens to text while they are generated; never half a character, never a part of a stop string.

A token may hold a part of a character, and a stop string may span tokens and rounds. So text is held back
until it can no longer change: while its last character is incomplete, and while its end could still grow
into a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decodes(Protocol):
    def decode(self, ids: list[int], /) -> str: ...


class Detokenizer:
    """The text of one sequence's output."""

    __slots__ = ("_done", "_from", "_ids", "_passed", "_taken", "stops", "text", "tokenizer")

    def __init__(self, tokenizer: Decodes | None, stops: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stops = tuple(stops)
        self.text = ""  # all that is decoded, cut at a stop string
        self._taken = 0  # characters already handed out
        self._passed = 0  # characters written before stop strings began to count
        self._ids: list[int] = []  # those that still influence what follows; never changed, only replaced
        self._from = 0  # ids before this one no longer do
        self._done = 0  # ids before this one are in `text`

    def fork(self) -> Detokenizer:
        """A copy that continues from here, so that a round can be computed before it is written."""
        copy = Detokenizer.__new__(Detokenizer)
        copy.tokenizer, copy.stops, copy.text = self.tokenizer, self.stops, self.text
        copy._taken, copy._passed, copy._ids = self._taken, self._passed, self._ids
        copy._from, copy._done = self._from, self._done
        return copy

    def push(self, token: int, may_stop: bool = True) -> bool:
        """Add a token; True if it completes a stop string, which is then cut off."""
        if self.tokenizer is None:
            return False
        self._ids = [*self._ids[self._from :], token]
        self._done, self._from = self._done - self._from, 0
        before = self.tokenizer.decode(self._ids[self._from : self._done])
        after = self.tokenizer.decode(self._ids[self._from :])
        if after.endswith("\ufffd"):
            return False  # an incomplete character: wait for the rest
        fresh = after[len(before) :]
        self._from, self._done = self._done, len(self._ids)
        # a stop string counts if it is completed now: one that was completed while it did not count stays
        searched = max(self._passed, len(self.text) - max(map(len, self.stops), default=0) + 1)
        self.text += fresh
        if not may_stop:
            self._passed = len(self.text)
            return False
        hits = [at for stop in self.stops if (at := self.text.find(stop, searched)) >= 0]
        if hits:
            self.text = self.text[: min(hits)]
        return bool(hits)

    def take(self, final: bool) -> str:
        """The text that can no longer change and was not handed out yet."""
        if final:
            self._flush()
        end = len(self.text) if final else self._unchanging()
        text = self.text[self._taken : end]
        self._taken = max(self._taken, end)
        return text

    def _unchanging(self) -> int:
        """How much of the text can no longer become part of a stop string."""
        for start in range(max(0, len(self.text) - max(map(len, self.stops), default=0) + 1), len(self.text)):
            if any(stop.startswith(self.text[start:]) for stop in self.stops):
                return start
        return len(self.text)

    def _flush(self) -> None:
        """Give up waiting for the rest of a character: the text has ended."""
        if self.tokenizer is None or self._done == len(self._ids):
            return
        before = self.tokenizer.decode(self._ids[self._from : self._done])
        self.text += self.tokenizer.decode(self._ids[self._from :])[len(before) :]
        self._from = self._done = len(self._ids)
