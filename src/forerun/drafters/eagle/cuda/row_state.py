"""RowState: which feature rows of one sequence a head has seen and read, and where they are (feature_rows.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from forerun.drafters.eagle.cuda.draft_noise import Settings
from forerun.models.cuda.plan import Span
from forerun.models.paged import Ints
from forerun.models.pages import pages_for
from forerun.topology import chain_of

NO_PAGES: Ints = np.zeros(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class RowState:
    """What is known of one sequence's rows. Row t belongs to token t, and comes with the token after it."""

    seq_id: int
    place: int  # which ROOM rows it owns
    pages: Ints  # of its slots, by position
    noise: Settings | None = None  # that its drafts share with the verifier
    after: list[int] = field(default_factory=list)  # the token after each row that was observed
    read: int = 0  # rows whose keys and values are in the head's slots, were sent there, or are put off
    kept: bool | None = None  # of the round under way the rows are in their places: has the head read them?

    @property
    def seen(self) -> int:
        """Rows that were observed."""
        return len(self.after)

    def span(self, first: int, tokens: list[int]) -> Span:
        """Rows from a position on, with the token after each."""
        pages: list[int] = self.pages[: pages_for(first + len(tokens))].tolist()
        return Span(tokens, chain_of(len(tokens)), pages, first)
