"""PlaceLookup: what may follow the end of a sequence, in all texts that are searched, in Python.

The request itself, past outputs of its tenant and a corpus are searched. Where the request is all there is, and the
native library is there, forerun.drafters.suffix.native_lookup finds the same in a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import itemgetter, mul
from typing import NamedTuple, Protocol

from forerun.drafters.base import NEGLIGIBLE
from forerun.drafters.best_first import BestTree, Candidates, Size, Successors, Ways, grow
from forerun.drafters.suffix.automaton import SuffixAutomaton
from forerun.drafters.suffix.corpus import Corpus
from forerun.drafters.suffix.history import Reader
from forerun.drafters.suffix.rates import ALIKE, ONCE, SECOND, HitRates, kind_of
from forerun.drafters.suffix.sources import AutomatonPlace, Place
from forerun.drafters.tree_builder import best_count
from forerun.types import Seq

REQUEST, PAST, CORPUS = range(3)  # the texts that are searched
SHORTER = 3  # places of one text that a tree branches from: of the longest match and of shorter ones
RANKS = 8  # continuations of one match that become branches
ELSEWHERE = 0.5  # of the rate of a match, where longer ones, or other texts, have said something else
ALWAYS = 8  # tokens of a chain that are looked up however unlikely: a fixed budget drafts them all

Price = tuple[float, ...]  # of a budget
Match = tuple[float, int, int, Place]  # probability, token, the text, where the node above matches


class Step(NamedTuple):
    """A token of the chain with what is known of it."""

    token: int
    rate: float  # probability that it is accepted if those before it are
    kind: int
    match: int
    second: int | None  # the next best continuation


class Lookup(Protocol):
    """What may follow one sequence: the likeliest chain, and a tree."""

    rates: list[HitRates]  # of this sequence, by text
    source: int  # the text that the chain comes from
    matched: list[int]  # of the last tree: continuations of matches below its root

    def read(self, seq: Seq, fresh: Sequence[int], most: int) -> None:
        """The sequence has grown by these tokens: find the chain, so many steps at most."""
        ...

    def steps(self, most: int) -> Sequence[Step]:
        """The first steps of the chain."""
        ...

    def tokens(self, most: int) -> list[int]:
        """Their tokens."""
        ...

    def survivals(self) -> Sequence[float]:
        """How likely the first 1, 2, ... tokens of the chain are all accepted."""
        ...

    def match(self) -> int:
        """The length of the match that the chain follows; 0 = there is none."""
        ...

    def grow(
        self, seq: Seq, table: Successors | None, size: Size, least: float, price: Price | None
    ) -> BestTree:
        """The tree below the sequence's last token, down to survivals of `least`, cut to what pays by a price list."""
        ...


class PlaceLookup:
    """Implements Lookup with a suffix automaton of the request, and what else is searched."""

    def __init__(
        self,
        rates: list[HitRates],
        shared: list[HitRates],
        shortest: int,
        reader: Reader | None,
        corpus: Corpus | None,
    ) -> None:
        self.rates, self._shared, self._shortest = rates, shared, shortest
        self._reader, self._corpus, self._text = reader, corpus, SuffixAutomaton()
        self.source, self.matched = REQUEST, list[int]()
        self._chain: list[Step] = []

    def read(self, seq: Seq, fresh: Sequence[int], most: int) -> None:
        self._text.extend(fresh)
        if self._reader is not None:
            self._reader.read(fresh)
        self._chain, best = [], 0.0
        for source, place in self._places(seq):
            steps = self._steps(place, source, seq.stop_ids, most)
            worth = sum(_survivals(steps))
            if worth > best:
                self._chain, self.source, best = steps, source, worth

    def steps(self, most: int) -> Sequence[Step]:
        return self._chain[:most]

    def tokens(self, most: int) -> list[int]:
        return [step.token for step in self._chain[:most]]

    def survivals(self) -> Sequence[float]:
        return [*_survivals(self._chain)]

    def match(self) -> int:
        return self._chain[0].match if self._chain else 0

    def grow(
        self, seq: Seq, table: Successors | None, size: Size, least: float, price: Price | None
    ) -> BestTree:
        grown = grow(seq.tokens[-1], self._first(seq), self._ways(seq.stop_ids), table, size, least)
        return grown.cut(best_count(grown.survivals, price))

    def _places(self, seq: Seq) -> list[tuple[int, Place]]:
        """Where the end of the sequence matches, in every text that it does."""
        places: list[tuple[int, Place]] = [(REQUEST, AutomatonPlace(self._text, *self._text.earlier()))]
        if self._reader is not None:
            places += [(PAST, place) for place in self._reader.places()]
        if self._corpus is not None:
            places.append((CORPUS, self._corpus.find(seq.tokens)))
        return [(source, place) for source, place in places if place.length >= self._shortest]

    def _steps(self, place: Place, source: int, stop_ids: frozenset[int], most: int) -> list[Step]:
        """The likeliest chain from a place on, as long as it is worth drafting; the first few tokens always."""
        own, shared = self.rates[source], self._shared[source]
        steps: list[Step] = []
        survival = 1.0
        while len(steps) < most and (survival >= NEGLIGIBLE or len(steps) < ALWAYS):
            found = place.continuations()
            if not found:
                break
            (count, token), match = found[0], place.length
            kind = kind_of(count, sum(times for times, _ in found))
            rate = own.rate(kind, match, shared)
            steps.append(Step(token, rate, kind, match, found[1][1] if len(found) > 1 else None))
            if token in stop_ids:
                break
            survival *= rate
            place = place.after(token)
        return steps

    def _first(self, seq: Seq) -> Candidates:
        """What may follow the root: continuations of the longest match in every text, and of shorter ones there."""
        places = self._places(seq)
        places.sort(key=lambda pair: pair[0] != self.source)  # the chain's own text first
        found, left = list[Match](), 1.0
        for source, place in places:
            for _ in range(SHORTER):
                if place.length < self._shortest:
                    break
                left = self._add_matches(source, place, found, left)
                place = place.shorter()
        self.matched = [match[1] for match in found]
        return found, left

    def _ways(self, stop_ids: frozenset[int]) -> Ways:
        """What matches after a node, as a function of what it is."""
        single = self._text.nexts[0] if self._shortest == 1 else {}

        def ways(node: Match | tuple[float, int]) -> Candidates | None:
            token = node[1]
            if token in stop_ids:
                return None
            if len(node) == 4:
                source, place = node[2], node[3].after(token)
            elif token in single:
                source, place = REQUEST, AutomatonPlace(self._text, single[token], 1)
            else:
                return [], 1.0
            found = list[Match]()
            return found, self._add_matches(source, place, found, 1.0)

        return ways

    def _add_matches(self, source: int, place: Place, found: list[Match], left: float) -> float:
        """Add the continuations of a match to others; returns what probability all of them leave."""
        own, shared, length = self.rates[source], self._shared[source], place.length
        following = place.continuations()
        if len(following) == 1 and not found:
            ((count, token),) = following
            rate = own.rate(ONCE if count == 1 else ALIKE, length, shared)
            found.append((rate, token, source, place))
            return 1.0 - rate
        known, first = {match[1] for match in found}, 1.0 if not found else ELSEWHERE
        total = sum([times for times, _ in following])
        for rank, (count, token) in enumerate(following[:RANKS]):
            if token not in known:
                kind, doubt = (SECOND, 1.0) if rank else (kind_of(count, total), first)
                rate = left * doubt * own.rate(kind, length, shared)
                left -= rate
                found.append((rate, token, source, place))
        found.sort(key=itemgetter(0), reverse=True)
        return left


def _survivals(steps: Iterable[Step]) -> Iterable[float]:
    return accumulate([step.rate for step in steps], mul)
