"""Losses between a head's law and the target's (KL, LK, top-K), with gradients, without holding all logits.

Both laws are made from hidden rows, a chunk of rows at a time, over the draft vocabulary only, and the gradient
with respect to the head's logits is written down at once (it is a softmax: q * sum(w) - w for a loss
-sum w log q). So what is kept for the backward pass is as wide as the model, not as the vocabulary.

    kl         KL(p, q): the default
    lk_hybrid  l KL + (1 - l) TV with l = exp(-3 a), a = 1 - TV the acceptance: the better the head, the more
               directly acceptance itself is trained
    top_k      added with a weight: -sum over the target's K likeliest tokens of p log q (HASS); of its gradient only
               q sum(w) is as wide as the vocabulary, and K numbers are added to it: no further pass over [n, Vd]

`Survival` weighs a block's positions by how far its draft gets, as D-PACE does. A token counts only if those before it
were accepted: with overlaps a_i of the laws, softened to q_i = 1/2 + a_i / 2, position j weighs the sum over m >= j of
q_1 ... q_m, the expected length that hangs on it. The better a drafter gets, the more later positions count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

CHUNK = 4096  # rows at a time
# losses [n], gradients [n, Vd] but for what the likeliest K add to their own columns, acceptances [n], and that [n, K]
Terms = tuple[Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class LawLoss:
    """Which loss."""

    kind: str = "kl"
    top_k: int = 10
    top_weight: float = 0.0

    def of_rows(
        self, rows: Tensor, head: Tensor, truth: Tensor, truth_head: Tensor, weights: Tensor, chunk: int = CHUNK
    ) -> tuple[Tensor, Tensor]:
        """Of each row [N] its weighted loss and its weighted acceptance (to report, without a gradient).

        rows [N, D] by head [Vd, D] against truth [N, D'] by truth_head [Vd, D']; weights [N]. Rows may be weighted once
        more when all are known, if the head is frozen; the gradient of a head that learns is a sum over rows with the
        weights given here.
        """
        apply: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLaw.apply
        return apply(rows, head, truth, truth_head, weights, self, chunk)


def law_terms(z: Tensor, t: Tensor, kind: str, top_weight: float, best: Tensor | None) -> Terms:
    """Losses and gradients with respect to the logits z [n, Vd]; t are the target's logits, best its likeliest."""
    z, t = z.float(), t.float()
    most_z, most_t = z.logsumexp(-1, keepdim=True), t.logsumexp(-1, keepdim=True)
    log_q, log_p = z - most_z, t - most_t
    q, p = log_q.exp(), log_p.exp()
    loss = (p * (log_p - log_q)).sum(-1)
    slope = q - p
    accepted = torch.minimum(p, q).sum(-1)
    if kind == "lk_hybrid":
        share = (-3.0 * accepted).exp()
        sign = -(q < p).to(q.dtype)
        towards = q * (sign - (q * sign).sum(-1, keepdim=True))
        loss = share * loss + (1 - share) * (1 - accepted)
        slope = share[:, None] * slope + (1 - share)[:, None] * towards
    if best is None:
        return loss, slope, accepted, None
    w = (t.gather(-1, best) - most_t).exp()
    loss = loss - top_weight * (w * (z.gather(-1, best) - most_z)).sum(-1)
    slope = slope + top_weight * q * w.sum(-1, keepdim=True)
    return loss, slope, accepted, -top_weight * w


def weighted_terms(
    z: Tensor, t: Tensor, weights: Tensor, dtype: torch.dtype, kind: str, top_weight: float, best: Tensor | None
) -> Terms:
    """The same, weighted: losses and acceptances [n], and gradients as the products want them."""
    losses, slope, accepted, pull = law_terms(z, t, kind, top_weight, best)
    pulled = None if pull is None else (pull * weights[:, None]).to(dtype)
    slope = (slope * weights[:, None]).to(dtype)
    return losses * weights, slope, accepted * weights, pulled


@cache
def _terms_for(device: str) -> Callable[..., Terms]:
    """Fused on a GPU, where the passes over [n, Vd] would cost more than the products."""
    return torch.compile(weighted_terms, dynamic=True) if device == "cuda" else weighted_terms


class _ChunkedLaw(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        head: Tensor,
        truth: Tensor,
        truth_head: Tensor,
        weights: Tensor,
        loss: LawLoss,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = truth_head.dtype
        small, narrow = rows.to(dtype), head.to(dtype)
        slopes = torch.empty_like(small)
        head_slope = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        total, accepted = (torch.zeros(len(rows), device=rows.device) for _ in range(2))
        terms = _terms_for(rows.device.type)
        for low in range(0, len(rows), chunk):
            part, some = slice(low, low + chunk), weights[low : low + chunk]
            z, t = small[part] @ narrow.t(), truth[part] @ truth_head.t()
            best = t.topk(min(loss.top_k, t.shape[-1])).indices if loss.top_weight else None
            losses, slope, alphas, pull = terms(z, t, some, dtype, loss.kind, loss.top_weight, best)
            if best is not None and pull is not None:
                slope.scatter_add_(-1, best, pull)
            total[part], accepted[part] = losses, alphas
            torch.mm(slope, narrow, out=slopes[part])
            if head_slope is not None:
                head_slope += slope.t() @ small[part]
        ctx.save_for_backward(slopes, head_slope)
        ctx.dtypes = rows.dtype, head.dtype
        ctx.mark_non_differentiable(accepted)
        return total, accepted

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        slopes, head_slope = ctx.saved_tensors
        onto_rows = (slopes * grads[0][:, None]).to(ctx.dtypes[0])
        # a head that learns is given the sum over all rows, so that they all have the same factor
        onto_head = None if head_slope is None else (head_slope * grads[0][:1].sum()).to(ctx.dtypes[1])
        return onto_rows, onto_head, None, None, None, None, None


FLOOR = 0.5  # of a position's chance: a hard position must not silence all behind it


@dataclass(slots=True)
class Survival:
    """The positions of all drafts of a batch, level by level."""

    rows: int  # of the batch: drafts are named by the row that they start from
    _places: list[Tensor] = field(default_factory=list)  # [N] by level
    _losses: list[Tensor] = field(default_factory=list)
    _overlaps: list[Tensor] = field(default_factory=list)
    _learnt: list[Tensor] = field(default_factory=list)

    def add(self, places: Tensor, losses: Tensor, overlaps: Tensor, learnt: Tensor) -> None:
        """One level: which drafts have it [N], and of each its loss, its overlap, and 1 where it is learnt."""
        self._places.append(places)
        self._losses.append(losses)
        self._overlaps.append(overlaps.detach())
        self._learnt.append(learnt)

    def __bool__(self) -> bool:
        return bool(self._places)

    def loss(self) -> Tensor:
        """The weighted mean over all positions."""
        chances = torch.zeros(len(self._places), self.rows, device=self._losses[0].device)
        for level, (places, overlaps) in enumerate(zip(self._places, self._overlaps, strict=True)):
            chances[level, places] = FLOOR + (1 - FLOOR) * overlaps
        weights = survival_weights(chances.t()).t()
        total, count = torch.zeros((), device=chances.device), torch.zeros((), device=chances.device)
        for mine, places, losses, learnt in zip(weights, self._places, self._losses, self._learnt, strict=True):
            total = total + (mine[places] * losses).sum()
            count = count + (mine[places] * learnt).sum()
        return total / count.clamp(min=1e-6)


def survival_weights(chances: Tensor) -> Tensor:
    """[N, levels] from the chances of every position [N, levels]; zero from where a draft ends."""
    reached = chances.cumprod(-1)
    return reached.flip(-1).cumsum(-1).flip(-1)
