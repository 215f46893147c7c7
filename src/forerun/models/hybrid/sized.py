"""Layers of different sizes (Gemma 4): attention that may read an earlier layer's keys and values, and layer inputs.

Every layer has its own number of KV heads and numbers per head; in the KV cache a row is as wide as the widest layer's,
and a narrower layer uses its start. Layers without keys of their own read those of the last layer of the same kind that
has some. Beside the residual stream, a token gives every layer a short input of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.attention import Span
from forerun.models.config import Activation
from forerun.models.hybrid.rows import RowLinear, attend_by_nodes, by_rows
from forerun.models.layers import activate, rms_norm, rotate_


@dataclass(frozen=True, slots=True)
class SizedAttention:
    """Weights of one layer."""

    kv_heads: int
    head_dim: int
    window: int | None
    source: int  # whose keys and values it reads
    eps: float
    queries: RowLinear  # [H Dh, D]
    query_norm: Tensor  # [Dh]
    keys: RowLinear | None  # [Hkv Dh, D]; None = it writes none
    key_norm: Tensor | None
    values: RowLinear | None  # None = of what keys are made of
    output: RowLinear  # [D, H Dh]

    def run(self, rows: Tensor, rotations: Tensor, cache: Tensor, spans: Sequence[Span], scale: float) -> Tensor:
        """[M, D] -> [M, D] with the KV cache [L, 2, 1, S, row]."""
        queries = by_rows(partial(self._turned, norm=self.query_norm), self.queries(rows), rotations)
        made = None
        if self.keys is not None:
            assert self.key_norm is not None
            plain = self.keys(rows)
            values = plain if self.values is None else self.values(rows)
            keys = by_rows(partial(self._turned, norm=self.key_norm), plain, rotations)
            made = torch.stack((keys, by_rows(self._normed, values)), 1)
        shape = self.kv_heads, self.head_dim
        data = torch.unflatten(cache[self.source, :, 0, :, : shape[0] * shape[1]], -1, shape).transpose(1, 2)
        found = torch.empty_like(queries)
        attend_by_nodes(data, spans, queries, made, scale, found, self.window)
        return self.output(found.flatten(1))

    def _normed(self, rows: Tensor) -> Tensor:
        """[M, Hkv Dh] -> [M, Hkv, Dh], without a weight."""
        return F.rms_norm(rows.view(len(rows), -1, self.head_dim), (self.head_dim,), None, self.eps)

    def _turned(self, rows: Tensor, rotations: Tensor, norm: Tensor) -> Tensor:
        """[M, heads Dh] -> [M, heads, Dh], normed and rotated."""
        heads = rms_norm(rows.view(len(rows), -1, self.head_dim), norm, self.eps)
        rotate_(heads.view(*heads.shape[:2], -1, 2), torch.view_as_complex(rotations))
        return heads


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What tokens give every layer: a row of a table of its own, and a projection of the embedding; P wide."""

    table: Tensor  # [V, L P]
    projection: RowLinear  # [L P, D]
    norm: Tensor  # [P]
    eps: float

    def of(self, tokens: Tensor, x: Tensor) -> Tensor:
        """[M, L, P] for tokens [M] whose embeddings are x [M, D]."""
        shape = len(tokens), -1, len(self.norm)
        own = F.embedding(tokens, self.table).view(shape) * torch.tensor(len(self.norm) ** 0.5, dtype=x.dtype)
        made = (self.projection(x) * x.shape[1] ** -0.5).view(shape)
        return (by_rows(partial(rms_norm, weight=self.norm, eps=self.eps), made) + own) * math.sqrt(0.5)


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """What ends a layer: its input, gated by the rows, is added to them, and a number multiplies all."""

    gate: RowLinear | None  # [P, D]
    projection: RowLinear | None  # [D, P]
    norm: Tensor | None  # [D]
    scale: Tensor  # [1]

    def apply(self, x: Tensor, inputs: Tensor | None, activation: Activation, eps: float) -> Tensor:
        """[M, D] -> [M, D] with inputs [M, P] of this layer."""
        if self.gate is not None:
            assert self.projection is not None and self.norm is not None and inputs is not None  # noqa: PT018
            gated = by_rows(partial(activate, activation=activation), self.gate(x)) * inputs
            x = x + by_rows(partial(rms_norm, weight=self.norm, eps=eps), self.projection(gated))
        return x * self.scale
