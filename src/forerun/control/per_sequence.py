"""SequencePlanner: budgets of single sequences, for drafters without a menu (n-gram, heads and models on a CPU).

Per sequence and round there are up to three options: a drafter that costs nothing (n-gram), a drafter that must run (a
head, a model), or no draft. The option with the highest expected gain is taken, in tokens beyond those that would have
been written in the same time. A drafter that knows its confidence gets the price list and cuts its own tree; for a
drafter that cannot stop by itself, depth is fixed beforehand from the acceptance at each depth.

Where nothing pays, only a trial can show that acceptance has risen (`Trials`). A drafter that stops where it is not
confident says at once what it would gain: its trials come after 2, 4, ... 32 rounds without a draft, until one pays
again; a new text has one at once, and then starts from half the wait of the text before. Where a drafter must read a
text before its first draft, that is part of what a text's first trial may lose, and is covered by what the drafter's
earlier texts have gained (`EarlierTexts`). Trials are as short as can pay, and all together lose no more than the
allowance has (`Allowance`). Until the next trial a sequence that is alone rests: nothing is planned for it, and its
rounds follow each other.

`History` has the acceptance of a drafter that costs by depth, and the tokens that it gained beyond the time that
drafting took. Counts decay, because acceptance changes within a text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log

from forerun.control.cost import MEMORY, NEWEST, PRIOR, CostModel, Factor
from forerun.control.prices import (
    CHAINS,
    FREE_DRAFTS,
    IN_A_ROW,
    PRIOR_CHAIN,
    REFRESH_ROUNDS,
    STOPPING,
    Allowance,
    Levels,
    MeanNodes,
    Option,
    Pace,
    PriceList,
    PriceLists,
    RoundSeconds,
    allocate,
    best_depth,
    drafting_seconds,
    share_chains,
    share_options,
    shortest_that_pays,
)
from forerun.core.types import FREE, Budget, Offer, Round, Seq, total

WORTH_IT = 0.05  # tokens a round: a smaller gain is within the noise
MOST_CHAIN_NODES = 1024  # nodes of all chains of a round: the rows of the largest pass

PRIOR_ACCEPTANCE = 0.7  # per position, before any draft was tested: high, so that a drafter gets its first trials
GAIN_MEMORY = 0.9  # per round, where the gain is known from the drafter's confidence: that varies less
# rounds from a draft that did not pay to the next trial, twice as many each time
FIRST_WAIT, LONGEST_WAIT = 2, 32
TRUST_MEMORY = 0.98  # per round: a drafter's bias changes more slowly than acceptance
PRIOR_GAIN = 0.3  # tokens a round: the assumed gain of a drafter that has not drafted yet
LEAST_TRUST, MOST_TRUST = 0.3, 1.3  # how far a drafter's expectations are scaled down and up


@dataclass(slots=True)
class History:
    """The history of one sequence, or of all sequences, with a drafter that costs."""

    hits: float = PRIOR_ACCEPTANCE * PRIOR
    tries: float = PRIOR
    by_depth: list[list[float]] = field(default_factory=list)  # [hits, tries] of depth 1, 2, ...
    gain: float = PRIOR_GAIN * PRIOR  # tokens beyond what the round's time was worth
    rounds: float = PRIOR
    expected: float = PRIOR  # tokens that the drafter expected to be accepted; next: tokens that were
    accepted: float = PRIOR
    nodes: float = 0.0  # drafted per level
    wait: int = FIRST_WAIT  # rounds without a draft before a trial
    idle: int = 0  # such rounds so far

    @classmethod
    def after(cls, earlier: History) -> History:
        """The history of a new sequence: starts from that of the others, and soon outweighs it."""
        share, asked = PRIOR / earlier.tries, PRIOR / earlier.rounds
        by_depth = [[hits * share, tries * share] for hits, tries in earlier.by_depth]
        trusted = PRIOR * earlier.trust
        return cls(
            earlier.hits * share,
            PRIOR,
            by_depth,
            earlier.gain * asked,
            PRIOR,
            PRIOR,
            trusted,
            earlier.nodes,
            max(FIRST_WAIT, earlier.wait // 2),
            LONGEST_WAIT,  # what holds for others may not hold for it: one trial at once
        )

    def count(self, depth: int, accepted: int, nodes: int = 0) -> None:
        """A tree of `nodes` nodes and `depth` levels was drafted, and `accepted` tokens of it were accepted."""
        tried = min(accepted + 1, depth)
        memory = MEMORY**tried
        self.hits = self.hits * memory + accepted
        self.tries = self.tries * memory + tried
        self.by_depth += [[0.0, 0.0] for _ in range(depth - len(self.by_depth))]
        for level, counts in enumerate(self.by_depth, start=1):
            counts[0] = counts[0] * MEMORY + (level <= accepted)
            counts[1] = counts[1] * MEMORY + (level <= tried)
        if depth:
            self.nodes += NEWEST * (max(nodes, depth) / depth - self.nodes)

    def count_gain(self, gain: float, memory: float = MEMORY) -> None:
        """A round with this drafter gained `gain` tokens beyond what its time was worth."""
        self.gain = self.gain * memory + gain
        self.rounds = self.rounds * memory + 1.0

    def note_trial(self) -> None:
        """Nothing pays, and it is tried all the same; the next trial comes later, unless this one pays."""
        self.idle, self.wait = 0, min(2 * self.wait, LONGEST_WAIT)

    def count_expected(self, expected: float, accepted: int) -> None:
        """The drafter expected `expected` tokens to be accepted, and `accepted` tokens were."""
        self.expected = self.expected * TRUST_MEMORY + expected
        self.accepted = self.accepted * TRUST_MEMORY + accepted

    @property
    def trust(self) -> float:
        """The factor that corrects the drafter's probabilities."""
        return min(max((self.accepted + PRIOR) / (self.expected + PRIOR), LEAST_TRUST), MOST_TRUST)

    @property
    def mean_gain(self) -> float:
        return self.gain / self.rounds

    @property
    def acceptance(self) -> float:
        """Of positions that were tested, whatever their depth."""
        return self.hits / self.tries

    def survivals(self, most: int, least: float = 0.0) -> list[float]:
        """The acceptance probability at depth 1, 2, ...: the rates of each depth, with the overall one as prior.

        They end where they fall below `least`.
        """
        overall, survival = self.acceptance, 1.0
        found: list[float] = []  # `list[float]()` would make a type, twenty times slower, in every round
        for level in range(most):
            hits, tries = self.by_depth[level] if level < len(self.by_depth) else (0.0, 0.0)
            survival *= (hits + PRIOR * overall) / (tries + PRIOR)
            if survival < least:
                break
            found.append(survival)
        return found


class SequencePlanner:
    """Budgets from measured costs and observed acceptance."""

    def __init__(self, cost: CostModel, nodes: int, width: int, offer: Callable[[Seq], Offer]) -> None:
        self.cost, self.nodes, self.width = cost, nodes, width
        self.offer = offer  # of the sequence's own drafter
        self.allowance = Allowance(**CHAINS)
        self.free, self.rounds = FreeDrafts(), RoundSeconds()
        self._records: dict[int, History] = {}
        self._earlier = defaultdict[int, EarlierTexts](EarlierTexts)  # by drafter: what a new sequence starts from
        self._drafters: dict[int, EarlierTexts] = {}  # the same by sequence
        self._offers: dict[int, Offer] = {}  # of this round's sequences
        self._next: dict[int, tuple[int, Offer]] = {}  # asked for already: at how many tokens, and the offer
        self._asked: dict[int, int] = {}  # sequences whose costly drafter may draft, and how deep
        # rounds without a draft that are not booked yet, by sequence; and those in which a drafter that costs rested
        self._idle, self._rested = dict[int, int](), dict[int, int]()
        self._pace, self._prices = Pace(), PriceLists(nodes, width)
        self._trials, self._usual = Trials(self.allowance), MeanNodes()

    @property
    def rate(self) -> float:
        return self._pace.rate

    def offers_of(self, seqs: Sequence[Seq]) -> list[Offer]:
        """The drafters' offers; one that was asked for when the last round was booked still holds."""
        kept, self._next = self._next, {}
        if not kept:
            return [self.offer(seq) for seq in seqs]
        asked = [kept.get(seq.id, (-1, FREE)) for seq in seqs]
        return [
            offer if length == len(seq.tokens) else self.offer(seq)
            for seq, (length, offer) in zip(seqs, asked, strict=True)
        ]

    def plan(self, seqs: Sequence[Seq], offers: Sequence[Offer], batch: int, beside: int = 0) -> list[Budget]:
        """Budgets of these sequences of a batch, whose other ones draft `beside` nodes together."""
        self.take_chains(seqs, offers)
        if not seqs:
            return []
        self._settle_idle()
        costly, others = sum(offer.costs for offer in offers), [beside] * len(seqs)
        listed = self._price(batch, self.rate, self._usual.beside(self._offers, batch) + beside)
        options = [self._option(*pair, batch, costly, listed) for pair in zip(seqs, offers, strict=True)]
        if batch > 1:
            depths = self._shared_depths([option.levels for option in options], batch, beside)
            options, others = share_options(options, depths, batch, beside)
        spare, budgets = self._trials.levels(), []
        for seq, option, nodes in zip(seqs, options, others, strict=True):
            if option.idle:
                option = self._tried(seq, option, batch, costly, spare)
            if option.asks:
                self._asked[seq.id] = option.depth
            budgets.append(NOTHING if option.idle else self._budget(seq, option, batch, costly, nodes))
        return budgets

    def _tried(self, seq: Seq, option: Option, batch: int, costly: int, spare: dict[bool, float]) -> Option:
        """A trial where one is due and covered by what is left; else the same."""
        offer, record, trials = option.offer, self._record(seq.id, option.offer), self._trials
        price, plain = self._price(batch, 1.0, 0).price, self.cost.pass_seconds(batch, batch)
        length, worst = shortest_trial(offer, price, plain, batch, costly)
        if offer.start and not self._drafters[seq.id].cover(seq, offer.start / plain, worst, batch):
            length = 0
        if length and trials.is_due(record, worst, spare[offer.stops], offer.stops):
            spare[offer.stops] -= worst
            depth = 2 * length if offer.stops else length  # it goes on only where it is confident
            return Option(offer, option.levels, asks=True, depth=depth)
        record.idle += 1
        if batch == 1 and (offer.stops or self.allowance.covers(0.0)):  # else it may pay as soon as that is so
            trials.rest(seq.id, self._prices.rounds, record, worst if length else None, offer.stops)
        return option

    def rests(self, seq: Seq, offer: Offer) -> bool:
        """Is it known, without a plan, that nothing pays for this sequence? It is alone in its batch."""
        self._settle_idle()
        return not offer.free and self._trials.are_off(seq.id, self._prices.rounds)

    def resting(self, seq: Seq) -> Budget:
        """Nothing, and for how many further rounds no drafter that must run will draft for this sequence."""
        return self._trials.resting(seq.id, self._prices.rounds)

    def note_idle(self, outcome: Round, costly: bool) -> None:
        """A round of one sequence in which nothing was drafted: what `observe` would book, in few steps."""
        seq = outcome.seqs[0]
        if outcome.tells_times:
            self.rounds.note_plain(outcome.seconds)
        self._idle[seq.id] = self._idle.get(seq.id, 0) + 1
        if costly:
            self._rested[seq.id] = self._rested.get(seq.id, 0) + 1

    def _settle_idle(self) -> None:
        """Book rounds without a draft, all since the last draft together: one by one they took longer."""
        if not self._idle:
            return
        for seq_id, rounds in self._idle.items():
            self._pace.add_plain(rounds)
            self.free.note_idle(rounds)
            self._prices.note_rounds(rounds)
            self._usual.rest(seq_id, rounds)
        for seq_id, rounds in self._rested.items():
            self._trials.note_rested(rounds)
            if seq_id in self._records:
                self._records[seq_id].idle += rounds
        self._idle, self._rested = {}, {}

    def free_chains(self, offers: Sequence[Offer], batch: int, most: int = MOST_CHAIN_NODES) -> tuple[list[int], float]:
        """How deep each chain that costs nothing is worth drafting, and how many tokens of all would be accepted."""
        self._settle_idle()
        chains = [offer.free[: self.nodes] for offer in offers]
        if not (
            any(chains) and self.free.allowance.covers_usual
        ):  # no sequence has a match: the usual case of small batches
            return [0] * len(offers), 0.0
        if batch == 1:  # by the list that its budget will have
            price = self._price(1, self.rate, 0).price
            depth, gain = best_depth(self.free.levels(offers[0]), price)
            return [depth], gain + price[depth] - price[0]
        seconds = self.cost.passes_seconds(batch, 1 + min(most, sum(map(len, chains))), batch)
        factor = self.rate * batch / self.cost.pass_seconds(batch, batch)
        costs = [factor * (one - seconds[0]) for one in seconds]
        return share_chains(chains, costs, self.free.trust)

    def take_chains(self, seqs: Sequence[Seq], offers: Sequence[Offer]) -> None:
        """The round of these sequences is observed here; of no sequences: there is nothing to learn from it."""
        self._offers = {seq.id: offer for seq, offer in zip(seqs, offers, strict=True)}
        self._asked = {}

    def observe(self, outcome: Round) -> None:
        """Learn from the sequences of a round that were planned here."""
        batch, nodes, offers = len(outcome.seqs), sum(outcome.drafted), self._offers
        if not offers:
            return
        self._settle_idle()
        columns = zip(outcome.seqs, outcome.drafted, outcome.depths, outcome.accepted, strict=True)
        rows = [row for row in columns if row[0].id in offers]
        if not rows:
            return
        plain, taken = self.cost.pass_seconds(batch, batch), self.cost.pass_seconds(batch + nodes, batch)
        drafting = drafting_seconds(outcome, offers, self._asked) / plain
        if any(offer.chosen or offer.costs for offer in offers.values()):  # plain decoding shows nothing
            self._pace.add(1.0 + sum([accepted for _, _, _, accepted in rows]) / len(rows), taken / plain + drafting)
        self.free.note_round()
        self._prices.note_rounds()
        each = max(0.0, taken - plain) / plain / max(1, nodes)  # passes of a node
        alone = batch == 1 and not outcome.followed and outcome.tells_times
        drafting += self.rounds.note_asked(outcome.seconds) if alone and self._asked else 0.0
        costly = gained = free_cost = free_gained = 0.0
        for seq, drafted, depth, accepted in rows:
            self._usual.note(seq.id, drafted)
            if seq.id in self._asked:
                spent = batch * (each * drafted + drafting / len(self._asked))
                once = min(spent, batch * self._offers[seq.id].start / plain / len(self._asked))
                self._drafters[seq.id].credit.book((spent - accepted) / batch)
                # the start of one that stops is bounded by the credit alone: its trials are many, and small
                costly, gained = costly + spent - once * offers[seq.id].stops, gained + accepted
                self._book(seq, drafted, depth, accepted, spent, once)
            elif drafted:
                free_cost, free_gained = free_cost + each * drafted, free_gained + accepted
                if depth <= len(offers[seq.id].free):
                    self.free.note_chain(accepted, sum(offers[seq.id].free[:depth]))
        if alone:
            free_cost = 0.0 if self._asked else self.rounds.note(outcome.seconds, taken, nodes, free_cost)
        self.free.allowance.book_draft(free_cost, free_gained / batch)
        if any(offer.costs for offer in offers.values()):
            own = self._trials.of(any(offer.stops for offer in offers.values()))
            own.book_draft(costly / batch, gained / batch)

    def forget(self, seq: Seq) -> None:
        self._settle_idle()
        if (drafter := self._drafters.pop(seq.id, None)) is not None:
            drafter.end(len(seq.tokens) - seq.prompt_length)
        for kept in (self._records, self._offers, self._next):
            kept.pop(seq.id, None)
        self._usual.forget(seq.id)

    def _book(self, seq: Seq, drafted: int, depth: int, accepted: int, spent: float, once: float) -> None:
        """Record what a drafter that costs gained, against the passes that it took.

        `once` is the part of `spent` that went into reading the sequence so far: later rounds do not repeat it.
        """
        following = self.offer(seq)  # it also says what was expected of the round that is being booked
        self._next[seq.id] = len(seq.tokens), following
        expected = following.expected
        for record in (self._records[seq.id], self._drafters[seq.id].latest):
            if depth:
                record.count(depth, accepted, drafted)
            if expected is not None:
                record.count_expected(expected, accepted)
            # what a drafter expects, corrected by its bias, varies less than what was accepted
            likely = accepted if expected is None else record.trust * expected
            memory = MEMORY if expected is None or not following.stops else GAIN_MEMORY
            record.count_gain(likely - self.rate * (spent - once), memory)
            if record.mean_gain > WORTH_IT:
                record.wait = FIRST_WAIT

    def _option(self, seq: Seq, offer: Offer, batch: int, costly: int, listed: PriceList) -> Option:
        """What costs nothing, or what the drafter that costs would gain: whichever gains more."""
        free = Option(offer, self.free.levels(offer, self._more(batch)))
        if not offer.costs:
            return free
        free_gain = best_depth(free.levels, listed.price)[1]
        record = self._record(seq.id, offer)
        if offer.stops and record.mean_gain <= max(free_gain, WORTH_IT):  # however deep it went
            return Option(offer, free.levels, idle=not free_gain)
        costs = [self._in_tokens(seconds, batch, costly) for seconds in offer.seconds]
        survivals = record.survivals(self.nodes, least=costs[-1])
        levels = Levels(survivals, costs, max(1.0, record.nodes) if offer.chosen else 1.0)
        depth, gain = best_depth(levels, listed.price)
        if offer.stops:  # what it gains by stopping in time shows only in its rounds
            least = 2 * shortest_that_pays(listed.price, tuple(costs))  # less could not pay at any confidence
            depth, gain = min(listed.deepest, max(depth + 1, least)), record.mean_gain
        elif offer.chosen:  # the nodes it left out were not tested, so its rates are too high
            gain = min(gain, record.mean_gain)
        left = self._drafters[seq.id].left(seq) / (1.0 + sum(levels.survivals[:depth]))  # rounds
        pays = gain > max(free_gain, WORTH_IT) and gain * left > self._in_tokens(offer.start, batch, 1)
        if pays and depth and self._trials.of(offer.stops).covers(0.0):
            return Option(offer, levels, asks=True, depth=depth)
        return Option(offer, free.levels, idle=not free_gain)

    def _shared_depths(self, levels: Sequence[Levels], batch: int, beside: int) -> list[int]:
        """How deep each of several sequences should draft beside `beside` nodes of others."""
        most = sum(round(len(one.survivals) * one.nodes) + 1 for one in levels)
        seconds = self.cost.passes_seconds(batch + beside, most + 1, batch)
        factor = self.rate * batch / self.cost.pass_seconds(batch, batch)
        return allocate(levels, lambda nodes: factor * (seconds[nodes] - seconds[0]))

    def _budget(self, seq: Seq, option: Option, batch: int, costly: int, others: int) -> Budget:
        offer, listed = option.offer, self._price(batch, self.rate, others)
        if not option.asks:
            return self.free.budget(listed)
        level = self._in_tokens(offer.level, batch, costly)
        if not offer.chosen:
            return Budget(option.depth, option.depth, level=level, source="costly")
        nodes = option.depth if listed.widest == 1 else self.nodes
        price, trust = listed.price[: nodes + 1], self._records[seq.id].trust
        if abs(trust - 1.0) > UNCORRECTED_ERROR:
            price, level = tuple([cost / trust for cost in price]), level / trust
        return Budget(nodes, option.depth, listed.widest, price, level, "costly")

    def lookup_budget(self, seq: Seq) -> Budget:
        """Of a sequence that is alone and has look-ups alone: nothing where they promise too little."""
        offer = self.offer(seq)
        if not offer.free:
            return NOTHING
        self._settle_idle()
        listed = self._price(1, self.rate, 0)
        # what plain rounds take comes first
        unseen = not self.rounds.plain and self._prices.rounds < IN_A_ROW
        if unseen or not best_depth(self.free.levels(offer, self._more(1)), listed.price)[0]:
            return NOTHING
        self.take_chains([seq], [offer])
        return self.free.budget(listed, chain=True)

    def _more(self, batch: int) -> float:
        """What a round that drafts costs beside its nodes, in tokens; of many sequences it is little for each."""
        return self._in_tokens(self.rounds.more, 1, 1) if batch == 1 else 0.0

    def _price(self, batch: int, rate: float, others: int) -> PriceList:
        return self._prices.of(self.cost, batch, rate, others)

    def _in_tokens(self, seconds: float, batch: int, sharing: int) -> float:
        """Tokens that would have been written in that time, per sequence of the `sharing` ones."""
        return self.rate * batch * seconds / self.cost.pass_seconds(batch, batch) / sharing

    def _record(self, seq_id: int, offer: Offer) -> History:
        if seq_id not in self._records:
            earlier = self._drafters[seq_id] = self._earlier[offer.key]
            self._records[seq_id] = History.after(earlier.latest)
        return self._records[seq_id]


UNCORRECTED_ERROR = 0.05  # smaller errors of a drafter's expectations are not corrected
FREE_MEMORY = 0.99  # per look-up that was drafted, of tokens accepted over tokens expected
FORGIVING = 0.997  # per round, of the same: distrust does not last
NOTHING = Budget(0, 0, source="free")


class FreeDrafts:
    """Of all sequences together."""

    def __init__(self) -> None:
        self.allowance = Allowance(**FREE_DRAFTS)
        self._kept = Factor(PRIOR_CHAIN)  # tokens accepted over tokens expected

    @property
    def trust(self) -> float:
        """Tokens accepted, by those expected: the best drafts are chosen, and so overrated."""
        trust = self._kept.value()
        return trust if trust < 1.0 - UNCORRECTED_ERROR else 1.0

    def levels(self, offer: Offer, more: float = 0.0) -> Levels:
        """What a sequence could draft for nothing; none where too much was lost of late.

        `more`: tokens that any draft costs beside its nodes.
        """
        if not self.allowance.covers_usual:
            return Levels(())
        trust = self.trust
        free = offer.free if trust == 1.0 else [trust * survival for survival in offer.free]
        return Levels(free, (more, 0.0))

    def budget(self, listed: PriceList, *, chain: bool = False) -> Budget:
        """All that may pay by a price list; `chain`: without branches."""
        if not self.allowance.covers_usual:
            return NOTHING
        trust, free = self.trust, listed.chain if chain else listed.free
        if trust == 1.0 or free.price is None:
            return free
        return replace(free, price=tuple([cost / trust for cost in free.price]))

    def note_round(self) -> None:
        self._kept.add(0.0, 0.0, FORGIVING)

    def note_idle(self, rounds: int) -> None:
        """So many rounds in a row that drafted nothing."""
        self._kept.add(0.0, 0.0, FORGIVING**rounds)
        self.allowance.rest(rounds)

    def note_chain(self, accepted: int, expected: float) -> None:
        """Of a chain `accepted` tokens were accepted, and `expected` were expected."""
        self._kept.add(accepted, expected, FREE_MEMORY)


TRIAL_SHARE = 0.9  # of what such drafters may lose at once: the rest is for drafts that have been paying
_RESTING = tuple(Budget(0, 0, source="free", repeats=rounds) for rounds in range(LONGEST_WAIT + 1))


class Trials:
    """Whether a trial is due, and until when it is known that none is."""

    def __init__(self, others: Allowance) -> None:
        self.others = others
        self.stopping = Allowance(**STOPPING)
        # a sequence alone in its batch, the round up to which nothing pays for it, and whether its drafter stops
        self._off = (-1, 0, True)

    def of(self, stops: bool) -> Allowance:
        """That of drafters that stop where they are not confident, or of all others."""
        return self.stopping if stops else self.others

    def levels(self) -> dict[bool, float]:
        """What each has left, by whether drafters stop."""
        return {True: self.stopping.level, False: self.others.level}

    def is_due(self, record: History, worst: float, spare: float, stops: bool) -> bool:
        """May a trial be made that loses so much at worst, with so much allowance left? Then the next is put off."""
        if spare < self._least(worst, stops) or (stops and record.idle < record.wait):
            return False
        record.note_trial()
        return True

    def rest(self, seq_id: int, now: int, record: History, worst: float | None, stops: bool) -> None:
        """No trial now: nothing is learnt until one is due. `worst` None = none can pay."""
        rounds = REFRESH_ROUNDS
        if worst is not None:
            rounds = self.of(stops).rounds_until(self._least(worst, stops), REFRESH_ROUNDS)
        if worst is not None and stops:
            rounds = min(REFRESH_ROUNDS, max(record.wait - record.idle, rounds))
        self._off = seq_id, now + rounds, stops

    def note_rested(self, rounds: int) -> None:
        """So many rounds of the sequence that rests have lost nothing."""
        self.of(self._off[2]).rest(rounds)

    def are_off(self, seq_id: int, now: int) -> bool:
        return seq_id == self._off[0] and now < self._off[1]

    def resting(self, seq_id: int, now: int) -> Budget:
        """Nothing, for this round and those behind it in which nothing pays for sure."""
        return _RESTING[max(0, self._off[1] - now - 1) if seq_id == self._off[0] else 0]

    def _least(self, worst: float, stops: bool) -> float:
        """The allowance that covers it."""
        return worst - TRIAL_SHARE * self.stopping.floor if stops else worst


LEAST_GAIN = 0.1  # plain rounds by token still to come, that a drafter is hoped to gain
LENGTH_MEMORY = 0.8  # by text, of their lengths


class EarlierTexts:
    """What the earlier texts of a drafter came to: acceptance, what was gained, length."""

    def __init__(self) -> None:
        self.latest = History()
        # what may be lost on reading texts: what was gained with this drafter, all of its time counted
        self.credit = Allowance()
        self._length = Factor(0.0)  # logarithms of tokens, of which few say how long a text will be

    def left(self, seq: Seq) -> float:
        """Tokens that a text has still to come: as it is limited, and as others were."""
        left, written = seq.max_length - len(seq.tokens), len(seq.tokens) - seq.prompt_length
        if not self._length.expected:
            return left
        return min(left, max(exp(self._length.value()) - written, written))

    def cover(self, seq: Seq, start: float, worst: float, batch: int) -> bool:
        """May a text be read, for `start` plain rounds, for a first trial that loses `worst` with it?"""
        return self.credit.covers(worst + start) and LEAST_GAIN * self.left(seq) > batch * start

    def end(self, tokens: int) -> None:
        """A text has ended."""
        self.credit.rest(tokens)
        self._length.add(log(max(1, tokens)), 1.0, LENGTH_MEMORY)


def shortest_trial(offer: Offer, price: tuple[float, ...], plain: float, batch: int, costly: int) -> tuple[int, float]:
    """The shortest draft that could pay, and what it costs in plain rounds if all of it is rejected, without a start.

    `plain` seconds take a plain pass; of the batch, `costly` sequences share what drafting takes.
    """
    costs = tuple([seconds * batch / costly / plain for seconds in offer.seconds])
    length = shortest_that_pays(price, costs)
    return length, (price[length] - 1.0 + total(costs, length)) / batch
