"""Sequential evidence: bets against a null hypothesis, whose winnings may be looked at after every batch of tokens.

An engine that samples from the stated law gives every bettor a fair game: a bettor whose wealth starts at 1 ever
reaches 1/a with a chance of at most a (Ville's inequality), however often anybody looks and whenever the run stops.
A check that may give `a` of the suite's false alarms fails where the mean wealth of its bettors reaches 1/a: a p-value
of 1/wealth. Nothing is assumed about sample sizes, and a clean run cannot become a failure by running on.

Bettors learn. `Tilt` looks at a feature of tokens (which symbol, how likely, what the drafter thinks of it, the draw
before) and multiplies the law by how often each value of the feature came beyond what was due. `Rival` bets on one
other law throughout (a parameter ignored, a temperature applied twice): the richest bettor names the fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from forerun.referee.tables import Contexts, Floats, Ints

FALSE_ALARMS = 1e-3  # of the whole suite: clean runs that fail, at most
_FLOOR = 1e-12  # a law's smaller values count as zero


@dataclass(frozen=True)
class Drawn:
    """A batch of n sampled tokens: where each came from, the law it was due from, what it was."""

    contexts: Contexts
    laws: Floats  # [n, A]
    draft: Floats  # [n, A] the drafter's laws; uniform where unknown
    tokens: Ints  # [n]
    position: Ints  # [n] in its output, from 0
    before: Floats  # [n] how much of the law lay below the token drawn before, 0.5 where there is none

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def below(self) -> Floats:
        """[n, A] how much of the law lies below each symbol, half of its own included."""
        return np.asarray(self.laws.cumsum(-1) - self.laws / 2)


Feature = Callable[[Drawn], Ints]  # -> [n, A] values from 0
Law = Callable[[Drawn], Floats]  # -> [n, A]


class Bettor(Protocol):
    """Bets on a batch before it sees it: log of the factor by which its wealth grows, [n]."""

    name: str

    def bet(self, drawn: Drawn) -> Floats: ...


@dataclass
class Tilt:
    """Learns by how much each value of a feature comes too often or too rarely."""

    name: str
    feature: Feature
    strength: float = 40.0  # tokens that a value must be seen before it is believed
    _seen: Floats = field(default_factory=lambda: np.zeros(0))
    _due: Floats = field(default_factory=lambda: np.zeros(0))

    def bet(self, drawn: Drawn) -> Floats:
        values = self.feature(drawn)  # [n, A]
        self._widen(int(values.max()) + 1)
        weight = ((self._seen + self.strength) / (self._due + self.strength))[values]
        rows = np.arange(len(drawn))
        total = (drawn.laws * weight).sum(-1)
        won = np.log(weight[rows, drawn.tokens]) - np.log(total)
        self._seen += np.bincount(values[rows, drawn.tokens], minlength=len(self._seen))
        self._due += np.bincount(values.ravel(), drawn.laws.ravel(), minlength=len(self._due))
        return np.asarray(won)

    def _widen(self, size: int) -> None:
        if size > len(self._seen):
            extra = np.zeros(size - len(self._seen))
            self._seen, self._due = np.concatenate([self._seen, extra]), np.concatenate([self._due, extra])


@dataclass
class Rival:
    """Bets on one other law, mixed with a little of the stated one, so that a lost bet is not ruin."""

    name: str
    law: Law
    share: float = 0.9

    def bet(self, drawn: Drawn) -> Floats:
        rows, tokens = np.arange(len(drawn)), drawn.tokens
        p, q = drawn.laws[rows, tokens], self.law(drawn)[rows, tokens]
        return np.asarray(np.log((1 - self.share) * p + self.share * q) - np.log(p))


def tempered(power: float) -> Law:
    """The stated law raised to a power: a temperature that is not the one asked for."""

    def law(drawn: Drawn) -> Floats:
        raised = np.where(drawn.laws > _FLOOR, drawn.laws, 0.0) ** power
        return np.asarray(raised / raised.sum(-1, keepdims=True))

    return law


def towards_draft(share: float) -> Law:
    """A share of the drafter's law, within what the stated law allows."""

    def law(drawn: Drawn) -> Floats:
        mixed = np.where(drawn.laws > _FLOOR, (1 - share) * drawn.laws + share * drawn.draft, 0.0)
        return np.asarray(mixed / mixed.sum(-1, keepdims=True))

    return law


def _rank(values: Floats) -> Ints:
    return np.asarray((-values).argsort(-1).argsort(-1))


def _place(drawn: Drawn) -> Ints:
    """0, 1, 2 for the first three tokens, 3 for all others: [n, 1]."""
    return np.minimum(drawn.position, 3)[:, None]


def usual_bettors() -> list[Bettor]:
    """Those that play against every law."""
    size = 64

    def favoured(drawn: Drawn) -> Ints:  # by the drafter, and how much
        ratio = np.log((drawn.draft + 1e-9) / (drawn.laws + 1e-9))
        return np.digitize(ratio, (-2.0, -1.0, -0.4, 0.0, 0.4, 1.0, 2.0))

    def lag(drawn: Drawn) -> Ints:
        now = np.minimum((drawn.below * 8).astype(int), 7)
        return np.asarray(np.minimum((drawn.before * 8).astype(int), 7)[:, None] * 8 + now)

    def repeats(drawn: Drawn) -> Ints:
        symbols = np.arange(drawn.laws.shape[1])
        return np.asarray(sum((2**i) * (drawn.contexts.last[:, [i]] == symbols) for i in range(3)))

    return [
        Tilt("some symbols come too often", lambda d: np.broadcast_to(np.arange(d.laws.shape[1]), d.laws.shape)),
        Tilt("likely symbols come too often or too rarely", lambda d: _rank(d.laws)),
        Tilt("what the drafter favours comes too often or too rarely", favoured),
        Tilt("the drafter's first choices come too often or too rarely", lambda d: _rank(d.draft)),
        Tilt("biased at some of the first places", lambda d: _place(d) * size + _rank(d.laws)),
        Tilt("drafted symbols are biased at some of the first places", lambda d: _place(d) * size + favoured(d)),
        Tilt("a draw depends on the draw before it", lag),
        Tilt("symbols of the context come too often or too rarely", repeats),
        *(Rival(f"law of temperature {1 / power:.2f} times the one asked for", tempered(power))
          for power in (0.8, 0.9, 1.1, 1.25, 2.0)),
        *(Rival(f"{share:.0%} of the drafter's law", towards_draft(share)) for share in (0.1, 0.3, 0.9)),
    ]  # fmt: skip


@dataclass
class Evidence:
    bettors: list[Bettor] = field(default_factory=usual_bettors)
    log_wealth: Floats = field(default_factory=lambda: np.zeros(0))
    tokens: int = 0
    impossible: int | None = None  # place in the batch of a token that the law forbids
    trace: list[tuple[int, float]] = field(default_factory=list)  # tokens so far, log of the mean wealth

    def __post_init__(self) -> None:
        self.log_wealth = np.zeros(len(self.bettors))

    def take(self, drawn: Drawn, clear: NDArray[np.bool_]) -> None:
        """Let everybody bet on a batch; rows that are not clear are left out, whatever was drawn there."""
        keep = np.flatnonzero(clear)
        chance = drawn.laws[np.arange(len(drawn)), drawn.tokens]
        forbidden = np.flatnonzero(clear & (chance < _FLOOR))
        if len(forbidden):
            self.impossible = int(forbidden[0])
            return
        kept = Drawn(drawn.contexts.take(keep), drawn.laws[keep], drawn.draft[keep], drawn.tokens[keep],
                     drawn.position[keep], drawn.before[keep])  # fmt: skip
        if not len(kept):
            return
        for i, bettor in enumerate(self.bettors):
            self.log_wealth[i] += float(bettor.bet(kept).sum())
        self.tokens += len(kept)
        self.trace.append((self.tokens, self.log_mean))

    @property
    def log_mean(self) -> float:
        """Log of the mean wealth."""
        if self.impossible is not None:
            return math.inf
        top = float(self.log_wealth.max())
        return top + math.log(float(np.exp(self.log_wealth - top).mean()))

    @property
    def p_value(self) -> float:
        """Valid at any time: at most the largest mean wealth so far counts."""
        best = max([self.log_mean, *(wealth for _, wealth in self.trace)])
        return min(1.0, math.exp(-best)) if best < 700 else 0.0

    @property
    def richest(self) -> str:
        return self.bettors[int(self.log_wealth.argmax())].name


@dataclass
class Coin:
    """Evidence that something comes in more than half of the trials: wealth by a mixture of fixed stakes."""

    _stakes: Floats = field(default_factory=lambda: np.array([0.3, 0.6, 0.9]))
    _log: Floats = field(default_factory=lambda: np.zeros(3))
    trials: int = 0
    hits: int = 0
    best: float = 0.0

    def take(self, hit: bool) -> None:
        self._log += np.log1p(self._stakes if hit else -self._stakes)
        self.trials, self.hits = self.trials + 1, self.hits + hit
        self.best = max(self.best, float(np.log(np.exp(self._log).mean())))

    @property
    def p_value(self) -> float:
        return min(1.0, math.exp(-self.best))


@dataclass
class TwoSamples:
    """Evidence that two sources of categories differ, without a known law.

    A pair, one category of each source, could as well have come the other way round if both have one law: the bet is
    on which way round it came, at odds learnt from the pairs before.
    """

    counts: tuple[dict[str, float], dict[str, float]] = field(default_factory=lambda: ({}, {}))
    log_wealth: float = 0.0
    best: float = 0.0
    pairs: int = 0

    def take(self, one: str, other: str) -> None:
        a, b = self.counts
        straight = self._chance(a, one) * self._chance(b, other)
        turned = self._chance(a, other) * self._chance(b, one)
        self.log_wealth += math.log(2 * straight / (straight + turned))
        self.best = max(self.best, self.log_wealth)
        a[one] = a.get(one, 0.0) + 1
        b[other] = b.get(other, 0.0) + 1
        self.pairs += 1

    def _chance(self, counts: dict[str, float], category: str) -> float:
        """Seen so far, drawn towards what both sources have in common."""
        a, b = self.counts
        common = (a.get(category, 0.0) + b.get(category, 0.0) + 1) / (2 * self.pairs + 30)
        return (counts.get(category, 0.0) + 20 * common) / (self.pairs + 20)

    @property
    def p_value(self) -> float:
        return min(1.0, math.exp(-self.best))


def smallest_found(tokens: int, alarms: float, bettors: int = 16) -> float:
    """The smallest bias (total variation towards likely symbols) that is found with so many tokens, nine times in ten.

    Log wealth grows by about twice the square of the bias per token, give or take the root of twice itself. It must
    pay for the false alarms allowed, for the bettors that are wrong, and for what the right one spends on learning; 1.3
    standard deviations more make it nine times in ten.
    """
    nats = math.log(1 / alarms) + math.log(bettors) + 4.0
    return math.sqrt((nats + 1.3 * math.sqrt(2 * nats)) / (2 * max(1, tokens)))
