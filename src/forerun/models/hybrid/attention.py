"""Attention of other kinds, in torch: latent attention (DeepSeek), and layers of different sizes (Gemma 4).

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): what is cached of a token is one short row. It has the
latent, normed, that keys and values of all heads are made of, and one rotated key that they share. The weight that
makes keys of latents is applied to the queries, and the one that makes values to what attention finds, so all heads
read the cached rows themselves.

In Gemma 4 every layer has its own number of KV heads and numbers per head; in the KV cache a row is as wide as that of
the widest layer, and a narrower layer uses its start. Layers without keys of their own read those of the last layer of
the same kind that has some. Beside the residual stream, a token gives every layer a short input of its own.
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
from forerun.models.config import Activation, LatentConfig
from forerun.models.hybrid.rows import RowLinear, attend_by_nodes, by_rows
from forerun.models.layers import activate, rms_norm, rotate_

EPS = 1e-6  # of the norms within attention, whatever the config says of others


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Weights of one layer; N = key_dim, R = rope_dim, V = value_dim, C = rank."""

    config: LatentConfig
    index: int  # of the layer
    short_queries: RowLinear | None  # [query_rank, D]
    query_norm: Tensor | None  # [query_rank]
    queries: RowLinear  # [H (N + R), query_rank or D]
    latents: RowLinear  # [C + R, D]
    latent_norm: Tensor  # [C]
    keys: Tensor  # [H, N, C]
    values: Tensor  # [H, C, V]
    output: RowLinear  # [D, H V]

    def run(self, rows: Tensor, rotations: Tensor, cache: Tensor, spans: Sequence[Span], scale: float) -> Tensor:
        """[M, D] -> [M, D] with the cached rows [L, 1, 1, S, C + R]."""
        queries, made = self.projected(rows, rotations)
        found = rows.new_empty(len(rows), len(self.keys), self.config.rank)
        attend_by_nodes(cache[self.index], spans, queries, made[:, None, None], scale, found)
        return self.expanded(found)

    def projected(self, rows: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor]:
        """[M, D] -> [M, H, C + R] queries, as they are multiplied with cached rows, and [M, C + R] what is cached."""
        short = rows
        if self.short_queries is not None:
            assert self.query_norm is not None
            short = by_rows(partial(rms_norm, weight=self.query_norm, eps=EPS), self.short_queries(rows))
        return by_rows(self._absorbed, self.queries(short), rotations), by_rows(
            self._cached, self.latents(rows), rotations
        )

    def expanded(self, found: Tensor) -> Tensor:
        """[M, H, C] what attention finds -> [M, D]."""
        return self.output(by_rows(self._expanded, found))

    def _absorbed(self, rows: Tensor, rotations: Tensor) -> Tensor:
        """[M, H (N + R)] queries -> [M, H, C + R] what is multiplied with the cached rows."""
        heads = rows.view(len(rows), len(self.keys), -1)
        plain, turned = torch.split(heads, [self.config.key_dim, self.config.rope_dim], -1)
        absorbed = torch.bmm(plain.transpose(0, 1), self.keys).transpose(0, 1)
        return torch.cat((absorbed, _rotated(turned, rotations)), -1)

    def _cached(self, rows: Tensor, rotations: Tensor) -> Tensor:
        """[M, C + R] as the layer makes it -> as it is cached."""
        latent, turned = torch.split(rows, [self.config.rank, self.config.rope_dim], -1)
        normed = rms_norm(latent.contiguous(), self.latent_norm, EPS)
        return torch.cat((normed, _rotated(turned[:, None], rotations)[:, 0]), -1)

    def _expanded(self, found: Tensor) -> Tensor:
        """[M, H, C] -> [M, H V]."""
        return torch.bmm(found.transpose(0, 1), self.values).transpose(0, 1).flatten(1)


def _rotated(heads: Tensor, rotations: Tensor) -> Tensor:
    """Heads [M, H, R] whose neighbours rotate together, by rotations [M, 1, R / 2, 2]; in memory of their own."""
    turned = heads.clone(memory_format=torch.contiguous_format)
    rotate_(turned.view(*heads.shape[:2], -1, 2)[:, :, : rotations.shape[2]], torch.view_as_complex(rotations))
    return turned


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
