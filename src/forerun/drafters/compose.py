"""Drafters made of drafters: HybridDrafter, the composition `a+b`, and EitherDrafter, the better of two.

A lookup costs nothing and is right for long stretches of copied text; a model is right more often between them. Which
one drafts is decided per sequence and round from the committed tokens and from how often each was right, before
anything is proposed: by the controller, which sees both offers, or, where budgets are fixed, here. Both observe every
round. EitherDrafter decides from acceptance alone; the counts of the other one decay, so that it is tried again.

A device drafts for many sequences in less time than the host takes to look something up for each: beside a drafter that
has a menu of captured drafts, look-ups are made while there are few sequences, and mostly while the device is at work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from forerun.core.types import Budget, Needs, Offer, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.base import Drafter, LookupDrafter, device_of
from forerun.drafters.device.protocol import DeviceDrafter

PRIOR, WEIGHT = 0.7, 3.0  # acceptance before anything was seen, and the tries that it is worth
MEMORY = 0.95  # per position tested
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
        memory = MEMORY**tried
        self.hits = self.hits * memory + accepted
        self.tries = self.tries * memory + tried

    def rest(self) -> None:
        self.hits = self.hits * RETURN + (1.0 - RETURN) * PRIOR * self.tries


@dataclass(slots=True)
class _EitherSequence:
    records: tuple[_Record, _Record] = field(default_factory=lambda: (_Record(), _Record()))
    drafted: int | None = None  # which one made the tree that is being verified


class EitherDrafter:
    """Hands each sequence, each round, to one of two drafters."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.members = first, second
        self._sequences: dict[int, _EitherSequence] = {}

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
            self._sequences.setdefault(seq.id, _EitherSequence()).drafted = member_index
        return TreeBatch.join(parts, order)

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        paths = verdict.to_host()[0]
        for seq, path, (_, depth) in zip(seqs, paths, trees.drafted(), strict=True):
            held = self._sequences.get(seq.id)
            if held is not None and held.drafted is not None and depth:
                held.records[held.drafted].count(depth, len(path))
                held.records[1 - held.drafted].rest()
        for member in self.members:
            member.observe(seqs, trees, scores, verdict)

    def forget(self, seq: Seq) -> None:
        self._sequences.pop(seq.id, None)
        for member in self.members:
            member.forget(seq)

    def device(self, seqs: Sequence[Seq]) -> DeviceDrafter | None:
        """That of the drafter which has drafted for all of these."""
        held = [self._sequences[seq.id].drafted for seq in seqs if seq.id in self._sequences]
        made = {one for one in held if one is not None}
        return device_of(self.members[made.pop()], seqs) if len(made) == 1 else None

    def _choose(self, seq: Seq) -> int:
        """Which of the two drafts for this sequence now; the first on a tie."""
        held = self._sequences.get(seq.id)
        return int(held is not None and held.records[1].rate > held.records[0].rate)


HANDICAP = 0.1  # how much higher the costlier drafter's acceptance must be, where no controller weighs costs
FEW = 2  # sequences for which look-ups are made beside a drafter on a device

ANY, NOTHING = Budget(1, 1), Budget(0, 0)


@dataclass(slots=True)
class _Sequence:
    record: _Record = field(default_factory=_Record)  # of the second drafter
    silenced: bool = False  # its last budget was empty
    drafted: bool = False  # it made the tree that is being verified


_FRESH = _Sequence()


class HybridDrafter:
    """Hands each sequence, each round, to one of two drafters."""

    def __init__(self, first: LookupDrafter, second: Drafter) -> None:
        self.first, self.second = first, second
        self._sequences: dict[int, _Sequence] = {}
        self._is_crowded = False  # no look-ups were made for the last round
        self._decides = False  # the last budgets left it to this drafter which of the two drafts
        self._needs = Needs(), Needs(), Needs()  # of both, and of them together
        self._alone = Offer(), Offer()  # the second's offer, and ours where the first has none

    @classmethod
    def compose(cls, first: Drafter, second: Drafter) -> Drafter:
        """`first+second`: a lookup drafter goes first; of two that cost, the better one drafts (EitherDrafter)."""
        if isinstance(first, LookupDrafter):
            return cls(first, second)
        return cls(second, first) if isinstance(second, LookupDrafter) else EitherDrafter(first, second)

    @property
    def needs(self) -> Needs:
        first, second = self.first.needs, self.second.needs
        if self._needs[:2] != (first, second):
            self._needs = first, second, first | second
        return self._needs[2]

    def device(self, seqs: Sequence[Seq]) -> DeviceDrafter | None:
        """The second's; none where no controller decides (`_decides`) and the first would draft for one of these.

        By the tokens that are known: a match of these is likely to go on.
        """
        reads = self._decides and any([self._goes_first(seq, ANY) for seq in seqs])  # noqa: C419
        return None if reads else device_of(self.second, seqs)

    def offer(self, seq: Seq) -> Offer:
        """What the second costs, what is free, and what the second expected of its tree."""
        second, state = self.second.offer(seq), self._sequences.get(seq.id)
        if second.menu is not None and len(self._sequences) > FEW:
            return second
        first = self.first.offer(seq)
        own = state is not None and state.drafted
        if not (first.free or own):
            return self._without_match(second)
        return replace(
            second,
            free=max(first.free, second.free, key=sum) if second.free else first.free,
            chosen=second.chosen or not second.costs,
            expected=second.expected if own else None,
        )

    def _without_match(self, second: Offer) -> Offer:
        """What the second offers in a round behind one that it did not draft; often the same again and again."""
        if second is not self._alone[0]:
            chosen = second.chosen or not second.costs
            self._alone = second, replace(second, chosen=chosen, expected=None)
        return self._alone[1]

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        self._decides = False
        if len(seqs) == 1 and not budgets[0].nodes and budgets[0].source == "free":
            self._sequences.setdefault(seqs[0].id, _Sequence()).drafted = self._is_crowded = False
            return self.first.propose(seqs, budgets)
        self._is_crowded = len(seqs) > FEW and self.second.offer(seqs[0]).menu is not None
        if self._is_crowded:
            for seq in seqs:
                self._sequences.setdefault(seq.id, _Sequence()).drafted = False
            return self.second.propose(seqs, budgets)
        ours = [self._goes_first(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]
        # the first drafter proposes for all sequences: it scores its own guesses, used or not, at no cost
        asked = [budget if mine else NOTHING for budget, mine in zip(budgets, ours, strict=True)]
        trees = self.first.propose(seqs, asked)
        theirs = [b for b, mine in enumerate(ours) if not mine]  # those that end too: a device drafts for all
        if not any(budgets[b].nodes for b in theirs):
            theirs = []
        for b, seq in enumerate(seqs):
            state = self._sequences.setdefault(seq.id, _Sequence())
            state.drafted = b in theirs and budgets[b].nodes > 0
            if not ours[b]:
                state.silenced = budgets[b].nodes == 0
        if not theirs:
            return trees
        some, limits = [seqs[b] for b in theirs], [budgets[b] for b in theirs]
        second = self.second.propose(some, limits)
        self._decides = any([limit.source == "any" for limit in limits])  # noqa: C419
        mine = [b for b in range(len(seqs)) if b not in theirs]
        return TreeBatch.join([trees.select(mine), second] if mine else [second], [*mine, *theirs])

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        known = trees.form is not None or all([seq.id in self._sequences for seq in seqs])  # noqa: C419 - quicker
        if self._is_crowded and known:  # then nothing of the first's was drafted
            self.second.observe(seqs, trees, scores, verdict)
            return
        verified = [b for b, seq in enumerate(seqs) if seq.id in self._sequences and self._sequences[seq.id].drafted]
        drafted = trees.drafted() if verified else []
        for b in verified:
            self._sequences[seqs[b].id].record.count(drafted[b][1], len(verdict.path(b)))
        self.first.observe(seqs, trees, scores, verdict)
        self.second.observe(seqs, trees, scores, verdict)

    def forget(self, seq: Seq) -> None:
        self._sequences.pop(seq.id, None)
        self.first.forget(seq)
        self.second.forget(seq)

    def _goes_first(self, seq: Seq, budget: Budget) -> bool:
        """Does the first drafter draft this round? By the budget's source, else by the higher acceptance."""
        state = self._sequences.get(seq.id, _FRESH)  # nothing is kept here: a device asks of sequences that have ended
        if budget.source == "costly":
            return False
        if budget.source == "free":
            second = self.second.offer(seq)
            if second.free:
                return sum(self.first.offer(seq).free) >= sum(second.free)
            if second.costs:
                return True
        rival = 0.0 if state.silenced else state.record.rate - HANDICAP
        confidence = self.first.confidence(seq)
        return confidence > 0.0 and confidence >= rival
