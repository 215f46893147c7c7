"""ForcedDrafter: drafts what the law leaves no choice about, such as keys of a JSON schema or the end of thinking.

A grammar often allows one continuation alone. Its text may be cut into tokens in several ways, so that a forced token
is not always the target's: how often it is, is counted.

`forced+other` drafts for a request with such a law, where drafts lie in no captured buffers: see `DrafterPool`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from forerun.core.params import Forces, Prefix
from forerun.core.types import Budget, Needs, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.base import LookupDrafter, committed_tokens
from forerun.drafters.heads.growth import best_count

PRIOR, WEIGHT, MEMORY = 0.9, 8.0, 0.99


@dataclass(slots=True)
class _Sequence:
    length: int = -1  # of the sequence when its forced tokens were looked up
    tokens: Sequence[int] = field(default_factory=tuple)


class ForcedDrafter(LookupDrafter):
    """The tokens that must follow; nothing where several may."""

    needs = Needs()

    def __init__(self) -> None:
        self._sequences: dict[int, _Sequence] = {}
        self._hits, self._tries = PRIOR * WEIGHT, WEIGHT

    def chain(self, seq: Seq, length: int) -> Iterator[tuple[int, float]]:
        rate = self._hits / self._tries
        for token in self._look_up(seq)[:length]:
            yield token, rate

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        return TreeBatch.chains(
            [[seq.tokens[-1], *self._draft(seq, budget)] for seq, budget in zip(seqs, budgets, strict=True)]
        )

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Count how often forced tokens came, drafted or not."""
        if not self._sequences:
            return
        for seq, committed in zip(seqs, committed_tokens(trees, verdict), strict=True):
            state = self._sequences.get(seq.id)
            if state is None or state.length != len(seq.tokens):
                continue
            for forced, token in zip(state.tokens, committed, strict=False):
                self._hits = self._hits * MEMORY + (forced == token)
                self._tries = self._tries * MEMORY + 1.0
                if forced != token:
                    break

    def forget(self, seq: Seq) -> None:
        self._sequences.pop(seq.id, None)

    def _draft(self, seq: Seq, budget: Budget) -> Sequence[int]:
        depth = min(budget.nodes, budget.depth)
        tokens = self._look_up(seq)[:depth] if depth else ()
        if tokens and budget.price is not None:
            rate = self._hits / self._tries
            return tokens[: best_count([rate ** (1 + i) for i in range(len(tokens))], budget.price)]
        return tokens

    def _look_up(self, seq: Seq) -> Sequence[int]:
        laws = [law for law in seq.params.processors if isinstance(law, Forces)]
        if not laws:
            return ()
        state = self._sequences.setdefault(seq.id, _Sequence())
        if state.length != len(seq.tokens):
            state.length, state.tokens = (len(seq.tokens), laws[-1].forced(Prefix(seq.tokens, seq.prompt_length)))
        return state.tokens
