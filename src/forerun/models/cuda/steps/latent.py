"""The steps of layers with latent attention as Triton kernels: queries of heads, and one cached row per token."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from forerun.models.config import DecoderConfig, LatentConfig
from forerun.models.cuda.kernels import latent as kernels
from forerun.models.cuda.network import Buffers, Model, Run, shaped, turned
from forerun.models.cuda.plan import MAX_ROWS, QUERIES, split_of
from forerun.models.cuda.steps.attention import Attention
from forerun.models.cuda.steps.experts import FusedExpertSteps
from forerun.models.cuda.steps.fused import RESIDUAL, Product
from forerun.models.cuda.steps.tiles import power_of_two, programs_for, rows_per_tile
from forerun.models.cuda.weights import Weight

PARTS_BYTES = 1 << 30  # of what programs leave for others; passes with more rows have a program for a group


class LatentAttention(Attention):
    """The attention of one model on its device."""

    def __init__(self, config: DecoderConfig, max_length: int, device: torch.device, pdl: bool) -> None:
        assert config.latent is not None
        self.config, self.latent, self.room, self.pdl = config, config.latent, 0, pdl
        self.processors = 1
        if device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.blocks = -(-config.heads // QUERIES)  # of heads: as many as a program can have
        while config.heads % self.blocks:
            self.blocks += 1
        rank, every = config.latent.rank, MAX_ROWS * config.heads * (split_of(max_length + MAX_ROWS) + 1)
        self.most = max(MAX_ROWS * config.heads, min(every, PARTS_BYTES // (4 * rank)))  # rows of parts
        self.parts = torch.empty(self.most * rank, device=device)
        self.tops, self.sums = (torch.empty(self.most, device=device) for _ in range(2))

    def attend_latents(self, run: Run, queries: Tensor, store: Tensor, out: Tensor) -> None:
        """What all rows find in the cached rows [S, C + R] of a layer; heads of queries are as wide as these."""
        size, heads, latent = run.size, self.config.heads, self.latent
        taken = heads // self.blocks
        stride, settings = size.rows * heads, {"enable_fp_fusion": False, "launch_pdl": self.pdl}
        walks = size.groups * self.blocks >= 2 * self.processors or stride * size.splits > self.most
        programs = 1 if walks else programs_for(size, self.blocks, self.processors)
        for behind in (False, True) if walks else (False,):
            kernels.attend[size.groups, self.blocks, programs](
                queries, store, run.ints, run.groups, run.positions, out, self.parts, self.tops, self.sums,
                self.config.attention_scale / math.log(2), stride, programs, H=heads, EACH=power_of_two(taken),
                TAKEN=taken, C=latent.rank, R=latent.rope_dim, WALKS=walks, BEHIND=behind, PDL=self.pdl, num_warps=8,
                num_stages=1, **settings,
            )  # fmt: skip
        if not walks:
            self.split_stride = stride
            self._combine(run, latent.rank, out, 0, None, False, 4 if size.splits <= 8 else 8, settings)


class LatentSteps(FusedExpertSteps):
    """Implements forerun.models.cuda.network.Steps."""

    attention: LatentAttention

    def __init__(self, model: Model, buffers: Buffers, kv: Tensor, scales: Tensor | None = None) -> None:
        super().__init__(model, buffers, kv, scales)
        config, latent = model.config, _latent_of(model.config)
        wide, rank = config.heads * max(latent.key_dim, latent.value_dim), latent.query_rank or 0
        self.plain = torch.empty(MAX_ROWS, wide, dtype=model.dtype, device=model.device)
        self.short = torch.empty(MAX_ROWS, rank, dtype=model.dtype, device=model.device)

    def _make_attention(self, model: Model) -> Attention:
        return LatentAttention(model.config, model.max_length, model.device, self.pdl)

    def _other_weights(self) -> dict[str, Weight]:
        queries = self.model.layers[-1].latent
        return {} if queries is None or queries.queries is None else {"queries": queries.queries}

    def qkv(self, run: Run, layer: int) -> None:
        weights, latent, config = self.model.layers[layer], _latent_of(self.model.config), self.model.config
        own, heads, dim = weights.latent, config.heads, latent.key_dim
        assert own is not None
        assert weights.rope is not None
        sums = self._sums_of(run, "qkv", self.buffers.rows, weights.qkv)
        shared: dict[str, Any] = {
            "WIDTH": self.width, "PIECES": self.norm_columns, "C": latent.rank, "R": latent.rope_dim,
            "ROT": weights.rope.shape[1], "PDL": self.pdl, "num_warps": 4, "enable_fp_fusion": False,
            "launch_pdl": self.pdl,
        }  # fmt: skip
        stride, rank, eps = self.squares.stride(0), latent.query_rank or 0, config.norm_eps
        places = turned(self.buffers, run)
        kernels.finish[(run.size.rows,)](
            sums.data, self.squares, own.norm, own.norm if own.query_norm is None else own.query_norm, self.kv[layer],
            weights.rope, places, run.slots, self.short, eps, stride, N=weights.qkv.shape[0], SHORT=rank,
            SHORT_UP=power_of_two(rank), **shared,
        )  # fmt: skip
        outputs = weights.qkv.shape[0]
        if own.queries is not None:
            sums, outputs = self._sums_of(run, "queries", self.short, own.queries), own.queries.shape[0]
        plain, queries = shaped(self.plain, heads * dim), self.buffers.queries
        kernels.turn[run.size.rows, heads](
            sums.data, self.squares, weights.rope, places, plain, queries, eps, stride, N=outputs, H=heads,
            DIM=dim, DIM_UP=power_of_two(dim), NORMED=own.queries is not None, **(shared | {"num_warps": 1}),
        )  # fmt: skip
        self._by_heads(run, plain, own.keys, queries, latent.row)

    def attend(self, run: Run, layer: int) -> None:
        self.attention.attend_latents(run, self.buffers.queries, self.kv[layer], self.buffers.found)

    def leave_attention(self, run: Run, layer: int) -> None:
        weights, rows = self.model.layers[layer], self.buffers.rows
        assert weights.latent is not None
        given = shaped(self.plain, weights.o.shape[1])
        self._by_heads(run, self.buffers.found, weights.latent.values, given, weights.latent.values.shape[1])
        self._linear(run, Product("o", RESIDUAL, given, weights.o, rows, norm=weights.mlp_norm))

    def _by_heads(self, run: Run, rows: Tensor, weights: Tensor, out: Tensor, numbers: int) -> None:
        """Rows [R, H, K] by weights [H, N, K], to the first N of the `numbers` that heads of `out` have."""
        heads, outputs, depth = weights.shape
        tile, step = (next(size for size in (64, 32, 16) if one % size == 0) for one in (outputs, depth))
        wide = rows_per_tile(run.size.rows)
        kernels.by_heads[-(-run.size.rows // wide), outputs // tile, heads](
            rows, weights, out, run.size.rows, N=outputs, K=depth, H=heads, OUT=numbers, BN=tile, BK=step, MT=wide,
            PDL=self.pdl, num_warps=4, enable_fp_fusion=False, launch_pdl=self.pdl,
        )  # fmt: skip


def _latent_of(config: DecoderConfig) -> LatentConfig:
    assert config.latent is not None
    return config.latent
