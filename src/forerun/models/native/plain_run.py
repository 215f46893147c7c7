"""PlainRun: plain passes of one greedy text, run in the native call of the pass before them, until rounds ask for them.

Python between two passes mostly waits for what the pass has evicted from the caches: a round behind a pass takes six
times as long as one that finds everything at hand. So where the next token is known to be the largest logit and nobody
would draft behind it (`Needs.match_length`), the call goes on with the next pass. The engine learns nothing of it: its
next rounds ask for the same passes, one by one, and get what is known. Whoever asks for anything else has them dropped;
they were written behind the committed positions, where any pass writes.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from forerun.core.types import Greedy, Needs, Scores, Seq, TreeBatch
from forerun.models.native import library as native
from forerun.models.native.pass_rows import HiddenRows
from forerun.models.native.tree_pass import TreePass, checked
from forerun.models.paged import Extent

MOST = 7  # passes behind the first of a call: up to eight tokens come at once, within the seconds that it may hold
SECONDS = 0.03  # of a call: where passes take long, Python between them is a small share, and tokens come one by one
_MORE = 256  # tokens that the text grows by


@lru_cache(maxsize=64)
def without_rows(needs: Needs) -> Needs:
    """What a head that reads one row needs of a pass behind which it rests; the last round of the rest has that row."""
    return replace(needs, hidden_layers=(), rests=(needs.rests or 1) - 1)


class PlainRun:
    """The passes behind the last one: whose they are, and what each found."""

    def __init__(self, alone: TreePass, layers: int, width: int) -> None:
        self._last, self._width = layers, width
        self._alone, self._one, self._tops = alone, native.Run(), (ctypes.c_int32 * MOST)()
        self._decode = native.library().fr_decode_run
        self._one.seconds, self._one.tops = SECONDS, ctypes.addressof(self._tops)
        self._at = *alone.at, ctypes.byref(self._one)
        self._extent: Extent | None = None  # None = there are none
        self._start = 0  # committed positions before the first of them
        self._found: list[
            tuple[int, Tensor, int, Mapping[int, Tensor]]
        ] = []  # the token of each, its logits, where these are largest, and rows that entered layers
        self._layers: tuple[int, ...] = ()  # these layers
        # of the sequence that `_reader` is, and how much of it is known
        self._text, self._read = array("i"), 0
        self._reader: Extent | None = None
        self._stop_ids, self._stops = frozenset[int](), array("q")

    def known(self, extent: Extent, tokens: list[int], needs: Needs) -> Scores | None:
        """Of a pass over these tokens, if it was run; else all that were are dropped."""
        if extent is self._extent and len(tokens) == 1 and needs.hidden_layers == self._layers:
            place = extent.length - self._start
            if 0 <= place < len(self._found) and self._found[place][0] == tokens[0]:
                _, logits, top, hidden = self._found[place]
                return Scores(logits, hidden, Greedy(checked([top])), ahead=-1)
        self.drop()
        return None

    def has_next(self, extent: Extent) -> bool:
        """Was the next pass of this sequence run, without hidden rows?"""
        known = extent is self._extent and not self._layers
        return known and 0 <= extent.length - self._start < len(self._found)

    def drop(self) -> None:
        """What was run and not asked for no longer counts."""
        self._extent = None

    def passes(self, seq: Seq, extent: Extent, trees: TreeBatch, needs: Needs) -> int:
        """How many may be run behind the pass over this tree. The first token of a text does not wait for others."""
        if needs.match_length is None or needs.may_run or len(seq.tokens) <= seq.prompt_length:
            return 0
        if not trees.topology()[0].is_chain:
            return 0
        if self._last in needs.hidden_layers:  # computed in place, for the caller of the first pass
            return 0
        room = min(seq.max_length - len(seq.tokens), extent.writable - extent.length) - trees.nodes
        return max(0, min(MOST if needs.rests is None else min(MOST, needs.rests), room))

    def run(
        self, seq: Seq, extent: Extent, tokens: list[int], most: int, needs: Needs, layers: Sequence[int] = ()
    ) -> tuple[int, float]:
        """The pass that the TreePass has, over a chain of these tokens, and up to `most` behind it.

        `layers`: of these, the rows that enter them are kept for each. How many were run, and the first one's share of
        the time.
        """
        one, alone = self._one, self._alone
        shown = [HiddenRows(layers, 1, self._width) for _ in range(most)] if layers else []
        places = array("Q", [at for rows in shown for at in rows.addresses.values()])
        one.hidden = places.buffer_info()[0]
        one.most, one.match, one.logits = most, needs.match_length or 0, alone.spare_rows(most)
        if needs.match_length:
            self._write_text(seq.tokens, extent, len(tokens))
        if seq.stop_ids is not self._stop_ids:
            self._stop_ids, self._stops = seq.stop_ids, array("q", seq.stop_ids)
            one.stops, one.stop_count = self._stops.buffer_info()
        if self._decode(*self._at):
            raise MemoryError(f"no memory for a pass over {len(tokens)} nodes")
        count = one.count
        if count:
            tops = self._tops[:count]
            roots, hidden = (alone.top(one.kept), *tops), shown or ({},) * count
            self._found = list(zip(roots, alone.take_rows(count), tops, hidden, strict=False))
            self._layers = needs.hidden_layers
            self._extent, self._start = extent, extent.length + one.kept + 1
        return count, one.own

    def _write_text(self, tokens: list[int], extent: Extent, nodes: int) -> None:
        """The text of this sequence, with room behind it for tokens found behind `nodes` nodes."""
        length = len(tokens)
        if extent is not self._reader or length < self._read:
            self._reader, self._read = extent, 0
        if length + nodes + MOST > len(self._text):
            self._text.extend([0] * (length + nodes + _MORE - len(self._text)))
        self._text[self._read : length] = array("i", tokens[self._read :])
        self._read = length
        self._one.text, self._one.length = self._text.buffer_info()[0], length
