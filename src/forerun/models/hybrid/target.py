"""RowDecoder: our decoder in torch for layers of other kinds; HybridDecoder: the same with recurrent layers.

Slots, prompts and trees are handled by the decoder that they extend, states by StatefulDecoder. Every row has the same
bits in any company: linear layers, norms and attention are computed as rows.py says. They run ordinary attention, gated
or not, multi-head latent attention and layers of different sizes, on GPUs, and on CPUs where the C kernels cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from forerun.core.types import Seq
from forerun.models.attention import PassRows, Span
from forerun.models.base import LayerSubset, SharedWeights
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.hybrid.attention import LatentAttention, SizedAttention
from forerun.models.hybrid.mixers import Mixer, Walk
from forerun.models.hybrid.rows import RowLinear, attend_by_nodes, by_rows, threads_for_rows
from forerun.models.hybrid.stateful import KEPT_BYTES, Made, State, StatefulDecoder, States
from forerun.models.hybrid.weights import GatedAttention, HybridBlock, HybridCheckpoint
from forerun.models.layers import Rotations, gate, mix, norm_heads_, rms_norm, rotate_
from forerun.models.slots import Placement, SlotTarget

Recur = Callable[[Mixer, Tensor], Tensor]  # a recurrent layer and its rows [M, D] -> [M, D]


class RowDecoder(Decoder):
    """Implements forerun.models.base.Target."""

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Tensor], **placed: Unpack[Placement]) -> None:
        SlotTarget.__init__(self, config, **placed)  # not Decoder's: its blocks have ordinary attention only
        with torch.no_grad(), torch.inference_mode(False):
            checkpoint = HybridCheckpoint(weights, config, self._dtype, self.device)
            self._embedding, self._blocks = checkpoint.embedding(), []
            self._hybrid_blocks = [checkpoint.hybrid_block(i) for i in range(config.layers)]
            self._layer_inputs = checkpoint.layer_inputs()
            self._final_norm = checkpoint.final_norm()
            self._head = checkpoint.head(self._embedding)
        self._head_linear = RowLinear(self._head)
        self._rotations = [Rotations(rope, self.device) for rope in config.ropes]
        self.early_exits = {}

    def shared(self) -> SharedWeights:
        """Without layers: they are not those that drafters know how to run."""
        return replace(super().shared(), layers=(), partial=None)

    def _run(self, given: PassRows, layers: LayerSubset | None = None, rows: Tensor | None = None) -> list[int] | None:
        assert layers is None and rows is None, "all layers run, or none"  # noqa: PT018
        with torch.inference_mode(), threads_for_rows(self.device):
            self._run_blocks(given)
        return None

    def _run_blocks(self, given: PassRows, recur: Recur | None = None) -> None:
        tokens, spans, seqs, hidden, logits, _ = given
        turns = [self._row_rotations(i, spans, seqs) for i in range(len(self.config.ropes))]
        unread = logits is None and not LayerSubset(self.config.layers).output_is_in(hidden)
        x, attends, scale, norm = self._embedded(tokens), 0, self.config.residual_scale, self._normed
        inputs = None
        if self._layer_inputs is not None:
            inputs = self._layer_inputs.of(torch.tensor(tokens, device=self.device), x)
        for i, block in enumerate(self._hybrid_blocks):
            if i in hidden:
                hidden[i].copy_(x)
            rows, mixer, rope = norm(x, block.norm), block.mixer, self.config.layer_ropes[i]
            rotations = None if rope is None else turns[rope]
            if isinstance(mixer, LatentAttention | SizedAttention):
                assert rotations is not None
                mixed = mixer.run(rows, rotations, self.kv.data, spans, self.config.attention_scale)
            elif isinstance(mixer, GatedAttention):
                mixed = self._attend(rows, mixer, attends, spans, rotations)
                attends += 1
            elif mixer is not None:
                assert recur is not None
                mixed = recur(mixer, rows)
            if mixer is not None:
                x += norm(mixed, block.after_mixer) * scale
            if unread and i == self.config.layers - 1:
                break
            if block.mlp is not None or block.experts is not None:
                x += norm(self._feed_forward(x, block), block.after_mlp) * scale
            if block.end is not None:
                own = None if inputs is None else inputs[:, i]
                x = block.end.apply(x, own, self.config.activation, self.config.norm_eps)
        if self.config.layers in hidden:
            hidden[self.config.layers].copy_(x)
        if not unread:
            self._finish_rows(x, hidden, logits)

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else by_rows(partial(rms_norm, weight=norm, eps=self.config.norm_eps), x)

    def _finish_rows(self, x: Tensor, hidden: Mapping[int, Tensor], logits: Tensor | None) -> None:
        if logits is not None or -1 in hidden:
            x = self.final_norm_of(x)
        if -1 in hidden:
            hidden[-1].copy_(x)
        if logits is not None:
            logits.copy_(self._head_product(x[: len(logits)]))

    def final_norm_of(self, rows: Tensor) -> Tensor:
        return by_rows(super().final_norm_of, rows)

    def _head_product(self, rows: Tensor) -> Tensor:
        return self._head_linear(rows)

    def _attend(
        self, rows: Tensor, mixer: GatedAttention, index: int, spans: Sequence[Span], rotations: Tensor | None
    ) -> Tensor:
        """[M, D] -> [M, D] with the keys and values of the attention layer of this number."""
        config = self.config
        heads, dim, both = config.heads, config.head_dim, (config.heads + config.kv_heads) * config.head_dim
        wide = mixer.inputs(rows)
        turned = (wide[:, :both],) if rotations is None else (wide[:, :both], rotations)
        rotary = by_rows(partial(self._rotated, norm=mixer.qk_norm), *turned)
        rotary = rotary.view(len(rows), -1, dim)
        values = wide[:, both : both + config.kv_heads * dim].view(len(rows), -1, dim)
        found = rows.new_empty(len(rows), heads, dim)
        made = torch.stack((rotary[:, heads:], values), 1)
        attend_by_nodes(self.kv.data[index], spans, rotary[:, :heads].contiguous(), made, config.attention_scale, found)
        flat = found.flatten(1)
        if config.gated_attention:
            flat *= by_rows(torch.sigmoid, wide[:, -heads * dim :])
        return mixer.output(flat)

    def _rotated(self, wide: Tensor, rotations: Tensor | None = None, *, norm: Tensor | None) -> Tensor:
        """Queries and keys of all heads, normed and rotated."""
        config, rotary = self.config, wide.view(len(wide), -1, self.config.head_dim)
        if norm is not None:
            norm_heads_(rotary, norm, config.heads, config.qk_norm == "all", config.norm_eps)
        if rotations is not None:
            pairs = rotary[..., : config.ropes[0].dims].view(*rotary.shape[:2], -1, 2)
            rotate_(pairs, torch.view_as_complex(rotations))
        return wide

    def _row_rotations(self, index: int, spans: Sequence[Span], seqs: Sequence[Seq]) -> Tensor:
        """[M, 1, R, 2] the rotation of every row's position by one rope."""
        rope, parts = self._rotations[index], list[Tensor]()
        for span, seq in zip(spans, seqs, strict=True):
            positions = torch.tensor([span.length + depth for depth in span.shape.depths], device=self.device)
            turn = partial(rope.at, regime=rope.rope.regime(self._lengths[seq.id]))
            parts.append(by_rows(lambda some, turn=turn: torch.view_as_real(turn(some)), positions))
        return torch.cat(parts)

    def _feed_forward(self, x: Tensor, block: HybridBlock) -> Tensor:
        rows = self._normed(x, block.mlp_norm)
        activation, moe, added = self.config.activation, self.config.moe, list[Tensor]()
        before, after, dense = block.apart or (None, None, None)
        if block.experts is not None:
            assert moe is not None
            mixed = mix(rows if before is None else self._normed(x, before), block.experts, moe, activation, by_rows)
            added.append(self._normed(mixed, after))
        if block.mlp is not None:
            given = block.mlp.down(by_rows(partial(gate, activation=activation), block.mlp.gate_up(rows)))
            added.append(self._normed(given, dense))
        return added[0] if len(added) == 1 else added[0] + added[1]


def torch_decoder(config: DecoderConfig) -> type[Decoder]:
    """Which of our decoders in torch runs a model."""
    if config.recurrent is not None:
        return HybridDecoder
    return Decoder if config.special is None else RowDecoder


class HybridDecoder(StatefulDecoder, RowDecoder):
    """Implements forerun.models.base.Target."""

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Tensor], **placed: Unpack[Placement]) -> None:
        RowDecoder.__init__(self, config, weights, **placed)
        assert config.recurrent is not None
        self._recurrent = config.recurrent
        mixers = [block.mixer for block in self._hybrid_blocks if block.mixer is not None]
        self._mixers = [one for one in mixers if not isinstance(one, GatedAttention | LatentAttention | SizedAttention)]
        self._states = States(max(KEPT_BYTES, (placed.get("kv_memory") or 0) // 8))

    def _run(self, given: PassRows, layers: LayerSubset | None = None, rows: Tensor | None = None) -> list[int] | None:
        """The nodes of trees all keep their states for a verdict."""
        _, spans, seqs, *_, trees = given
        made = list[list[Made]]()
        starts = [self._start_state(seq, span.length) for seq, span in zip(seqs, spans, strict=True)]

        def recur(mixer: Mixer, rows: Tensor) -> Tensor:
            mixed, states = mixer.run(rows, walks, [state[len(made)] for state in starts])
            made.append(states)
            return mixed

        with torch.inference_mode(), threads_for_rows(self.device):
            walks = [self._walk(seq, span, i < trees) for i, (seq, span) in enumerate(zip(seqs, spans, strict=True))]
            self._run_blocks(given, recur)
        for b, seq in enumerate(seqs):
            self._states.note(seq.id, [layer[b] for layer in made])
        return None

    def _walk(self, seq: Seq, span: Span, is_tree: bool) -> Walk:
        kept = frozenset(range(span.nodes) if is_tree else self._kept_nodes(seq, span.length, span.nodes))
        return Walk.of(span, is_tree, kept, self._recurrent.kernel, self.device)

    def _empty_state(self) -> State:
        return tuple(mixer.start() for mixer in self._mixers)

    def _state_of(self, made: Sequence[Made], node: int) -> State:
        with torch.inference_mode(), threads_for_rows(self.device):
            return super()._state_of(made, node)
