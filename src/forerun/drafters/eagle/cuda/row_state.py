"""RowState: which feature rows of one sequence a head has seen and read, and where they are (feature_rows.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from forerun.drafters.eagle.cuda.draft_noise import Settings
from forerun.models.paged import Ints
from forerun.models.pages import PAGE, pages_for

NO_PAGES: Ints = np.zeros(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class RowState:
    """What is known of one sequence's rows. Row t belongs to token t, and comes with the token after it."""

    seq_id: int
    place: int  # which ROOM rows it owns
    pages: Ints  # of its slots, by position
    noise: Settings | None = None  # that its drafts share with the verifier
    after: list[int] = field(default_factory=list)  # the token after each row that was observed
    read: int = 0  # rows whose keys and values are in the head's slots, or were sent there

    @property
    def seen(self) -> int:
        """Rows that were observed."""
        return len(self.after)

    def slots(self, first: int, end: int) -> list[int]:
        """Of positions that it has pages for."""
        pages: list[int] = self.pages[first // PAGE : pages_for(end)].tolist()
        skipped = first % PAGE
        return [page * PAGE + i for page in pages for i in range(PAGE)][skipped : skipped + end - first]
