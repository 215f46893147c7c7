"""SuffixAutomaton: every substring of a growing text, with how often each occurs.

Tokens are added one at a time in amortised constant time (Blumer et al. 1985). A state stands for all substrings that
end at the same places; its suffix link leads to the longest shorter suffix that ends at more places. So the link of the
last state is the longest suffix of the text that occurred earlier, which is what a lookup drafter wants.

A new token occurs in the suffixes of all states along the links. Only the first CLIMB of them are counted, because
their number is not bounded, and the shortest suffixes need their counts least.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

CLIMB = 8  # states along the suffix links whose counts follow each new token
LOOKED_AT = 48  # continuations of a state that are compared: those that came up last
BREAK = -1  # stands between two texts in one automaton; it never matches and is never drafted


class SuffixAutomaton:
    """Parallel lists, one entry per state; state 0 is the empty suffix."""

    __slots__ = ("counts", "last", "latest", "lengths", "links", "nexts", "size", "whole")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.size = 0  # tokens
        self.lengths, self.links = [0], [-1]  # of the longest substring of a state; -1 = no link
        self.counts, self.latest = [0], [0]  # occurrences, and where the last one ended
        self.nexts: list[dict[int, int]] = [{}]
        self.last = 0
        self.whole = True  # False where an interrupt came between two steps of a change
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end of the text."""
        self.whole = False
        lengths, links, counts, latest, nexts = self.lengths, self.links, self.counts, self.latest, self.nexts
        last, end = self.last, self.size
        for token in tokens:
            state, made, end = last, len(lengths), end + 1
            lengths.append(lengths[state] + 1)
            counts.append(1)
            latest.append(end)
            nexts.append({})
            while state >= 0:
                after = nexts[state]
                if token in after:
                    break
                after[token] = made
                state = links[state]
            links.append(0)
            if state >= 0:
                to = after[token]
                links[made] = state = (
                    to if lengths[to] == lengths[state] + 1 else self._split(state, token, to)
                )
                climbed = 0
                while state > 0 and climbed < CLIMB:
                    counts[state] += 1
                    latest[state] = end
                    state = links[state]
                    climbed += 1
            last = made
            self.last, self.size = last, end
        self.whole = True

    def _split(self, state: int, token: int, target: int) -> int:
        """A new state for the longest substring of `state` and the token, which `target` stood for among others."""
        lengths, links, nexts = self.lengths, self.links, self.nexts
        clone = len(lengths)
        lengths.append(lengths[state] + 1)
        links.append(links[target])
        self.counts.append(self.counts[target])
        self.latest.append(self.latest[target])
        nexts.append(nexts[target].copy())
        links[target] = clone
        while state >= 0 and nexts[state].get(token) == target:
            nexts[state][token] = clone
            state = links[state]
        return clone

    def earlier(self) -> tuple[int, int]:
        """The state of the longest suffix of the text that occurred before its end, and the length of that suffix."""
        state = max(0, self.links[self.last])
        return state, self.lengths[state]

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The state of the longest suffix after one more token of *another* text, and the length of that suffix."""
        nexts = self.nexts
        while state > 0 and token not in nexts[state]:
            state = self.links[state]
            length = self.lengths[state]
        following = nexts[state].get(token)
        return (0, 0) if following is None else (following, length + 1)

    def shorten(self, state: int, length: int) -> tuple[int, int]:
        """The longest suffix of these that anything followed, and its length; state 0 where there is none."""
        nexts, links = self.nexts, self.links
        while state > 0 and (not nexts[state] or (BREAK in nexts[state] and len(nexts[state]) == 1)):
            state = links[state]
            length = self.lengths[state]
        return state, length

    def continuations(self, state: int) -> list[tuple[int, int]]:
        """(count, token) of what followed a state: the most frequent first, and of those the most recent."""
        counts, latest, nexts = self.counts, self.latest, self.nexts[state]
        if len(nexts) == 1:
            ((token, to),) = nexts.items()
            return [(counts[to], token)] if token != BREAK else []
        recent = islice(reversed(nexts.items()), LOOKED_AT)
        found = [(counts[to], latest[to], token) for token, to in recent if token != BREAK]
        found.sort(reverse=True)
        return [(count, token) for count, _, token in found]
