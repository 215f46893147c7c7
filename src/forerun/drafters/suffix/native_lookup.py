"""NativeLookup: what may follow the end of a request in the request itself, found by the native library.

The same chain and the same tree as PlaceLookup finds in Python, to the last bit of every probability, in less time than
an n-gram look-up takes. Past outputs and a corpus are not searched here.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence

from forerun.drafters.base import NEGLIGIBLE
from forerun.drafters.best_first import BestTree, Size, Successors
from forerun.drafters.suffix.fill import Fill
from forerun.drafters.suffix.places import ALWAYS, REQUEST, Price, Step
from forerun.drafters.suffix.rates import SHARED_TRIES, HitRates
from forerun.models.native import suffix_library as native
from forerun.types import Seq


class NativeLookup:
    """Implements forerun.drafters.suffix.places.Lookup."""

    def __init__(
        self,
        rates: list[HitRates],
        shared: list[HitRates],
        shortest: int,
        stop_ids: frozenset[int],
        fill: Fill | None,
    ) -> None:
        self.rates, self.source, self.matched = rates, REQUEST, list[int]()
        library, ask, own, of_all = native.library(), native.Lookup(), rates[REQUEST], shared[REQUEST]
        text = library.fr_suffix_new()
        if not text:
            raise MemoryError("no memory for a text to look up")
        weakref.finalize(self, library.fr_suffix_free, text)
        self._text, self._ask, self._at = text, ask, ctypes.addressof(ask)
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

    def grow(
        self, seq: Seq, table: Successors | None, size: Size, least: float, price: Price | None
    ) -> BestTree:
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
