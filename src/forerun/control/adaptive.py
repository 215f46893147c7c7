"""AdaptiveController: budgets from what passes cost here and how often this sequence's drafts were accepted.

Per sequence and round there are up to three options: a drafter that costs nothing (n-gram), one that must run (a head,
a model), or no draft. The one with the highest expected gain is taken, in tokens beyond those that would have been
written in the same time. A drafter that knows its confidence gets the price list and cuts its own tree; for one that
cannot stop by itself, depth is fixed beforehand from the acceptance at each depth. Flat costs thus give wide and deep
trees, steep ones short chains or nothing, by one rule.

Where nothing pays, only a trial can show that acceptance has risen, and trials cost. So there is an allowance: every
token adds a small part of a pass to it, every round of a drafter that costs is charged its cost beyond the tokens
it gained, and a trial is made only when the allowance covers its worst case. Trials are as short as can pay, so that
they come often. Whatever the acceptance, the loss stays within that part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.control.allocate import Levels, allocate, best_depth, deepest, shortest_that_pays, widest
from forerun.control.base import ControlParts
from forerun.control.cost import CostModel
from forerun.control.history import History
from forerun.offers import FREE, Offer, total
from forerun.types import Budget, Round, Seq

MOST_NODES, MOST_WIDTH = 60, 10  # the largest budget, where no limit was set
EARNED = 0.015  # passes that a token adds to the allowance
MOST_SAVED = 4.0  # passes; more would be spent at once when acceptance falls
PACE = 0.97  # memory of the rate, per round
WORTH_IT = 0.05  # tokens a round: a smaller gain is within the noise
CLOSE = 0.05  # smaller errors of a drafter's expectations are not corrected
REFRESH = 16  # rounds for which a price list holds
NOTHING = Budget(0, 0, source="free")


@dataclass(frozen=True, slots=True)
class Option:
    """What a sequence may draft in the coming round."""

    offer: Offer
    levels: Levels
    asks: bool = False  # the drafter that costs
    idle: bool = False  # nothing pays
    depth: int = 0


@dataclass(frozen=True, slots=True)
class PriceList:
    """What nodes cost, and the longest chain and widest tree that can pay."""

    price: tuple[float, ...]
    deepest: int
    widest: int


class AdaptiveController:
    """Budgets from measured costs and observed acceptance."""

    def __init__(
        self,
        cost: CostModel,
        nodes: int,
        width: int,
        offer: Callable[[Seq], Offer],
    ) -> None:
        self.cost, self.nodes, self.width = cost, nodes, width
        self.offer = offer  # of the sequence's own drafter
        self.allowance = MOST_SAVED / 2  # passes that may still be lost on trials
        self._records: dict[int, History] = {}
        self._latest = History()  # what a new sequence starts from
        self._offers: dict[int, Offer] = {}  # of this round's sequences
        self._next: dict[int, tuple[int, Offer]] = {}  # asked for already: at how many tokens, and the offer
        self._asked: dict[int, int] = {}  # sequences whose costly drafter may draft, and how deep
        self._usual: dict[int, float] = {}  # nodes that a sequence drafts on average
        self._written, self._passes = 1.0, 1.0
        self._prices: dict[tuple[int, float, int], PriceList] = {}
        self._rounds = 0

    @classmethod
    def build(cls, parts: ControlParts) -> AdaptiveController:
        nodes = MOST_NODES if parts.nodes is None else parts.nodes
        return cls(parts.measure(), nodes, parts.width or MOST_WIDTH, parts.offer)

    @property
    def rate(self) -> float:
        """Tokens that a sequence writes in the time of a plain pass, of late."""
        return max(1.0, self._written / self._passes)

    def plan(self, seqs: Sequence[Seq]) -> list[Budget]:
        self._offers = {seq.id: self._offer_now(seq) for seq in seqs}
        costly = sum(offer.costs for offer in self._offers.values())
        options = [self._option(seq, len(seqs), costly) for seq in seqs]
        others = [0] * len(seqs)
        if len(seqs) > 1:
            options, others = self._share(options, len(seqs))
        spare, budgets = self.allowance, []
        self._asked = {}
        for seq, option, nodes in zip(seqs, options, others, strict=True):
            length, worst = self._trial(option, len(seqs), costly) if option.idle else (0, 0.0)
            if length and spare >= worst:
                spare -= worst
                depth = 2 * length if option.offer.stops else length  # it goes on only where it is confident
                option = Option(option.offer, option.levels, asks=True, depth=depth)
            if option.asks:
                self._asked[seq.id] = option.depth
            budgets.append(self._budget(seq, option, len(seqs), costly, nodes))
        return budgets

    def observe(self, outcome: Round) -> None:
        batch, nodes = len(outcome.seqs), sum(outcome.drafted)
        if batch == 1 and not outcome.prompt_rows:
            # with the verdict, because the host waits for a device only there
            self.cost.observe(nodes + 1, outcome.seconds["target"] + outcome.seconds.get("verify", 0.0))
        plain, taken = self.cost.pass_seconds(batch), self.cost.pass_seconds(batch + nodes)
        drafting = self._drafting_seconds(outcome) / plain
        if any(
            offer.chosen or offer.costs for offer in self._offers.values()
        ):  # plain decoding shows nothing
            self._written = self._written * PACE + 1.0 + sum(outcome.accepted) / batch
            self._passes = self._passes * PACE + taken / plain + drafting
        self._rounds += 1
        if self._rounds % REFRESH == 0:
            self._prices.clear()
        rows = zip(outcome.seqs, outcome.drafted, outcome.depths, outcome.accepted, strict=True)
        for seq, drafted, depth, accepted in rows:
            usual = self._usual.get(seq.id, 0.0)
            self._usual[seq.id] = usual + 0.2 * (drafted - usual)
            if self._offers.get(seq.id, FREE).costs:
                self.allowance += EARNED * (accepted + 1)
            if seq.id in self._asked:
                added = taken - self.cost.pass_seconds(batch + nodes - drafted)
                spent = batch * (max(0.0, added) / plain + drafting / len(self._asked))
                once = min(spent, batch * self._offers[seq.id].start / plain / len(self._asked))
                self._book(seq, drafted, depth, accepted, spent, once)
            self.allowance = min(self.allowance, MOST_SAVED)

    def forget(self, seq: Seq) -> None:
        for kept in (self._records, self._offers, self._usual, self._next):
            kept.pop(seq.id, None)

    def _offer_now(self, seq: Seq) -> Offer:
        """The drafter's offer; one that was asked for when the last round was booked still holds."""
        length, offer = self._next.pop(seq.id, (-1, FREE))
        return offer if length == len(seq.tokens) else self.offer(seq)

    def _book(self, seq: Seq, drafted: int, depth: int, accepted: int, spent: float, once: float) -> None:
        """Record what a drafter that costs gained, against the passes that it took.

        `once` are those that went into reading the sequence so far: later rounds do not need them again.
        """
        self.allowance += accepted - spent
        following = self.offer(seq)  # it also says what was expected of the round that is being booked
        self._next[seq.id] = len(seq.tokens), following
        expected = following.expected
        for record in (self._record(seq), self._latest):
            if depth:
                record.count(depth, accepted, drafted)
            if expected is not None:
                record.count_expected(expected, accepted)
            # what a drafter expects, corrected by its bias, varies less than what was accepted
            likely = accepted if expected is None else record.trust * expected
            record.count_gain(likely - self.rate * (spent - once))

    def _drafting_seconds(self, outcome: Round) -> float:
        """What drafting took; a pause of the machine is not charged to the drafter."""
        longest = most = 0.0
        for seq, depth in zip(outcome.seqs, outcome.depths, strict=True):
            if seq.id in self._asked:
                offer = self._offers[seq.id]
                levels = max(1, depth) if offer.stops else self._asked[seq.id]  # drafted, accepted or not
                longest = max(longest, offer.start + offer.until(levels))
                most = max(most, offer.start + 2 * offer.until(levels + 1))
        return min(outcome.seconds.get("draft", longest), most) if len(outcome.seqs) == 1 else longest

    def _option(self, seq: Seq, batch: int, costly: int) -> Option:
        """What costs nothing, or what the drafter that costs would gain: whichever gains more."""
        offer = self._offers[seq.id]
        free = Option(offer, Levels(offer.free))
        if not offer.costs:
            return free
        others = round(sum(self._usual.get(i, 0.0) for i in self._offers if i != seq.id))
        listed = self._price(batch, self.rate, others)
        free_gain = best_depth(free.levels, listed.price)[1]
        record = self._record(seq)
        costs = [self._in_tokens(seconds, batch, costly) for seconds in offer.seconds]
        survivals = record.survivals(self.nodes, least=costs[-1])
        levels = Levels(survivals, costs, max(1.0, record.nodes) if offer.chosen else 1.0)
        depth, gain = best_depth(levels, listed.price)
        if offer.stops:  # what it gains by stopping in time shows only in its rounds
            least = 2 * shortest_that_pays(listed.price, costs)  # less could not pay at any confidence
            depth, gain = min(listed.deepest, max(depth + 1, least)), record.mean_gain
        elif offer.chosen:  # the nodes it left out were not tested, so its rates are too high
            gain = min(gain, record.mean_gain)
        left = (seq.max_length - len(seq.tokens)) / (1.0 + sum(levels.survivals[:depth]))  # rounds
        pays = gain > max(free_gain, WORTH_IT) and gain * left > self._in_tokens(offer.start, batch, 1)
        if pays and depth and self.allowance > -MOST_SAVED:
            return Option(offer, levels, asks=True, depth=depth)
        return Option(offer, free.levels, idle=not free_gain)

    def _share(self, options: list[Option], batch: int) -> tuple[list[Option], list[int]]:
        """The same with one pass for all sequences: how deep each goes, and how many nodes the others have."""
        plain, rate = self.cost.pass_seconds(batch), self.rate

        def price(nodes: int) -> float:
            return rate * batch * (self.cost.pass_seconds(batch + nodes) / plain - 1.0)

        depths = allocate([option.levels for option in options], price)
        nodes = [round(depth * option.levels.nodes) for depth, option in zip(depths, options, strict=True)]
        shared = [
            Option(one.offer, one.levels, one.asks and depth > 0, one.idle or (one.asks and not depth), depth)
            for one, depth in zip(options, depths, strict=True)
        ]
        return shared, [sum(nodes) - own for own in nodes]

    def _trial(self, option: Option, batch: int, costly: int) -> tuple[int, float]:
        """The shortest draft that could pay, and what it costs in passes if all of it is rejected."""
        offer, price, plain = option.offer, self._price(batch, 1.0, 0).price, self.cost.pass_seconds(batch)
        costs = [seconds * batch / costly / plain for seconds in offer.seconds]
        length = shortest_that_pays(price, costs)
        return length, price[length] - 1.0 + total(costs, length) + offer.start * batch / plain

    def _budget(self, seq: Seq, option: Option, batch: int, costly: int, others: int) -> Budget:
        if option.idle:
            return NOTHING
        offer, listed = option.offer, self._price(batch, self.rate, others)
        if not option.asks:
            nodes = listed.deepest if listed.widest == 1 else self.nodes if listed.deepest else 0
            return Budget(nodes, listed.deepest, listed.widest, listed.price[: nodes + 1], source="free")
        level = self._in_tokens(offer.level, batch, costly)
        if not offer.chosen:
            return Budget(option.depth, option.depth, level=level, source="costly")
        nodes = option.depth if listed.widest == 1 else self.nodes
        price, trust = listed.price[: nodes + 1], self._record(seq).trust
        if abs(trust - 1.0) > CLOSE:
            price, level = tuple(cost / trust for cost in price), level / trust
        return Budget(nodes, option.depth, listed.widest, price, level, "costly")

    def _price(self, batch: int, rate: float, others: int) -> PriceList:
        key = batch, round(rate * 20) / 20, others
        if key not in self._prices:
            price = self.cost.price(self.nodes, batch - 1, key[1], others)
            self._prices[key] = PriceList(price, deepest(price), widest(price, self.width))
        return self._prices[key]

    def _in_tokens(self, seconds: float, batch: int, sharing: int) -> float:
        """Tokens that would have been written in that time, per sequence of those that share it."""
        return self.rate * batch * seconds / self.cost.pass_seconds(batch) / sharing

    def _record(self, seq: Seq) -> History:
        if seq.id not in self._records:
            self._records[seq.id] = History.after(self._latest)
        return self._records[seq.id]
