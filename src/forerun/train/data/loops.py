"""Where answers begin to repeat themselves: small models that write greedily often end in a loop.

A drafter learns nothing from the hundredth turn of a loop, which can be half of a greedy corpus. A text loops where
a run of `RUN` tokens is the run of the same answer a few tokens (`PERIODS`) before. Runs are compared by a hash of 64
bits over the whole corpus at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RUN = 16  # tokens that must come again
PERIODS = 96  # a loop is at most so long

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
Ints = NDArray[np.int64]


def first_repeats(tokens: Ints, firsts: Ints, ends: Ints) -> Ints:
    """Per answer, tokens[first:end], where the first repeated run ends; its own end where nothing repeats.

    Answers must not overlap, and come in their order.
    """
    found = ends.copy()
    if not len(firsts) or len(tokens) <= RUN:
        return found
    runs = _hashes(tokens)
    for period in range(1, min(PERIODS, len(runs) - 1) + 1):
        again = np.flatnonzero(runs[period:] == runs[:-period])  # the earlier of both runs
        answer = np.searchsorted(firsts, again, side="right") - 1
        close = again + period + RUN
        inside = (answer >= 0) & (close <= ends[answer])
        answer, close = answer[inside], close[inside]
        first = np.flatnonzero(np.diff(answer, prepend=-1))  # of each answer; they come in their order
        found[answer[first]] = np.minimum(found[answer[first]], close[first])
    return found


def _hashes(tokens: Ints) -> NDArray[np.uint64]:
    """Of the run that begins at each token."""
    words = tokens.astype(np.uint64) + np.uint64(1)
    count = len(words) - RUN + 1
    total = np.zeros(count, dtype=np.uint64)
    for shift in range(RUN):
        total = total * _FACTOR + words[shift : shift + count]
    return total
