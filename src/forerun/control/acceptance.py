"""Acceptance of a menu's forms: expected tokens per draft, corrected over all forms, per form and per sequence.

A drafter's files say how many tokens of each form are accepted on average. Text differs from that text, so the figure
is multiplied by three factors, each observed / expected: one over all forms, with a short memory; one per form,
slower and close to 1; and one per sequence, within bounds.

History: how often drafts were accepted so far, by depth, and what rounds gained beyond their time.

All counts decay, because acceptance changes within a sequence. A second rate with a short memory notices when
acceptance rises; being noisy, it must exceed the first by a margin. A fall needs no such rate: long drafts that
are rejected lower the first one quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.core.offer import Form

# memory of the common factor, per round: of one sequence, and of 16, which show more
MEMORY_ALONE, MEMORY_IN_BATCH = 0.93, 0.7
SEQUENCE_MEMORY = 0.95  # memory of a sequence's factor, per round
FORM_MEMORY = 0.93  # memory of a form's factor, per round of that form
LEAST_FACTOR, MOST_FACTOR = 0.02, 4.0  # of the common factor
PRIOR_TOKENS = 2.0  # expected tokens that a prior counts for


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


PRIOR_ACCEPTANCE = 0.7  # acceptance before anything was seen
PRIOR_TRIES = 3.0  # tries that a prior counts for
MEMORY = 0.95  # per position tested, or per round
GAIN_MEMORY = 0.9  # per round, where the gain is known from the drafter's confidence: that varies less
# rounds from a draft that did not pay to the next trial, twice as many each time
FIRST_WAIT, LONGEST_WAIT = 2, 32
TRUST_MEMORY = 0.98  # per round: a drafter's bias changes more slowly than acceptance
NEWEST = 0.25  # weight of the newest position in the short memory
NEWEST_MARGIN = 0.2  # what the rate of the short memory must be ahead by, as it is noisy
PRIOR_GAIN = 0.3  # tokens a round: the assumed gain of a drafter that has not drafted yet
LEAST_TRUST, MOST_TRUST = 0.3, 1.3  # how far a drafter's expectations are scaled down and up


@dataclass(slots=True)
class History:
    """The history of one sequence, or of all sequences, with a drafter that costs."""

    hits: float = PRIOR_ACCEPTANCE * PRIOR_TRIES
    tries: float = PRIOR_TRIES
    recent: float = PRIOR_ACCEPTANCE
    by_depth: list[list[float]] = field(default_factory=list)  # [hits, tries] of depth 1, 2, ...
    gain: float = PRIOR_GAIN * PRIOR_TRIES  # tokens beyond what the round's time was worth
    rounds: float = PRIOR_TRIES
    expected: float = PRIOR_TRIES  # tokens that the drafter expected to be accepted, and those that were
    accepted: float = PRIOR_TRIES
    nodes: float = 0.0  # drafted per level
    wait: int = FIRST_WAIT  # rounds without a draft before a trial
    idle: int = 0  # such rounds so far

    @classmethod
    def after(cls, earlier: History) -> History:
        """The history of a new sequence: starts from that of the others, and soon outweighs it."""
        share, asked = PRIOR_TRIES / earlier.tries, PRIOR_TRIES / earlier.rounds
        rate = earlier.hits / earlier.tries
        by_depth = [[hits * share, tries * share] for hits, tries in earlier.by_depth]
        trusted = PRIOR_TRIES * earlier.trust
        return cls(
            rate * PRIOR_TRIES,
            PRIOR_TRIES,
            rate,
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
        """A tree so deep was drafted, and this many tokens of it were accepted."""
        tried = min(accepted + 1, depth)
        memory = MEMORY**tried
        self.hits = self.hits * memory + accepted
        self.tries = self.tries * memory + tried
        self.by_depth += [[0.0, 0.0] for _ in range(depth - len(self.by_depth))]
        for level, counts in enumerate(self.by_depth, start=1):
            reached = level <= tried
            counts[0] = counts[0] * MEMORY + (level <= accepted)
            counts[1] = counts[1] * MEMORY + reached
            if reached:
                self.recent += NEWEST * ((level <= accepted) - self.recent)
        if depth:
            self.nodes += 0.2 * (max(nodes, depth) / depth - self.nodes)

    def count_gain(self, gain: float, memory: float = MEMORY) -> None:
        """A round with this drafter gained so many tokens beyond what its time was worth."""
        self.gain = self.gain * memory + gain
        self.rounds = self.rounds * memory + 1.0

    def note_trial(self) -> None:
        """Nothing pays, and it is tried all the same; the next trial comes later, unless this one pays."""
        self.idle, self.wait = 0, min(2 * self.wait, LONGEST_WAIT)

    def count_expected(self, expected: float, accepted: int) -> None:
        """The drafter expected so many tokens to be accepted, and so many were."""
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
        return min(max(self.hits / self.tries, self.recent - NEWEST_MARGIN), 0.999)

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
