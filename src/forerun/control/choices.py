"""Choices: which kind of round, and which shape, is worth most.

With rho, the tokens per second of the best round that can be launched without reading the last one, a round is worth

    V = tokens - rho x seconds

Among captured shapes, plain decoding being one of no nodes, that is the highest rate. Look-ups need the last tokens:
behind an unread round they are worth reading it first if V, times how likely the match goes on, exceeds what is
written in the gap. Whatever is chosen must be covered by the account (account.py) if nothing of it is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod

from forerun.control.acceptance import Request, optimistic
from forerun.control.account import covered
from forerun.control.allocate import share_chains
from forerun.control.base import WaitingPrompts
from forerun.control.times import RoundTimes
from forerun.core.offer import NOTHING, Form, Menu, Offer, Part, Plan
from forerun.core.types import Budget, Seq

BETTER = 1.02  # times the tokens per second of the last shape, for another one: less is noise
ROUNDS_TO_REGAIN = 8  # rounds in which trees must gain as much as is lost by switching to them
LEAST_GAIN = 0.1  # tokens of a sequence that a look-up must gain: less is noise
MOST_WAITED_FOR = 2  # sequences for which a round of trees waits for look-ups: of more, one always has a match
WAITING_WORTH = 8.0  # tokens of those that write, for one of a request that has not begun: somebody waits for it
BURST, BURST_SHARE, BURST_ENDS = 3, 1 / 6, 1 / 16  # requests that wait, and shares of those that write
MOST_ACCEPTED = 0.95  # of the levels of a tree: what is believed at most


@dataclass(frozen=True, slots=True)
class Choice:
    """A shape, or none, what it writes for a whole batch, and what that takes."""

    shape: Form | None
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of one drafter in a batch."""

    seqs: Sequence[Seq]
    offers: Sequence[Offer]
    requests: Sequence[Request]
    batch: int  # sequences of the round, others included

    @property
    def menu(self) -> Menu | None:
        return self.offers[0].menu


class Choices:
    """Of sequences with captured trees, with look-ups, or with both."""

    def __init__(self, times: RoundTimes, nodes: int, width: int) -> None:
        self.times, self.nodes, self.width = times, nodes, width
        self.prompts = WaitingPrompts()  # that wait for the coming round
        self._burst = False  # were they many, and have some waited ever since?

    def shapes(self, menu: Menu) -> list[Form]:
        return [one for one in menu.forms if one.nodes <= self.nodes and one.width <= self.width]

    def best(self, group: Group, last: Form | None) -> Choice:
        """The shape that writes most tokens per second; `last`: of the round under way, or none."""
        times, batch, menu, requests = self.times, group.batch, group.menu, group.requests
        plain = Choice(None, batch, times.plain(batch))
        if menu is None or self._is_burst(batch):
            return plain
        weight, count, found = optimistic(requests), len(requests), [plain]
        for shape in self.shapes(menu):
            seconds = times.trees(requests[0].drafter, menu, shape, count, batch)
            if seconds < inf and covered(requests, seconds / plain.seconds - 1.0):
                tokens = min(weight * menu.expected(shape), MOST_ACCEPTED * shape.depth * count)
                found.append(Choice(shape, batch + tokens, seconds))
        if self.prompts.requests:
            found = self._with_missed(found, menu, batch)
        best = max(found, key=lambda one: one.rate * (BETTER if one.shape == last else 1.0))
        lost = times.gap(batch) / plain.seconds / ROUNDS_TO_REGAIN
        return plain if last is None and best.rate < plain.rate * (1.0 + lost) else best

    def _is_burst(self, batch: int) -> bool:
        """Do so many requests wait that whoever is read last waits for all? Until few do, nothing is drafted."""
        waiting, least = (self.prompts.requests, BURST_ENDS * batch if self._burst else max(BURST, BURST_SHARE * batch))
        self._burst = waiting > 0 and waiting >= least
        return self._burst

    def _with_missed(self, choices: Sequence[Choice], menu: Menu, batch: int) -> list[Choice]:
        """The same, less the tokens that waiting requests write later, whose prompts are read later beside trees."""
        cost, prompts, plain = self.times.cost, self.prompts, choices[0]
        worth = WAITING_WORTH * prompts.requests * max([one.rate for one in choices]) / batch
        read = max(1, min(prompts.rows, prompts.taken, prompts.room - batch))  # a prompt of one token: 0 rows
        beside = cost.whole_seconds(batch + read, batch) + plain.seconds - cost.pass_seconds(batch, batch)
        found = [plain]
        for one in choices[1:]:
            rows = batch if one.shape is None else menu.rows(one.shape, batch)
            some = min(read, max(0, prompts.room - rows))
            taken = cost.whole_seconds(rows + some, batch) + one.seconds - cost.pass_seconds(rows, batch)
            later = max(0.0, taken - beside * some / read)
            found.append(Choice(one.shape, one.tokens - worth * later, one.seconds))
        return found

    def lookup(self, group: Group, best: Choice, unread: Plan | None) -> Plan | None:
        """A round of look-ups if it is worth more than the best shape; behind an unread round, if that pays."""
        batch, times, offers, requests = group.batch, self.times, group.offers, group.requests
        if unread is not None and group.menu is not None and batch > MOST_WAITED_FOR:
            return None
        claims: list[tuple[float, ...]] = [offer.free[: self.nodes] for offer in offers]
        rho, gap, holds, other = best.rate, 0.0, 1.0, 0.0
        if unread is not None:
            gap = times.gap(batch)
            holds, claims = self._behind(group, claims, unread)
            if unread.shape is None:
                other = sum([one.otherwise * request.lookups for one, request in zip(offers, requests, strict=True)])
        if not any(claims) and other <= LEAST_GAIN * batch:
            return None
        depths, accepted = self.chains(claims, requests, batch, rho, batch)
        seconds = times.lookup(sum(depths), batch)
        value = holds * max(0.0, batch + accepted - rho * seconds) - rho * gap
        value += (1.0 - holds) * max(0.0, batch + other - rho * seconds)
        worst = (seconds + gap) / times.plain(batch) - 1.0
        if value <= LEAST_GAIN * batch or not covered(requests, worst, value / batch):
            return None
        return self._looked_up(group, depths, rho)

    def _behind(
        self, group: Group, claims: Sequence[tuple[float, ...]], unread: Plan
    ) -> tuple[float, list[tuple[float, ...]]]:
        """How likely a match goes on behind the round under way, and what it claims then."""
        more = 1
        if unread.shape is not None and group.menu is not None:
            factor = sum([one.trees for one in group.requests]) / len(group.requests)
            more = max(1, round(1.0 + factor * group.menu.expected(unread.shape)))
        later = [tuple([one / free[more - 1] for one in free[more:]]) if len(free) > more else () for free in claims]
        return 1.0 - prod([1.0 - free[more - 1] for free in claims if len(free) > more]), later

    def chains(
        self, claims: Sequence[Sequence[float]], requests: Sequence[Request], rows: int, rho: float, batch: int
    ) -> tuple[list[int], float]:
        """How deep each chain is worth drafting in a pass of so many rows, and the tokens accepted of all."""
        likely = [
            [min(0.98, request.lookups * one) for one in free] for free, request in zip(claims, requests, strict=True)
        ]
        most = sum(map(len, likely))
        if not most:
            return [0] * len(likely), 0.0
        seconds = self.times.cost.passes_seconds(rows, 1 + most, batch)
        return share_chains(likely, [rho * (one - seconds[0]) for one in seconds])

    def _looked_up(self, group: Group, depths: Sequence[int], rho: float, branches: bool = True) -> Plan:
        """Of few sequences, trees of all that may pay by its price; of more, the chains that were weighed."""
        branches = branches and group.batch <= MOST_WAITED_FOR and self.times.follows
        budgets = list[Budget]()
        for request, depth in zip(group.requests, depths, strict=True):
            if branches:
                seconds = self.times.cost.passes_seconds(group.batch, self.nodes + 1, group.batch)
                scale = rho / min(1.0, request.lookups)
                price = tuple([scale * (one - seconds[0]) for one in seconds])
                budgets.append(Budget(self.nodes, self.nodes, self.width, price, source="free"))
            else:
                budgets.append(Budget(depth, depth, source="free") if depth else NOTHING)
        each = zip(group.seqs, group.offers, budgets, strict=True)
        parts = {seq.id: Part("lookup", claims=offer.free) for seq, offer, budget in each if budget.nodes}
        return Plan("lookup", tuple(budgets), parts, asked=group.batch)

    def beside(self, group: Group, others: Drafted) -> Drafted:
        """What one group of a mixed batch does, given what the others draft. Such rounds are all read first."""
        times, cost, batch, requests = self.times, self.times.cost, group.batch, group.requests
        around, rows = times.around("trees" if others.rows else "plain", False, batch), batch + others.rows
        base = cost.pass_seconds(rows, batch) + others.seconds + around
        plain = cost.pass_seconds(batch, batch) + times.around("plain", False, batch)
        best, rate = Drafted(), (batch + others.tokens) / base
        weight, count, menu = optimistic(requests), len(requests), group.menu
        for shape in [] if menu is None else self.shapes(menu):
            assert menu is not None
            draft, more = times.draft(requests[0].drafter, menu, shape, count), count * shape.nodes
            seconds = base + draft + cost.pass_seconds(rows + more, batch) - cost.pass_seconds(rows, batch)
            tokens = min(weight * menu.expected(shape), MOST_ACCEPTED * shape.depth * count)
            own = (batch + others.tokens + tokens) / seconds
            if own > BETTER * rate and covered(requests, (seconds - base) / plain):
                best, rate = Drafted(trees_plan(group.seqs, shape), more, tokens, draft), own
        claims = [offer.free[: self.nodes] for offer in group.offers]
        depths, accepted = self.chains(claims, requests, rows, rate, batch)
        if nodes := sum(depths):
            seconds = base + cost.pass_seconds(rows + nodes, batch) - cost.pass_seconds(rows, batch)
            seconds += max(0.0, times.around("lookup", False, batch) - around)
            gains = (batch + others.tokens + accepted) / seconds > rate
            if gains and covered(requests, (seconds - base) / plain):
                return Drafted(self._looked_up(group, depths, rate, branches=False), nodes, accepted)
        return best


@dataclass(frozen=True, slots=True)
class Drafted:
    """What one group of a mixed batch drafts: rows, the tokens that they gain, and the seconds of its draft."""

    plan: Plan | None = None
    rows: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Drafted) -> Drafted:
        return Drafted(None, self.rows + other.rows, self.tokens + other.tokens, self.seconds + other.seconds)


def trees_plan(seqs: Sequence[Seq], shape: Form) -> Plan:
    """Trees of one shape for all of these."""
    budget, part = Budget(shape.nodes, shape.depth, shape.width, source="costly"), Part("trees", shape)
    return Plan("trees", (budget,) * len(seqs), dict.fromkeys([seq.id for seq in seqs], part), shape)
