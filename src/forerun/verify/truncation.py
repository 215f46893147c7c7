"""Top-k, top-p and min-p on log-weights [N, V]: what is cut becomes -inf. As in transformers, ties included.

Top-p is defined by a sort of the whole vocabulary, which on a CPU costs more than the rest of a round. But
tokens of less than (1 - top_p) / V each have less than 1 - top_p together, so the others reach top_p without
them: only those few are sorted. Where a tie or rounding could make a difference the definition decides.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
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
    floor = 0.99 * (1 - top_p) / log_weights.shape[-1]
    rows, probs = log_weights.numpy(), log_weights.softmax(-1).numpy()
    kept = np.full_like(rows, _CUT)
    for i, (row, of_row) in enumerate(zip(rows, probs, strict=True)):
        those = _kept_of_row(row, of_row, top_p, floor)
        if those is None:
            kept[i] = _keep_top_p_by_sorting(log_weights[i : i + 1], top_p)[0].numpy()
        else:
            kept[i, those] = row[those]
    return torch.from_numpy(kept)


def _kept_of_row(
    log_weights: NDArray[np.float32], probs: NDArray[np.float32], top_p: float, floor: float
) -> NDArray[np.intp] | None:
    """The tokens kept of one row [V]; those below the floor cannot be. None = the definition must decide.

    By numpy: of the few that are left each operation takes a fraction of what it takes in torch.
    """
    likely = np.flatnonzero(probs >= floor)
    likely = likely[log_weights[likely].argsort()]  # least likely first, as the definition has it
    values, masses = log_weights[likely], probs[likely].astype(np.float64)
    above = masses[::-1].cumsum()[::-1] - masses  # what the likelier tokens have
    kept = above < top_p
    first = len(kept) - int(kept.sum())
    tied = first > 0 and values[first - 1] == values[first]
    if tied or (np.abs(above - top_p) < _CLOSE).any():
        return None
    return likely[kept]


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
