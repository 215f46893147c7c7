"""NativeHead: an EAGLE head for the native CPU kernels, in blocks of four or eight bits.

A draft step on a CPU is memory traffic and the number of operations, so here it is an eighth or a quarter of the bytes
and two calls, and the target's embedding is read in place. Rounding costs a rejected token now and then, and never
correctness, which is the verifier's: with four bits the packaged head writes 2.09 tokens a round in chains of three
instead of 2.10 with eight, and a level takes half as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from forerun.drafters.eagle.config import EagleConfig
from forerun.drafters.head_shape import checked_shared, vocabulary_of
from forerun.drafters.matrix import Matrix, packed_form
from forerun.errors import VocabularyMismatch
from forerun.models.load.quants import Blocks
from forerun.models.native import head_library
from forerun.models.native import library as native
from forerun.models.native.head_library import Head, HeadLayer
from forerun.models.native.library import Weights
from forerun.models.native.packing import (
    FloatMode,
    as_q4_1,
    is_packable,
    pack_blocks,
    side_by_side,
    table_of,
    take_rows,
    unpack_rows,
)
from forerun.models.shared import SharedWeights

Bits = Literal[4, 8]
_MANY = 1024  # rows of the LM head that are worth rounding
_ROWS = 4096  # of them that are in floats at once


class NativeHead:
    """Weights of one head, packed, and the struct that points to them."""

    def __init__(
        self,
        config: EagleConfig,
        weights: Mapping[str, Tensor],
        shared: SharedWeights | None,
        bits: Bits | None = None,
    ) -> None:
        """`bits` of a weight; None = four where memory limits the kernels, else eight."""
        self.config, self.device = config, torch.device("cpu")
        if bits is None:
            bits = 4 if native.library().fr_prefers_half() else 8
        self._mode: FloatMode = "q4" if bits == 4 else "q8"
        self._weights, self._kept = weights, list[Tensor]()
        self.vocabulary = vocabulary_of(config, weights)
        self._shared = checked_shared(config, weights, shared)
        narrows = self._weights.get("embed_proj.weight")  # of a head that is narrower than its target
        self._embed_proj = None if narrows is None else Matrix(narrows.detach().float())
        self._table = self._embedding_table()
        with torch.no_grad(), torch.inference_mode(False):
            layers = ["midlayer.", *(f"layers.{i}." for i in range(1, config.depth))]
            self.layers = (HeadLayer * config.depth)(*map(self._layer, layers))
            self.struct = self._struct()
        self.ids: list[int] = self.vocabulary.ids.tolist()
        # can the kernels look up whatever they draft?
        self.looks_up = self._table is not None and max(self.ids) < self._table.shape[0]
        self.int32_ids = self.vocabulary.ids.to(torch.int32)
        del self._weights  # what is needed is packed by now

    @staticmethod
    def supports(config: EagleConfig, device: torch.device) -> bool:
        """Can the kernels run such a head here?"""
        fits = config.head_dim % 4 == 0 and config.heads % config.kv_heads == 0
        return fits and device.type == "cpu" and head_library.available()

    def embedded(self, tokens: list[int]) -> Tensor | None:
        """[N, D] of these tokens; None where the kernels look them up themselves."""
        if self._table is not None:
            if max(tokens) >= self._table.shape[0]:  # C would read what is not there
                raise VocabularyMismatch(
                    f"token {max(tokens)} is beyond the head's {self._table.shape[0]}: use a head of this target"
                )
            return None
        assert self._shared is not None
        rows = self._shared.embed(torch.tensor(tokens)).float().contiguous()
        return rows if self._embed_proj is None else self._embed_proj.times(rows)

    def _struct(self) -> Head:
        config, table = self.config, self._table
        fused = config.kind == "eagle3"
        parts = [self._weights[f"fc_norm.{i}.weight"] for i in range(len(config.layers)) if config.fc_norm]
        return Head(
            width=config.width,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            inner=config.inner,
            features=config.feature_width,
            parts=max(1, len(config.layers)),
            joins_token=not fused,
            norm_before_residual=config.norm_before_residual,
            norm_output=config.norm_output,
            depth=config.depth,
            eps=config.norm_eps,
            attention_scale=config.head_dim**-0.5,
            token_norm=self._vector("midlayer.input_layernorm.weight") if fused else None,
            feature_norm=self._vector("midlayer.hidden_norm.weight") if fused else None,
            out_norm=self._vector("norm.weight"),
            input_norm=self._vector("input_norm.weight") if config.norm_before_fc else None,
            part_norms=self._keep(torch.cat(parts)) if parts else None,
            fc=self._linear(self._weights["fc.weight"], bias=self._weights.get("fc.bias")),
            lm_head=self._lm_head(),
            layers=self.layers,
            embedding=table_of(table),
        )

    def _layer(self, at: str) -> HeadLayer:
        """The layer whose weights are named so; an ordinary one has a norm of its own before attention."""
        return HeadLayer(
            input_norm=None if at == "midlayer." else self._vector(at + "input_layernorm.weight"),
            mlp_norm=self._vector(at + "post_attention_layernorm.weight"),
            qkv=self._linear(*(self._weights[f"{at}self_attn.{name}_proj.weight"] for name in "qkv")),
            output=self._linear(self._weights[at + "self_attn.o_proj.weight"]),
            gate_up=self._linear(*(self._weights[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up"))),
            down=self._linear(self._weights[at + "mlp.down_proj.weight"]),
        )

    def _embedding_table(self) -> Tensor | Blocks | None:
        """What tokens are looked up in; None where only the target can do it."""
        own = self._weights.get("embed_tokens.weight")
        if own is not None:
            return own.detach().float().contiguous()
        assert self._shared is not None
        if self._embed_proj is not None:
            return None
        return self._shared.table if table_of(self._shared.table).rows else None

    def _lm_head(self) -> Weights:
        """The head's own, or the target's rows of these words, as the file has them: never all of them in floats."""
        own = self._weights.get("lm_head.weight")
        if own is not None:
            return self._linear(own)
        assert self._shared is not None
        ids, table = self.vocabulary.ids, self._shared.head_table
        if not (isinstance(table, Blocks) and is_packable(table.kind)):
            return self._linear(self._shared.head_rows(ids))
        rows = take_rows(table, ids)
        if self._mode == "q4" and rows.data.numel() > len(ids) * table.shape[1] and len(ids) >= _MANY:
            packed = pack_blocks(_in_four_bits(rows))
        else:
            packed = pack_blocks(rows)
        self._kept.append(packed.data)
        return side_by_side([packed])

    def _linear(self, *weights: Tensor, bias: Tensor | None = None) -> Weights:
        packed = [packed_form(weight, bias, self._mode) for weight in weights]
        self._kept.extend(part.data for part in packed)
        self._kept.extend(part.bias for part in packed if part.bias is not None)
        return side_by_side(packed)

    def _vector(self, name: str) -> int | None:
        return self._keep(self._weights[name]) if name in self._weights else None

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor.detach().to(torch.float32, copy=True).contiguous())
        return self._kept[-1].data_ptr()


def _in_four_bits(blocks: Blocks) -> Blocks:
    """The same rows in a third to a half of the bytes, some at a time."""
    outputs, inputs = blocks.shape
    parts = [
        as_q4_1(unpack_rows(blocks, range(i, min(i + _ROWS, outputs)))) for i in range(0, outputs, _ROWS)
    ]
    return Blocks(parts[0].kind, (outputs, inputs), torch.cat([part.data for part in parts]))
