"""Detokenizer: tokens to text while they are generated; never half a character, never a part of a stop string.

A token may hold a part of a character, and a stop string may span tokens and rounds. So text is held back
until it can no longer change: while its last character is incomplete, and while its end could still grow
into a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol, TypeGuard, runtime_checkable


class Decodes(Protocol):
    def decode(self, ids: list[int], /) -> str: ...


@runtime_checkable
class DecodesPieces(Decodes, Protocol):
    """A tokenizer that knows what most tokens add to any text of whole characters."""

    def piece(self, token: int, /) -> str | None:
        """None where that depends on what comes before or behind it."""
        ...


class Detokenizer:
    __slots__ = (
        "_ahead", "_done", "_from", "_ids", "_may_stop", "_piece", "_taken", "stops", "text", "tokenizer",
    )  # fmt: skip

    def __init__(self, tokenizer: Decodes | None, stops: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stops = tuple(stops)
        self.text = ""  # all that is decoded, cut at a stop string
        self._taken = 0  # characters already handed out
        self._may_stop = True  # whether stop strings counted at the last token
        self._ids: list[int] = []  # tokens that still influence what follows; never changed, only replaced
        self._from = 0  # ids before this one no longer do
        self._done = 0  # ids before this one are in `text`
        self._ahead = 0  # characters of later ids that are in `text`: those before an incomplete one
        # of tokens whose text does not depend on others; None = there are stop strings to look for, too
        self._piece = _piece_of(tokenizer) if not self.stops else None

    def fork(self) -> Detokenizer:
        """A copy that continues from here, so that a round can be computed before it is written."""
        copy = Detokenizer.__new__(Detokenizer)
        copy.tokenizer, copy.stops, copy.text = self.tokenizer, self.stops, self.text
        copy._taken, copy._may_stop, copy._ids = self._taken, self._may_stop, self._ids
        copy._from, copy._done, copy._ahead = self._from, self._done, self._ahead
        copy._piece = self._piece
        return copy

    def behind(self, tokens: Sequence[int]) -> tuple[Detokenizer, str] | None:
        """What `fork`, `push` of each token and `take` come to, in few steps; None = they are not of the usual kind."""
        if self.tokenizer is None:
            return self, ""
        find = self._piece
        if find is None or self._ahead or self._done != len(self._ids) or self._taken != len(self.text):
            return None
        if len(tokens) == 1:
            piece = find(tokens[0])
            if piece is None:
                return None
        else:
            pieces = [one for one in map(find, tokens) if one is not None]
            if len(pieces) < len(tokens) or not pieces:
                return None
            piece = "".join(pieces)
        copy = Detokenizer.__new__(Detokenizer)
        copy.tokenizer, copy.stops, copy._piece, copy._may_stop = self.tokenizer, (), find, True
        copy.text = text = self.text + piece
        copy._taken, copy._ids, copy._from, copy._done, copy._ahead = len(text), [tokens[-1]], 0, 1, 0
        return copy, piece

    def push(self, token: int, may_stop: bool = True) -> bool:
        """Add a token; True if it completes a stop string, which is then cut off."""
        if self.tokenizer is None:
            return False
        self._may_stop = may_stop
        self._ids = [*self._ids[self._from :], token]
        self._done, self._from = self._done - self._from, 0
        before = self.tokenizer.decode(self._ids[: self._done])
        after = self.tokenizer.decode(self._ids)
        known = len(before) + self._ahead
        # an incomplete character: wait for the rest of it, not for what precedes it
        if after.endswith("\ufffd"):
            fresh = after.rstrip("\ufffd")[known:]
            self._ahead += len(fresh)
        else:
            fresh = after[known:]
            self._from, self._done, self._ahead = self._done, len(self._ids), 0
        if not self.stops:
            self.text += fresh
            return False
        return self._add(fresh)

    def _add(self, fresh: str) -> bool:
        """Add text and cut it at a stop string that it completes; one that was complete before stays."""
        before = len(self.text)
        self.text += fresh
        if not self._may_stop or not self.stops:
            return False
        starts = [(stop, max(0, before - len(stop) + 1)) for stop in self.stops]
        hits = [at for stop, start in starts if (at := self.text.find(stop, start)) >= 0]
        if hits:
            self.text = self.text[: min(hits)]
            self._from, self._done, self._ahead = 0, len(self._ids), 0  # nothing follows
        return bool(hits)

    def take(self, final: bool) -> str:
        """The text that can no longer change and was not handed out yet."""
        if final:
            self.flush()
        end = len(self.text) if final or not self.stops else self._unchanging()
        text = self.text[self._taken : end]
        self._taken = max(self._taken, end)
        return text

    def _unchanging(self) -> int:
        """How much of the text can no longer become part of a stop string."""
        if not self.stops:
            return len(self.text)
        for start in range(max(0, len(self.text) - max(map(len, self.stops), default=0) + 1), len(self.text)):
            if any(stop.startswith(self.text[start:]) for stop in self.stops):
                return start
        return len(self.text)

    def flush(self) -> bool:
        """Give up waiting for the rest of a character, as the text has ended; True if a stop string is complete."""
        if self.tokenizer is None or self._done == len(self._ids):
            return False
        before = self.tokenizer.decode(self._ids[self._from : self._done])
        fresh = self.tokenizer.decode(self._ids[self._from :])[len(before) + self._ahead :]
        self._from = self._done = len(self._ids)
        self._ahead = 0
        return self._add(fresh)


def _piece_of(tokenizer: Decodes | None) -> Callable[[int], str | None] | None:
    return tokenizer.piece if tokenizer is not None and _knows_pieces(tokenizer) else None


def _knows_pieces(tokenizer: Decodes) -> TypeGuard[DecodesPieces]:
    return _kind_knows_pieces(type(tokenizer))


@cache
def _kind_knows_pieces(kind: type) -> bool:
    """Asked once: to compare a class with a protocol takes long."""
    return issubclass(kind, DecodesPieces)
