"""HybridDecoder: our decoder in torch for models with recurrent layers, a Target whose states roll back.

Slots, prompts, trees and other layers are handled by RowDecoder, states by StatefulDecoder. Every row has the same bits
in any company (rows.py). It runs on GPUs, and on CPUs where the C kernels (native.py) cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor

from forerun.core.types import Seq
from forerun.models.attention import PassRows, Span
from forerun.models.base import LayerSubset
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.hybrid.latent import LatentAttention
from forerun.models.hybrid.mixers import Mixer, Walk
from forerun.models.hybrid.row_decoder import RowDecoder
from forerun.models.hybrid.rows import threads_for_rows
from forerun.models.hybrid.sized import SizedAttention
from forerun.models.hybrid.stateful import StatefulDecoder
from forerun.models.hybrid.states import KEPT_BYTES, Made, State, States
from forerun.models.hybrid.weights import GatedAttention
from forerun.models.slots import Placement


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
        starts, made = [self._start_state(seq, span) for seq, span in zip(seqs, spans, strict=True)], list[list[Made]]()

        def recur(mixer: Mixer, rows: Tensor) -> Tensor:
            mixed, states = mixer.run(rows, walks, [state[len(made)] for state in starts])
            made.append(states)
            return mixed

        with torch.inference_mode(), threads_for_rows(self.device):
            walks = [self._walk(seq, span, i < trees) for i, (seq, span) in enumerate(zip(seqs, spans, strict=True))]
            self._run_blocks(given, recur)
        for b, seq in enumerate(seqs):
            self._states.nodes[seq.id] = [layer[b] for layer in made]
        return None

    def _walk(self, seq: Seq, span: Span, is_tree: bool) -> Walk:
        kept = frozenset(range(span.nodes) if is_tree else self._kept_nodes(seq, span))
        return Walk.of(span, is_tree, kept, self._recurrent.kernel, self.device)

    def _empty_state(self) -> State:
        return tuple(mixer.start() for mixer in self._mixers)

    def _state_of(self, made: Sequence[Made], node: int) -> State:
        with torch.inference_mode(), threads_for_rows(self.device):
            return super()._state_of(made, node)
