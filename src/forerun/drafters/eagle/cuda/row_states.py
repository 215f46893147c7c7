"""RowStates: what is known of the feature rows of every sequence that a head drafts for, in arrays.

A sequence has a place, the index of all arrays, from when it is first observed until it is forgotten. The place PADDING
stands for nobody: one row of zeros, on pages of its own, so that drafts treat padding like any other sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.drafters.eagle.cuda.draft_plan import MOST, Lanes
from forerun.models.paged import Ints
from forerun.models.pages import PAGE, TREE_MARGIN, PagePool, pages_for
from forerun.types import Seq

ROOM = 24  # feature rows of a sequence; a round adds at most DEEPEST + 1
PADDING = MOST  # the place of nobody


class RowStates:
    """Row t of a sequence belongs to its token t, and comes with the token after it."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.seen: Ints = np.zeros(MOST + 1, dtype=np.int32)  # rows that were observed
        self.read: Ints = np.zeros(
            MOST + 1, dtype=np.int32
        )  # those whose keys and values are written, or will be
        self.after: Ints = np.zeros((MOST + 1, ROOM), dtype=np.int32)  # the token after row t, at t % ROOM
        self.pages: Ints = np.zeros((MOST + 1, 8), dtype=np.int32)  # of the head's slots, by position
        self.counts: Ints = np.zeros(MOST + 1, dtype=np.int32)  # how many of these there are
        self._place: dict[int, int] = {}  # sequence -> place
        self._owner: dict[int, int] = {PADDING: -1}  # place -> owner of its pages
        self._free = list(range(MOST))[::-1]
        self._left_out: set[int] = set()  # sequences for which there was no room
        self.seen[PADDING] = 1
        self.has_room(PADDING, TREE_MARGIN)

    @property
    def held(self) -> int:
        """Sequences that have places."""
        return len(self._place)

    def place_of(self, seq_id: int) -> int:
        """PADDING where it has none."""
        return self._place.get(seq_id, PADDING)

    def admit(self, seqs: Sequence[Seq], rows: Sequence[int]) -> Ints:
        """Places and pages for so many more rows of each; PADDING where there are none, until it is forgotten."""
        places: Ints = np.array([self._place.get(seq.id, PADDING) for seq in seqs], dtype=np.int32)
        lacking = (places == PADDING) | (
            self.seen[places] + np.array(rows, dtype=np.int32) > PAGE * self.counts[places]
        )
        for b in np.flatnonzero(lacking).tolist():
            places[b] = self._admit(seqs[b].id, rows[b])
        return places

    def _admit(self, seq_id: int, rows: int) -> int:
        place = self._place.get(seq_id)
        if place is None and self._free and seq_id not in self._left_out:
            place = self._place[seq_id] = self._free.pop()
            self._owner[place] = seq_id
            self.seen[place] = self.read[place] = self.counts[place] = 0
        if place is not None and not self.has_room(place, int(self.seen[place]) + rows):
            self.forget(seq_id)
            place = None
        if place is None:
            self._left_out.add(seq_id)
            return PADDING
        return place

    def has_room(self, place: int, positions: int) -> bool:
        """Give a sequence pages for so many positions; False = there are too few."""
        owner, more = self._owner[place], pages_for(positions) - int(self.counts[place])
        if more <= 0:
            return True
        if not self.pool.take(owner, more):
            return False
        pages = self.pool.held[owner]
        while len(pages) > self.pages.shape[1]:
            self.pages = np.concatenate((self.pages, np.zeros_like(self.pages)), 1)
        self.pages[place, : len(pages)] = pages
        self.counts[place] = len(pages)
        return True

    def forget(self, seq_id: int) -> None:
        self._left_out.discard(seq_id)
        place = self._place.pop(seq_id, None)
        if place is not None:
            del self._owner[place]
            self._free.append(place)
            self.pool.release(seq_id)

    def unread(self, places: Ints) -> Ints:
        found: Ints = self.seen[places] - self.read[places]
        return found

    def slots(self, places: Ints, at: Ints) -> Ints:
        """Of positions, each of a sequence, that have pages."""
        found: Ints = self.pages[places, at // PAGE] * PAGE + at % PAGE
        return found

    def lanes(self, places: Sequence[int], roots: Sequence[int]) -> Lanes:
        """What a draft must know of these sequences."""
        at, seen = np.array(places, dtype=np.int32), self.seen[places]
        first = np.minimum(self.read[at], seen - 1)  # the last row in any case: the draft starts from it
        counts = self.counts[at]
        pages = self.pages[at, : max(1, int(counts.max()))]
        return Lanes(
            np.array(roots, dtype=np.int32), first, seen - first, self.after[at], at * ROOM, pages, counts
        )
