"""What rounds have shown: acceptance rates of drafts, and the seconds of a round beside its pass.

`Acceptance` is for the forms of a menu. A drafter's files say how many tokens of each form are accepted on average. The
text at hand differs from the text of those files, so that number is multiplied by three factors, each observed over
expected: one for all forms, with a short memory; one for each form, slower and close to 1; one for each sequence.

`History` is for drafters that run sequence by sequence: acceptance by depth, and tokens gained beyond the time that
drafting took. Counts decay, because acceptance changes within a text.

`RoundOverhead`: drafting, verdict and the host's work, by form and batch size. An overlapping round hides the host's
work; a round that was read first shows it. The seconds of a form are those of overlapping rounds, once there were any;
what other rounds take on top of them is kept apart, as the gap. The first plain rounds of a process may be the slowest
it ever sees: forms that did not run yet can also be judged by drafted rounds that overlapped. A gap is only seen where
a round is read first, so that one slow round could keep it from ever being seen again: the gap is the median of the
last few, with a presumed one among them until there are enough, and old gaps are forgotten while none is seen.

`RoundSeconds`: whole rounds of sequences that are alone. A round that drafts takes the host longer, and ends a row of
plain passes that run in one native call. Beside a pass of 4 ms that is as much as the pass over one more node. So a
draft must promise more than its nodes cost, and its loss is counted in seconds of its round against plain rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median_low

from forerun.core.offer import PLAIN, Form, Offer
from forerun.core.types import Round

# memory of the common factor, per round: of one sequence, and of 16, which show more
MEMORY_ALONE, MEMORY_IN_BATCH = 0.93, 0.7
SEQUENCE_MEMORY = 0.95  # memory of a sequence's factor, per round
FORM_MEMORY = 0.93  # memory of a form's factor, per round of that form
LEAST_FACTOR, MOST_FACTOR = 0.02, 4.0  # bounds of the common factor, so that it can return from any text
PRIOR_TOKENS = 2.0  # expected tokens: a prior counts for about one draft


@dataclass(slots=True)
class Factor:
    """Observed over expected, with a memory, starting from 1."""

    weight: float  # expected tokens that the start counts for
    observed: float = 0.0
    expected: float = 0.0

    def add(self, observed: float, expected: float, memory: float) -> None:
        self.observed = self.observed * memory + observed
        self.expected = self.expected * memory + expected

    def value(self, start: float = 1.0) -> float:
        return (self.observed + self.weight * start) / (self.expected + self.weight)


@dataclass(slots=True)
class Acceptance:
    """What is accepted of each form, as rounds have shown."""

    overall: float = 1.0
    _forms: dict[Form, Factor] = field(default_factory=dict)
    _counts: Factor = field(default_factory=lambda: Factor(PRIOR_TOKENS))
    _sequences: dict[int, tuple[float, float]] = field(default_factory=dict)  # observed, expected
    _own: dict[int, float] = field(default_factory=dict)  # a sequence's factor

    def expected(self, form: Form, prior: float) -> float:
        """Tokens of one average sequence."""
        return min(prior * self.overall * self._of_form(form), 0.98 * form.depth)

    def _of_form(self, form: Form) -> float:
        own = self._forms.get(form)
        return 1.0 if own is None else min(max(own.value(), 0.5), 2.0)

    def weight(self, ids: Sequence[int]) -> float:
        """How many average sequences these are together."""
        own = self._own
        return sum([own.get(seq_id, 1.0) for seq_id in ids])

    def observe(self, form: Form, prior: float, ids: Sequence[int], accepted: Sequence[int]) -> None:
        """A round of this form: tokens accepted of each sequence."""
        batch, total, each = len(ids), sum(accepted), self.expected(form, prior)
        memory = max(MEMORY_IN_BATCH, MEMORY_ALONE - (batch - 1) * (MEMORY_ALONE - MEMORY_IN_BATCH) / 15)
        self._counts.add(total, prior * self._of_form(form) * batch, memory)
        self.overall = min(max(self._counts.value(), LEAST_FACTOR), MOST_FACTOR)
        # what all forms share is settled first; a form that runs on and on tends to 1, and leaves the rest to that
        of_form = self._forms.setdefault(form, Factor(6.0 * PRIOR_TOKENS / batch**0.5))
        of_form.add(total / batch, prior * self.overall, FORM_MEMORY)
        if batch == 1:
            return  # the common factor is its own
        counts, own = self._sequences, self._own
        for seq_id, tokens in zip(ids, accepted, strict=True):  # plain numbers: once per sequence and round
            seen, hoped = counts.get(seq_id, (PRIOR_TOKENS, PRIOR_TOKENS))
            seen, hoped = seen * SEQUENCE_MEMORY + tokens, hoped * SEQUENCE_MEMORY + each
            counts[seq_id] = seen, hoped
            own[seq_id] = min(max((seen + PRIOR_TOKENS) / (hoped + PRIOR_TOKENS), 0.25), 2.0)

    def forget(self, seq_id: int) -> None:
        self._sequences.pop(seq_id, None)
        self._own.pop(seq_id, None)


PRIOR_ACCEPTANCE = 0.7  # per position, before any draft was tested: high, so that a drafter gets its first trials
PRIOR_TRIES = 3.0  # positions or rounds that a prior counts for: a few drafts outweigh it
MEMORY = 0.95  # per position tested, or per round: acceptance changes within tens of tokens
GAIN_MEMORY = 0.9  # per round, where the gain is known from the drafter's confidence: that varies less
# rounds from a draft that did not pay to the next trial, twice as many each time
FIRST_WAIT, LONGEST_WAIT = 2, 32
TRUST_MEMORY = 0.98  # per round: a drafter's bias changes more slowly than acceptance
PRIOR_GAIN = 0.3  # tokens a round: the assumed gain of a drafter that has not drafted yet
LEAST_TRUST, MOST_TRUST = 0.3, 1.3  # how far a drafter's expectations are scaled down and up


@dataclass(slots=True)
class History:
    """The history of one sequence, or of all sequences, with a drafter that costs."""

    hits: float = PRIOR_ACCEPTANCE * PRIOR_TRIES
    tries: float = PRIOR_TRIES
    by_depth: list[list[float]] = field(default_factory=list)  # [hits, tries] of depth 1, 2, ...
    gain: float = PRIOR_GAIN * PRIOR_TRIES  # tokens beyond what the round's time was worth
    rounds: float = PRIOR_TRIES
    expected: float = PRIOR_TRIES  # tokens that the drafter expected to be accepted; next: tokens that were
    accepted: float = PRIOR_TRIES
    nodes: float = 0.0  # drafted per level
    wait: int = FIRST_WAIT  # rounds without a draft before a trial
    idle: int = 0  # such rounds so far

    @classmethod
    def after(cls, earlier: History) -> History:
        """The history of a new sequence: starts from that of the others, and soon outweighs it."""
        share, asked = PRIOR_TRIES / earlier.tries, PRIOR_TRIES / earlier.rounds
        by_depth = [[hits * share, tries * share] for hits, tries in earlier.by_depth]
        trusted = PRIOR_TRIES * earlier.trust
        return cls(
            earlier.hits * share,
            PRIOR_TRIES,
            by_depth,
            earlier.gain * asked,
            PRIOR_TRIES,
            PRIOR_TRIES,
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
            self.nodes += 0.2 * (max(nodes, depth) / depth - self.nodes)

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
        return min(max((self.accepted + PRIOR_TRIES) / (self.expected + PRIOR_TRIES), LEAST_TRUST), MOST_TRUST)

    @property
    def mean_gain(self) -> float:
        return self.gain / self.rounds

    @property
    def acceptance(self) -> float:
        """Of positions that were tested, whatever their depth."""
        return min(self.hits / self.tries, 0.999)

    def survivals(self, most: int, least: float = 0.0) -> list[float]:
        """The acceptance probability at depth 1, 2, ...: the rates of each depth, with the overall one as prior.

        They end where they fall below `least`.
        """
        overall, survival = self.acceptance, 1.0
        found: list[float] = []  # `list[float]()` would make a type, twenty times slower, in every round
        for level in range(most):
            hits, tries = self.by_depth[level] if level < len(self.by_depth) else (0.0, 0.0)
            survival *= (hits + PRIOR_TRIES * overall) / (tries + PRIOR_TRIES)
            if survival < least:
                break
            found.append(survival)
        return found


FORGIVEN_SHARE = 0.0005  # of what a form takes beyond another, per round in which it is not run for that
NEWEST_SECONDS = 0.1  # weight of the newest round in a moving average of seconds
GAPS_KEPT = 7  # gaps whose median counts: three slow rounds do not move it far
STALE_ROUNDS = 128  # rounds that were not read first for the gap, after which the oldest is forgotten
FIRST_PLAIN = 3  # plain rounds at the start that may be slow by chance: the quickest of them counts
PRESUMED_GAP = 5e-4  # seconds, before any was seen
MOST_PRESUMED = 0.25  # of a round: the most that is presumed of a gap


class RoundOverhead:
    """Drafting, verdict and the host's work."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[Form, int], float] = {}
        self._rounds: dict[tuple[Form, int], int] = {}
        self._follow: set[tuple[Form, int]] = set()  # of which rounds followed
        self._gaps: dict[int, deque[float]] = {}  # the last ones
        self._avoided: dict[int, int] = {}  # rounds that were not read first for them, since the last
        self._beside: dict[int, float] = {}  # of drafted rounds that followed, without their drafts

    def seconds(self, form: Form, batch: int, drafting: float) -> float:
        """What rounds took, else what drafting is said to take on top of a plain round.

        Plain rounds that were all read first would follow now, if rounds with drafts do: then they take no more.
        """
        group = batch.bit_length()
        known = self._seconds.get((form, group))
        if form == PLAIN:
            known = known or 0.0
            return known if (PLAIN, group) in self._follow else min(known, self._beside.get(group, known))
        return drafting + self.seconds(PLAIN, batch, 0.0) if known is None else known

    def gap(self, batch: int, presumed: float | None = None) -> float:
        """Seconds that a round takes longer if the one before it is read first; 0 = that was not seen yet."""
        seen = self._gaps.get(batch.bit_length())
        if not seen:
            return 0.0
        return median_low(seen if presumed is None or len(seen) == GAPS_KEPT else [presumed, *seen])

    def follows(self, form: Form, batch: int) -> bool:
        """Were there rounds of this form that followed?"""
        return (form, batch.bit_length()) in self._follow

    def is_known(self, form: Form, batch: int) -> bool:
        return (form, batch.bit_length()) in self._seconds

    def knows_plain(self, batch: int, usual: float) -> bool:
        """Is it known what plain rounds take beside their pass? One round says so if it is no more than is usual."""
        key = PLAIN, batch.bit_length()
        if key not in self._seconds:
            return False
        return self._seconds[key] <= usual or key in self._follow or self._rounds[key] >= FIRST_PLAIN

    def observe(
        self, form: Form, batch: int, seconds: float, expected: float, followed: bool = False, drafting: float = 0.0
    ) -> None:
        """Learn from a round, of which `drafting` is what its draft is said to take.

        A pause of the machine counts little: at most for three times what was expected.
        """
        key = form, batch.bit_length()
        if followed and key not in self._follow:
            self._follow.add(key)
            self._rounds[key] = 0  # those before it were read first
        elif not followed and key in self._follow:
            self._note_gap(batch.bit_length(), seconds, self._seconds[key])
            return
        elif not followed and form.nodes:
            seconds = max(0.0, seconds - self.gap(batch))
        rounds = self._rounds[key] = self._rounds.get(key, 0) + 1
        known = self._seconds.get(key, expected)
        if form.kind == "plain" and not followed and 1 < rounds <= FIRST_PLAIN:
            seconds = min(seconds, known)
        elif known and isfinite(known):  # a menu may say that a form is not ready
            seconds = known + (min(seconds, 3.0 * known) - known) * max(NEWEST_SECONDS, 1.0 / rounds)
        self._seconds[key] = seconds
        if followed and form.nodes and isfinite(drafting):
            self._beside[batch.bit_length()] = max(0.0, seconds - drafting)

    def _note_gap(self, group: int, seconds: float, known: float) -> None:
        self._gaps.setdefault(group, deque(maxlen=GAPS_KEPT)).append(max(0.0, seconds - known))
        self._avoided[group] = 0

    def note_avoided_gap(self, batch: int) -> None:
        """A round was not read first because of what that took: in time it is tried again."""
        group = batch.bit_length()
        if not (seen := self._gaps.get(group)):
            return
        self._avoided[group] += 1
        if self._avoided[group] >= STALE_ROUNDS:
            seen.popleft()
            self._avoided[group] = 0

    def lower(self, form: Form, batch: int, least: float) -> None:
        """A form that is not run any more for what it once took: in time it may have become cheaper."""
        key = form, batch.bit_length()
        if key in self._seconds:
            self._seconds[key] += FORGIVEN_SHARE * (min(least, self._seconds[key]) - self._seconds[key])


def presumed_gap(seconds: float) -> float:
    """The gap before any was seen, for rounds of `seconds`: the host's work, which the device does not change."""
    return min(PRESUMED_GAP, MOST_PRESUMED * seconds)


PRESUMED_SECONDS = 3e-4  # seconds that a round with a draft takes longer beside its pass, before any was seen
# plain rounds that are timed together: as many as run in one native call, of which the first is slow
IN_A_ROW = 4
MOST_TIMES = 2.0  # times what was expected: a pause of the machine counts for no more


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
            return PRESUMED_SECONDS
        return max(0.0, self._drafted - self._beside) if self._drafted else PRESUMED_SECONDS

    def note_plain(self, seconds: Mapping[str, float]) -> None:
        total = sum(seconds.values())
        self._row += total
        self._row_beside += total - seconds["pass"]
        self._rounds += 1
        if self._rounds == IN_A_ROW:
            self.plain = _moved(self.plain, self._row / IN_A_ROW)
            self._beside = _moved(self._beside, self._row_beside / IN_A_ROW)
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
        self._drafted = _moved(self._drafted or self._beside + PRESUMED_SECONDS, total - seconds["pass"])
        if not self.plain:
            return cost
        return min(total, MOST_TIMES * (expected + self._drafted)) / self.plain - 1.0

    def note_asked(self, seconds: Mapping[str, float]) -> float:
        """A round of a drafter that had to run: what the host took longer, in plain rounds, beside the draft itself."""
        self._end_row()
        host = sum(seconds.values()) - seconds["pass"] - seconds.get("draft", 0.0)
        self._asked = _moved(self._asked, host)
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


def _moved(mean: float, value: float) -> float:
    """A moving average, which a pause of the machine moves little; 0 = nothing was seen."""
    return mean + NEWEST_SECONDS * (min(value, MOST_TIMES * mean) - mean) if mean else value
