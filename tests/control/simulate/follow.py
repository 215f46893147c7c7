"""Simulate a head on a GPU at batch 1, with look-ups beside it, or these alone: rounds follow, wait, or are dropped.

    both = FollowSimulation(COST, menu, texts, Host(), rate).run(3000)
    both.least_speed(FollowSimulation(COST, menu, texts, Host(), rate, looks_up=False).run(3000))

Without a menu there is no head: look-ups alone, or with looks_up=False plain decoding.

As in forerun.engine.engine, a round of the head's, or a plain one, may be launched before the last one is read,
which hides what the host does; any other round shows it. Look-ups, texts and the controller are real; which tokens of
a text a head misses is drawn. One text is written behind the other, so that two runs can be compared token by token.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.types import Budget, Form, Menu, Offer, Round, RoundPlan, Scores, Seq, TreeBatch, Verdict, lone_roots
from forerun.drafters.base import BaseDrafter, Drafter, LookupDrafter, NoDrafter
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.lookup.ngram import NgramDrafter
from lab.simulate.speeds import draw_accepted
from tests.control.simulate.history import KnownTexts, Text

# text, tokens written of it -> how likely the head's likeliest token is right
Rate = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds of the host's work: of a round that was read first, of drafting look-ups."""

    gap: float = 8e-4
    drafts: float = 0.0


@dataclass(slots=True)
class FollowHistory:
    """Rounds of a run."""

    tokens: list[int] = field(default_factory=list)  # written so far, after each round
    seconds: list[float] = field(default_factory=list)  # the same
    kinds: list[str] = field(default_factory=list)  # plain, head, followed or look-up
    dropped: int = 0  # rounds that were launched behind the end of a text

    def add(self, kind: str, tokens: int, seconds: float) -> None:
        self.tokens.append((self.tokens[-1] if self.tokens else 0) + tokens)
        self.seconds.append((self.seconds[-1] if self.seconds else 0.0) + seconds)
        self.kinds.append(kind)

    @property
    def spent(self) -> float:
        return self.seconds[-1] if self.seconds else 0.0

    def until(self, tokens: int) -> float:
        """Seconds until so many tokens were written."""
        at = bisect_left(self.tokens, tokens)
        before = (self.tokens[at - 1], self.seconds[at - 1]) if at else (0, 0.0)
        share = (tokens - before[0]) / (self.tokens[at] - before[0])
        return before[1] + share * (self.seconds[at] - before[1])

    def speed(self, other: FollowHistory, first: int = 0, last: int | None = None) -> float:
        """How many times as fast these tokens were written as in another run of the same texts."""
        last = min(self.tokens[-1], other.tokens[-1]) if last is None else last
        return (other.until(last) - other.until(first)) / (self.until(last) - self.until(first))

    def least_speed(self, other: FollowHistory, tokens: int = 600) -> float:
        """The lowest over any so many tokens in a row: about 200 rounds."""
        last = min(self.tokens[-1], other.tokens[-1])
        return min(self.speed(other, first, first + tokens) for first in range(0, last - tokens, 20))


class _Head(BaseDrafter):
    """Offers a menu; what it drafts is drawn by the simulation."""

    def __init__(self, menu: Menu) -> None:
        self._offer = Offer(menu=menu)

    def offer(self, seq: Seq) -> Offer:
        return self._offer

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        return lone_roots(seqs)


class FollowSimulation:
    """One controller, one text after the other."""

    def __init__(
        self,
        cost: CostModel,
        menu: Menu | None,
        texts: Sequence[Text],
        host: Host,
        rate: Rate = lambda text, at: 0.0,
        *,
        looks_up: bool = True,
        lookup: LookupDrafter | None = None,
        seed: int = 1,
    ) -> None:
        self.cost, self.menu, self.texts, self.host = cost, menu, KnownTexts(texts), host
        self.rate, self.seed = rate, seed
        self.lookup = lookup or NgramDrafter()
        drafter: Drafter = NoDrafter() if menu is None else _Head(menu)
        if looks_up:
            drafter = self.lookup if menu is None else HybridDrafter(self.lookup, drafter)
        alone = menu is None and looks_up
        self.controller = AdaptiveController(
            CostModel(cost.seconds), 60, 10, drafter.offer, lambda seq: alone, follows=True
        )
        self.history = FollowHistory()
        self._left = 0  # rounds that may still follow under this plan
        self._budget, self._following, self._drafted = Budget(0, 0), False, False
        self.seq = self.texts.start()

    def run(self, rounds: int) -> FollowHistory:
        for _ in range(rounds):
            self._step()
        return self.history

    def write(self) -> tuple[float, int]:
        """Seconds and rounds of the text that comes next, to its end."""
        text, rounds, before = self.seq.id, len(self.history.kinds), self.history.spent
        while self.seq.id == text:
            self._step()
        return self.history.spent - before, len(self.history.kinds) - rounds

    def _step(self) -> None:
        followed = self._following
        if not followed:
            (self._budget,) = self.controller.plan([self.seq])
            self._left = self._budget.repeats
        self._left -= 1
        seq, budget, by_head = self.seq, self._budget, self._budget.source == "costly"
        trees = lone_roots([seq]) if by_head else self.lookup.propose([seq], [budget])
        accepted, nodes, depth = self._accept(trees, budget)
        self._following = self._follows(by_head and budget.nodes > 0, plain=not nodes)
        if self._following and not nodes:
            self._budget = Budget(0, 0)
        seconds = self._seconds(by_head, nodes, followed)
        fresh = self.texts.after(seq, accepted + 1)
        chain = TreeBatch.chains([[seq.tokens[-1], *fresh[:-1]]])
        self.lookup.observe([seq], chain, Scores(None), Verdict.whole_chain(chain, fresh[-1:]))
        seq.tokens += fresh
        outcome = Round((seq,), (nodes,), (depth,), (len(fresh) - 1,), seconds, followed=followed)
        self.controller.observe(outcome)
        kind = "look-up" if nodes else "plain"
        if by_head or (followed and not nodes):
            kind = "followed" if followed else "head"
        self._drafted, spent = by_head, sum(seconds.values())
        if len(seq.tokens) >= seq.max_length:
            if self._following:
                self.history.dropped += 1
                spent += seconds["draft"] + seconds["pass"]  # what follows waits for it
            self._following = self._drafted = False
            self.lookup.forget(seq)
            self.controller.forget(seq)
            self.texts.end(seq)
            self.seq = self.texts.start()
        self.history.add(kind, len(fresh), spent)

    def _follows(self, can: bool, plain: bool) -> bool:
        """Is the next round launched before this one is read? As in forerun.engine.engine."""
        if len(self.seq.tokens) + 1 >= self.seq.max_length:
            return False
        if not plain and (not can or self._left < 0):
            return False
        last = RoundPlan("plain" if plain else "trees", 1)
        return self.controller.follow([self.seq], last, bool) is not None

    def _accept(self, trees: TreeBatch, budget: Budget) -> tuple[int, int, int]:
        """Tokens accepted, nodes and depth."""
        seq, at = self.seq, len(self.seq.tokens)
        most = seq.max_length - at - 1
        if budget.source != "costly":
            path = self.texts.verdict([seq], trees).to_host()[0][0]
            return min(len(path), most), trees.nodes - 1, trees.topology()[0].deepest
        written = at - seq.prompt_length
        form = Form(budget.nodes, budget.depth, budget.width)
        rate = self.rate(seq.id % len(self.texts.texts), written)
        accepted = draw_accepted(form, rate, min(budget.depth, most), lambda level: self._draw(written + level))
        return accepted, budget.nodes, budget.depth

    def _draw(self, place: int) -> float:
        """Of one place of a text: a token that a head misses, it misses wherever its tree starts."""
        return random.Random(f"{self.seed} {self.seq.id} {place}").random()

    def _seconds(self, by_head: bool, nodes: int, followed: bool) -> dict[str, float]:
        form = Form(self._budget.nodes, self._budget.depth, self._budget.width)
        drafting = self.host.drafts if nodes and not by_head else 0.0
        if by_head and nodes and self.menu is not None:
            drafting = self.menu.seconds(form, 1)
        elif nodes and self._drafted and self.menu is not None:
            drafting += self.menu.seconds(Form(5, 5, 1), 1)  # the head has drafted ahead, in vain
        host = 0.0 if followed else self.host.gap
        return {"draft": drafting, "pass": self.cost.pass_seconds(1 + nodes), "host": host}
