"""What may follow the end of a sequence: in the request itself, in past outputs of its tenant, and in a corpus.

`PlaceLookup` searches all texts in Python. Where the request is all there is, `NativeLookup` finds the same chain and
tree by the native library, to the last bit of every probability, in a tenth of the time.

`History` has past outputs of each tenant, in bounded memory and on request in a file; they are never looked up for
another tenant. When a tenant's automaton is half as large as allowed, a second one is started and the one before it is
dropped: so nothing is ever rebuilt.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import itemgetter, mul
from pathlib import Path
from typing import Any, NamedTuple

from forerun.core.errors import InvalidInput
from forerun.core.request import best_count
from forerun.core.types import Seq
from forerun.drafters.base import NEGLIGIBLE
from forerun.drafters.heads.growth import BestTree, Candidates, Size, TextTable, Ways, grow
from forerun.drafters.lookup.suffix_index import (
    ALIKE,
    BREAK,
    ONCE,
    SECOND,
    SHARED_TRIES,
    AutomatonPlace,
    Corpus,
    HitRates,
    Place,
    SuffixAutomaton,
    kind_of,
)
from forerun.drafters.lookup.suffix_table import Fill
from forerun.models.native import library as native

log = logging.getLogger(__name__)

MOST_TOKENS, MOST_TENANTS = 32768, 16  # tokens kept of each, tenants kept; beyond, the oldest are dropped
_KIND = "forerun suffix history"


class _Tenant:
    """The automata of one tenant, the one that grows last."""

    __slots__ = ("texts",)

    def __init__(self) -> None:
        self.texts = [SuffixAutomaton()]

    def add(self, tokens: Sequence[int], most: int) -> None:
        if not self.texts[-1].whole:  # an interrupt came while it grew
            self.texts[-1] = SuffixAutomaton()
        if self.texts[-1].size >= most // 2:
            self.texts = [self.texts[-1], SuffixAutomaton()]
        self.texts[-1].extend([*tokens[-most // 2 :], BREAK])


class Reader:
    """How far the end of one sequence matches the past outputs of its tenant."""

    def __init__(self, tenant: _Tenant) -> None:
        self._tenant = tenant
        self._at: list[tuple[SuffixAutomaton, int, int]] = []
        self._recent: list[int] = []  # tokens to find the place with in an automaton that is new

    def read(self, tokens: Iterable[int]) -> None:
        """Tokens that were added to the sequence."""
        tokens = list(tokens)
        known = {id(text): (state, length) for text, state, length in self._at}
        self._at = []
        for text in self._tenant.texts:
            state, length = known.get(id(text), (0, 0))
            for token in tokens if id(text) in known else [*self._recent, *tokens]:
                state, length = text.follow(state, length, token)
            self._at.append((text, state, length))
        self._recent = [*self._recent, *tokens][-32:]

    def places(self) -> list[Place]:
        return [AutomatonPlace(text, state, length) for text, state, length in self._at if text.whole]


class History:
    """Past outputs by tenant."""

    def __init__(self, vocab_size: int, most: int = MOST_TOKENS, file: Path | None = None) -> None:
        self._vocab_size, self._most, self._file = vocab_size, most, file
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        if file is not None:
            self._open(file)

    def reader(self, tenant: str) -> Reader:
        return Reader(self._tenant(_digest(tenant)))

    def add(self, tenant: str, tokens: Sequence[int]) -> None:
        if len(tokens) < 2:
            return
        self._tenant(_digest(tenant)).add(tokens, self._most)
        if self._file is not None:
            row = json.dumps({"tenant": _digest(tenant), "tokens": tokens})
            try:
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(row + "\n")
            except OSError as error:  # drafting goes on without the file
                log.warning("outputs are no longer kept in %s: %s", self._file, error)
                self._file = None

    def _tenant(self, name: str) -> _Tenant:
        if name not in self._tenants:
            while len(self._tenants) >= MOST_TENANTS:
                self._tenants.popitem(last=False)
            self._tenants[name] = _Tenant()
        self._tenants.move_to_end(name)
        return self._tenants[name]

    def _open(self, path: Path) -> None:
        """Index what a file holds, and write it anew without what is too old to be kept."""
        head = {"kind": _KIND, "vocab_size": self._vocab_size}
        rows: list[str] = []
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            if not lines or _parsed(lines[0]) != head:
                raise InvalidInput(f"{str(path)!r} holds no outputs of a model with {self._vocab_size} tokens")
            rows = self._newest(lines[1:])
        for row in rows:
            entry = json.loads(row)
            self._tenant(entry["tenant"]).add(entry["tokens"], self._most)
        try:
            path.write_text("".join(f"{row}\n" for row in (json.dumps(head), *rows)), encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"cannot keep outputs in {str(path)!r}: {error.strerror}") from None

    def _newest(self, rows: Sequence[str]) -> list[str]:
        """The last rows that fit; a row that an interrupted run left unfinished is dropped."""
        kept, sizes = list[str](), dict[str, int]()
        for row in reversed(rows):
            entry = _parsed(row)
            tenant, tokens = entry.get("tenant"), entry.get("tokens")
            if not isinstance(tenant, str) or not isinstance(tokens, list):
                continue
            if not all(type(token) is int and 0 <= token < self._vocab_size for token in tokens):
                continue
            sizes[tenant] = sizes.get(tenant, 0) + len(tokens)
            if sizes[tenant] <= self._most:
                kept.append(row)
        return kept[::-1]


def _digest(tenant: str) -> str:
    """A tenant's name as it may stand in a file."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]


def _parsed(row: str) -> dict[str, Any]:
    try:
        found = json.loads(row)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


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


class PlaceLookup:
    """What may follow one sequence: the likeliest chain, and a tree. Searches all texts."""

    def __init__(
        self, rates: list[HitRates], shared: list[HitRates], shortest: int, reader: Reader | None, corpus: Corpus | None
    ) -> None:
        """`rates` of this sequence, by text, and `shared` ones of all."""
        self.rates, self._shared, self._shortest = rates, shared, shortest
        self._reader, self._corpus, self._text = reader, corpus, SuffixAutomaton()
        self.source = REQUEST  # the text that the chain comes from
        self.matched = list[int]()  # of the last tree: continuations of matches below its root
        self._chain: list[Step] = []

    def read(self, seq: Seq, fresh: Sequence[int], most: int) -> None:
        """The sequence has grown by these tokens: find the chain, `most` steps at most."""
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
        """How likely the first 1, 2, ... tokens of the chain are all accepted."""
        return [*_survivals(self._chain)]

    def match(self) -> int:
        """The length of the match that the chain follows; 0 = there is none."""
        return self._chain[0].match if self._chain else 0

    def grow(self, seq: Seq, table: TextTable | None, size: Size, least: float, price: Price | None) -> BestTree:
        """The tree below the sequence's last token, down to survivals of `least`, cut to what pays by a price list."""
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


class NativeLookup:
    """The same as PlaceLookup where the request alone is searched."""

    def __init__(
        self, rates: list[HitRates], shared: list[HitRates], shortest: int, stop_ids: frozenset[int], fill: Fill | None
    ) -> None:
        self.rates, self.source, self.matched = rates, REQUEST, list[int]()
        library, ask, own, of_all = native.library(), native.Lookup(), rates[REQUEST], shared[REQUEST]
        text = library.fr_suffix_new()
        if not text:
            raise MemoryError("no memory for a text to look up")
        weakref.finalize(self, library.fr_suffix_free, text)
        self._text, self._ask, self._at = text, ask, ctypes.byref(ask)
        self._read, self._grow = library.fr_suffix_read, library.fr_suffix_grow
        # views of what it found: to make one takes longer than to read it
        self._tokens, self._survivals, self._matches = ask.step_tokens, ask.step_survivals, ask.step_matches
        self._columns = ask.step_tokens, ask.step_rates, ask.step_kinds, ask.step_matches, ask.step_seconds
        self._factors, self._tree = ask.factors, (ask.tokens, ask.parents, ask.by_depth, ask.nexts)
        self._stops = array("q", sorted(stop_ids))
        self._kept = own, of_all, fill  # what the library reads
        self._price: tuple[Price | None, array[float]] = None, array("d")
        ask.own_hits, ask.own_tries = _address(own.hits), _address(own.tries)
        ask.all_hits, ask.all_tries = _address(of_all.hits), _address(of_all.tries)
        ask.longest, ask.shortest, ask.shared_tries = own.longest, shortest, SHARED_TRIES
        ask.stops, ask.stop_count = _address(self._stops), len(self._stops)
        ask.always, ask.negligible = ALWAYS, NEGLIGIBLE
        if fill is not None:
            ask.rows, ask.kept, ask.table, ask.shares = fill.at

    def read(self, seq: Seq, fresh: Sequence[int], most: int) -> None:
        tokens = array("i", fresh)
        self._ask.most_steps = min(most, native.MOST_STEPS)
        if self._read(self._text, tokens.buffer_info()[0], len(tokens), self._at):
            raise MemoryError("no memory for a text to look up")

    def steps(self, most: int) -> Sequence[Step]:
        return [self._step(i) for i in range(min(most, self._ask.steps))]

    def _step(self, i: int) -> Step:
        token, rate, kind, match, second = [column[i] for column in self._columns]
        return Step(token, rate, kind, match, second if second >= 0 else None)

    def tokens(self, most: int) -> list[int]:
        tokens: list[int] = self._tokens[: min(most, self._ask.steps)]
        return tokens

    def survivals(self) -> Sequence[float]:
        survivals: list[float] = self._survivals[: self._ask.steps]
        return survivals

    def match(self) -> int:
        return self._matches[0] if self._ask.steps else 0

    def grow(self, seq: Seq, table: TextTable | None, size: Size, least: float, price: Price | None) -> BestTree:
        ask = self._ask
        # a factor of nothing leaves the table out
        self._factors[:] = (0.0, 0.0) if table is None else table.factors
        if price is not self._price[0]:
            self._price = price, array("d", price or ())
            ask.price, ask.prices = _address(self._price[1]) if price else None, len(self._price[1])
        tokens, parents, by_depth, nexts = self._tree
        ask.nodes, ask.depth, ask.width = size
        ask.least, tokens[0] = least, seq.tokens[-1]
        self._grow(self._text, self._at)
        count = ask.best + 1
        self.matched = ask.matches[: ask.matched]
        return BestTree(tokens[:count], parents[:count], by_depth[: ask.levels], nexts[: ask.next_count])


def _address(values: array[float] | array[int]) -> int:
    return values.buffer_info()[0]
