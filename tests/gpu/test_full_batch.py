"""The largest batch that a head drafts for, and those whose prompts are read before there is a place for them."""

from __future__ import annotations

from forerun.core.types import Budget
from forerun.drafters.device.plan import MOST, PLACES
from forerun.engine.scheduler import EARLY
from tests.drafters.rounds import as_lists
from tests.gpu.test_draft_batch import Batch

CHAIN = Budget(1, 1)


def test_whoever_is_read_early_beside_a_full_batch_is_drafted_for() -> None:
    """Rows of prompts are read once: whoever had no place for them was written without drafts to its end.

    And a draft that was started for more than the largest batch ended all drafts on the device.
    """
    batch, early = Batch(), MOST // EARLY
    batch.join(*[3 + i % 5 for i in range(MOST)])
    trees = batch.ours.propose(batch.seqs, [CHAIN] * MOST)
    running = list(batch.seqs)
    batch.join(*[4 + i % 3 for i in range(early)])  # while the round is under way
    everybody, batch.seqs = batch.seqs, running
    batch.end_round(trees)
    assert not batch.ours._failed
    assert batch.ours.draft.rows.held == MOST + early <= PLACES
    batch.seqs = everybody
    for _ in range(early):  # places get free
        batch.leave(batch.seqs[0])
    ours, plain = batch.draft(CHAIN)
    assert ours.sizes() == [2] * MOST
    assert as_lists(ours) == as_lists(plain)
