"""Text: the tokens of a sequence, and where its end came before; a look-up takes no longer in a long text.

The last few thousand tokens are also kept as a string with a character per token: to search it takes less time than to
keep an index of it, above all where look-ups are rare. Of all that lies before, every run of FAR tokens is sorted,
now and then: a search there takes a few steps more in a text of 128,000 tokens than in one of 10,000.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

TAIL = 4096  # tokens of the string at least; at twice as many the rest is sorted
FAR = 4  # tokens of a run that is found before them
_MIX, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # runs that only look alike are told apart by whoever asks


class Text:
    """Grows at its end."""

    __slots__ = ("_ends", "_runs", "_start", "tail", "tokens")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list[int]()
        self.tail, self._start = "", 0  # of the tokens from `_start` on
        self._runs, self._ends = np.empty(0, np.uint64), np.empty(0, np.int32)  # sorted; equal runs by their ends
        self.extend(tokens)

    def extend(self, fresh: Sequence[int]) -> None:
        self.tokens += fresh
        if len(self.tokens) - self._start > 2 * TAIL:
            self._sort()
        else:
            self.tail += "".join(map(chr, fresh))

    def cut(self, length: int) -> None:
        """Forget all but the first tokens."""
        if length < self._start + TAIL // 2 and self._start:
            kept = self.tokens[:length]
            self.tokens.clear()
            self.tail, self._start = "", 0
            self.extend(kept)
        else:
            del self.tokens[length:]
            self.tail = self.tail[: length - self._start]

    @property
    def is_long(self) -> bool:
        """Is there more than the string?"""
        return self._start > 0

    def last_before(self, n: int, end: int) -> int:
        """The end of the last n tokens where they came last before `end`, of the string; -1 = nowhere."""
        until = end - self._start
        at = self.tail.rfind(self.tail[-n:], 0, until) if n <= until else -1
        return -1 if at < 0 else at + n + self._start

    def far_ends(self, most: int) -> list[int]:
        """Where a run like the last one has ended among those that are sorted, the most recent first."""
        if not self._start:
            return []
        run = 0
        for token in self.tokens[-FAR:]:
            run = (run * _MIX + token) & _MASK
        wanted = np.uint64(run)
        first, behind = (int(self._runs.searchsorted(wanted, side)) for side in ("left", "right"))
        found: list[int] = self._ends[max(first, behind - most) : behind][::-1].tolist()
        return [end for end in found if end < len(self.tokens)]

    def _sort(self) -> None:
        tokens, count = np.array(self.tokens, np.uint64), len(self.tokens) - FAR + 1
        runs = tokens[:count]
        for i in range(1, FAR):
            runs = runs * np.uint64(_MIX) + tokens[i : i + count]
        order = np.argsort(runs, kind="stable")
        self._runs, self._ends = runs[order], (order + FAR).astype(np.int32)
        self._start = len(self.tokens) - TAIL
        self.tail = "".join(map(chr, self.tokens[self._start :]))
