"""LookupGate: are look-ups (n-gram, suffix) made for a batch at all? Decided for the whole batch, before any is made.

A look-up costs no pass, but the host makes one per sequence. On a GPU plain passes are launched before the last one
was read, which hides the host's work; a round that drafts is launched behind it. So with many sequences and few
matches look-ups lose, whatever is accepted of them.

Where asking all sequences takes a negligible share of a round, all are asked. Elsewhere the gate is open or closed.
While it is closed, rounds are plain ones, and now and then single sequences are asked, one after the other: their
matches, put together to a batch, show what drafts would give per second. If that is more than plain decoding gives,
the gate opens, and it closes when rounds have shown that it was not. What that may lose is bounded (allowance.py).

GateState: is the gate of look-ups open for one size of batch, since when, and what have its open rounds gained?

Rounds of a batch of which all draft by look-ups: budgets, and whether a plain one follows before the last is read.

For the whole batch first (`LookupGate`): is anybody asked, and is what they have found drafted? Both are asked again
while a plain round is under way: look-ups that are made then cost nothing, as the device is at work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from forerun.control.acceptance import Factor
from forerun.control.allowance import Allowance
from forerun.control.cost import CostModel
from forerun.control.per_sequence import NOTHING, SequencePlanner
from forerun.control.times import Around
from forerun.core.offer import LOOKUP, PLAIN, SEARCHED, Form, Offer
from forerun.core.types import Budget, Round, Seq

LOOKUP_SECONDS = 25e-6  # of one look-up before any was timed
DRAFTED_SECONDS = 5e-5  # that a sequence takes the host longer in a round that drafts, before any was timed
ALWAYS_ASKED = 8  # sequences: of so few, all are asked in every round
MOST_WITH_TREES = 2  # sequences for which look-ups make trees; of more, chains
NEGLIGIBLE_SHARE = 0.02  # of a plain round: what asking all may take without being weighed
SAMPLING_SHARE = 0.002  # of a plain round: what asking single sequences may take while the gate is closed
# the same where drafts seem to pay, but the sequences never asked, who have their whole text to read, are too many to
# be asked at once
OPENING_SHARE = 0.04
FIRST_CREDIT = 0.2  # of a plain round: what asking single sequences may take at once
BETTER = 1.03  # times what plain decoding gives, for the gate to open
SAMPLED_SEQUENCES = 4  # that are asked again and again while it is closed: who was never asked has more to read
LEAST_SAMPLES = 8  # offers of single sequences before they tell anything
KEPT_SAMPLES = 32  # the last offers, which show what is found of late
ROUNDS_BETWEEN_DECISIONS = 16  # while the gate is closed
TRUST_MEMORY = 0.97  # per drafted round, of tokens accepted by those promised
MOST_TRUST = 2.0  # trees have more accepted than the chains that are promised
NEWEST = 0.05  # weight of the last round in averages of seconds
PLAIN_ROUNDS = 8  # in a row while it is open, once, which show what plain rounds take
SETTLED_ROUNDS = 4  # plain rounds in a row before they tell that: then they follow each other

NODES = (1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 16, 8)  # that a round may draft at most

# offers, batch, nodes at most -> depth of each, tokens accepted of all
Chains = Callable[[Sequence[Offer], int, int], tuple[list[int], float]]


@dataclass(slots=True)
class LookupGate:
    """Whom to ask for look-ups, and whether what they found is drafted."""

    cost: CostModel
    chains: Chains
    around: Around = field(default_factory=Around)
    allowance: Allowance = field(default_factory=lambda: Allowance(most=1.0, earned=0.003, floor=1.0))
    _sizes: dict[int, GateState] = field(default_factory=dict)
    _drafting: dict[int, float] = field(default_factory=dict)  # "draft" of rounds in which nobody was asked
    # beside the pass, of plain rounds that were read first
    _shown: dict[int, float] = field(default_factory=dict)
    _sample: deque[Offer] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))
    _asking: float = 0.0  # seconds of one look-up where all are asked; 0 = none was timed
    _sampling: float = 0.0  # the same of those that are asked now and then
    _reading: float = 0.0  # the same of those that were never asked before
    _panel: list[int] = field(default_factory=list)  # whom to ask, the next one first
    _met: set[int] = field(default_factory=set)  # sequences that were asked
    _fresh: int = 0  # of those asked in this round, those that never were before
    _credit: float | None = None  # seconds that asking single sequences may take; None = it was never closed
    _promising: bool = False  # drafts seem to pay, but it is too dear to ask all at once
    _streak: int = 0  # rounds in a row that drafted nothing
    _kept: Factor = field(default_factory=lambda: Factor(8.0))  # tokens accepted, by those that were promised
    _promised: float = 0.0  # of this round

    def whom(self, ids: Sequence[int], unread: bool = False) -> Sequence[int] | None:
        """Which of these sequences are asked in this round: None = all, and what pays may be drafted.

        `unread`: of a round that would start before the last one is known; if the gate is to open, that is read first.
        """
        batch = len(ids)
        size = self._size(batch)
        if batch <= ALWAYS_ASKED or size.is_open or self._is_cheap(batch, plain := self.plain_seconds(batch)):
            return self._open_round(size, batch)
        size.rounds += 1
        if self._should_open(size, ids, plain):
            if unread:
                size.rounds -= 1  # the same question comes once more
                return None
            size.open()
            self._met.update(ids)
            self._promising = False
            return None
        return self._few(ids, plain)

    def _few(self, ids: Sequence[int], plain: float) -> list[int]:
        """Those that are asked while it is closed: a few, the same ones for long, as far as the credit goes."""
        share = OPENING_SHARE if self._promising else SAMPLING_SHARE
        most = FIRST_CREDIT * plain
        self._credit = most if self._credit is None else min(self._credit + share * plain, most)
        again, first = self._sampling or LOOKUP_SECONDS, self._reading or LOOKUP_SECONDS
        if self._credit < min(again, first):
            return []
        there, wanted = set(ids), len(ids) if self._promising else SAMPLED_SEQUENCES
        panel = [one for one in self._panel if one in there]
        if len(panel) < wanted:
            known = set(panel)
            panel = [one for one in reversed(ids) if one not in known][: wanted - len(panel)] + panel
        asked = list[int]()
        self._fresh = 0
        for one in panel:
            fresh = one not in self._met
            if self._credit < (first if fresh else again) or (asked and fresh != bool(self._fresh)):
                break  # those that were never asked are timed apart
            self._credit -= first if fresh else again
            self._fresh += fresh
            asked.append(one)
        if self._promising:
            self.allowance.book((self._fresh * first + (len(asked) - self._fresh) * again) / plain)
        self._met.update(asked)
        self._panel = panel[len(asked) :] + asked
        return asked

    def _open_round(self, size: GateState, batch: int) -> Sequence[int] | None:
        """A round while it is open: all are asked, but for a few plain rounds that show what plain rounds take."""
        if size.plain_left:
            size.plain_left -= 1
            return ()
        if size.rounds >= size.plain_due and not self.around.is_known(PLAIN, batch):
            size.plain_left, size.plain_due = PLAIN_ROUNDS - 1, 1 << 30
            return ()
        return None

    def is_open(self, batch: int) -> bool:
        return self._size(batch).is_open

    def asks_all(self, batch: int) -> bool:
        """Is asking all of so many so cheap that it is not weighed?"""
        return batch <= ALWAYS_ASKED or self._is_cheap(batch, self.plain_seconds(batch))

    def note_offer(self, offer: Offer) -> None:
        """What one of the few that were asked has to offer."""
        self._sample.append(offer)

    def most_nodes(self, batch: int) -> int:
        """Nodes that a round may draft, so that the allowance covers that all of them are rejected."""
        if batch <= ALWAYS_ASKED or self._is_cheap(batch, plain := self.plain_seconds(batch)):
            return NODES[0]
        most = plain * (1.0 + 0.9 * max(0.0, self.allowance.level + self.allowance.floor))
        around = self._around(LOOKUP, batch)
        fits = (n for n in NODES if self.cost.pass_seconds(batch + n, batch) + around <= most)
        return next(fits, 0)

    def pays(self, nodes: int, accepted: float, batch: int) -> bool:
        """Is a round that drafts so many nodes worth more than one that drafts nothing, and covered?"""
        size, self._promised = self._size(batch), accepted
        if batch <= MOST_WITH_TREES and (not size.has_tried or size.gain > -NEGLIGIBLE_SHARE):
            return True  # trees accept more than is promised here, and rounds have not lost
        plain, looked = self.plain_seconds(batch), self._seconds(SEARCHED, batch, batch)
        drafted = self._seconds(LOOKUP, batch + nodes, batch)
        likely = accepted * min(self._kept.value(), MOST_TRUST)
        if (batch + likely) * looked <= batch * drafted:
            self.around.lower(LOOKUP, batch, self._around(SEARCHED, batch))
            return False
        return self._is_cheap(batch, plain) or self.allowance.covers(drafted / plain - 1.0)

    def observe(self, outcome: Round, asked: int) -> None:
        """A round in which so many were asked."""
        batch, nodes, seconds = len(outcome.seqs), sum(outcome.drafted), outcome.seconds
        form = LOOKUP if nodes else SEARCHED if asked >= batch else PLAIN
        own = sum(seconds.values()) - seconds["pass"] - seconds.get("prompt", 0.0)
        if form.kind == "plain" and not outcome.followed:
            self._shown[batch.bit_length()] = _moved(self._shown.get(batch.bit_length(), 0.0), own)
        if form.kind != "plain" or self._streak >= SETTLED_ROUNDS:
            self.around.observe(form, batch, own, 0.0, outcome.followed)
        self._time_asking(seconds.get("draft", 0.0), asked, batch)
        self._streak = 0 if nodes else self._streak + 1
        if nodes:
            self._kept.add(sum(outcome.accepted), self._promised, TRUST_MEMORY)
        if form.kind == "plain":
            self.allowance.book(0.0)
            return
        plain = self.plain_seconds(batch)
        lost = self._seconds(form, batch + nodes, batch) / plain - 1.0
        gain = sum(outcome.accepted) / batch - lost
        self.allowance.book(-gain)
        self._book_open(self._size(batch), gain, batch, plain)

    def _book_open(self, size: GateState, gain: float, batch: int, plain: float) -> None:
        size.note(gain)
        if self._is_cheap(batch, plain):
            return
        if size.has_gained:
            size.note_success()
        elif size.has_tried or not self.allowance.covers(0.2 * self.allowance.floor):
            size.close()
            self._sample.clear()  # what was found before is known to have misled

    def forget(self, seq_id: int) -> None:
        self._met.discard(seq_id)

    def plain_seconds(self, batch: int) -> float:
        """Seconds of a plain round."""
        return self._seconds(PLAIN, batch, batch)

    def _seconds(self, form: Form, rows: int, batch: int) -> float:
        return self.cost.pass_seconds(rows, batch) + self._around(form, batch)

    def _around(self, form: Form, batch: int) -> float:
        """Seconds of a round beside its pass: what rounds took, else by those that were seen."""
        asking, known = batch * self._seconds_of_one, self.around.is_known
        if known(form, batch):
            return self.around.seconds(form, batch, 0.0)
        if form.kind != "plain":
            more = DRAFTED_SECONDS * batch if form.kind == "lookup" else 0.0
            plain = max(self.around.seconds(PLAIN, batch, 0.0), self._shown.get(batch.bit_length(), 0.0))
            return plain + asking + more
        seen = next((one for one in (SEARCHED, LOOKUP) if known(one, batch)), PLAIN)
        return max(0.0, self.around.seconds(seen, batch, 0.0) - (asking if seen.kind != "plain" else 0.0))

    @property
    def _seconds_of_one(self) -> float:
        return self._asking or LOOKUP_SECONDS

    def _size(self, batch: int) -> GateState:
        size = self._sizes.get(batch.bit_length())
        if size is None:
            cheap = batch * self._seconds_of_one <= NEGLIGIBLE_SHARE * self.cost.pass_seconds(batch, batch)
            size = self._sizes[batch.bit_length()] = GateState(cheap)
        return size

    def _is_cheap(self, batch: int, plain: float) -> bool:
        return batch <= ALWAYS_ASKED or batch * self._seconds_of_one <= NEGLIGIBLE_SHARE * plain

    def _time_asking(self, seconds: float, asked: int, batch: int) -> None:
        group = batch.bit_length()
        if not asked:
            known = self._drafting.get(group, seconds)
            self._drafting[group] = known + NEWEST * (min(seconds, 3.0 * known) - known)
            return
        each = max(1e-9, (seconds - self._drafting.get(group, 0.0)) / asked)
        if asked >= batch:
            self._asking = _moved(self._asking, each)
            return
        if self._fresh:
            self._reading = _moved(self._reading, each)
        else:
            self._sampling = _moved(self._sampling, each)

    def _should_open(self, size: GateState, ids: Sequence[int], plain: float) -> bool:
        """Would drafts for the whole batch give more, by what single sequences have offered of late?"""
        if size.rounds < size.wait or size.rounds % ROUNDS_BETWEEN_DECISIONS or len(self._sample) < LEAST_SAMPLES:
            return False
        if not self.around.is_known(PLAIN, len(ids)):
            return False
        few, batch = [*self._sample], len(ids)
        found = sum([sum(offer.free) for offer in few])
        most = 1.0 + found / len(few)  # tokens of a sequence, if all were drafted
        if most * plain <= BETTER * self._seconds(LOOKUP, batch, batch):
            self._promising = False
            return False
        depths, accepted = self.chains([few[i % len(few)] for i in range(batch)], batch, self.most_nodes(batch))
        nodes = sum(depths)
        seconds = self._seconds(LOOKUP, batch + nodes, batch)
        better = nodes > 0 and (batch + accepted) * plain > BETTER * batch * seconds
        worst = seconds / plain - 1.0
        unread = self._reading / plain * len([one for one in ids if one not in self._met])
        covered = self.allowance.covers(worst + unread)
        self._promising = better and not covered and self.allowance.covers(worst)
        return better and covered


def _moved(mean: float, value: float) -> float:
    """A moving average, which a pause of the machine moves little; 0 = nothing was seen."""
    weight = NEWEST if value > mean else 4.0 * NEWEST  # the first are often slow
    return mean + weight * (min(value, 4.0 * mean) - mean) if mean else value


FIRST_WAIT, LONGEST_WAIT = (64, 512)  # rounds that it stays closed behind an opening in vain, twice as many each time
LEAST_OPEN_ROUNDS = 48  # before it may close again: the gain of fewer is chance
NEWEST_GAIN = 0.02  # weight of the last round in the average gain
PLAIN_AFTER = 8  # open rounds before some are plain, to show what plain ones take


@dataclass(slots=True)
class GateState:
    """Of one size of batch."""

    is_open: bool
    rounds: int = 0  # since it opened or closed
    gain: float = 0.0  # of open rounds, in plain rounds: a moving average
    wait: int = 0  # rounds that it stays closed
    next_wait: int = FIRST_WAIT
    plain_left: int = 0  # plain rounds that are still to be made to time them
    plain_due: int = PLAIN_AFTER  # open rounds before that

    @property
    def has_tried(self) -> bool:
        """Was it open for long enough to say what that gains?"""
        return self.rounds >= LEAST_OPEN_ROUNDS

    def open(self) -> None:
        self.is_open, self.rounds, self.gain, self.plain_due = True, 0, 0.0, 1 << 30

    def note(self, gain: float) -> None:
        """An open round gained so many plain rounds."""
        self.rounds += 1
        self.gain += max(NEWEST_GAIN, 1.0 / self.rounds) * (gain - self.gain)

    @property
    def has_gained(self) -> bool:
        return self.has_tried and self.gain > 0.0

    def note_success(self) -> None:
        """It has gained: the next opening in vain counts as the first."""
        self.next_wait = FIRST_WAIT

    def close(self) -> None:
        self.is_open, self.rounds, self.wait = False, 0, self.next_wait
        self.next_wait = min(2 * self.next_wait, LONGEST_WAIT)


@lru_cache(maxsize=64)
def chain_budget(depth: int) -> Budget:
    """A chain that was found, so long."""
    return Budget(depth, depth, source="free") if depth else NOTHING


def plan_lookup(planner: SequencePlanner, seq: Seq) -> Budget:
    """Of a sequence that is alone: nothing where a draft promises too little."""
    offer = planner.offer(seq)
    return planner.lookup_budget(seq, offer) if offer.free else NOTHING


def plan_lookups(gate: LookupGate, planner: SequencePlanner, seqs: Sequence[Seq]) -> tuple[list[Budget], int]:
    """The budgets of a round of several sequences, and how many were asked for it."""
    batch, few = len(seqs), gate.whom([seq.id for seq in seqs])
    if few is not None:
        _ask_few(gate, planner, seqs, few)
        planner.skip()
        return [NOTHING] * batch, len(few)
    offers = [planner.offer(seq) for seq in seqs]
    planner.take_chains(seqs, offers)
    depths, accepted = planner.free_chains(offers, batch, gate.most_nodes(batch))
    if not gate.pays(sum(depths), accepted, batch):
        return [NOTHING] * batch, batch
    if batch <= MOST_WITH_TREES:
        return planner.plan(seqs, offers, batch), batch
    return [chain_budget(depth) for depth in depths], batch


def asked_beside(gate: LookupGate, planner: SequencePlanner, seqs: Sequence[Seq]) -> int | None:
    """Of how many it was asked, beside a plain round under way, whether the next is plain too; None = it is not.

    What they find is one token old by then: it shows whether it is worth reading the round under way first.
    """
    batch, few = len(seqs), gate.whom([seq.id for seq in seqs], unread=True)
    if few is not None:
        _ask_few(gate, planner, seqs, few)
        return len(few)
    if not gate.is_open(batch):
        return None  # it is to be opened
    offers = [planner.offer(seq) for seq in seqs]
    depths, accepted = planner.free_chains(offers, batch, gate.most_nodes(batch))
    return None if gate.pays(sum(depths), accepted, batch) else batch


def _ask_few(gate: LookupGate, planner: SequencePlanner, seqs: Sequence[Seq], few: Sequence[int]) -> None:
    for seq in seqs if few else ():
        if seq.id in few:
            gate.note_offer(planner.offer(seq))
