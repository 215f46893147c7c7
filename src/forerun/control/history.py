"""What drafting came to so far: how often drafts stood, by depth, and what rounds brought beyond their time.

Everything is forgotten at a steady pace, because texts change. A second rate with a short memory notices a text
that has become easy; being noisy, it must beat the first by a margin. The other way round nothing is needed:
failures of long drafts are many and costly enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PRIOR = 0.7  # acceptance before anything was seen
WEIGHT = 3.0  # tries that a prior is worth
MEMORY = 0.95  # per position tested, or per round
PATIENCE = 0.98  # memory of claims, per round: it is the drafter that follows the text, and how it errs changes little
RECENT, MARGIN = 0.25, 0.2  # weight of the newest position in the short memory, and what it must be ahead by
HOPED_GAIN = 0.3  # tokens a round: what a drafter that was never asked is hoped to bring
HALVING, MOST_TRUST = 0.3, 1.3  # how far claims are scaled down and up


@dataclass(slots=True)
class History:
    """One text's history with a drafter that costs, or that of all texts with it."""

    hits: float = PRIOR * WEIGHT
    tries: float = WEIGHT
    recent: float = PRIOR
    by_depth: list[list[float]] = field(default_factory=list)  # [hits, tries] of depth 1, 2, ...
    gain: float = HOPED_GAIN * WEIGHT  # tokens beyond what the round's time was worth
    rounds: float = WEIGHT
    claimed: float = WEIGHT  # tokens that the drafter expected to stand, and those that did
    stood: float = WEIGHT
    nodes: float = 0.0  # drafted per level

    @classmethod
    def after(cls, earlier: History) -> History:
        """A new text starts from what was seen of the others, and soon outweighs it."""
        share, asked = WEIGHT / earlier.tries, WEIGHT / earlier.rounds
        rate = earlier.hits / earlier.tries
        by_depth = [[hits * share, tries * share] for hits, tries in earlier.by_depth]
        trusted = WEIGHT * earlier.trust
        return cls(
            rate * WEIGHT,
            WEIGHT,
            rate,
            by_depth,
            earlier.gain * asked,
            WEIGHT,
            WEIGHT,
            trusted,
            earlier.nodes,
        )

    def count(self, depth: int, accepted: int, nodes: int = 0) -> None:
        """A tree so deep was drafted, and this many tokens of it stood."""
        tried = min(accepted + 1, depth)
        memory = MEMORY**tried
        self.hits = self.hits * memory + accepted
        self.tries = self.tries * memory + tried
        self.by_depth += [[0.0, 0.0] for _ in range(depth - len(self.by_depth))]
        for level, counts in enumerate(self.by_depth, start=1):
            reached = level <= tried
            counts[0] = counts[0] * MEMORY + (level <= accepted)
            counts[1] = counts[1] * MEMORY + reached
            if reached:
                self.recent += RECENT * ((level <= accepted) - self.recent)
        if depth:
            self.nodes += 0.2 * (max(nodes, depth) / depth - self.nodes)

    def settle(self, gain: float) -> None:
        """A round in which the drafter was asked brought so many tokens beyond what its time was worth."""
        self.gain = self.gain * MEMORY + gain
        self.rounds = self.rounds * MEMORY + 1.0

    def hold_to(self, claimed: float, stood: int) -> None:
        """The drafter expected so many tokens to stand."""
        self.claimed = self.claimed * PATIENCE + claimed
        self.stood = self.stood * PATIENCE + stood

    @property
    def trust(self) -> float:
        """What a claimed probability is to be multiplied by."""
        return min(max((self.stood + WEIGHT) / (self.claimed + WEIGHT), HALVING), MOST_TRUST)

    @property
    def mean_gain(self) -> float:
        return self.gain / self.rounds

    @property
    def acceptance(self) -> float:
        """Of positions that were tested, whatever their depth."""
        return min(max(self.hits / self.tries, self.recent - MARGIN), 0.999)

    def survivals(self, most: int, least: float = 0.0) -> list[float]:
        """How likely something stands at depth 1, 2, ...: the rates of each depth, leaning on that of all.

        They end where they fall below `least`.
        """
        overall, survival, found = self.acceptance, 1.0, list[float]()
        for level in range(most):
            hits, tries = self.by_depth[level] if level < len(self.by_depth) else (0.0, 0.0)
            survival *= (hits + WEIGHT * overall) / (tries + WEIGHT)
            if survival < least:
                break
            found.append(survival)
        return found
