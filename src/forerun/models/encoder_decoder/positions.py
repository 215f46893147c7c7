"""Positions: Marian's sinusoids, and the buckets of T5's relative distances."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from forerun.models.encoder_decoder.config import RelativeConfig


def sinusoids(count: int, width: int) -> Tensor:
    """[P, D] sines in the first half of the columns, cosines in the second."""
    columns = np.arange(width)
    angles = np.arange(count)[:, None] / np.power(10000, 2 * (columns // 2) / width)[None, :]
    table = np.concatenate((np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])), axis=1)
    return torch.from_numpy(table).float()


def buckets(distances: Tensor, relative: RelativeConfig, two_sided: bool) -> Tensor:
    """The bucket of every distance key - query: near ones have their own, far ones share by the logarithm."""
    count, found = relative.buckets, torch.zeros_like(distances)
    if two_sided:
        count //= 2
        found = found + (distances > 0) * count
        away = distances.abs()
    else:
        away = (-distances).clamp(min=0)
    exact = count // 2
    far = exact + (
        torch.log(away.clamp(min=1).float() / exact) / math.log(relative.farthest / exact) * (count - exact)
    ).to(torch.long)
    return found + torch.where(away < exact, away, far.clamp(max=count - 1))


def encoder_bias(table: Tensor, length: int, relative: RelativeConfig) -> Tensor:
    """[H, S, S] what T5 adds to the scores between the tokens of a source."""
    places = torch.arange(length, device=table.device)
    found = buckets(places[None, :] - places[:, None], relative, two_sided=True)
    return table[found].permute(2, 0, 1).contiguous()


def decoder_bias(table: Tensor, length: int, relative: RelativeConfig) -> Tensor:
    """[H, N] for the query at position N - 1: what T5 adds to its scores with keys 0 to N - 1.

    For a query further left it is the last columns: the distance counts, not the place.
    """
    distances = torch.arange(1 - length, 1, device=table.device)
    return table[buckets(distances, relative, two_sided=False)].t().contiguous()
