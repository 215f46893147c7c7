"""PartialTarget: a target's own layers as a draft model, over the target's own KV cache: some layers, or some pages.

It reads the keys and values that the target has cached of the committed tokens, so it has no cache of its own and no
prompt to read. Drafted tokens are written behind them, where the target's pass writes the nodes of the tree anyway.

Where it runs the first layers whole, a CPU's pass over the drafted chain need not run them again: their keys and values
are in place, and `EarlyExitChain` keeps the rows that enter the next layer. A GPU's pass starts from the tokens
(models/cuda/target.py says why).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from forerun.core.tree import chain_of
from forerun.core.types import Needs, Prompts, Scores, Seq, TreeBatch, Verdict
from forerun.models.attention import Span, SparseContext
from forerun.models.base import BaseTarget, LayerSubset
from forerun.models.pages import Extent, PagedKV, slots_of

# [M, D] what leaves the last layer that is run -> [M, D] what the LM head reads
Leave = Callable[[Tensor], Tensor]


class RunsLayers(Protocol):
    """A target of which some layers can run apart: a Decoder, or the layers of a GPU's (forerun.models.cuda.target)."""

    @property
    def kv(self) -> PagedKV: ...
    @property
    def early_exits(self) -> dict[int, EarlyExitChain] | None:
        """Chains that its own pass continues, by sequence; None where it starts from the tokens."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def slots(self) -> int | None: ...
    @property
    def pass_rows(self) -> int: ...
    def make_room(self, seqs: Sequence[Seq], rows: Sequence[int]) -> bool: ...

    def run_layers(
        self, tokens: Sequence[int], spans: Sequence[Span], seqs: Sequence[Seq], layers: LayerSubset
    ) -> Tensor:
        """[M, D] what leaves the last of some layers; their keys and values are written as in any pass."""

    def final_norm_of(self, rows: Tensor) -> Tensor: ...
    def logits_of(self, rows: Tensor) -> Tensor: ...


class PartialTarget(BaseTarget):
    """Implements forerun.models.base.Target for sequences that the whole target has prefilled, and no others."""

    used_slots = cached_slots = 0  # all slots are the whole target's

    def __init__(
        self, whole: RunsLayers, layers: LayerSubset, leave: Leave | None = None, context: SparseContext | None = None
    ) -> None:
        """`leave` stands in for the final norm; `context` says which pages are read, None = all."""
        self.whole, self.layers, self.context = whole, layers, context
        # of these the whole target's pass takes over keys, values and rows: they are its own
        self._is_start = layers.is_prefix and context is None
        self.vocab_size, self.max_length, self.device = whole.vocab_size, whole.max_length, whole.device
        self.slots, self.pass_rows = whole.slots, whole.pass_rows
        self._leave = leave or whole.final_norm_of
        self._chains: dict[int, EarlyExitChain] = {}  # what was drafted behind the committed tokens, by sequence
        self._scored: dict[int, tuple[list[int], Tensor]] = {}  # the last trees: tokens, and rows [M, D]

    def prefill(self, seqs: Sequence[Seq], needs: Needs, rows: int | None = None) -> tuple[TreeBatch, Scores]:
        """The whole target has read them."""
        return TreeBatch.chains([[] for _ in seqs], self.device), Scores(None)

    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        """A pass over trees whose roots follow what was drafted before."""
        tokens, shapes, spans = trees.to_host()[0], trees.topology(), list[Span]()
        for b, seq in enumerate(seqs):
            first, end = trees.starts[b : b + 2]
            chain = self._chain(seq)
            self._take_over(seq, chain)
            start = chain.length + len(chain.tokens)
            extent = self.whole.kv.grow(seq.id, start + end - first)
            span = Span(first, end, extent.pages, start, shapes[b])
            spans.append(span if self.context is None else self.context.narrow(seq, chain.length, span))
        rows = self.whole.run_layers(tokens, spans, seqs, self.layers)
        for seq, span in zip(seqs, spans, strict=True):
            self._scored[seq.id] = tokens[span.first : span.end], rows[span.first : span.end]
        return Scores(self.whole.logits_of(self._leave(rows)))

    def commit(self, seqs: Sequence[Seq], trees: TreeBatch, verdict: Verdict) -> None:
        """Root and path follow what was drafted before; their keys and values become neighbours."""
        for seq, path in zip(seqs, verdict.to_host()[0], strict=True):
            chain, (tokens, rows) = self._chain(seq), self._scored.pop(seq.id)
            pages, root = chain.extent.pages, chain.length + len(chain.tokens)
            moved = [(root + node, root + i) for i, node in enumerate(path, start=1) if node != i]
            self.whole.kv.move([(_slot(pages, source), _slot(pages, place)) for source, place in moved])
            early_exits = self.whole.early_exits
            if early_exits is not None:  # before its tokens: a fault between does no harm
                chain.rows += [rows[node] for node in (0, *path)]
            chain.tokens += [tokens[node] for node in (0, *path)]
            if early_exits is not None and self._is_start and chain.intact:
                early_exits[seq.id] = chain

    def truncate(self, seq: Seq, length: int) -> None:
        """Forget drafted tokens; what is committed is the whole target's to forget."""
        chain = self._chains.get(seq.id)
        if chain is not None:
            left = max(0, length - chain.length)
            del chain.tokens[left:], chain.rows[left:]

    def has_room(self, *lengths: int) -> bool:
        return True

    def make_room(self, seqs: Sequence[Seq], rows: Sequence[int]) -> bool:
        return self.whole.make_room(seqs, rows)

    def reused_tokens(self, seq: Seq) -> int:
        return 0

    def cached_tokens(self, seq: Seq) -> int:
        """All that the whole target has cached, and what was drafted behind it."""
        if not self.whole.kv.holds(seq.id):
            return 0
        chain = self._chain(seq)
        return chain.length + len(chain.tokens)

    def release(self, seq: Seq) -> None:
        self._chains.pop(seq.id, None)
        self._scored.pop(seq.id, None)
        if self.context is not None:
            self.context.forget(seq.id)

    def _take_over(self, seq: Seq, chain: EarlyExitChain) -> None:
        """What another part drafted for this sequence is about to be overwritten: no pass may go on with it."""
        early_exits = self.whole.early_exits
        other = None if early_exits is None else early_exits.get(seq.id)
        if early_exits is not None and other is not None and other is not chain:
            other.intact = False
            del early_exits[seq.id]

    def _chain(self, seq: Seq) -> EarlyExitChain:
        """What was drafted behind the committed tokens: nothing, once others were committed."""
        extent, chain = self.whole.kv.extent(seq.id), self._chains.get(seq.id)
        if chain is None or not chain.follows(extent):
            chain = self._chains[seq.id] = EarlyExitChain(extent, extent.length, self.layers.end)
        return chain


def _slot(pages: Sequence[int], position: int) -> int:
    return slots_of(pages, position, position + 1)[0]


@dataclass(slots=True)
class EarlyExitChain:
    """A chain behind the committed tokens of one sequence, and what leaves the first `end` layers for each token."""

    extent: Extent
    length: int  # committed positions before it
    end: int
    intact: bool = True  # no other part of the target has written where its keys and values are
    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)  # [D] each

    def follows(self, extent: Extent) -> bool:
        """Is it still what lies behind the committed tokens of this extent?"""
        return self.extent is extent and self.length == extent.length

    def agreeing(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, are its own."""
        pairs = enumerate(zip(self.tokens, tokens, strict=False))
        return next((i for i, (own, token) in pairs if own != token), min(len(self.tokens), len(tokens)))


def reusable_nodes(
    early_exits: Mapping[int, EarlyExitChain], tokens: Sequence[int], spans: Sequence[Span]
) -> dict[int, int]:
    """Of these chains by span: how many nodes of each span need not go through the first layers again."""
    found = {}
    for i, chain in early_exits.items():
        span = spans[i]
        if span.shape.is_chain and (count := chain.agreeing(tokens[span.first : span.end])):
            found[i] = count
    return found


def rows_after_first_layers(
    early_exits: Mapping[int, EarlyExitChain],
    done: Mapping[int, int],
    tokens: Sequence[int],
    spans: Sequence[Span],
    seqs: Sequence[Seq],
    run: Callable[[Sequence[int], Sequence[Span], Sequence[Seq], LayerSubset], Tensor],
) -> Tensor:
    """[M, D] what leaves the first layers for every row of a pass; those that are `done` are not run again."""
    fresh, left, owners, places = list[int](), list[Span](), list[Seq](), list[int]()
    for i, (span, seq) in enumerate(zip(spans, seqs, strict=True)):
        have = done.get(i, 0)
        if have == span.nodes:
            continue
        shape = chain_of(span.nodes - have) if have else span.shape
        start = len(places)
        places += range(span.first + have, span.end)
        left.append(Span(start, len(places), span.pages, span.length + have, shape))
        owners.append(seq)
        fresh += tokens[span.first + have : span.end]
    kept = [(span, early_exits[i].rows[: done[i]]) for i, span in enumerate(spans) if i in done]
    sample = kept[0][1][0]
    rows = sample.new_empty(len(tokens), len(sample))
    for span, some in kept:
        rows[span.first : span.first + len(some)] = torch.stack(some)
    if places:
        end = early_exits[next(iter(done))].end
        rows[torch.tensor(places, device=rows.device)] = run(fresh, left, owners, LayerSubset(end))
    return rows
