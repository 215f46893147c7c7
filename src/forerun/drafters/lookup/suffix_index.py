"""SuffixAutomaton: every substring of a growing text, with how often each occurs; and hit rates of continuations.

Tokens are added one at a time in amortised constant time (Blumer et al. 1985). A state stands for all substrings that
end at the same places; its suffix link leads to the longest shorter suffix that ends at more places. So the link of the
last state is the longest suffix of the text that occurred earlier. A new token occurs in the suffixes of all states
along the links: the first CLIMB of them are counted, and the shortest suffixes need their counts least.

A drafter sees the request itself, past outputs and the corpus through one interface (`Place`). Rates are learnt at no
cost: the committed token shows whether a continuation would have been accepted, by the length of the match and by its
occurrences. Recent counts weigh more; what was learnt on all sequences is the prior of each.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import islice
from typing import Protocol

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
                links[made] = state = to if lengths[to] == lengths[state] + 1 else self._split(state, token, to)
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


ONCE, ALIKE, MOSTLY, DIVIDED, SECOND = range(5)
"""What earlier occurrences say: there was one | all agree | most agree | they do not. SECOND is the rate of the second
most frequent continuation where the first was wrong."""

_PRIOR = (  # measured on chats of the default model; the last entry holds for longer matches
    (0.28, 0.51, 0.66, 0.7, 0.72, 0.77, 0.77, 0.79, 0.8, 0.82, 0.83, 0.83, 0.84, 0.85, 0.87, 0.9),
    (0.49, 0.71, 0.77, 0.82, 0.85, 0.86, 0.87, 0.88, 0.9),
    (0.36, 0.45, 0.47, 0.49, 0.51, 0.53, 0.55, 0.56),
    (0.13, 0.24, 0.26, 0.28),
    (0.1, 0.2, 0.24, 0.28),
)
# of that where nodes are dear: those that are drafted promise most of all, and so are overrated
CAUTION = 0.85
PRIOR_TRIES, SHARED_TRIES = 24.0, 6.0  # what this is worth, and what all sequences are worth to one
OWN_MEMORY, SHARED_MEMORY = 0.985, 0.998  # per try


class HitRates:
    """Hits and tries by kind and by match length, from 1 to `longest`."""

    __slots__ = ("hits", "longest", "tries")

    def __init__(self, longest: int, prior: float = 0.0) -> None:
        """`prior`: what is presumed, times what was measured; 0 = nothing is."""
        self.longest = longest
        tries = PRIOR_TRIES if prior else 0.0
        # arrays, which the native library reads where they lie
        self.tries = array("d", [tries] * (longest * len(_PRIOR)))
        rates = [prior * kind[min(m, len(kind) - 1)] for kind in _PRIOR for m in range(longest)]
        self.hits = array("d", [tries * rate for rate in rates])

    def count(self, kind: int, match: int, hit: bool, memory: float) -> None:
        i = kind * self.longest + min(match, self.longest) - 1
        self.hits[i] = self.hits[i] * memory + hit
        self.tries[i] = self.tries[i] * memory + 1.0

    def rate(self, kind: int, match: int, prior: HitRates) -> float:
        i = kind * self.longest + min(match, self.longest) - 1
        shared = SHARED_TRIES * prior.hits[i] / prior.tries[i]
        return (self.hits[i] + shared) / (self.tries[i] + SHARED_TRIES)


def kind_of(count: int, total: int) -> int:
    """What a continuation is that `count` of `total` earlier occurrences had."""
    if count == total:
        return ONCE if total == 1 else ALIKE
    return MOSTLY if 2 * count > total else DIVIDED
