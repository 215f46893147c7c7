"""Two drafters in one: n-gram where its match can be trusted, a model or a trained head elsewhere.

Looking things up costs nothing and is right for long stretches of copied text; a model is right more often in
the stretches between. Who drafts is decided per sequence and round from the committed text and from how often each
was right, before anything is proposed: never from the tokens it would propose. Both are shown every round,
whoever drafted it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from forerun import registry
from forerun.drafters.base import Drafter, Parts
from forerun.drafters.ngram import NgramDrafter
from forerun.types import Budget, Needs, Scores, Seq, TreeBatch, Verdict

HANDICAP = 0.1  # of acceptance: what the costlier drafter must be ahead by
MEMORY = 0.95  # per position tested


@runtime_checkable
class Routes(Protocol):
    """A drafter whose cost depends on the sequence, because it hands it on."""

    def cost_of(self, seq: Seq) -> float:
        """Seconds to draft one more level for this sequence in the coming round."""
        ...


class Confident(Drafter, Protocol):
    """A drafter that costs nothing and knows how far to trust itself."""

    def confidence(self, seq: Seq) -> float:
        """How likely the first token it would draft now is right; 0 = it has nothing to say."""
        ...


@dataclass(slots=True)
class _Text:
    """What is kept per sequence."""

    hits: float = 2.1  # of the second drafter: to begin with, an acceptance of 0.7 worth three tries
    tries: float = 3.0
    silenced: bool = False  # the controller gave the second drafter nothing when it was last its turn
    length: int = -1  # of the text when the route was decided
    to_first: bool = False
    drafted: bool = False  # the second drafter made the tree that is being judged


class HybridDrafter:
    """Routes each sequence, each round, to one of two drafters."""

    uses_checkpoint = True
    second_name: ClassVar[str] = "draft_model"

    def __init__(self, first: Confident, second: Drafter) -> None:
        self.first, self.second = first, second
        self._texts: dict[int, _Text] = {}

    @classmethod
    def build(cls, parts: Parts) -> HybridDrafter:
        second: Drafter = registry.drafters.get(cls.second_name).build(parts)
        return cls(NgramDrafter.build(parts), second)

    @property
    def needs(self) -> Needs:
        return self.first.needs | self.second.needs

    @property
    def cost(self) -> float:
        return self.second.cost

    def cost_of(self, seq: Seq) -> float:
        """What the drafter costs that this sequence is routed to."""
        return self.first.cost if self._goes_first(seq) else self.second.cost

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        ours = [self._goes_first(seq) for seq in seqs]
        # the first drafter is asked about everybody: it scores its own guesses, used or not, at no cost
        nothing = Budget(0, 0)
        asked = [budget if mine else nothing for budget, mine in zip(budgets, ours, strict=True)]
        trees = self.first.propose(seqs, asked)
        theirs = [b for b, mine in enumerate(ours) if not mine]
        for b, seq in enumerate(seqs):
            text = self._texts[seq.id]
            text.drafted = not ours[b]
            if not ours[b]:
                text.silenced = budgets[b].nodes == 0
        if not theirs:
            return trees
        second = self.second.propose([seqs[b] for b in theirs], [budgets[b] for b in theirs])
        mine = [b for b in range(len(seqs)) if ours[b]]
        return TreeBatch.join([trees.select(mine), second] if mine else [second], [*mine, *theirs])

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        depths: list[int] | None = None
        accepted = verdict.accepted.tolist()
        for b, seq in enumerate(seqs):
            text = self._texts.get(seq.id)
            if text is not None and text.drafted:
                depths = depths or trees.depths().tolist()
                _count(text, max(depths[trees.starts[b] : trees.starts[b + 1]]), accepted[b])
                text.drafted = False
        for member in (self.first, self.second):
            member.observe(seqs, trees, scores, verdict)

    def forget(self, seq: Seq) -> None:
        self._texts.pop(seq.id, None)
        self.first.forget(seq)
        self.second.forget(seq)

    def _goes_first(self, seq: Seq) -> bool:
        """Is this round the first drafter's? Decided once per round; plan and proposal agree."""
        text = self._texts.setdefault(seq.id, _Text())
        if text.length != len(seq.tokens):
            rival = 0.0 if text.silenced else text.hits / text.tries - HANDICAP
            confidence = self.first.confidence(seq)
            text.to_first = confidence > 0.0 and confidence >= rival
            text.length = len(seq.tokens)
        return text.to_first


class HybridEagle3Drafter(HybridDrafter):
    """n-gram, else an EAGLE-3 head."""

    uses_checkpoint = False
    second_name = "eagle3"


class HybridMedusaDrafter(HybridDrafter):
    """n-gram, else Medusa heads."""

    uses_checkpoint = False
    second_name = "medusa"


def _count(text: _Text, depth: int, accepted: int) -> None:
    tried = min(accepted + 1, depth)
    memory = MEMORY**tried
    text.hits = text.hits * memory + accepted
    text.tries = text.tries * memory + tried
