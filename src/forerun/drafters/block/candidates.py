"""Candidates of a block: the likeliest tokens of each position, and how likely each is behind those of the one before.

All of it comes from one pass, so it is computed for all levels at once and read by the host once; the tree is then
grown there. A Markov head corrects only these candidates: what it would lift from below the first 64 is left out, and
what all other tokens weigh together stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.drafters.block.head import BlockHead
from forerun.drafters.draft_law import Noised, likeliest
from forerun.drafters.tree_growth import Frontier, Ranked

CANDIDATES = 64


class BlockCandidates:
    """The draft of one batch, as the growth of trees asks for it (tree_growth.Ranks)."""

    def __init__(self, scored: Tensor, tokens: Tensor) -> None:
        """As `candidates_of` makes them; this waits for the device."""
        self.size = tokens.shape[-1]
        self._scored, self._level = scored.cpu(), 0
        self._tokens: list[list[list[int]]] = tokens.tolist()
        # values and places [2][B][L][P][count]: numbers, as indexing tensors is slow
        self._ranked: list[Any] = []

    def roots(self, count: int) -> list[Ranked]:
        self._ranked = [part.tolist() for part in self._scored.topk(count)]
        return [self._children(b, [0]) for b in range(len(self._tokens))]

    def below(self, frontiers: Sequence[Frontier], count: int) -> list[Ranked]:
        self._level += 1
        found = []
        for b, frontier in enumerate(frontiers):
            before = self._tokens[b][self._level - 1]
            found.append(self._children(b, [before.index(token) for _, token in frontier]))
        return found

    def _children(self, b: int, parents: list[int]) -> Ranked:
        """Of each parent, by its place among the candidates of the level before."""
        values, places = (part[b][self._level] for part in self._ranked)
        here, some = self._tokens[b][self._level], parents if len(values) > 1 else [0] * len(parents)
        tokens = [here[place] for i in some for place in places[i]]
        return [value for i in some for value in values[i]], tokens


def candidates_of(
    head: BlockHead,
    rows: Tensor,
    roots: Tensor,
    noised: Noised | None = None,
    factors: Tensor | None = None,
    count: int = CANDIDATES,
) -> tuple[Tensor, Tensor]:
    """Of predicting rows [B, L, D] behind roots [B]: tokens [B, L, K], and log-confidences of each behind each of the
    level before [B, L, K, K], or [B, L, 1, K] where what comes before does not matter.

    `noised` brings logits under temperatures and noise, and `factors` [B, 1, 1] are what it multiplies them by; None =
    as the head says.
    """
    logits = torch.unflatten(head.logits(rows.flatten(0, 1)), 0, rows.shape[:2])  # [B, L, Vd]
    if noised is not None:
        logits = torch.stack([noised(logits[:, level], level) for level in range(rows.shape[1])], 1)
    values, places = likeliest(logits, min(count, logits.shape[-1]))  # [B, L, K]
    tokens = head.vocabulary.ids[places]
    if not head.has_markov:
        return values[:, :, None], tokens
    return corrected(head, rows, roots, values, places, tokens, factors), tokens


def corrected(
    head: BlockHead,
    rows: Tensor,
    roots: Tensor,
    values: Tensor,
    places: Tensor,
    tokens: Tensor,
    factors: Tensor | None,
) -> Tensor:
    """Log-confidences [B, L, K, K] of candidates behind each candidate of the level before; the root's all alike.

    `values` [B, L, K] are their log-probabilities by position alone, `places` and `tokens` which they are.
    """
    count = tokens.shape[-1]
    before = torch.cat((roots[:, None, None].expand(-1, 1, count), tokens[:, :-1]), 1)  # [B, L, K]
    previous = torch.unflatten(head.markov(before.flatten()), 0, before.shape)  # [B, L, K, rank]
    bias = (previous @ head.markov_columns(places).transpose(-1, -2)).float()  # [B, L, K, K]
    if factors is not None:
        bias = bias * factors[..., None]
    moved = values[:, :, None] + bias
    others = (1.0 - values.exp().sum(-1)).clamp(min=0.0)[:, :, None, None]  # what is no candidate
    scored = moved - (others + moved.exp().sum(-1, keepdim=True)).log()
    sure = head.confidence(rows[:, :, None], previous)  # [B, L, K]
    if sure is None:
        return scored
    # the confidence is that of the likeliest; the others keep their share of it
    log_sure = sure.clamp(1e-6, 1.0).log()[..., None]
    return scored - scored.amax(-1, keepdim=True) + log_sure
