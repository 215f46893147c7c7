"""PartialTable: a part of a TableLM as a draft model, for tests of drafters that run the target's own layers.

It holds what was drafted behind the tokens that the whole TableLM has cached, and asserts that a drafter neither reads
a committed token again nor leaves one out. Its logits are the table's, blurred: the more layers run, the less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from forerun.core.types import Needs, Prompts, Scores, Seq, TreeBatch, Verdict
from forerun.models.attention import SparseContext
from forerun.models.base import LayerSubset, SharedWeights
from forerun.models.slots import UnpagedTarget
from forerun.testing.doubles import TableLM, path_to, tree_of

LAYERS = 6


def with_layers(whole: TableLM) -> TableLM:
    """The same table, which now lends a part of itself to drafters."""

    def make(
        layers: LayerSubset, leave: Callable[[Tensor], Tensor] | None = None, context: SparseContext | None = None
    ) -> PartialTable:
        return PartialTable(whole, layers)

    tables = torch.zeros(whole.vocab_size, whole.width)
    whole.lends = replace(SharedWeights.of(tables, tables), layers=(None,) * LAYERS, partial=make)
    return whole


@dataclass(slots=True)
class PartialTable(UnpagedTarget):
    """Implements forerun.models.base.Target; misuse is an AssertionError."""

    whole: TableLM
    layers: LayerSubset
    slots: int | None = None
    _promised: int = 0
    _drafted: dict[int, tuple[int, list[int]]] = field(default_factory=dict)  # cached before it, and tokens
    _scored: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.whole.vocab_size

    @property
    def max_length(self) -> int:
        return self.whole.max_length

    @property
    def device(self) -> torch.device:
        return self.whole.device

    @property
    def pass_rows(self) -> int:
        return self.whole.pass_rows

    @property
    def used_slots(self) -> int:
        return 0

    def shared(self) -> SharedWeights | None:
        return None

    def prefill(self, seqs: Sequence[Seq], needs: Needs, rows: int | None = None) -> tuple[TreeBatch, Scores]:
        return TreeBatch.chains([[] for _ in seqs], self.device), Scores(None)

    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        rows = []
        for b, seq in enumerate(seqs):
            known = self.whole._cached[seq.id] + self._behind(seq)
            tokens, parents = tree_of(trees, b)
            assert seq.tokens == [*known, tokens[0]], f"sequence {seq.id}: its last token is not the only new one"
            rows += [self._logits(known + [tokens[j] for j in (0, *path_to(parents, i))]) for i in range(len(tokens))]
            self._scored[seq.id] = (tokens, parents)
        return Scores(torch.stack(rows).to(self.device))

    def commit(self, seqs: Sequence[Seq], trees: TreeBatch, verdict: Verdict) -> None:
        for b, seq in enumerate(seqs):
            tokens, parents = self._scored.pop(seq.id)
            assert (tokens, parents) == tree_of(trees, b), f"sequence {seq.id}: tree was not scored"
            drafted = self._behind(seq) + [tokens[i] for i in (0, *verdict.path(b))]
            self._drafted[seq.id] = self.whole.cached_tokens(seq), drafted

    def truncate(self, seq: Seq, length: int) -> None:
        before = self.whole.cached_tokens(seq)
        self._drafted[seq.id] = before, self._behind(seq)[: max(0, length - before)]

    def cached_tokens(self, seq: Seq) -> int:
        return self.whole.cached_tokens(seq) + len(self._behind(seq))

    def release(self, seq: Seq) -> None:
        self._drafted.pop(seq.id, None)
        self._scored.pop(seq.id, None)

    def _behind(self, seq: Seq) -> list[int]:
        before, drafted = self._drafted.get(seq.id, (0, []))
        return drafted if before == self.whole.cached_tokens(seq) else []

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        """[V] the table's own, and noise for what is left out."""
        left_out = 1.0 - self.layers.sublayers / (2 * LAYERS)
        noise = self.whole._row("left out", tokens, self.vocab_size) * self.whole.sharpness
        return self.whole.logits(tokens) + left_out * noise
