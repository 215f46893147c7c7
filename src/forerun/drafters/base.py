"""The seam of drafting: three methods, batched, and nothing about exactness, which is the verifier's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from forerun.models.base import Target
from forerun.params import SpeculativeConfig
from forerun.types import Budget, Needs, Scores, Seq, TreeBatch, Verdict


@dataclass(frozen=True, slots=True)
class Parts:
    """What a drafter may be built from: a class with `build(parts)` gets them, any other is called bare."""

    target: Target
    draft: Target | None  # the second checkpoint, if one was given
    speculative: SpeculativeConfig


class Drafter(Protocol):
    """Guesses continuations.

    A drafter learns only through `observe`; it never touches the target, its KV or the sequences. It may be
    wrong as often as it likes: that costs time, never correctness. What must hold: node 0 of every tree is the
    sequence's last token; parents precede children; a tree has at most `budget.nodes` nodes below its root, at
    most `budget.depth` deep; siblings that were chosen differ; a node that was *sampled* says from which law
    (`TreeBatch.drawn_from`), and whether it was proposed never depended on what was sampled.
    """

    @property
    def needs(self) -> Needs:
        """What it reads from the target."""
        ...

    @property
    def cost(self) -> float:
        """Seconds to draft one more level of depth; 0 = not worth counting. The controller weighs it."""
        ...

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        """One tree per sequence; a lone root where there is nothing to say or nothing allowed."""
        ...

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """What a round came to, prompts included (a prompt is a chain accepted whole).

        Called after the verdict and before its tokens are appended to `seq.tokens`.
        """
        ...

    def forget(self, seq: Seq) -> None:
        """The sequence is finished: free what is held for it."""
        ...
