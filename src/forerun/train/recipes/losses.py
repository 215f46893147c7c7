"""Losses between a head's law and the target's (KL, LK, top-K), with gradients, without holding all logits.

Both laws are made from hidden rows, a chunk of rows at a time, over the draft vocabulary only, and the gradient
with respect to the head's logits is written down at once (it is a softmax: q * sum(w) - w for a loss
-sum w log q). So what is kept for the backward pass is as wide as the model, not as the vocabulary.

    kl         KL(p, q): the default
    lk_hybrid  l KL + (1 - l) TV with l = exp(-3 a), a = 1 - TV the acceptance: the better the head, the more
               directly acceptance itself is trained
    top_k      added with a weight: -sum over the target's K likeliest tokens of p log q (HASS)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

CHUNK = 4096  # rows at a time


@dataclass(frozen=True, slots=True)
class LawLoss:
    """Which loss."""

    kind: str = "kl"
    top_k: int = 10
    top_weight: float = 0.0

    def __call__(
        self,
        rows: Tensor,
        head: Tensor,
        truth: Tensor,
        truth_head: Tensor,
        weights: Tensor,
        chunk: int = CHUNK,
    ) -> tuple[Tensor, Tensor]:
        """Weighted sum over rows, and the weighted sum of acceptances (to report, without a gradient).

        rows [N, D] by head [Vd, D] against truth [N, D'] by truth_head [Vd, D']; weights [N].
        """
        apply: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLaw.apply
        return apply(rows, head, truth, truth_head, weights, self, chunk)


def law_terms(
    z: Tensor, t: Tensor, kind: str, top_k: int, top_weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [n], gradients with respect to the logits z [n, Vd], and acceptances [n]; t are the target's logits."""
    log_q, log_p = z.float().log_softmax(-1), t.float().log_softmax(-1)
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
    if top_weight:
        best = p.topk(min(top_k, p.shape[-1]))
        w = torch.zeros_like(p).scatter(-1, best.indices, best.values)
        loss = loss - top_weight * (w * log_q).sum(-1)
        slope = slope + top_weight * (q * w.sum(-1, keepdim=True) - w)
    return loss, slope, accepted


def weighted_terms(
    z: Tensor, t: Tensor, weights: Tensor, dtype: torch.dtype, kind: str, top_k: int, top_weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, weighted: sums of losses and acceptances, and gradients as the products want them."""
    losses, slope, accepted = law_terms(z, t, kind, top_k, top_weight)
    return (losses * weights).sum(), (slope * weights[:, None]).to(dtype), (accepted * weights).sum()


@cache
def _terms_for(device: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
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
        total = torch.zeros((), device=rows.device)
        accepted = torch.zeros((), device=rows.device)
        terms = _terms_for(rows.device.type)
        for low in range(0, len(rows), chunk):
            part, some = slice(low, low + chunk), weights[low : low + chunk]
            z, t = small[part] @ narrow.t(), truth[part] @ truth_head.t()
            losses, slope, alphas = terms(z, t, some, dtype, loss.kind, loss.top_k, loss.top_weight)
            total += losses
            accepted += alphas
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
        onto_rows = (slopes * grads[0]).to(ctx.dtypes[0])
        onto_head = None if head_slope is None else (head_slope * grads[0]).to(ctx.dtypes[1])
        return onto_rows, onto_head, None, None, None, None, None
