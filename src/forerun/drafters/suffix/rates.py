"""Hit rates of continuations: how often they were right, by the length of the match and by what its occurrences say.

Rates are learnt at no cost, whether or not a continuation was put to the target: the committed token shows whether it
would have been accepted. Recent counts weigh more; what was learnt on all sequences is the prior of each.
"""

from __future__ import annotations

ONCE, ALIKE, MOSTLY, DIVIDED, SECOND = range(5)
"""What earlier occurrences say: there was one | all agree | most agree | they do not. SECOND is the rate of the second
most frequent continuation where the first was wrong."""

_PRIOR = (  # measured (docs/log/2026-11-16-lookups3.md); the last entry holds for longer matches
    (0.31, 0.55, 0.71, 0.76, 0.76, 0.79, 0.8, 0.83, 0.87, 0.89, 0.89, 0.91, 0.91, 0.92, 0.93, 0.96),
    (0.6, 0.8, 0.84, 0.89, 0.91, 0.92, 0.93, 0.94),
    (0.38, 0.42, 0.5, 0.52, 0.54, 0.56),
    (0.15, 0.24, 0.3),
    (0.12, 0.24, 0.36),
)
PRIOR_TRIES, SHARED_TRIES = 24.0, 6.0  # what this is worth, and what all sequences are worth to one
OWN_MEMORY, SHARED_MEMORY = 0.985, 0.998  # per try


class HitRates:
    """Hits and tries by kind and by match length, from 1 to `longest`."""

    __slots__ = ("hits", "longest", "tries")

    def __init__(self, longest: int, with_prior: bool = False) -> None:
        self.longest = longest
        tries = PRIOR_TRIES if with_prior else 0.0
        self.tries = [tries] * (longest * len(_PRIOR))
        self.hits = [tries * kind[min(m, len(kind) - 1)] for kind in _PRIOR for m in range(longest)]

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
