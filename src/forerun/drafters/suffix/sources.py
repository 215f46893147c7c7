"""Sources of continuations: a place in an indexed text, what followed there, and the place after a token.

The drafter sees all of its texts through one interface: the request itself, past outputs and the corpus.
"""

from __future__ import annotations

from typing import Protocol

from forerun.drafters.suffix.automaton import SuffixAutomaton


class Place(Protocol):
    """Where the end of a sequence matches an indexed text."""

    @property
    def length(self) -> int:
        """Tokens that match; 0 = none."""
        ...

    def continuations(self) -> list[tuple[int, int]]:
        """(count, token) of what followed, the most frequent first; [] where nothing did."""
        ...

    def after(self, token: int) -> Place:
        """The place after one of them."""
        ...

    def shorter(self) -> Place:
        """Where a shorter end of the sequence matches, more often; a place of length 0 where there is none."""
        ...


class AutomatonPlace:
    """A state of a suffix automaton."""

    __slots__ = ("_text", "length", "state")

    def __init__(self, text: SuffixAutomaton, state: int, length: int) -> None:
        self._text = text
        self.state, self.length = text.shorten(state, length)

    def continuations(self) -> list[tuple[int, int]]:
        return self._text.continuations(self.state) if self.state else []

    def after(self, token: int) -> Place:
        return AutomatonPlace(self._text, self._text.nexts[self.state][token], self.length + 1)

    def shorter(self) -> Place:
        link = max(0, self._text.links[self.state])
        return AutomatonPlace(self._text, link, self._text.lengths[link])
