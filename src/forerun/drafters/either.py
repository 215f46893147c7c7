"""EitherDrafter: two drafters in one; the one whose drafts were accepted more often drafts for a sequence.

Which one drafts is decided per sequence and round from earlier rounds alone, before anything is proposed. The counts
of the other one decay, so that it is tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from forerun.drafters.base import Drafter
from forerun.offers import Offer
from forerun.types import Budget, Needs, Scores, Seq, TreeBatch, Verdict

PRIOR, WEIGHT = 0.7, 3.0  # acceptance before anything was seen, and the tries that it is worth
LOOKUP_MEMORY = 0.95  # per position tested
RETURN = 0.99  # per round: decay of the counts of the drafter that does not draft


@dataclass(slots=True)
class _Record:
    """How often one drafter's tokens were accepted on one sequence."""

    hits: float = PRIOR * WEIGHT
    tries: float = WEIGHT

    @property
    def rate(self) -> float:
        return self.hits / self.tries

    def count(self, depth: int, accepted: int) -> None:
        tried = min(accepted + 1, depth)
        memory = LOOKUP_MEMORY**tried
        self.hits = self.hits * memory + accepted
        self.tries = self.tries * memory + tried

    def rest(self) -> None:
        self.hits = self.hits * RETURN + (1.0 - RETURN) * PRIOR * self.tries


@dataclass(slots=True)
class _LookupSequence:
    records: tuple[_Record, _Record] = field(default_factory=lambda: (_Record(), _Record()))
    drafted: int | None = None  # which one made the tree that is being verified


class EitherDrafter:
    """Hands each sequence, each round, to one of two drafters."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.members = first, second
        self._sequences: dict[int, _LookupSequence] = {}

    @property
    def needs(self) -> Needs:
        return self.members[0].needs | self.members[1].needs

    def offer(self, seq: Seq) -> Offer:
        """That of the drafter chosen now; what it expected counts only if it made the last draft."""
        member_index, held = self._choose(seq), self._sequences.get(seq.id)
        offer = self.members[member_index].offer(seq)
        return offer if held is not None and held.drafted == member_index else replace(offer, expected=None)

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        choices = [self._choose(seq) for seq in seqs]
        parts, order = [], list[int]()
        for member_index, member in enumerate(self.members):
            which = [b for b, one in enumerate(choices) if one == member_index]
            if which:
                parts.append(member.propose([seqs[b] for b in which], [budgets[b] for b in which]))
                order += which
        for seq, member_index in zip(seqs, choices, strict=True):
            self._sequences.setdefault(seq.id, _LookupSequence()).drafted = member_index
        return TreeBatch.join(parts, order)

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Both observe every round."""
        depths, (paths, _) = trees.host_depths(), verdict.to_host()
        for b, seq in enumerate(seqs):
            held = self._sequences.get(seq.id)
            depth = max(depths[trees.starts[b] : trees.starts[b + 1]], default=0)
            if held is not None and held.drafted is not None and depth:
                held.records[held.drafted].count(depth, len(paths[b]))
                held.records[1 - held.drafted].rest()
        for member in self.members:
            member.observe(seqs, trees, scores, verdict)

    def forget(self, seq: Seq) -> None:
        self._sequences.pop(seq.id, None)
        for member in self.members:
            member.forget(seq)

    def _choose(self, seq: Seq) -> int:
        """Which of the two drafts for this sequence now; the first on a tie."""
        held = self._sequences.get(seq.id)
        return int(held is not None and held.records[1].rate > held.records[0].rate)
