"""SequenceCache: what the decoder keeps of one sequence: keys and values of its tokens, and those of its source."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STEP = 64  # slots that a cache grows by


class SequenceCache:
    """Committed slots first, the nodes of the last pass behind them; growing keeps what is committed."""

    def __init__(self, source: Tensor, encoded: Tensor) -> None:
        self.source = source  # [L, 2, H, S, Dh]
        self.encoded = encoded  # [S, D] what the encoder made of it
        layers, _, heads, _, head_dim = source.shape
        self.data = source.new_empty(layers, 2, heads, 0, head_dim)
        self.length = 0  # committed slots

    def reserve(self, nodes: int) -> None:
        """Slots for so many nodes behind the committed ones."""
        have, wanted = self.data.shape[3], self.length + nodes
        if wanted > have:
            grown = self.data.new_empty(*self.data.shape[:3], -(-wanted // STEP) * STEP, self.data.shape[4])
            grown[:, :, :, : self.length] = self.data[:, :, :, : self.length]
            self.data = grown

    @torch.inference_mode()  # its tensors are made in that mode
    def keep(self, path: Sequence[int]) -> None:
        """Commit the root and these nodes of the last pass: each moves behind the one before it."""
        places = list(enumerate(path, start=1))
        moves = [(self.length + node, self.length + i) for i, node in places if node != i]
        if moves:
            device = self.data.device
            source, to = (torch.tensor(column, device=device) for column in zip(*moves, strict=True))
            self.data[:, :, :, to] = self.data[:, :, :, source]
        self.length += 1 + len(path)

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
