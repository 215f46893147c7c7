"""DraftMenu: the forms of drafts that are captured for each batch size, what each takes, and what it should bring."""

from __future__ import annotations

import math
from collections.abc import Sequence

from forerun.drafters.eagle.cuda.draft_plan import BUCKETS, MOST, bucket_of
from forerun.models.cuda.plan import MAX_ROWS, ROW_SIZES, round_up
from forerun.offers import Form

FORMS = tuple(
    Form(*sizes)
    for sizes in (
        (1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 4, 1), (5, 5, 1),
        (7, 5, 3), (11, 5, 4), (15, 6, 5), (23, 6, 6), (31, 6, 8), (47, 7, 8), (59, 7, 10),
    )
)  # fmt: skip
ROWS = 384  # of a target's pass over all trees: a larger pass costs more than any draft brings
FILLED = 0.9  # of a pass, at least, by trees that branch
UNMEASURED = 2e-4  # seconds per level: about the time to read a head's weights
# how often a head's likeliest tokens are accepted, where its config does not say
UNKNOWN = ((0.6, 0.1, 0.05, 0.03, 0.02),)


def forms_for(bucket: int) -> tuple[Form, ...]:
    """The forms for so many sequences: those whose trees fit a pass that can pay for itself, and fill it.

    A pass is computed for the next of a few numbers of rows (ROW_SIZES). Trees of 15 nodes and a root fill one of
    128 rows at batch 8, while trees of 16 would pay for 160.
    """
    most = min(ROWS, MAX_ROWS)
    return tuple(form for form in FORMS if bucket * (form.nodes + 1) <= most and _fills(form, bucket))


def _fills(form: Form, bucket: int) -> bool:
    rows = bucket * (form.nodes + 1)
    return form.width == 1 or rows >= FILLED * round_up(rows, ROW_SIZES)


class DraftMenu:
    """Implements forerun.offers.Menu."""

    def __init__(self, rates: Sequence[Sequence[float]] = ()) -> None:
        self._rates = rates or UNKNOWN
        self._seconds: dict[tuple[int, Form], float] = {}
        self._found: dict[tuple[Form, int], float] = {}  # what was looked up since the last measurement
        self._expected = {form: expected(self._rates, form) for form in FORMS}

    @property
    def forms(self) -> tuple[Form, ...]:
        return FORMS

    def seconds(self, form: Form, batch: int) -> float:
        """Infinite where this form is not captured for so many sequences."""
        found = self._found.get((form, batch))
        if found is None:
            listed = batch <= MOST and form in forms_for(bucket_of(batch))
            found = self._found[form, batch] = self.drafting(form, batch) if listed else math.inf
        return found

    def rows(self, form: Form, batch: int) -> int:
        return (bucket_of(batch) if batch <= MOST else batch) * (form.nodes + 1)

    def drafting(self, form: Form, batch: int) -> float:
        """The same of any form; a guess where none was timed for so many sequences or a few more."""
        larger = [bucket for bucket in BUCKETS if bucket >= batch]
        known = (self._seconds.get((bucket, form)) for bucket in larger)
        return next((seconds for seconds in known if seconds is not None), UNMEASURED * form.depth)

    def note(self, bucket: int, form: Form, seconds: float) -> None:
        """A draft of this form for so many sequences was timed."""
        self._seconds[bucket, form] = seconds
        self._found.clear()

    def measured(self) -> dict[tuple[int, Form], float]:
        return dict(self._seconds)

    def expected(self, form: Form) -> float:
        return self._expected[form] if form in self._expected else expected(self._rates, form)


def expected(rates: Sequence[Sequence[float]], form: Form) -> float:
    """Expected accepted tokens of a tree of this form, given the acceptance rates of each level and rank."""
    level, found = [1.0], list[float]()
    for i in range(form.depth):
        ranks = rates[min(i, len(rates) - 1)][: form.width]
        level = sorted((above * rate for above in level[: form.width] for rate in ranks), reverse=True)
        found += level
    return sum(sorted(found, reverse=True)[: form.nodes])
