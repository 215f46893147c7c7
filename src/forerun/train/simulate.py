"""Simulate tokens per round on held-back text, without decoding: at which rank is the true token, level by level?

The text counts as the target's output. A draft started at row t is accepted as long as each drafted token equals
the text's: then the next level saw exactly what it would see in a real round, so the count is what a
chain would have had (and, with any of the likeliest few instead of the first, an upper bound for a tree).
Rows whose levels would reach past the text's end are left out.

That is a mean over all rows. A decoder starts a round behind what the last one accepted, so hard places count more:
`walk` goes through greedy text in this way and finds what decoding it would have counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.drafters.heads.base import Calibration
from forerun.train.data.corpus import Batch
from forerun.train.recipes.base import Measured, Recipe, shifted

RANKS = 10
CHAIN = 5  # tokens drafted in a round that is walked through; a block drafter drafts its whole block


@torch.no_grad()
def measure(recipe: Recipe, batches: Iterable[Batch], device: torch.device, chunk: int = 4096) -> Measured:
    """Simulate rounds over some batches."""
    ranks, sure = [], []
    for batch in batches:
        found = _ranks(recipe, batch.to(device), chunk)
        ranks.append(found.ranks)
        sure.append(found.sure)
    return summarise(torch.cat(ranks), torch.cat(sure))


@torch.no_grad()
def walk(recipe: Recipe, batches: Iterable[Batch], device: torch.device, chunk: int = 4096) -> tuple[int, int] | None:
    """Tokens and rounds of chains of 5, or of whole blocks, through greedy texts; None where rows were left out."""
    tokens = rounds = 0
    for batch in batches:
        found = _ranks(recipe, batch.to(device), chunk)
        if not found.every_row:
            return None
        more = walk_rows(batch.learnt, found.usable.cpu(), found.ranks.cpu(), found.shift, found.chain)
        tokens, rounds = tokens + more[0], rounds + more[1]
    return tokens, rounds


def walk_rows(learnt: Tensor, usable: Tensor, ranks: Tensor, shift: int, chain: int = CHAIN) -> tuple[int, int]:
    """Tokens and rounds through sequences [B, T], each round from where the one before ended.

    `learnt` are the answers' tokens, `usable` the rows that have ranks [N, levels]; the first level of row t predicts
    token t + shift + 1, behind a root at t + shift. A text starts with its answer's first token as the root: the
    prompt's own pass gave that. It ends where a row has no ranks.
    """
    accepted = torch.full(learnt.shape, -1)
    accepted[usable] = (ranks[:, :chain] == 0).long().cumprod(1).sum(1)
    tokens = rounds = 0
    for row, first in zip(accepted.tolist(), learnt.int().argmax(1).tolist(), strict=True):
        place = max(0, first - shift)
        while place < len(row) and row[place] >= 0:
            tokens, rounds, place = tokens + 1 + row[place], rounds + 1, place + 1 + row[place]
    return tokens, rounds


def summarise(ranks: Tensor, sure: Tensor) -> Measured:
    """From ranks [N, levels] (RANKS = not among the likeliest) and the likeliest token's probabilities [N, levels]."""
    levels = ranks.shape[1]
    chain, tree = 1.0, 1.0
    alive = torch.ones(len(ranks), dtype=torch.bool, device=ranks.device)
    near = alive.clone()
    rates: list[tuple[float, ...]] = []
    for level in range(levels):
        rank = ranks[:, level]
        base = near.sum().clamp(min=1)
        rates.append(tuple(float((near & (rank == r)).sum() / base) for r in range(RANKS)))
        alive &= rank == 0
        near &= rank < RANKS
        chain += float(alive.float().mean()) if len(ranks) else 0.0
        tree += float(near.float().mean()) if len(ranks) else 0.0
    return Measured(chain, tree, tuple(rates), fit_calibration(sure.flatten(), (ranks == 0).flatten()))


def fit_calibration(probabilities: Tensor, accepted: Tensor) -> Calibration:
    """scale * q^power with the least squared error; the scale makes the mean right."""
    q, hits = probabilities.double().clamp(1e-6, 1.0), accepted.double()
    best, best_error = Calibration(), float("inf")
    if not len(q) or not float(hits.sum()):
        return best
    for power in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5):
        raised = q**power
        scale = min(float(hits.mean() / raised.mean()), 2.0)
        error = float((((raised * scale).clamp(max=1.0) - hits) ** 2).mean())
        if error < best_error:
            best, best_error = Calibration(round(scale, 4), power), error
    return best


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Where the true tokens ranked, of the rows of one batch."""

    ranks: Tensor  # [N, levels]; RANKS = not among the likeliest
    sure: Tensor  # [N, levels] probability of the likeliest token
    usable: Tensor  # [B, T] which rows these are
    every_row: bool  # False: the recipe drafts from some rows only
    shift: int  # of the first level
    chain: int  # tokens of a draft


def _ranks(recipe: Recipe, batch: Batch, chunk: int) -> _Ranks:
    """Of every row whose levels lie within the answer: where the true token ranked, level by level."""
    outputs = list(recipe.outputs(batch, recipe.read(batch), None))
    inside = torch.stack([shifted(batch.learnt, output.shift + 1) for output in outputs]).all(0)  # [B, T]
    usable = inside.to(batch.tokens.device)
    if outputs[0].at is not None:  # a recipe that names its rows names the same ones for every level
        kept = torch.zeros_like(usable.flatten())
        kept[outputs[0].at] = True
        usable = usable & kept.view(usable.shape)
    head, ids = recipe.lm_head(), recipe.vocabulary.ids.to(batch.tokens.device)
    ranks, sure = [], []
    for output in outputs:
        rows = output.rows[usable] if output.at is None else output.rows[usable.flatten()[output.at]]
        truth = shifted(batch.tokens, output.shift + 1)[usable]
        parts = []
        for low in range(0, len(rows), chunk):
            logits = (rows[low : low + chunk].to(head.dtype) @ head.t()).float()
            top = logits.topk(min(RANKS, logits.shape[-1]))
            hit = ids[top.indices] == truth[low : low + chunk, None]
            rank = torch.where(hit.any(-1), hit.int().argmax(-1), RANKS)
            parts.append((rank, (top.values[:, 0] - logits.logsumexp(-1)).exp()))
        empty = (truth.new_zeros(0), rows.new_zeros(0))
        ranks.append(torch.cat([rank for rank, _ in parts] or [empty[0]]))
        sure.append(torch.cat([q.float() for _, q in parts] or [empty[1].float()]))
    first = outputs[0]
    chain = CHAIN if first.at is None else len(outputs)
    every_row = bool(usable.sum() == inside.sum())
    return _Ranks(torch.stack(ranks, 1), torch.stack(sure, 1), usable, every_row, first.shift, chain)
