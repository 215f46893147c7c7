"""Acceptance of a menu's forms: expected tokens per draft, corrected over all forms, per form and per sequence.

A drafter's files say how many tokens of each form are accepted on average. Text differs from that text, so the figure
is multiplied by three factors, each observed / expected: one over all forms, with a short memory; one per form,
slower and close to 1; and one per sequence, within bounds.
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
