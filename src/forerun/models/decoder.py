"""Decoder: our own model in torch, a Target for every family of forerun.models.families.

One pass serves prompts, trees and plain decoding: rows of all sequences share the linear layers, attention
runs per sequence. What is the same for every layer (rotations, masks, views of buffers and of the KV cache) is
made once per pass, which makes a pass over one node cheap on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.tree import chain_of
from forerun.core.types import Greedy, Needs, Prompts, Scores, Seq, TreeBatch, offsets
from forerun.models.attention import PassRows, Span, attend, views_of, write_keys
from forerun.models.base import LayerSubset, SharedWeights
from forerun.models.blocks import Block, Checkpoint
from forerun.models.config import DecoderConfig
from forerun.models.layers import (
    Experts,
    Rotations,
    add_linear_,
    check_numbers,
    gate,
    linear,
    mix,
    norm_heads_,
    rms_norm,
    rotate_,
    softcap_,
)
from forerun.models.partial import EarlyExitChain, PartialTarget, reusable_nodes, rows_after_first_layers
from forerun.models.slots import Piece, Placement, SlotTarget

CHUNK = 512  # rows of prompts per pass


class Decoder(SlotTarget):
    """Implements forerun.models.base.Target."""

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Tensor], **placed: Unpack[Placement]) -> None:
        super().__init__(config, **placed)
        with torch.no_grad(), torch.inference_mode(False):
            checkpoint = Checkpoint(weights, config, self._dtype, self.device)
            self._embedding = checkpoint.embedding()
            self._blocks = [checkpoint.block(i) for i in range(config.layers)]
            self._final_norm = checkpoint.final_norm()
            self._head = checkpoint.head(self._embedding)
        self._rotations = [Rotations(rope, self.device) for rope in config.ropes]
        self.early_exits: dict[int, EarlyExitChain] = {}  # drafted with its own first layers, by sequence

    def shared(self) -> SharedWeights:
        return SharedWeights(
            embed=lambda ids: F.embedding(ids.to(self.device), self._embedding),
            head_rows=lambda ids: self._head[ids.to(self.device)],
            vocab_size=self.vocab_size,
            width=self.config.width,
            dtype=self._dtype,
            layers=self._blocks,
            final_norm=self._final_norm,
            rotations=self._rotations,
            config=self.config,
            partial=partial(PartialTarget, self),
        )

    def run_layers(
        self, tokens: Sequence[int], spans: Sequence[Span], seqs: Sequence[Seq], layers: LayerSubset
    ) -> Tensor:
        """[M, D] what leaves the last of some layers; their keys and values are written as in any pass."""
        rows = self._empty_rows(len(tokens))
        self._run(PassRows(tokens, spans, seqs, {layers.end: rows}), layers)
        return rows

    def final_norm_of(self, rows: Tensor) -> Tensor:
        """What the LM head reads, of rows that leave a layer: [M, D] -> [M, D]."""
        return rms_norm(rows, self._final_norm, self.config.norm_eps)

    def logits_of(self, rows: Tensor) -> Tensor:
        """[M, V] fp32, the LM head's, of rows that it reads [M, D]."""
        return self._finish_logits(self._head_product(rows).float())

    def _finish_logits(self, logits: Tensor) -> Tensor:
        """What the LM head gives, scaled and capped, in place."""
        if self.config.logit_scale != 1.0:
            logits.mul_(self.config.logit_scale)
        cap = self.config.logit_softcap
        return logits if cap is None else softcap_(logits, cap)

    def _head_product(self, rows: Tensor) -> Tensor:
        return linear(rows, self._head)

    @property
    def pass_rows(self) -> int:
        return CHUNK

    @torch.no_grad()
    def prefill(self, seqs: Sequence[Seq], needs: Needs, rows: int | None = None) -> tuple[TreeBatch, Scores]:
        """Cache tokens that are not cached yet, in passes of at most CHUNK rows."""
        fresh = self._admit(seqs, needs, rows)
        self._note_layers(seqs, needs)
        hidden = self._hidden_rows(needs, sum(map(len, fresh)))
        for first, pieces in self._passes(seqs, fresh, CHUNK):
            spans = _chain_spans(0, pieces)
            rows_here = slice(first, first + spans[-1].end)
            into = {layer: out[rows_here] for layer, out in hidden.items()}
            tokens = [token for piece in pieces for token in piece.tokens]
            self._run(PassRows(tokens, spans, [piece.seq for piece in pieces], into))
            self._keep_rows(into, [slot for span in spans for slot in span.slots])
        chains, found = self._with_found(seqs, fresh, hidden)
        return TreeBatch.chains(chains, self.device), Scores(None, found)

    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        """One pass over every node, and over prompts behind them; keys and values go behind the committed ones."""
        tokens, shapes, nodes = trees.to_host()[0], trees.topology(), trees.nodes
        spans: list[Span] = []
        owners = list(seqs)
        self._note_layers(seqs, needs)
        for b, seq in enumerate(seqs):
            first, end = trees.starts[b : b + 2]
            extent = self._extent_for(seq, end - first)
            spans.append(Span(first, end, extent.pages, extent.length, shapes[b]))
        fresh: list[list[int]] = []
        pieces: list[Piece] = []
        if prompts is not None:
            fresh = self._admit(prompts.seqs, needs, prompts.rows)
            self._note_layers(prompts.seqs, needs)
            pieces = self._pieces(prompts.seqs, fresh)
            spans += _chain_spans(nodes, pieces)
            owners += [piece.seq for piece in pieces]
            tokens = [*tokens, *(token for piece in pieces for token in piece.tokens)]
        hidden = self._hidden_rows(needs, len(tokens))
        logits = torch.empty(nodes, self.vocab_size, dtype=self._dtype, device=self.device)
        argmax = self._run_trees(PassRows(tokens, spans, owners, hidden, logits, len(seqs)))
        if hidden:
            self._keep_rows(hidden, [slot for span in spans for slot in span.slots])
        self._keep_pieces(pieces)
        if self._dtype != torch.float32:
            logits = logits.float()
        if argmax is None:  # kernels that know it have looked at every logit, and finished it
            logits = self._finish_logits(check_numbers(logits))
        known = None if argmax is None else Greedy(argmax)
        if prompts is None:
            return Scores(logits, hidden, known)
        behind = {layer: rows[nodes:] for layer, rows in hidden.items()}
        chains, behind = self._with_found(prompts.seqs, fresh, behind)
        read = TreeBatch.chains(chains, self.device), Scores(None, behind)
        return Scores(logits, {layer: rows[:nodes] for layer, rows in hidden.items()}, known, read)

    def _read_piece(self, piece: Piece) -> None:
        self._run(PassRows(piece.tokens, _chain_spans(0, [piece]), [piece.seq], {}))

    def release(self, seq: Seq) -> None:
        self.early_exits.pop(seq.id, None)
        super().release(seq)

    def _hidden_rows(self, needs: Needs, rows: int) -> Mapping[int, Tensor]:
        return {layer: self._empty_rows(rows) for layer in self._layers(needs)}

    def _run_trees(self, given: PassRows) -> list[int] | None:
        """A pass whose trees may have gone through the first layers already: early exits are not computed again."""
        if not self.early_exits:
            return self._run(given)
        tokens, spans, seqs, hidden, *_ = given
        drafted = seqs[: given.trees]
        chains = [self.early_exits.pop(seq.id, None) for seq in drafted]
        mine = {i: chain for i, chain in enumerate(chains) if chain is not None}
        ends = {chain.end for chain in mine.values()}
        mine = {i: chain for i, chain in mine.items() if chain.follows(self.kv.extent(drafted[i].id))}
        adapted = any(seq.adapter is not None for seq in drafted)  # who drafted may not have had the adapter
        done = reusable_nodes(mine, tokens, spans) if len(ends) == 1 and not hidden and not adapted else {}
        if not done:
            return self._run(given)
        rows = rows_after_first_layers(mine, done, tokens, spans, seqs, self.run_layers)
        rest = LayerSubset(self.config.layers, first=ends.pop())
        return self._run(given, rest, rows)

    @torch.inference_mode()
    def _run(self, given: PassRows, layers: LayerSubset | None = None, rows: Tensor | None = None) -> list[int] | None:
        """One pass, which fills the hidden rows and logits given.

        `layers` None = all; `rows` [M, D] enter the first of them, and are overwritten; None = the tokens' embedding.
        Kernels may say where logits are largest.
        """
        (tokens, spans, seqs, hidden, logits, _), config, data = given, self.config, self.kv.data
        heads, head_dim = config.heads, config.head_dim
        qkv = data.new_empty(len(tokens), (heads + 2 * config.kv_heads) * head_dim)
        found = data.new_empty(len(tokens), heads * head_dim)
        views = {window: views_of(spans, window, data, qkv, found, heads) for window in set(config.windows)}
        rotary = qkv[:, : (heads + config.kv_heads) * head_dim].view(len(tokens), -1, head_dim)
        rotations = [self._rope_rotations(i, spans, seqs) for i in range(len(config.ropes))]
        pairs = [rotary[..., : rope.dims].view(*rotary.shape[:2], -1, 2) for rope in config.ropes]

        layers = layers or LayerSubset(config.layers)
        ends_with_keys = logits is None and not layers.output_is_in(hidden)
        x = self._embedded(tokens) if rows is None else rows  # [M, D]
        for i in range(layers.first, layers.end):
            block = self._blocks[i]
            if i in hidden:
                hidden[i].copy_(x)
            if i in layers.without_attention:
                self._add_mlp(x, block, i, layers)
                continue
            linear(self._normed(x, block.attention_norm), block.qkv, block.qkv_bias, out=qkv)
            if block.qk_norm is not None:
                norm_heads_(rotary, block.qk_norm, heads, config.qk_norm == "all", config.norm_eps)
            rope = config.layer_ropes[i]
            if rope is not None:
                rotate_(pairs[rope], rotations[rope])
            if ends_with_keys and i == layers.end - 1:
                write_keys(i, views[config.windows[i]])
                break
            for view in views[config.windows[i]]:
                attend(i, view, config.attention_scale, config.attention_softcap, block.sinks)
            self._add_attention(x, block, found)
            self._add_mlp(x, block, i, layers)
        if layers.end in hidden:
            hidden[layers.end].copy_(x)
        if logits is not None or -1 in hidden:
            x = rms_norm(x, self._final_norm, config.norm_eps)
        if -1 in hidden:
            hidden[-1].copy_(x)
        if logits is not None:
            self._fill_logits(x[: len(logits)], logits)
        return None

    def _embedded(self, tokens: Sequence[int]) -> Tensor:
        """[M, D] what enters the first layer."""
        x = F.embedding(torch.tensor(tokens, device=self.device), self._embedding)
        if self.config.embedding_scale != 1.0:
            x.mul_(torch.tensor(self.config.embedding_scale, dtype=self._dtype))
        return x

    def _fill_logits(self, x: Tensor, logits: Tensor) -> None:
        linear(x, self._head, out=logits)

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else rms_norm(x, norm, self.config.norm_eps)

    def _add_attention(self, x: Tensor, block: Block, found: Tensor) -> None:
        """From what attention found to the residual stream, in place."""
        self._add(x, found, block.o, block.o_bias, block.after_attention_norm)

    def _add_mlp(self, x: Tensor, block: Block, index: int, layers: LayerSubset) -> None:
        """The rest of a layer, which works row by row, in place; nothing where it is left out."""
        if index in layers.without_mlp:
            return
        activation, rows, mlp = self.config.activation, self._normed(x, block.mlp_norm), block.mlp
        if isinstance(mlp, Experts):
            assert self.config.moe is not None
            found = self._normed(self._whole(mix(rows, mlp, self.config.moe, activation)), block.after_mlp_norm)
            x.add_(found, alpha=self.config.residual_scale)
            return
        inner = gate(linear(rows, mlp.gate_up, mlp.gate_up_bias), activation)
        self._add(x, inner, mlp.down, mlp.down_bias, block.after_mlp_norm)

    def _whole(self, part: Tensor) -> Tensor:
        """The sum of what ranks have of a product, where several share the layers."""
        return part

    def _add(self, x: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None) -> None:
        """x += what a layer's last product makes of these rows."""
        scale = self.config.residual_scale
        if norm is None and scale == 1.0:
            add_linear_(x, rows, weight, bias)
        else:
            x.add_(self._normed(linear(rows, weight, bias), norm), alpha=scale)

    def _rope_rotations(self, index: int, spans: Sequence[Span], seqs: Sequence[Seq]) -> Tensor:
        """[M, 1, R] the rotations of one rope at every row's position."""
        rotations = self._rotations[index]
        regimes = [rotations.rope.regime(self._lengths[seq.id]) for seq in seqs]
        positions = [[span.length + span.skipped + depth for depth in span.shape.depths] for span in spans]
        if len(set(regimes)) == 1:
            flat = [position for row in positions for position in row]
            return rotations.at(torch.tensor(flat, device=self.device), regimes[0])
        rows = zip(positions, regimes, strict=True)
        return torch.cat([rotations.at(torch.tensor(row, device=self.device), r) for row, r in rows])


def _chain_spans(first: int, pieces: Sequence[Piece]) -> list[Span]:
    """Pieces of prompts, laid end to end from a row on."""
    starts = offsets([len(piece.tokens) for piece in pieces])
    return [
        Span(first + low, first + high, piece.extent.pages, piece.extent.length, chain_of(high - low))
        for piece, (low, high) in zip(pieces, pairwise(starts), strict=True)
    ]
