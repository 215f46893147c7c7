"""HostTrees: budgets of drafters that run on the host, level by level, beside look-ups that cost nothing.

Per sequence there are up to three options: a look-up, the drafter, or no draft; the one that gains most tokens beyond
those that would have been written in the same time is taken. A drafter that knows its confidence gets the price of
every node and cuts its own tree; for one that cannot stop by itself the depth is fixed beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import log

from forerun.control.acceptance import KAPPA, RECORD_IDLE, DrafterState, Request
from forerun.control.account import covered
from forerun.control.allocate import (
    Levels,
    Option,
    allocate,
    best_depth,
    deepest,
    share_options,
    shortest_that_pays,
    widest,
)
from forerun.control.choices import Group
from forerun.control.times import RoundTimes
from forerun.core.offer import NOTHING, Kind, Offer, Part, Plan
from forerun.core.types import Budget, Round, Seq

WORTH_IT = 0.05  # tokens a round: a smaller gain is within the noise
REFRESH_ROUNDS = 16  # rounds for which prices hold
LONGEST_REST = 16  # rounds for which it is said that a drafter rests
HOPE = 1.0  # standard deviations by which acceptance is overrated for a trial
CLOSE = 0.05  # smaller errors of what a drafter expects are not corrected


@dataclass(frozen=True, slots=True)
class Prices:
    """What nodes cost, and the longest chain and widest tree that can pay."""

    price: tuple[float, ...]
    deepest: int
    widest: int


@lru_cache(maxsize=32)
def resting(rounds: int) -> Budget:
    return Budget(0, 0, source="free", repeats=rounds)


@dataclass(slots=True)
class HostTrees:
    """Of all drafters that run on the host."""

    times: RoundTimes
    nodes: int
    width: int
    _prices: dict[tuple[int, float, int], Prices] = field(default_factory=dict)
    _age: int = 0

    def plan(self, group: Group, beside: int = 0) -> Plan:
        """Budgets of these sequences of a batch, whose others draft `beside` nodes."""
        seqs, offers, requests, batch = group.seqs, group.offers, group.requests, group.batch
        if batch == 1 and not offers[0].costs:
            return self._lookup(offers[0], requests[0], seqs[0])
        costly, rate = sum([offer.costs for offer in offers]), requests[0].drafter.pace
        listed = self._price(batch, rate, beside)
        options = [self._option(*one, batch, costly, listed) for one in zip(seqs, offers, requests, strict=True)]
        others = [beside] * len(seqs)
        if batch > 1:
            chains = [option.levels for option in options]
            most = sum(round(len(one.survivals) * one.nodes) + 1 for one in chains)
            seconds = self.times.cost.passes_seconds(batch + beside, most + 1, batch)
            factor = self._in_tokens(1.0, rate, batch, 1)
            depths = allocate(chains, lambda nodes: factor * (seconds[nodes] - seconds[0]))
            options, others = share_options(options, depths, batch, beside)
        budgets, parts = list[Budget](), dict[int, Part]()
        for seq, request, option, count in zip(seqs, requests, options, others, strict=True):
            budget = NOTHING if option.idle else self._budget(option, request, batch, costly, count)
            if option.asks:
                parts[seq.id] = Part("trees", start=option.offer.start)
            elif budget.nodes:
                parts[seq.id] = Part("lookup", claims=option.offer.free)
            elif batch == 1 and offers[0].costs and not offers[0].free:
                budget = resting(self._rest(request, offers[0]))
            budgets.append(budget)
        kinds = {part.kind for part in parts.values()}
        kind: Kind = "trees" if "trees" in kinds else "lookup" if kinds else "plain"
        return Plan(kind, tuple(budgets), parts)

    def _option(self, seq: Seq, offer: Offer, request: Request, batch: int, costly: int, listed: Prices) -> Option:
        """What costs nothing, or what the drafter would gain: whichever gains more."""
        free = self._free(offer, request, batch)
        free_gain = best_depth(free, listed.price)[1]
        if free_gain and not covered([request], request.drafter.usual_lookup):
            free, free_gain = Levels(()), 0.0
        nothing = Option(offer, free, idle=not free_gain)
        if not offer.costs:
            return nothing
        record, rate = request.record, request.drafter.pace
        base = request.drafter.record
        mean = record.mean_gain(base)
        if offer.stops and mean <= max(free_gain, WORTH_IT):  # however deep it went
            return nothing
        costs = [self._in_tokens(seconds, rate, batch, costly) for seconds in offer.seconds]
        survivals = record.survivals(base, self.nodes, costs[-1])
        wide = (record.nodes or base.nodes) if offer.chosen else 1.0
        levels = Levels(survivals, costs, max(1.0, wide))
        depth, gain = best_depth(levels, listed.price)
        if offer.stops:  # what it gains by stopping in time shows only in its rounds
            least = 2 * shortest_that_pays(listed.price, tuple(costs))  # less could not pay at any confidence
            depth, gain = min(listed.deepest, max(depth + 1, least)), mean
        elif offer.chosen:  # the nodes it left out were not tested, so its rates are too high
            gain = min(gain, mean)
        if gain <= WORTH_IT and not offer.stops:  # a trial, as short as can pay
            hoped = Levels(record.survivals(base, self.nodes, costs[-1], HOPE), costs, levels.nodes)
            gain, depth = best_depth(hoped, listed.price)[1], shortest_that_pays(listed.price, tuple(costs))
        left = (seq.max_length - len(seq.tokens)) / (1.0 + sum(survivals[:depth]))  # rounds
        start = self._in_tokens(offer.start, rate, batch, 1)
        if gain <= max(free_gain, WORTH_IT) or gain * left <= start or not depth:
            return nothing
        worst = request.drafter.usual or self._worst(offer, 1, batch)
        return Option(offer, levels, asks=True, depth=depth) if covered([request], worst) else nothing

    def _free(self, offer: Offer, request: Request, batch: int) -> Levels:
        factor, times = request.lookups, self.times
        more = max(0.0, times.around("lookup", False, 1) - times.around("plain", False, 1)) if batch == 1 else 0.0
        free = offer.free if abs(factor - 1.0) < CLOSE else [min(0.98, factor * one) for one in offer.free]
        return Levels(free, (self._in_tokens(more, request.drafter.pace, 1, 1), 0.0))

    def _worst(self, offer: Offer, depth: int, batch: int) -> float:
        """Plain rounds that a draft so deep loses if nothing is accepted."""
        cost, plain = self.times.cost, self.times.plain(batch)
        return (cost.pass_seconds(batch + depth, batch) - cost.pass_seconds(batch, batch) + offer.until(depth)) / plain

    def _budget(self, option: Option, request: Request, batch: int, costly: int, others: int) -> Budget:
        offer, rate = option.offer, request.drafter.pace
        listed = self._price(batch, rate, others)
        if not option.asks:
            return self._lookup_budget(request, listed, chain=not offer.costs)
        level = self._in_tokens(offer.level, rate, batch, costly)
        if not offer.chosen:
            return Budget(option.depth, option.depth, level=level, source="costly")
        nodes = option.depth if listed.widest == 1 else self.nodes
        price, trust = listed.price[: nodes + 1], request.record.trust(request.drafter.record)
        if abs(trust - 1.0) > CLOSE:
            price, level = tuple([cost / trust for cost in price]), level / trust
        return Budget(nodes, option.depth, listed.widest, price, level, "costly")

    def _lookup_budget(self, request: Request, listed: Prices, *, chain: bool) -> Budget:
        """All that may pay by a price list; `chain`: without branches."""
        width = 1 if chain else listed.widest
        nodes = listed.deepest if width == 1 else self.nodes if listed.deepest else 0
        if not nodes:
            return NOTHING
        price, factor = listed.price[: nodes + 1], request.lookups
        if abs(factor - 1.0) > CLOSE:
            price = tuple([cost / factor for cost in price])
        return Budget(nodes, listed.deepest, width, price, source="free")

    def _lookup(self, offer: Offer, request: Request, seq: Seq) -> Plan:
        """Of a lone sequence whose drafter makes look-ups alone."""
        if not offer.free:
            return Plan.plain(1)
        listed = self._price(1, request.drafter.pace, 0)
        free = self._free(offer, request, 1)
        if not best_depth(free, listed.price)[0] or not covered([request], request.drafter.usual_lookup):
            return Plan.plain(1)
        budget = self._lookup_budget(request, listed, chain=True)
        return Plan("lookup", (budget,), {seq.id: Part("lookup", claims=offer.free)}, asked=1)

    def _rest(self, request: Request, offer: Offer) -> int:
        """Rounds until what is believed of a drafter has drifted so far that it is tried again."""
        if not offer.stops:
            return 0
        record, prior = request.record, request.record.prior_gain(request.drafter.record)
        over, under = prior - WORTH_IT, WORTH_IT * record.rounds - record.gain
        if over <= 0.0 or under <= 0.0:
            return LONGEST_REST
        faded = KAPPA * over / under
        return max(0, min(LONGEST_REST, int(log(faded) / log(RECORD_IDLE)) - 1)) if faded < 1.0 else 0

    def observe(self, outcome: Round, plan: Plan, requests: Mapping[int, Request], offers: Mapping[int, Offer]) -> None:
        """A round of drafters on the host, or of look-ups where nothing overlaps."""
        batch, nodes, times = len(outcome.seqs), sum(outcome.drafted), self.times
        self._age += 1
        if self._age >= REFRESH_ROUNDS:
            self._age = 0
            self._prices.clear()
        plain, taken = times.cost.pass_seconds(batch, batch), times.cost.pass_seconds(batch + nodes, batch)
        asked = [seq.id for seq in outcome.seqs if plan.part(seq.id).kind == "trees"]
        host = max(0.0, times.around(plan.kind, False, batch) - times.around("plain", False, batch)) if nodes else 0.0
        drafting = outcome.seconds.get("draft", 0.0) / plain if asked else 0.0
        each = max(0.0, taken - plain) / plain / max(1, nodes)
        states = dict[int, tuple[DrafterState, list[int]]]()
        for seq, drafted, depth, accepted in zip(
            outcome.seqs, outcome.drafted, outcome.depths, outcome.accepted, strict=True
        ):
            request = requests.get(seq.id)
            if request is None:
                continue
            state = request.drafter
            states.setdefault(id(state), (state, []))[1].append(accepted)
            if seq.id in asked:
                spent = batch * (each * drafted + (drafting + host / plain) / len(asked))
                once = min(spent, batch * plan.part(seq.id).start / plain / len(asked))
                expected = offers[seq.id].expected if seq.id in offers else None
                self._book(request, depth, drafted, accepted, spent - once, expected)
                if once:
                    request.loss -= once / batch
                    request.once += once / batch
            elif drafted:
                state.usual_lookup += 0.2 * (each * drafted + host / plain - state.usual_lookup)
        for state, counts in states.values():
            state.pace_of(1.0 + sum(counts) / len(counts), (taken + host) / plain + drafting)

    def _book(
        self, request: Request, depth: int, drafted: int, accepted: int, spent: float, expected: float | None
    ) -> None:
        state = request.drafter
        state.usual = max(spent, 0.9 * state.usual)
        for record in (request.record, state.record):
            if depth:
                record.count(depth, accepted, drafted)
            if expected is not None:
                record.count_expected(expected, accepted)
        trust = request.record.trust(state.record)
        # what a drafter expects, corrected by its bias, varies less than what was accepted
        likely = accepted if expected is None else trust * expected
        for record in (request.record, state.record):
            record.count_gain(likely - state.pace * spent)

    def _price(self, batch: int, rate: float, others: int) -> Prices:
        key = batch, round(rate * 20) / 20, others
        found = self._prices.get(key)
        if found is None:
            price = self.times.cost.price(self.nodes, batch - 1, key[1], others)
            found = self._prices[key] = Prices(price, deepest(price), widest(price, self.width))
        return found

    def _in_tokens(self, seconds: float, rate: float, batch: int, sharing: int) -> float:
        """Tokens that would have been written in that time, per sequence of those that share it."""
        return rate * batch * seconds / self.times.cost.pass_seconds(batch, batch) / sharing
