"""HybridDecoder: our decoder in torch for models with recurrent layers, a Target whose states roll back.

It runs on GPUs, and on CPUs where the native kernels cannot (native.py). Every row has the same bits in any company
(rows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.types import Seq
from forerun.models.attention import Span
from forerun.models.base import LayerSubset, SharedWeights
from forerun.models.config import DecoderConfig
from forerun.models.hybrid.mixers import Walk
from forerun.models.hybrid.rows import RowLinear, attend_by_nodes, by_rows, threads_for_rows
from forerun.models.hybrid.stateful import StatefulDecoder
from forerun.models.hybrid.states import KEPT_BYTES, Made, State, States
from forerun.models.hybrid.weights import GatedAttention, HybridBlock, HybridCheckpoint
from forerun.models.layers import Rotations, gate, mix, norm_heads_, rms_norm, rotate_
from forerun.models.slots import SlotTarget


class HybridDecoder(StatefulDecoder):
    """Implements forerun.models.base.Target."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_slots: int | None,
        kv_memory: int | None = None,
    ) -> None:
        # Not Decoder's: its blocks have attention only.
        SlotTarget.__init__(
            self, config, dtype=dtype, device=torch.device(device), kv_slots=kv_slots, kv_memory=kv_memory
        )
        assert config.recurrent is not None
        self._recurrent = config.recurrent
        with torch.no_grad(), torch.inference_mode(False):
            checkpoint = HybridCheckpoint(weights, config, dtype, self.device)
            self._embedding = checkpoint.embedding()
            self._hybrid_blocks = [checkpoint.hybrid_block(i) for i in range(config.layers)]
            self._final_norm = checkpoint.final_norm()
            self._head = checkpoint.head(self._embedding)
        self._head_linear = RowLinear(self._head)
        self._rotations = [Rotations(rope, self.device) for rope in config.ropes]
        self.early_exits = {}
        mixers = [block.mixer for block in self._hybrid_blocks]
        self._mixers = [one for one in mixers if one is not None and not isinstance(one, GatedAttention)]
        self._states = States(max(KEPT_BYTES, (kv_memory or 0) // 8))

    def shared(self) -> SharedWeights:
        """Without layers: none of them can run apart from its state."""
        return SharedWeights(
            embed=lambda ids: F.embedding(ids.to(self.device), self._embedding),
            head_rows=lambda ids: self._head[ids.to(self.device)],
            vocab_size=self.vocab_size,
            width=self.config.width,
            dtype=self._dtype,
            final_norm=self._final_norm,
            rotations=self._rotations,
            config=self.config,
        )

    def _run_on(
        self,
        drafted: Sequence[Seq],
        tokens: Sequence[int],
        spans: Sequence[Span],
        seqs: Sequence[Seq],
        hidden: Mapping[int, Tensor],
        logits: Tensor,
    ) -> list[int] | None:
        self._pass(tokens, spans, seqs, hidden, logits, len(drafted))
        return None

    def _run(
        self,
        tokens: Sequence[int],
        spans: Sequence[Span],
        seqs: Sequence[Seq],
        hidden: Mapping[int, Tensor],
        logits: Tensor | None = None,
        layers: LayerSubset | None = None,
        rows: Tensor | None = None,
    ) -> list[int] | None:
        assert layers is None and rows is None, "no layer runs apart from its state"  # noqa: PT018
        self._pass(tokens, spans, seqs, hidden, logits, 0)
        return None

    def _pass(
        self,
        tokens: Sequence[int],
        spans: Sequence[Span],
        seqs: Sequence[Seq],
        hidden: Mapping[int, Tensor],
        logits: Tensor | None,
        trees: int,
    ) -> None:
        """One pass over M rows; the first `trees` spans are trees, whose nodes all keep their states for a verdict."""
        with torch.inference_mode(), threads_for_rows(self.device):
            walks = [self._walk(seq, span, i < trees) for i, (seq, span) in enumerate(zip(seqs, spans, strict=True))]
            made = self._run_blocks(tokens, walks, seqs, hidden, logits)
        for b, seq in enumerate(seqs):
            self._states.nodes[seq.id] = [layer[b] for layer in made]

    def _run_blocks(
        self,
        tokens: Sequence[int],
        walks: Sequence[Walk],
        seqs: Sequence[Seq],
        hidden: Mapping[int, Tensor],
        logits: Tensor | None,
    ) -> list[list[Made]]:
        """By recurrent layer and walk: the states of the nodes that are kept."""
        spans = [walk.span for walk in walks]
        rotations = self._row_rotations(spans, seqs)
        starts, made = [self._start_state(seq, span) for seq, span in zip(seqs, spans, strict=True)], list[list[Made]]()
        unread = logits is None and not LayerSubset(self.config.layers).output_is_in(hidden)
        x, attends, scale = self._embedded(tokens), 0, self.config.residual_scale
        for i, block in enumerate(self._hybrid_blocks):
            if i in hidden:
                hidden[i].copy_(x)
            rows = x if block.norm is None else by_rows(self._norm_by(block.norm), x)
            if block.mixer is None:
                pass
            elif isinstance(block.mixer, GatedAttention):
                turns = None if self.config.layer_ropes[i] is None else rotations
                x += self._attend(rows, block.mixer, attends, spans, turns) * scale
                attends += 1
            else:
                mixed, states = block.mixer.run(rows, walks, [state[len(made)] for state in starts])
                x += mixed * scale
                made.append(states)
            if unread and i == self.config.layers - 1:
                break
            if block.mlp is not None or block.experts is not None:
                x += self._feed_forward(x, block) * scale
        if self.config.layers in hidden:
            hidden[self.config.layers].copy_(x)
        if not unread:
            self._finish_rows(x, hidden, logits)
        return made

    def _finish_rows(self, x: Tensor, hidden: Mapping[int, Tensor], logits: Tensor | None) -> None:
        if logits is not None or -1 in hidden:
            x = self.final_norm_of(x)
        if -1 in hidden:
            hidden[-1].copy_(x)
        if logits is not None:
            logits.copy_(self._head_product(x[: len(logits)]))

    def _norm_by(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        return partial(rms_norm, weight=weight, eps=self.config.norm_eps)

    def final_norm_of(self, rows: Tensor) -> Tensor:
        return by_rows(super().final_norm_of, rows)

    def _head_product(self, rows: Tensor) -> Tensor:
        return self._head_linear(rows)

    def _walk(self, seq: Seq, span: Span, is_tree: bool) -> Walk:
        kept = frozenset(range(span.nodes) if is_tree else self._kept_nodes(seq, span))
        return Walk.of(span, is_tree, kept, self._recurrent.kernel, self.device)

    def _empty_state(self) -> State:
        return tuple(mixer.start() for mixer in self._mixers)

    def _state_of(self, made: Sequence[Made], node: int) -> State:
        with torch.inference_mode(), threads_for_rows(self.device):
            return super()._state_of(made, node)

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

    def _row_rotations(self, spans: Sequence[Span], seqs: Sequence[Seq]) -> Tensor:
        """[M, 1, R, 2] the rotation of every row's position."""
        parts = []
        for span, seq in zip(spans, seqs, strict=True):
            positions = torch.tensor([span.length + depth for depth in span.shape.depths], device=self.device)
            turn = partial(self._rotations[0].at, regime=self._rotations[0].rope.regime(self._lengths[seq.id]))
            parts.append(by_rows(lambda some, turn=turn: torch.view_as_real(turn(some)), positions))
        return torch.cat(parts)

    def _feed_forward(self, x: Tensor, block: HybridBlock) -> Tensor:
        assert block.mlp_norm is not None
        rows = by_rows(self._norm_by(block.mlp_norm), x)
        activation, moe, added = self.config.activation, self.config.moe, list[Tensor]()
        if block.experts is not None:
            assert moe is not None
            added.append(by_rows(partial(mix, experts=block.experts, config=moe, activation=activation), rows, size=1))
        if block.mlp is not None:
            added.append(block.mlp.down(by_rows(partial(gate, activation=activation), block.mlp.gate_up(rows))))
        return added[0] if len(added) == 1 else added[0] + added[1]
