"""LookupGate: are look-ups (n-gram, suffix) made for a batch at all? Decided for the whole batch, before any is made.

A look-up costs no pass, but the host makes one per sequence. On a GPU overlapping plain rounds hide the host's work; a
round that drafts from look-ups is launched behind it. So with many sequences and few matches look-ups lose, whatever
is accepted of them.

Where look-ups for all sequences take a negligible share of a round, all are made. Elsewhere the gate is open or closed.
While it is closed, rounds are plain, and now and then look-ups are made for single sequences: their matches, put
together to a batch, show what drafts would give per second. If that is more than plain decoding gives, the gate
opens, and it closes when rounds have shown that it was not. What that may lose is bounded (`Allowance`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from forerun.control.cost import CostModel, RoundOverhead
from forerun.control.per_sequence import NOTHING, SequencePlanner
from forerun.control.prices import BETTER, SEARCHES, Allowance, moved
from forerun.core.types import LOOKUP, PLAIN, SEARCHED, Budget, Form, Offer, Round, Seq

SEARCH_SECONDS = 25e-6  # seconds of one look-up before any was timed
DRAFTED_SECONDS = 5e-5  # seconds of the host for each sequence of a round that drafts, before any was timed
ALWAYS_SEARCHED = 8  # sequences: look-ups for 8 lose nothing, whatever they find
# sequences for whose look-ups the round under way is read first, and that make trees; for more, chains, which are
# quicker to share out
FEW = 2
NEGLIGIBLE_SHARE = 0.02  # of a plain round: what look-ups for all may take without being weighed
SAMPLING_SHARE = 0.002  # of a plain round: what samples may take while the gate is closed
FIRST_CREDIT = 0.2  # of a plain round: what samples may take at once
SAMPLED_SEQUENCES = 4  # searched again and again while it is closed: a first search reads the whole text
SAMPLES = 16  # offers of single sequences, the last ones: so many show what is found now
ROUNDS_BETWEEN_DECISIONS = 16  # rounds while the gate is closed: weighing a batch takes the host long
LEAST_ASKING = 1e-9  # seconds of a look-up that took no time, as 0 means that none was timed

NODES = (1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 16, 8)  # nodes of a round at most, largest first

# offers, batch, nodes at most -> depth of each, tokens accepted of all
Chains = Callable[[Sequence[Offer], int, int], tuple[list[int], float]]


@dataclass(slots=True)
class LookupGate:
    """Whom to ask for look-ups, and whether what they found is drafted."""

    cost: CostModel
    chains: Chains
    overhead: RoundOverhead = field(default_factory=RoundOverhead)
    allowance: Allowance = field(default_factory=lambda: Allowance(**SEARCHES))
    _sizes: dict[int, GateState] = field(default_factory=dict)
    _drafting: dict[int, float] = field(default_factory=dict)  # the part "draft" of rounds without look-ups
    # beside the pass, of plain rounds that were read first
    _shown: dict[int, float] = field(default_factory=dict)
    _sample: deque[Offer] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _asking: float = 0.0  # seconds of one look-up where all sequences are searched; 0 = none was timed
    _sampling: float = 0.0  # the same of the sampled sequences
    _reading: float = 0.0  # the same of sequences that were never searched before
    _panel: list[int] = field(default_factory=list)  # sampled sequences, the next one first
    met: set[int] = field(default_factory=set)  # sequences that were searched, until they end
    _fresh: int = 0  # sequences of this round that were searched for the first time
    _credit: float | None = None  # seconds that samples may take; None = it was never closed

    def to_search(self, ids: Sequence[int], unread: bool = False) -> Sequence[int] | None:
        """The sequences that look-ups are made for in this round: None = all, and what pays may be drafted.

        `unread`: the round would overlap the last one; if the gate is to open, that is read first.
        """
        batch = len(ids)
        size = self._size(batch)
        if batch <= ALWAYS_SEARCHED or size.is_open or self._is_cheap(batch, plain := self.plain_seconds(batch)):
            return None
        size.rounds += 1
        if self._should_open(size, batch, plain):
            if unread:
                size.rounds -= 1  # the same question comes once more
                return None
            size.open()
            self.met.update(ids)
            return None
        return self._sampled(ids, plain)

    def _sampled(self, ids: Sequence[int], plain: float) -> list[int]:
        """Sequences that are searched while it is closed: a few, the same ones for long, as far as the credit goes."""
        most = FIRST_CREDIT * plain
        self._credit = most if self._credit is None else min(self._credit + SAMPLING_SHARE * plain, most)
        again, first = self._sampling or SEARCH_SECONDS, self._reading or SEARCH_SECONDS
        if self._credit < min(again, first):
            return []
        there, wanted = set(ids), SAMPLED_SEQUENCES
        panel = [one for one in self._panel if one in there]
        if len(panel) < wanted:
            known = set(panel)
            panel = [one for one in reversed(ids) if one not in known][: wanted - len(panel)] + panel
        asked = list[int]()
        self._fresh = 0
        for one in panel:
            fresh = one not in self.met
            if self._credit < (first if fresh else again) or (asked and fresh != bool(self._fresh)):
                break  # first searches are timed apart
            self._credit -= first if fresh else again
            self._fresh += fresh
            asked.append(one)
        self.met.update(asked)
        self._panel = panel[len(asked) :] + asked
        return asked

    def is_open(self, batch: int) -> bool:
        return self._size(batch).is_open

    def searches_all(self, batch: int) -> bool:
        """Do look-ups for all of `batch` sequences take too little to be weighed?"""
        return batch <= ALWAYS_SEARCHED or self._is_cheap(batch, self.plain_seconds(batch))

    def note_sample(self, offer: Offer) -> None:
        """What one of the few that were asked has to offer."""
        self._sample.append(offer)

    def most_nodes(self, batch: int) -> int:
        """Nodes that a round may draft, so that the allowance covers that all of them are rejected."""
        if batch <= ALWAYS_SEARCHED or self._is_cheap(batch, plain := self.plain_seconds(batch)):
            return NODES[0]
        most = plain * (1.0 + self.allowance.level + self.allowance.floor)
        overhead = self._overhead(LOOKUP, batch)
        fits = (n for n in NODES if self.cost.pass_seconds(batch + n, batch) + overhead <= most)
        return next(fits, 0)

    def pays(self, nodes: int, accepted: float, batch: int) -> bool:
        """Is a round that drafts `nodes` nodes worth more than a round without drafts, and covered?"""
        size = self._size(batch)
        if batch <= FEW and (not size.has_tried or size.gain > -NEGLIGIBLE_SHARE):
            return True  # trees accept more than is promised here, and rounds have not lost
        plain, looked = self.plain_seconds(batch), self._seconds(SEARCHED, batch, batch)
        drafted = self._seconds(LOOKUP, batch + nodes, batch)
        if (batch + accepted) * looked <= batch * drafted:
            return False
        return self._is_cheap(batch, plain) or self.allowance.covers(drafted / plain - 1.0)

    def observe(self, outcome: Round, asked: int) -> None:
        """A round in which look-ups were made for `asked` sequences."""
        batch, nodes, seconds = len(outcome.seqs), sum(outcome.drafted), outcome.seconds
        form = LOOKUP if nodes else SEARCHED if asked >= batch else PLAIN
        own = sum(seconds.values()) - seconds["pass"] - seconds.get("prompt", 0.0)
        if form.kind == "plain" and not outcome.followed:
            self._shown[batch.bit_length()] = moved(self._shown.get(batch.bit_length(), 0.0), own)
        self.overhead.observe(form, batch, own, 0.0, outcome.followed)
        self._time_asking(seconds.get("draft", 0.0), asked, batch)
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
        if size.has_tried and size.gain > 0.0:
            size.next_wait = FIRST_WAIT  # the next opening in vain counts as the first
        elif size.has_tried or not self.allowance.covers(0.0):
            size.close()
            self._sample.clear()  # what was found before is known to have misled

    def plain_seconds(self, batch: int) -> float:
        """Seconds of a plain round."""
        return self._seconds(PLAIN, batch, batch)

    def _seconds(self, form: Form, rows: int, batch: int) -> float:
        return self.cost.pass_seconds(rows, batch) + self._overhead(form, batch)

    def _overhead(self, form: Form, batch: int) -> float:
        """Seconds of a round beside its pass: what rounds of this kind took, else estimated from other kinds."""
        asking, known = batch * self._search_seconds, self.overhead.is_known
        if known(form, batch):
            return self.overhead.seconds(form, batch, 0.0)
        if form.kind != "plain":
            more = DRAFTED_SECONDS * batch if form.kind == "lookup" else 0.0
            plain = max(self.overhead.seconds(PLAIN, batch, 0.0), self._shown.get(batch.bit_length(), 0.0))
            return plain + asking + more
        seen = next((one for one in (SEARCHED, LOOKUP) if known(one, batch)), PLAIN)
        return max(0.0, self.overhead.seconds(seen, batch, 0.0) - (asking if seen.kind != "plain" else 0.0))

    @property
    def _search_seconds(self) -> float:
        return self._asking or SEARCH_SECONDS

    def _size(self, batch: int) -> GateState:
        size = self._sizes.get(batch.bit_length())
        if size is None:
            cheap = batch * self._search_seconds <= NEGLIGIBLE_SHARE * self.cost.pass_seconds(batch, batch)
            size = self._sizes[batch.bit_length()] = GateState(cheap)
        return size

    def _is_cheap(self, batch: int, plain: float) -> bool:
        return batch <= ALWAYS_SEARCHED or batch * self._search_seconds <= NEGLIGIBLE_SHARE * plain

    def _time_asking(self, seconds: float, asked: int, batch: int) -> None:
        group = batch.bit_length()
        if not asked:
            self._drafting[group] = moved(self._drafting.get(group, 0.0), seconds)
            return
        each = max(LEAST_ASKING, (seconds - self._drafting.get(group, 0.0)) / asked)
        if asked >= batch:
            self._asking = moved(self._asking, each)
            return
        if self._fresh:
            self._reading = moved(self._reading, each)
        else:
            self._sampling = moved(self._sampling, each)

    def _should_open(self, size: GateState, batch: int, plain: float) -> bool:
        """Would drafts for the whole batch give more, by what single sequences have offered of late?"""
        if size.rounds < size.wait or size.rounds % ROUNDS_BETWEEN_DECISIONS or len(self._sample) < SAMPLES:
            return False
        if not self.overhead.is_known(PLAIN, batch):
            return False
        few = [*self._sample]
        found = sum([sum(offer.free) for offer in few])
        most = 1.0 + found / len(few)  # tokens of a sequence, if all were drafted
        if most * plain <= BETTER * self._seconds(LOOKUP, batch, batch):
            return False
        depths, accepted = self.chains([few[i % len(few)] for i in range(batch)], batch, self.most_nodes(batch))
        nodes = sum(depths)
        seconds = self._seconds(LOOKUP, batch + nodes, batch)
        return nodes > 0 and (batch + accepted) * plain > BETTER * batch * seconds


FIRST_WAIT, LONGEST_WAIT = (64, 512)  # rounds that it stays closed behind an opening in vain, twice as many each time
LEAST_OPEN_ROUNDS = 48  # rounds before it may close again: the gain of fewer is chance


@dataclass(slots=True)
class GateState:
    """Of one size of batch."""

    is_open: bool
    rounds: int = 0  # since it opened or closed
    gain: float = 0.0  # of open rounds, in plain rounds: a moving average
    wait: int = 0  # rounds that it stays closed
    next_wait: int = FIRST_WAIT

    @property
    def has_tried(self) -> bool:
        """Was it open for long enough to say what that gains?"""
        return self.rounds >= LEAST_OPEN_ROUNDS

    def open(self) -> None:
        self.is_open, self.rounds, self.gain = True, 0, 0.0

    def note(self, gain: float) -> None:
        """An open round gained the time of `gain` plain rounds."""
        self.rounds += 1
        self.gain += max(1.0 / LEAST_OPEN_ROUNDS, 1.0 / self.rounds) * (gain - self.gain)

    def close(self) -> None:
        self.is_open, self.rounds, self.wait = False, 0, self.next_wait
        self.next_wait = min(2 * self.next_wait, LONGEST_WAIT)


@cache
def chain_budget(depth: int) -> Budget:
    """The budget of a chain of `depth` tokens that was found."""
    return Budget(depth, depth, source="free") if depth else NOTHING


def plan_lookups(gate: LookupGate, planner: SequencePlanner, seqs: Sequence[Seq]) -> tuple[list[Budget], int]:
    """The budgets of a round of several sequences, and how many were asked for it."""
    batch, few = len(seqs), gate.to_search([seq.id for seq in seqs])
    if few is not None:
        _search_few(gate, planner, seqs, few)
        planner.take_chains((), ())
        return [NOTHING] * batch, len(few)
    offers = [planner.offer(seq) for seq in seqs]
    planner.take_chains(seqs, offers)
    depths, accepted = planner.free_chains(offers, batch, gate.most_nodes(batch))
    if not gate.pays(sum(depths), accepted, batch):
        return [NOTHING] * batch, batch
    if batch <= FEW:
        return planner.plan(seqs, offers, batch), batch
    return [chain_budget(depth) for depth in depths], batch


def search_ahead(gate: LookupGate, planner: SequencePlanner, seqs: Sequence[Seq]) -> int | None:
    """Of how many it was asked, beside a plain round under way, whether the next is plain too; None = it is not.

    What they find is one token old by then: it shows whether it is worth reading the round under way first.
    """
    batch, few = len(seqs), gate.to_search([seq.id for seq in seqs], unread=True)
    if few is not None:
        _search_few(gate, planner, seqs, few)
        return len(few)
    if not gate.is_open(batch):
        return None  # it is to be opened
    offers = [planner.offer(seq) for seq in seqs]
    depths, accepted = planner.free_chains(offers, batch, gate.most_nodes(batch))
    return None if gate.pays(sum(depths), accepted, batch) else batch


def _search_few(gate: LookupGate, planner: SequencePlanner, seqs: Sequence[Seq], few: Sequence[int]) -> None:
    for seq in seqs if few else ():
        if seq.id in few:
            gate.note_sample(planner.offer(seq))
