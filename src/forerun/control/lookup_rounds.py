"""Rounds of a batch of which all draft by look-ups: budgets, and whether a plain one follows before the last is read.

For the whole batch first (`LookupGate`): is anybody asked, and is what they have found drafted? Both are asked again
while a plain round is under way: look-ups that are made then cost nothing, as the device is at work.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.control.decision import chain_budget
from forerun.control.free_drafts import NOTHING
from forerun.control.lookups import MOST_WITH_TREES, LookupGate
from forerun.control.per_sequence import SequencePlanner
from forerun.core.types import Budget, Seq


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
