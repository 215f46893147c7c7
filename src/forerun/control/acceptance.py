"""What is believed of drafters and of their requests: how much of a draft is accepted.

Tokens accepted of a draft = what the drafter's files or its look-up claim, x the factor of the drafter, x the factor of
the request. A request starts from its drafter's factor, which counts for a few tokens, and soon outweighs it. What was
seen is forgotten with every round, drafted or not, so that a drafter that does not pay is tried again.

Drafters on the host draft to any depth: of these acceptance is counted by depth, and what their rounds gained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.core.offer import Offer

KAPPA = 3.0  # claimed tokens that the drafter's factor counts for in a request
ARM_PRIOR = 6.0  # claimed tokens that the drafter's files count for
MEMORY, ARM_MEMORY = 0.95, 0.995  # of a request and of a drafter, per drafted round
IDLE_MEMORY, ARM_IDLE = 0.985, 0.998  # the same per plain round
OPTIMISM = 0.5  # standard deviations by which a factor is overrated: what is not known is tried
WINDOW = 20  # requests of a drafter that the account looks at together
# drafters on the host, per round: memory of gains, of a drafter's bias, of the pace, and of all that in an idle round
GAIN_MEMORY, TRUST_MEMORY, PACE_MEMORY, RECORD_IDLE = 0.9, 0.98, 0.97, 0.97
FIRST_RATE, FIRST_GAIN = (
    0.7,
    0.3,
)  # the same: acceptance of a level, and tokens that a round gains, before any was seen
LEAST_HOPE = 0.1  # tokens that a round of a request's first draft is hoped to gain, whatever others have shown
LEAST_TRUST, MOST_TRUST = 0.3, 1.3  # how far what is claimed is scaled down and up


@dataclass(slots=True)
class Factor:
    """Accepted over claimed tokens, with a memory."""

    seen: float = 0.0
    claimed: float = 0.0

    def add(self, seen: float, claimed: float, memory: float) -> None:
        self.seen, self.claimed = self.seen * memory + seen, self.claimed * memory + claimed

    def fade(self, memory: float) -> None:
        self.seen, self.claimed = self.seen * memory, self.claimed * memory

    def after(self, prior: float, weight: float) -> float:
        return (self.seen + weight * prior) / (self.claimed + weight)

    def spread(self, prior: float, weight: float) -> float:
        """The variance of that."""
        return (self.seen + weight * prior) / (self.claimed + weight) ** 2


@dataclass(slots=True)
class Record:
    """What a drafter on the host has shown: acceptance by depth, what it expected, and what its rounds gained."""

    hits: float = 0.0
    tries: float = 0.0
    by_depth: list[list[float]] = field(default_factory=list)  # [hits, tries] of depth 1, 2, ...
    gain: float = 0.0  # tokens beyond what the round's time was worth
    rounds: float = 0.0
    expected: float = 0.0
    accepted: float = 0.0
    nodes: float = 0.0  # drafted per level

    def count(self, depth: int, accepted: int, nodes: int) -> None:
        tried = min(accepted + 1, depth)
        self.hits = self.hits * MEMORY**tried + accepted
        self.tries = self.tries * MEMORY**tried + tried
        self.by_depth += [[0.0, 0.0] for _ in range(depth - len(self.by_depth))]
        for level, counts in enumerate(self.by_depth, start=1):
            counts[0] = counts[0] * MEMORY + (level <= accepted)
            counts[1] = counts[1] * MEMORY + (level <= tried)
        self.nodes += 0.2 * (max(nodes, depth) / depth - self.nodes)

    def count_gain(self, gain: float) -> None:
        self.gain, self.rounds = self.gain * GAIN_MEMORY + gain, self.rounds * GAIN_MEMORY + 1.0

    def count_expected(self, expected: float, accepted: float) -> None:
        self.expected, self.accepted = (
            self.expected * TRUST_MEMORY + expected,
            self.accepted * TRUST_MEMORY + accepted,
        )

    def fade(self, memory: float) -> None:
        self.hits, self.tries = self.hits * memory, self.tries * memory
        self.gain, self.rounds = self.gain * memory, self.rounds * memory
        for counts in self.by_depth:
            counts[0], counts[1] = counts[0] * memory, counts[1] * memory

    @property
    def own_rate(self) -> float:
        return (self.hits + KAPPA * FIRST_RATE) / (self.tries + KAPPA)

    def rate(self, base: Record, hope: float = 0.0) -> float:
        """Of positions that were tested; `hope`: standard deviations more than that."""
        mean, tries = (self.hits + KAPPA * base.own_rate) / (self.tries + KAPPA), self.tries + KAPPA
        return float(min(0.999, mean + hope * (max(0.0, mean * (1.0 - mean)) / tries) ** 0.5))

    def prior_gain(self, base: Record) -> float:
        return max(LEAST_HOPE, (base.gain + KAPPA * FIRST_GAIN) / (base.rounds + KAPPA))

    def mean_gain(self, base: Record) -> float:
        return (self.gain + KAPPA * self.prior_gain(base)) / (self.rounds + KAPPA)

    def trust(self, base: Record) -> float:
        prior = (base.accepted + KAPPA) / (base.expected + KAPPA)
        return min(max((self.accepted + KAPPA * prior) / (self.expected + KAPPA), LEAST_TRUST), MOST_TRUST)

    def survivals(self, base: Record, most: int, least: float, hope: float = 0.0) -> list[float]:
        """How likely depth 1, 2, ... is accepted; they end where they fall below `least`."""
        overall, of_base, survival = self.rate(base, hope), base.own_rate, 1.0
        found: list[float] = []
        for level in range(most):
            prior = overall
            if level < len(base.by_depth):
                hits, tries = base.by_depth[level]
                prior *= (hits + KAPPA * of_base) / (tries + KAPPA) / of_base
            hits, tries = self.by_depth[level] if level < len(self.by_depth) else (0.0, 0.0)
            survival *= min(0.999, (hits + KAPPA * prior) / (tries + KAPPA))
            if survival < least:
                break
            found.append(survival)
        return found


@dataclass(slots=True)
class Request:
    """What one request has shown, and lost."""

    drafter: DrafterState
    seen_trees: Factor = field(default_factory=Factor)
    seen_lookups: Factor = field(default_factory=Factor)
    tokens: int = 0
    loss: float = 0.0  # plain rounds
    reserve: float = 0.0  # plain rounds that are lost unseen: reading the prompt, a round that is dropped
    once: float = 0.0  # of that, and not in it: what a drafter took to read the request
    record: Record = field(default_factory=Record)
    offered: tuple[int, Offer] | None = None  # asked for already: at how many tokens, and the offer
    ahead: bool = False  # was the pass of its next round run already?

    @property
    def trees(self) -> float:
        """The factor of captured trees."""
        return self.seen_trees.after(self.drafter.trees, KAPPA)

    @property
    def lookups(self) -> float:
        """The factor of look-ups."""
        return min(MOST_TRUST, max(LEAST_TRUST, self.seen_lookups.after(self.drafter.lookups, KAPPA)))

    def see_trees(self, accepted: int, claimed: float) -> None:
        self.seen_trees.add(accepted, claimed, MEMORY)
        self.drafter.seen_trees.add(accepted, claimed, ARM_MEMORY)

    def see_lookup(self, accepted: int, claimed: float) -> None:
        self.seen_lookups.add(accepted, claimed, MEMORY)
        self.drafter.seen_lookups.add(accepted, claimed, ARM_MEMORY)

    def book(self, tokens: int, loss: float) -> None:
        self.tokens, self.loss = self.tokens + tokens, self.loss + loss

    def idle(self) -> None:
        """A round without a draft."""
        self.seen_trees.fade(IDLE_MEMORY)
        self.seen_lookups.fade(IDLE_MEMORY)
        self.record.fade(RECORD_IDLE)


@dataclass(slots=True)
class DrafterState:
    """What all requests of one drafter have shown, and what its last ones have lost."""

    seen_trees: Factor = field(default_factory=Factor)
    seen_lookups: Factor = field(default_factory=Factor)
    record: Record = field(default_factory=Record)
    usual: float = 0.0  # plain rounds that drafts on the host cost of late, whatever was accepted
    usual_lookup: float = 0.0
    written: float = 1.0  # tokens of a sequence, and the plain passes that they took, of late
    passes: float = 1.0
    ended: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=WINDOW - 1))  # loss, tokens

    @property
    def trees(self) -> float:
        return self.seen_trees.after(1.0, ARM_PRIOR)

    @property
    def lookups(self) -> float:
        return min(MOST_TRUST, self.seen_lookups.after(1.0, ARM_PRIOR))

    def idle(self) -> None:
        self.seen_trees.fade(ARM_IDLE)
        self.seen_lookups.fade(ARM_IDLE)
        self.record.fade(ARM_IDLE)
        self.usual *= ARM_IDLE
        self.usual_lookup *= ARM_IDLE

    @property
    def pace(self) -> float:
        """Tokens that a sequence writes in the time of a plain pass; plain decoding writes one."""
        return max(1.0, self.written / self.passes)

    def pace_of(self, tokens: float, passes: float) -> None:
        self.written, self.passes = self.written * PACE_MEMORY + tokens, self.passes * PACE_MEMORY + passes

    def end(self, request: Request) -> None:
        if request.tokens:
            self.ended.append((max(0.0, request.loss + request.once), request.tokens))


def optimistic(requests: Sequence[Request]) -> float:
    """The sum of their factors if a little more goes well than is known."""
    mean = spread = 0.0
    for one in requests:
        prior = one.drafter.trees
        mean += one.seen_trees.after(prior, KAPPA)
        spread += one.seen_trees.spread(prior, KAPPA)
    return float(mean + OPTIMISM * spread**0.5)
