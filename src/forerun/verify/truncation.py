"""Top-k, top-p and min-p on log-weights [N, V]: what is cut becomes -inf. As in transformers, ties included.

Top-p is defined by a sort of the whole vocabulary, which on a CPU costs more than the rest of a round. But
tokens of less than (1 - top_p) / V each have less than 1 - top_p together, so the others reach top_p without
them: only those few are sorted. Where a tie or rounding could make a difference the definition decides.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_CLOSE = 4e-6  # masses nearer to the limit than this may round either way
_CUT = -math.inf


def truncate(log_weights: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """All that are set, one after the other."""
    if top_k:
        log_weights = keep_top_k(log_weights, top_k)
    if top_p < 1.0:
        log_weights = keep_top_p(log_weights, top_p)
    if min_p > 0.0:
        log_weights = keep_within_min_p(log_weights, min_p)
    return log_weights


def keep_top_k(log_weights: Tensor, k: int) -> Tensor:
    """The k likeliest, and whatever ties with the last of them."""
    kth = log_weights.topk(min(k, log_weights.shape[-1])).values[..., -1:]
    return torch.where(log_weights < kth, _CUT, log_weights)


def keep_top_p(log_weights: Tensor, top_p: float) -> Tensor:
    """The smallest set of the likeliest tokens whose mass reaches top_p; at least one."""
    if log_weights.device.type != "cpu":  # sorting is cheap there, and reading sizes back is not
        return _keep_top_p_by_sorting(log_weights, top_p)
    probs = log_weights.softmax(-1)
    floor = 0.99 * (1 - top_p) / log_weights.shape[-1]
    rows = [_keep_row(*pair, top_p, floor) for pair in zip(log_weights, probs, strict=True)]
    return torch.stack(rows) if rows else log_weights


def _keep_row(log_weights: Tensor, probs: Tensor, top_p: float, floor: float) -> Tensor:
    """One row [V]; tokens below the floor cannot be kept."""
    likely = (probs >= floor).nonzero().squeeze(-1)
    values, order = log_weights[likely].sort()  # least likely first, as the definition has it
    masses = probs[likely][order].double()
    above = masses.flip(0).cumsum(0).flip(0) - masses  # what the likelier tokens have
    kept = above < top_p
    first = len(kept) - int(kept.sum())
    tied = first > 0 and bool(values[first - 1] == values[first])
    if tied or bool(((above - top_p).abs() < _CLOSE).any()):
        return _keep_top_p_by_sorting(log_weights[None], top_p)[0]
    row = torch.full_like(log_weights, _CUT)
    row[likely[order[kept]]] = values[kept]
    return row


def _keep_top_p_by_sorting(log_weights: Tensor, top_p: float) -> Tensor:
    """The definition: least likely first, cut while the mass so far is at most 1 - top_p."""
    on_gpu = log_weights.device.type != "cpu"
    values, order = log_weights.sort(dim=-1, stable=on_gpu)
    masses = values.softmax(-1)
    if on_gpu:  # in how many parts it adds a row up depends on the number of rows
        masses = masses.double()
    cut = masses.cumsum(-1) <= 1 - top_p
    cut[..., -1] = False
    return torch.where(torch.zeros_like(cut).scatter(-1, order, cut), _CUT, log_weights)


def keep_within_min_p(log_weights: Tensor, min_p: float) -> Tensor:
    """Tokens at least min_p times as likely as the likeliest."""
    probs = log_weights.softmax(-1)
    return torch.where(probs < min_p * probs.amax(-1, keepdim=True), _CUT, log_weights)
