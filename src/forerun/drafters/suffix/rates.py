"""Hit rates of continuations: how often they were right, by the length of the match and by what its occurrences say.

Rates are learnt at no cost, whether or not a continuation was put to the target: the committed token shows whether it
would have been accepted. Recent counts weigh more; what was learnt on all sequences is the prior of each.
"""

from __future__ import annotations

from array import array

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
        """The estimate for one sequence."""
        i = kind * self.longest + min(match, self.longest) - 1
        shared = SHARED_TRIES * prior.hits[i] / prior.tries[i]
        return (self.hits[i] + shared) / (self.tries[i] + SHARED_TRIES)


def kind_of(count: int, total: int) -> int:
    """What a continuation is that `count` of `total` earlier occurrences had."""
    if count == total:
        return ONCE if total == 1 else ALIKE
    return MOSTLY if 2 * count > total else DIVIDED
