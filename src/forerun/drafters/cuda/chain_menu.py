"""ChainMenu: chains that a draft model has ready on the device, what each takes, and what it should bring."""

from __future__ import annotations

import math

from forerun.drafters.cuda.chain_plan import BUCKETS, MOST
from forerun.models.cuda.plan import MAX_ROWS, round_up
from forerun.offers import Form

DEPTHS = (1, 2, 3, 4, 5, 6, 8)
FORMS = tuple(Form(depth, depth, 1) for depth in DEPTHS)
ROWS = 384  # of a target's pass over all chains: a larger pass costs more than any draft brings
UNMEASURED = 1e-3  # seconds of a pass
ACCEPTED = 0.75  # of a draft model's tokens, each, until rounds have shown it


def forms_for(bucket: int) -> tuple[Form, ...]:
    """The chains whose target pass can pay for itself, for so many sequences."""
    return tuple(form for form in FORMS if bucket * (form.nodes + 1) <= min(ROWS, MAX_ROWS))


class ChainMenu:
    """Implements forerun.offers.Menu: seconds are those of the first pass and of each further one, on the device."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[float, float]] = {}
        self._found: dict[tuple[Form, int], float] = {}  # what was looked up since the last measurement

    @property
    def forms(self) -> tuple[Form, ...]:
        return FORMS

    def seconds(self, form: Form, batch: int) -> float:
        """Infinite where this form is not captured for so many sequences."""
        found = self._found.get((form, batch))
        if found is None:
            listed = batch <= MOST and form in forms_for(round_up(batch, BUCKETS))
            found = self._found[form, batch] = self.drafting(form, batch) if listed else math.inf
        return found

    def drafting(self, form: Form, batch: int) -> float:
        """The same of any form; a guess where nothing was timed for so many sequences or a few more."""
        known = (self._seconds.get(bucket) for bucket in BUCKETS if bucket >= batch)
        first, further = next((pair for pair in known if pair is not None), (UNMEASURED, UNMEASURED))
        return first + (form.depth - 1) * further

    def note(self, bucket: int, first: float, further: float) -> None:
        """The passes of a draft for so many sequences were timed."""
        self._seconds[bucket] = first, further
        self._found.clear()

    def rows(self, form: Form, batch: int) -> int:
        return (round_up(batch, BUCKETS) if batch <= MOST else batch) * (form.nodes + 1)

    def expected(self, form: Form) -> float:
        return sum(ACCEPTED**depth for depth in range(1, form.depth + 1))
