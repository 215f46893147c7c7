"""Simulate a controller: rounds of sequences and drafters with known acceptance, with time counted and not measured.

A simulated head has a known confidence at every node, states it (or a power of it: `claim_power`), and grows its
trees by the rules that real ones follow. N-gram matches come in stretches, as in copied text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from forerun.control.adaptive import AdaptiveController
from forerun.control.base import Controller
from forerun.control.cost import CostModel
from forerun.core.request import best_count
from forerun.core.types import Budget, Offer, PlainSeq, Round, Seq
from forerun.drafters.heads.growth import worth_deepening


@dataclass(frozen=True, slots=True)
class TextKind:
    """How predictable a sequence is."""

    acceptance: float  # of the likeliest token, on average
    spread: float = 3.0  # of the confidence around that: small = near 0 or 1, large = always the average
    copied: float = 0.0  # share of rounds in which n-gram has a match
    copy_rate: float = 0.9  # how often each of its tokens is right

    def draw_confidence(self, rng: random.Random) -> float:
        if not 0.0 < self.acceptance < 1.0:
            return self.acceptance
        return rng.betavariate(self.spread * self.acceptance, self.spread * (1.0 - self.acceptance))


@dataclass(frozen=True, slots=True)
class Make:
    """How a drafter works."""

    level: float  # passes per drafted level
    chosen: bool = True  # trees of chosen nodes, cut by the price list; else sampled chains of a fixed length
    stops: bool = True
    claim_power: float = 1.0  # claimed = confidence ** claim_power: below 1 it claims too much
    start: float = 0.0  # passes before its first draft
    ngram: bool = False  # n-gram matches are used too
    one_pass: bool = False  # all levels come from one pass, which costs `level`


@dataclass(slots=True, eq=False)
class Writing(PlainSeq):
    """A sequence being written."""

    match: tuple[float, ...] = ()  # survivals of the n-gram match
    started: bool = False
    claimed: float = 0.0


@dataclass(frozen=True, slots=True)
class Drafted:
    """A simulated tree and what was accepted of it."""

    nodes: int = 0
    depth: int = 0
    levels: int = 0
    accepted: int = 0
    claimed: float = 0.0


class Simulation:
    """One controller, a batch of sequences, and a simulated drafter."""

    def __init__(
        self, cost: CostModel, make: Make, *, batch: int = 1, nodes: int = 60, width: int = 10, seed: int = 1
    ) -> None:
        self.cost, self.make, self.rng = cost, make, random.Random(seed)
        self.texts = [Writing(i, [1]) for i in range(batch)]
        self.controller = AdaptiveController(CostModel(cost.seconds), nodes, width, self._offer)
        self.budgets: list[Budget] = []

    def speed(self, kind: TextKind, rounds: int, controller: Controller | None = None) -> float:
        """Tokens written, over those that plain decoding would have written in the same time."""
        tokens, passes = self.write(kind, rounds, controller)
        return tokens / passes

    def write(self, kind: TextKind, rounds: int, controller: Controller | None = None) -> tuple[float, float]:
        """Tokens per sequence, and how many plain passes would take the same time."""
        judge = controller or self.controller
        tokens, passes, batch = 0, 0.0, len(self.texts)
        plain = self.cost.pass_seconds(batch)
        for _ in range(rounds):
            for text in self.texts:
                text.match = self._match(kind)
            self.budgets = judge.plan(self.texts)
            drafts = [self._draft(kind, *pair) for pair in zip(self.texts, self.budgets, strict=True)]
            starts = [self._start(*pair) for pair in zip(self.texts, drafts, strict=True)]
            target = self.cost.pass_seconds(batch + sum(one.nodes for one in drafts))
            unit = self.cost.pass_seconds(1)
            levels = max(one.levels for one in drafts)
            passes_run = min(1, levels) if self.make.one_pass else levels
            drafting = unit * (passes_run * self.make.level + sum(starts))
            nodes, depths = tuple(one.nodes for one in drafts), tuple(one.depth for one in drafts)
            accepted, times = tuple(one.accepted for one in drafts), {"pass": target, "draft": drafting}
            judge.observe(Round(tuple(self.texts), nodes, depths, accepted, times))
            tokens += sum(one.accepted + 1 for one in drafts)
            passes += (target + drafting) / plain
            for text, one in zip(self.texts, drafts, strict=True):
                text.tokens.extend([0] * (one.accepted + 1))
        return tokens / batch, passes

    def write_text(self, kind: TextKind, tokens: int, start: float, limit: int = 0) -> tuple[float, bool]:
        """A new text, whose prompt takes a drafter `start` passes: how many passes it takes, and was that read?

        It ends after so many tokens, and is said to end after `limit`.
        """
        (last,) = self.texts
        self.controller.forget(last)
        text = Writing(last.id + 1, [1], max_length=1 + (limit or tokens))
        self.texts, self.make, passes = [text], replace(self.make, start=start), 0.0
        while len(text.tokens) <= tokens:
            passes += self.write(kind, 1)[1]
        return passes, text.started

    def _of(self, seq: Seq) -> Writing:
        return self.texts[seq.id - self.texts[0].id]

    def _offer(self, seq: Seq) -> Offer:
        make, text, unit = self.make, self._of(seq), self.cost.pass_seconds(1)
        start = 0.0 if text.started else make.start * unit
        free = text.match if make.ngram else ()
        level = make.level * unit
        seconds = (level, 0.0) if make.one_pass else (level,) if level else ()
        return Offer(seconds, start, free, make.chosen, make.stops, expected=text.claimed)

    def _match(self, kind: TextKind) -> tuple[float, ...]:
        if self.rng.random() >= kind.copied:
            return ()
        return tuple(kind.copy_rate**depth for depth in range(1, 17))

    def _start(self, text: Writing, drafted: Drafted) -> float:
        first = drafted.levels > 0 and not text.started
        text.started = text.started or first
        return self.make.start if first else 0.0

    def _draft(self, kind: TextKind, text: Writing, budget: Budget) -> Drafted:
        if not budget.nodes or not budget.depth:
            return Drafted()
        if budget.source == "free":
            count = best_count(text.match[: budget.nodes], budget.price)
            return Drafted(count, count, 0, _run(self.rng, count, lambda: kind.copy_rate))
        if not self.make.chosen:
            confidence = lambda: kind.draw_confidence(self.rng)  # noqa: E731
            return Drafted(budget.depth, budget.depth, budget.depth, _run(self.rng, budget.depth, confidence))
        grown = _Tree(kind, self.make, self.rng).grow(budget)
        text.claimed = grown.claimed
        return grown


class _Tree:
    """A tree of a simulated head, with what it claims of every node and what is true of it."""

    def __init__(self, kind: TextKind, make: Make, rng: random.Random) -> None:
        self.kind, self.make, self.rng = kind, make, rng
        self.parents, self.depths, self.claims, self.truths = [-1], [0], [1.0], [1.0]

    def grow(self, budget: Budget) -> Drafted:
        frontier, levels = [0], 0
        for _ in range(budget.depth):
            levels += 1
            fresh = [child for node in frontier for child in self._children(node, budget.width)]
            frontier = sorted(fresh, key=lambda node: -self.claims[node])[: budget.width]
            if self.make.stops and budget.price is not None:
                survivals = [self.claims[node] for node in frontier]
                drafted = len(self._cut(budget))
                if not worth_deepening(survivals, drafted, budget.price, budget.level):
                    break
        kept = self._cut(budget)
        depth = max((self.depths[node] for node in kept), default=0)
        claimed = sum(self.claims[node] for node in kept)
        return Drafted(len(kept), depth, levels, self._walk(set(kept)), claimed)

    def _children(self, node: int, width: int) -> list[int]:
        sure = self.kind.draw_confidence(self.rng)
        made, left = [], 1.0
        for _ in range(width):
            truth = left * (sure if left == 1.0 else 0.4)
            left -= truth
            self.parents.append(node)
            self.depths.append(self.depths[node] + 1)
            self.claims.append(self.claims[node] * truth**self.make.claim_power)
            self.truths.append(truth)
            made.append(len(self.parents) - 1)
        return made

    def _cut(self, budget: Budget) -> list[int]:
        order = sorted(range(1, len(self.claims)), key=lambda node: (-self.claims[node], node))[: budget.nodes]
        return order[: best_count([self.claims[node] for node in order], budget.price)]

    def _walk(self, kept: set[int]) -> int:
        node, accepted = 0, 0
        while True:
            u = self.rng.random()
            for child in sorted(kept):
                if self.parents[child] == node:
                    u -= self.truths[child]
                    if u < 0.0:
                        node, accepted = child, accepted + 1
                        break
            else:
                return accepted


def _run(rng: random.Random, length: int, rate: Callable[[], float]) -> int:
    """How many in a row are accepted."""
    accepted = 0
    while accepted < length and rng.random() < rate():
        accepted += 1
    return accepted
