"""Begun chains: drafted tokens that have been through a target's first layers, so that its own pass starts behind them.

A drafter that leaves a model early computes, for each token that it reads, the keys and values of the first layers
and the row that enters the next one. Both are what the target's pass over the drafted chain would compute again: the
keys and values are in place already, and the rows are kept here. The last token of a chain was never read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.core.tree import chain_of
from forerun.core.types import Seq
from forerun.models.attention import Span
from forerun.models.layer_subset import LayerSubset
from forerun.models.paged import Extent


@dataclass(slots=True)
class Begun:
    """A chain behind the committed tokens of one sequence, and what leaves the first `end` layers for each token."""

    extent: Extent
    length: int  # committed positions before it
    end: int
    intact: bool = True  # no other part of the target has written where its keys and values are
    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)  # [D] each

    def is_behind(self, extent: Extent) -> bool:
        """Is it still what lies behind the committed tokens of this extent?"""
        return self.extent is extent and self.length == extent.length

    def agreeing(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, are its own."""
        pairs = enumerate(zip(self.tokens, tokens, strict=False))
        return next((i for i, (own, token) in pairs if own != token), min(len(self.tokens), len(tokens)))


def usable(begun: Mapping[int, Begun], tokens: Sequence[int], spans: Sequence[Span]) -> dict[int, int]:
    """Of these chains by span: how many nodes of each span need not go through the first layers again."""
    found = {}
    for i, chain in begun.items():
        span = spans[i]
        if span.shape.is_chain and (count := chain.agreeing(tokens[span.first : span.end])):
            found[i] = count
    return found


def start_rows(
    begun: Mapping[int, Begun],
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
    kept = [(span, begun[i].rows[: done[i]]) for i, span in enumerate(spans) if i in done]
    sample = kept[0][1][0]
    rows = sample.new_empty(len(tokens), len(sample))
    for span, some in kept:
        rows[span.first : span.first + len(some)] = torch.stack(some)
    if places:
        end = begun[next(iter(done))].end
        rows[torch.tensor(places, device=rows.device)] = run(fresh, left, owners, LayerSubset(end))
    return rows
