"""What nodes cost in tokens (`PriceLists`), how deep to draft then, and what drafts may still lose (`Allowance`).

Time is counted in the tokens that would have been written meanwhile, so that a node pays if its survival exceeds its
price. This rule gives the most tokens per second over many rounds: what else a round drafts does not change whether a
node pays. What time is worth follows from the pace of late (`Pace`), and what others of the batch leave of a pass from
their mean nodes (`MeanNodes`). Lists are made anew every few rounds, because every round corrects the costs.

`Allowance`: how much may still be lost on drafts, so that decoding never falls far below plain decoding. It is counted
in plain rounds. Every round adds a little, drafts take what they lost, gains fill it up again, and it never exceeds
`most`. A draft runs only if its worst case, nothing accepted, leaves the allowance above -`floor`; a trial only if the
allowance covers it whole. So over any stretch of n rounds the loss is at most

    most + n * earned + floor

whatever is accepted, and within a text that is written alone and has gained nothing

    at_start + n * earned + floor

Since the allowance is never below -`floor`, drafting returns after a bounded number of rounds. Where gains may fill it
beyond what rounds alone add (`earned_up_to`), the loss is at most

    earned_up_to + n * earned + floor                and what was gained just before, up to `most`

`RoundSeconds`: whole rounds of sequences that are alone. A round that drafts takes the host longer, and ends a row of
plain passes that run in one native call. Beside a pass of 4 ms that is as much as the pass over one more node. So a
draft must promise more than its nodes cost, and its loss is counted in seconds of its round against plain rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from forerun.control.cost import MOST_TIMES, NEWEST, NEWEST_SECONDS, PRESUMED_GAP, CostModel
from forerun.core.types import Budget, Offer, Round, at_depth

BETTER = 1.03  # times the tokens per second of what runs: what takes its place must promise so much, as noise does less
REFRESH_ROUNDS = 16  # rounds for which a list holds
PACE_STEPS = 20  # of one token a pass: paces that differ by less share a list
SHARES = 8  # of a batch: lists are made for nodes of others in steps of so many of a sequence's own
KEPT = 256  # answers to what idle rounds ask: prices and costs change rarely


@dataclass(frozen=True, slots=True)
class PriceList:
    """What nodes cost, and the longest chain and widest tree that can pay."""

    price: tuple[float, ...]
    deepest: int
    widest: int
    free: Budget  # of a draft that costs nothing but its places
    chain: Budget  # the same without branches


class PriceLists:
    """Lists by batch size, pace and nodes of others, for trees of at most `nodes` nodes and `width` children."""

    def __init__(self, nodes: int, width: int) -> None:
        self.nodes, self.width, self.rounds, self._made = nodes, width, 0, 0
        self._lists: dict[tuple[int, float, int, int], PriceList] = {}

    def note_rounds(self, count: int = 1) -> None:
        self.rounds += count
        if self.rounds - self._made >= REFRESH_ROUNDS:
            self._made = self.rounds
            self._lists.clear()

    def of(self, cost: CostModel, batch: int, rate: float, others: int) -> PriceList:
        """For one sequence of a batch whose others draft `others` nodes; `rate` is its pace."""
        key = batch, round(rate * PACE_STEPS) / PACE_STEPS, others, cost.context
        if key not in self._lists:
            price = cost.price(self.nodes, batch - 1, key[1], others)
            depth, width = deepest(price), widest(price, self.width)
            nodes = depth if width == 1 else self.nodes if depth else 0
            free = Budget(nodes, depth, width, price[: nodes + 1], source="free")
            chain = Budget(depth, depth, price=price[: depth + 1], source="free")
            self._lists[key] = PriceList(price, depth, width, free, chain)
        return self._lists[key]


BEST_ACCEPTANCE = 0.95  # the highest acceptance rate that is assumed of a chain, and that of a trial


@dataclass(frozen=True, slots=True)
class Levels:
    """What one sequence could draft: the survival of each level, what each costs, and the nodes that a level takes."""

    survivals: Sequence[float]
    costs: Sequence[float] = ()  # of depth 1, 2, ...; the last holds for all that follow
    nodes: float = 1.0

    def worth(self) -> list[float]:
        """What each depth gains beyond its cost, per node, averaged so that it never grows with depth.

        A drafter that makes all levels in one pass pays for the first alone. Later depths are then worth more than the
        first, and need it: such depths share the average of their worths.
        """
        pools: list[tuple[float, int]] = []  # worth of each depth, how many depths
        for depth, survival in enumerate(self.survivals, start=1):
            pools.append(((survival - at_depth(self.costs, depth)) / self.nodes, 1))
            while len(pools) > 1 and pools[-1][0] > pools[-2][0]:
                (above, many), (below, few) = pools[-2:]
                pools[-2:] = [((above * many + below * few) / (many + few), many + few)]
        return [worth for worth, count in pools for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Option:
    """What a sequence may draft in the coming round."""

    offer: Offer
    levels: Levels
    asks: bool = False  # the drafter that costs
    idle: bool = False  # nothing pays
    depth: int = 0


def best_depth(levels: Levels, price: Sequence[float]) -> tuple[int, float]:
    """How deep one sequence should draft, and what it gains; (0, 0.0) where nothing pays."""
    best, best_gain, gain = 0, 0.0, price[0]
    for depth, survival in enumerate(levels.survivals, start=1):
        count = round(depth * levels.nodes)
        if count >= len(price):
            break
        gain += survival - at_depth(levels.costs, depth)
        if gain - price[count] > best_gain:
            best, best_gain = depth, gain - price[count]
    return best, best_gain


def allocate(offers: Sequence[Levels], price: Callable[[int], float]) -> list[int]:
    """How deep each of several sequences that share a pass should draft: the largest gain comes first.

    price(n) is what n drafted nodes cost the whole batch. A level's worth never grows with depth, so the levels
    chosen for a sequence are its first ones.
    """
    ranked = sorted(
        (-worth, depth, i) for i, offer in enumerate(offers) for depth, worth in enumerate(offer.worth()) if worth > 0.0
    )
    best, depths = 0, [0] * len(offers)  # how many levels are best
    nodes = gain = best_gain = 0.0
    for count, (worth, _, i) in enumerate(ranked, start=1):
        nodes += offers[i].nodes
        gain -= worth * offers[i].nodes
        net = gain - price(round(nodes))
        if net > best_gain:
            best, best_gain = count, net
    for _, _, i in ranked[:best]:
        depths[i] += 1
    return depths


def share_options(
    options: Sequence[Option], depths: Sequence[int], batch: int, beside: int
) -> tuple[list[Option], list[int]]:
    """The options with one pass for all sequences, of these depths; and the nodes that the others of each have."""
    nodes = [round(depth * option.levels.nodes) for depth, option in zip(depths, options, strict=True)]
    shared = [
        Option(one.offer, one.levels, one.asks and depth > 0, one.idle or (one.asks and not depth), depth)
        for one, depth in zip(options, depths, strict=True)
    ]
    step, drafted = max(1, batch // SHARES), beside + sum(nodes)
    return shared, [(drafted - own) // step * step for own in nodes]


def share_chains(
    chains: Sequence[Sequence[float]], price: Sequence[float], trust: float = 1.0
) -> tuple[list[int], float]:
    """The same for chains that cost nothing but their places, given by their survivals times `trust`: many, quickly.

    price[n] is what n drafted nodes cost the whole batch. Returns how deep each goes, and what is accepted of all.
    """
    ranked = sorted([survival for chain in chains for survival in chain], reverse=True)
    best, gain, best_gain, accepted = 0, 0.0, 0.0, 0.0
    for count, survival in enumerate(ranked[: len(price) - 1], start=1):
        gain += trust * survival
        if gain - price[count] > best_gain:
            best, best_gain, accepted = count, gain - price[count], gain
    if not best:
        return [0] * len(chains), 0.0
    least, depths = ranked[best - 1], list[int]()
    # nodes for survivals that are equal to the least
    ties = best - sum([survival > least for survival in ranked[:best]])
    for chain in chains:
        above = 0
        for survival in chain:
            if survival < least or (survival == least and ties <= 0):
                break
            ties -= survival == least
            above += 1
        depths.append(above)
    return depths, accepted


@lru_cache(maxsize=KEPT)
def shortest_that_pays(price: tuple[float, ...], costs: tuple[float, ...], acceptance: float = BEST_ACCEPTANCE) -> int:
    """The shortest chain that beats a plain pass at this acceptance; 0 where none does."""
    gain, survival = price[0], 1.0
    for length in range(1, len(price)):
        survival *= acceptance
        gain += survival - at_depth(costs, length)
        if gain > price[length]:
            return length
    return 0


def widest(price: Sequence[float], most: int) -> int:
    """How many siblings can be worth their price.

    The probabilities of siblings add up to one, so the k-th is at most 1/k; equal ones are rare, so half of that is
    assumed.
    """
    each = min(((price[n] - price[0]) / n for n in range(1, len(price))), default=1.0)
    return most if each * 2 * most <= 1.0 else max(1, int(1.0 / (2.0 * each)))


def deepest(price: Sequence[float]) -> int:
    """The longest chain that can pay, at the best acceptance."""
    survivals = [BEST_ACCEPTANCE**depth for depth in range(1, len(price))]
    return best_depth(Levels(survivals), price)[0]


PACE_MEMORY = 0.97  # per round, of tokens and passes: about the last 30 rounds


@dataclass(slots=True)
class Pace:
    """Tokens and the plain passes that they took, with a memory."""

    written: float = 1.0
    passes: float = 1.0

    def add(self, tokens: float, passes: float) -> None:
        self.written = self.written * PACE_MEMORY + tokens
        self.passes = self.passes * PACE_MEMORY + passes

    def add_plain(self, rounds: int) -> None:
        """So many rounds of one token and one plain pass each."""
        memory = PACE_MEMORY**rounds
        more = (1.0 - memory) / (1.0 - PACE_MEMORY)
        self.written, self.passes = self.written * memory + more, self.passes * memory + more

    @property
    def rate(self) -> float:
        """Never below one: plain decoding writes that."""
        return max(1.0, self.written / self.passes)


class MeanNodes:
    """Averages by sequence."""

    def __init__(self) -> None:
        self._usual: dict[int, float] = {}

    def note(self, seq_id: int, drafted: int) -> None:
        usual = self._usual.get(seq_id, 0.0)
        self._usual[seq_id] = usual + NEWEST * (drafted - usual)

    def rest(self, seq_id: int, rounds: int) -> None:
        """So many rounds in which it drafted nothing."""
        if seq_id in self._usual:
            self._usual[seq_id] *= (1.0 - NEWEST) ** rounds

    def beside(self, seq_ids: Iterable[int], batch: int) -> int:
        """What the others of a batch usually draft, in steps, so that few price lists are made."""
        if batch == 1:
            return 0
        usual = sum(self._usual.get(seq_id, 0.0) for seq_id in seq_ids)
        step = max(1, batch // 2)
        return step * round(usual * (batch - 1) / batch / step)

    def forget(self, seq_id: int) -> None:
        self._usual.pop(seq_id, None)


# plain rounds: what a text has at its start, how far below zero it may fall, what each round adds: a text of 64 tokens
# loses 3.4 of them at most, a twentieth
AT_START, FLOOR, EARNED = 0.8, 2.2, 0.006
MOST_SAVED = 8.0  # plain rounds that texts have gained, and later ones may lose
STAKE = 0.5  # what may be put at risk, of what is left: times the gain by the worst loss
# per round, of what drafts that vary cost at most; and the most that this counts for, of the floor: so that dear ones
# are tried again
USUAL_MEMORY, MOST_USUAL = 0.9, 0.5


@dataclass(slots=True)
class Allowance:
    """What may still be lost, in plain rounds."""

    most: float = MOST_SAVED
    earned: float = EARNED  # by a round
    floor: float = FLOOR
    level: float = AT_START
    at_start: float = AT_START  # of a text that is written alone: what others gained beyond is saved for later ones
    saved: float = 0.0
    earned_up_to: float = inf  # beyond that, gains alone fill it up
    usual: float = 0.0  # what drafts cost of late, whatever was accepted: the worst case where forms vary

    def book(self, loss: float) -> None:
        """A round has lost so much against plain decoding; a negative loss is a gain."""
        earned = min(self.earned, max(0.0, self.earned_up_to - self.level))
        self.level = max(min(self.level + earned - loss, self.most), -self.floor)

    def begin(self) -> None:
        """A text begins that is written alone: it may lose what any text may, while those before have gained that."""
        saved = min(self.saved + self.level - self.at_start, MOST_SAVED)
        self.level, self.saved = min(self.at_start, self.at_start + saved), max(0.0, saved)

    def rest(self, rounds: int) -> None:
        """So many rounds have lost nothing."""
        most = min(max(self.level, self.earned_up_to), self.most)
        self.level = min(self.level + rounds * self.earned, most)

    def book_draft(self, cost: float, accepted: float) -> None:
        """A round of drafts that vary in size: what it cost, and what it gained."""
        if cost > 0.0:
            self.usual = max(cost, USUAL_MEMORY * self.usual)
        self.book(cost - accepted)

    def rounds_until(self, worst: float, most: int) -> int:
        """Rounds without a draft, `most` of them at most, in which a trial is not covered for sure."""
        return max(0, min(most, int((worst - self.level) / self.earned) - 1))

    @property
    def covers_usual(self) -> bool:
        """May drafts be made that cost as much as those of late?"""
        return self.covers(min(self.usual, MOST_USUAL * self.floor))

    def covers(self, worst: float) -> bool:
        """May a draft be made that has been paying?"""
        return self.level - worst > -self.floor

    def covers_stake(self, worst: float, gain: float) -> bool:
        """May a draft be made that promises so much? The less is left, the more it must promise for what it may lose.

        Doubtful drafts, missed one after the other, would else use up what is left when a long match comes: the share
        of what is left that is put at risk is at most STAKE times what is promised for each unit of it.
        """
        left = self.level + self.floor
        return worst < left and worst * worst <= STAKE * gain * left

    def covers_trial(self, worst: float) -> bool:
        """May a draft be made that may well lose all of it?"""
        return self.level >= min(worst, self.most) and self.covers(worst)


# What drafts may lose (`Allowance`), in plain rounds; the share is the bound over 200 rounds. Chains of fixed length,
# whose trials are dear: 5.5%. With what menus have, a draft model kept 0.94 of its speed (eight seeds), and with
# STOPPING Medusa 0.96
CHAINS = {"most": 4.0, "earned": 0.015, "floor": 4.0, "level": 2.0}
# drafters that stop where they are not confident: 3%. A loss is noticed within a few rounds, and 40 tokens lose little
STOPPING = {"most": 2.0, "earned": 0.015, "floor": 1.0, "level": 1.0}
# what costs nothing but its places: 4.25%, and nothing beforehand. Gains of many may be lost again before drafting
# ends: with STOPPING an n-gram and a draft model kept 0.96 of their speed
FREE_DRAFTS = {"most": 5.0, "earned": 0.01, "floor": 1.5, "level": 0.0}
# look-ups where nothing else drafts: 1.5%, and up to three rounds of what they have gained
LOOKUPS = {"most": 3.0, "earned": EARNED, "floor": 1.0, "level": AT_START, "earned_up_to": AT_START}
# look-ups in place of a head, in rounds of the head alone: 3%
BESIDE_HEAD = {"most": 2.0, "earned": 0.01, "floor": 2.0, "level": 2.0}
# look-ups for many sequences, which mostly find nothing: 1.3%
SEARCHES = {"most": 1.0, "earned": 0.003, "floor": 1.0}
PRIOR_CHAIN = 4.0  # expected tokens that what look-ups claim counts for: about one chain


# plain rounds that are timed together: as many as run in one native call, of which the first is slow
IN_A_ROW = 4


class RoundSeconds:
    """Of sequences that are alone in their rounds."""

    def __init__(self) -> None:
        self.plain = 0.0  # of a plain round in a row of them; 0 = none was seen
        self._beside = 0.0  # of that, what is not the pass
        self._drafted = 0.0  # the same of rounds that drafted; 0 = none was seen
        # the same of rounds in which a drafter that costs was asked, less what that took itself
        self._asked = 0.0
        self._row, self._row_beside, self._rounds = 0.0, 0.0, 0  # plain rounds since the last that drafted

    @property
    def more(self) -> float:
        """Seconds that a round takes longer, beside its pass, if it drafts."""
        if not self.plain:
            return PRESUMED_GAP
        return max(0.0, self._drafted - self._beside) if self._drafted else PRESUMED_GAP

    def note_plain(self, seconds: Mapping[str, float]) -> None:
        total = sum(seconds.values())
        self._row += total
        self._row_beside += total - seconds["pass"]
        self._rounds += 1
        if self._rounds == IN_A_ROW:
            self.plain = moved(self.plain, self._row / IN_A_ROW)
            self._beside = moved(self._beside, self._row_beside / IN_A_ROW)
            self._end_row()

    def note(self, seconds: Mapping[str, float], expected: float, nodes: int, cost: float) -> float:
        """A round that drafted `nodes` nodes: what they cost in plain rounds, the host's work included.

        Its pass was expected to take `expected` seconds. `cost` is by the pass alone: it counts until plain rounds were
        seen.
        """
        if not nodes:
            self.note_plain(seconds)
            return cost
        self._end_row()
        total = sum(seconds.values())
        self._drafted = moved(self._drafted or self._beside + PRESUMED_GAP, total - seconds["pass"])
        if not self.plain:
            return cost
        return min(total, MOST_TIMES * (expected + self._drafted)) / self.plain - 1.0

    def note_asked(self, seconds: Mapping[str, float]) -> float:
        """A round of a drafter that had to run: what the host took longer, in plain rounds, beside the draft itself."""
        self._end_row()
        host = sum(seconds.values()) - seconds["pass"] - seconds.get("draft", 0.0)
        self._asked = moved(self._asked, host)
        return max(0.0, min(host, MOST_TIMES * self._asked) - self._beside) / self.plain if self.plain else 0.0

    def _end_row(self) -> None:
        self._row = self._row_beside = 0.0
        self._rounds = 0


def drafting_seconds(outcome: Round, offers: Mapping[int, Offer], asked: Mapping[int, int]) -> float:
    """Seconds that drafters took which were asked for these depths; a pause of the machine is not charged to them."""
    most = 0.0
    for seq, depth in zip(outcome.seqs, outcome.depths, strict=True):
        if seq.id in asked:
            offer = offers[seq.id]
            levels = max(1, depth) if offer.stops else asked[seq.id]  # drafted, accepted or not
            most = max(most, offer.start + 2 * offer.until(levels + 1))
    return min(outcome.seconds.get("draft", most / 2), most)


def moved(mean: float, value: float) -> float:
    """A moving average, which a pause of the machine moves little; 0 = nothing was seen."""
    return mean + NEWEST_SECONDS * (min(value, MOST_TIMES * mean) - mean) if mean else value
