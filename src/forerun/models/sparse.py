"""SparseContext: a few pages of a sequence's context, for draft passes that do not read all of it.

It keeps the start of the text (attention sinks), its end (a window), and pages between them that say something about
what comes next: those in which the last tokens stood before. Keys in the cache are rotated already, so a page table
with fewer pages is all that a pass needs, and the number of positions that were left out, which rotations count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from forerun.core.types import Seq
from forerun.models.attention import Span
from forerun.models.paged import Ints
from forerun.models.pages import PAGE, TREE_MARGIN, pages_for

SINKS = 1  # pages at the start of the text
FOUND = 1 / 2  # of the other pages: those that are looked up
LONGEST = 8  # tokens of a match


class SparseContext:
    """`tokens` of every context, in whole pages; a context that has no more is read whole."""

    def __init__(self, tokens: int) -> None:
        pages = max(SINKS + 2, pages_for(tokens))
        self.found = int(FOUND * (pages - SINKS))
        self.window = pages - SINKS - self.found
        self._texts: dict[int, Text] = {}
        # by sequence: the committed positions that they hold for, the pages before the window, and its first page
        self._chosen: dict[int, tuple[int, list[int], int]] = {}

    @property
    def pages(self) -> int:
        """That are read of a long context."""
        return SINKS + self.found + self.window

    @property
    def farthest(self) -> int:
        """Positions that a draft pass reaches at most."""
        return (self.pages + 1) * PAGE + TREE_MARGIN

    def narrow(self, seq: Seq, committed: int, span: Span) -> Span:
        """The same nodes over fewer pages; what is read stays the same until others than `committed` positions are."""
        known = self._chosen.get(seq.id)
        if known is None or known[0] != committed:
            known = self._chosen[seq.id] = committed, *self._choose(seq, committed)
        _, before, low = known
        skipped = PAGE * (low - len(before))
        if not skipped:
            return span
        pages = [*(span.pages[i] for i in before), *span.pages[low:]]
        return replace(span, pages=pages, length=span.length - skipped, skipped=skipped)

    def forget(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)
        self._chosen.pop(seq_id, None)

    def _choose(self, seq: Seq, committed: int) -> tuple[list[int], int]:
        """Pages before the window, ascending, and the first page of the window."""
        low = committed // PAGE + 1 - self.window
        if low <= SINKS + self.found:
            return [], 0
        text = self._texts.setdefault(seq.id, Text())
        text.read(seq.tokens[: committed + 1])
        return [*range(SINKS), *sorted(text.pages_alike(SINKS, low, self.found))], low


class Text:
    """The tokens of one sequence, and where in them the last ones stood before."""

    def __init__(self) -> None:
        self._tokens: Ints = np.zeros(4 * PAGE, dtype=np.int32)
        self._count = 0

    def read(self, tokens: Sequence[int]) -> None:
        """All of them; those that were read before are not read again."""
        count = len(tokens)
        if count > len(self._tokens):
            self._tokens = np.concatenate((self._tokens[: self._count], np.zeros(2 * count, dtype=np.int32)))
        self._tokens[self._count : count] = tokens[self._count :]
        self._count = count

    def pages_alike(self, first: int, end: int, count: int) -> list[int]:
        """`count` of the pages `first` to `end`: those behind the longest matches first, then the latest."""
        tokens, last, low = self._tokens, self._count - 1, first * PAGE - 1
        alike = np.flatnonzero(tokens[low : end * PAGE - 1] == tokens[last]) + low
        found: dict[int, None] = {}
        matches = [alike]
        for back in range(1, min(LONGEST, last + 1)):
            alike = alike[alike >= back]
            alike = alike[tokens[alike - back] == tokens[last - back]]
            if not len(alike):
                break
            matches.append(alike)
        for some in reversed(matches):
            for page in dict.fromkeys(((some[::-1] + 1) // PAGE).tolist()):
                found.setdefault(page)
                if len(found) == count:
                    return [*found]
        return [*dict.fromkeys((*found, *range(end - 1, first - 1, -1)))][:count]
