"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): what is cached of a token is one short row.

The row has the latent, normed, that keys and values of all heads are made of, and one rotated key that they share. The
weight that makes keys of latents is applied to the queries, and the one that makes values to what attention finds, so
that all heads read the cached rows themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from forerun.models.attention import Span
from forerun.models.config import LatentConfig
from forerun.models.hybrid.rows import RowLinear, attend_by_nodes, by_rows
from forerun.models.layers import rms_norm, rotate_

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
