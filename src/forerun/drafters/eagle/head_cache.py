"""HeadCache: the KV cache of a drafting head, one row of slots per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.drafters.eagle.config import EagleConfig


class HeadCache:
    """Keys and values of each layer of many sequences, a row of slots each, of which the first `length` are valid."""

    def __init__(self, config: EagleConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = config.kv_heads, config.head_dim
        empty = (config.depth, 2, 0, self._shape[0], 0, self._shape[1])  # [L, 2, rows, Hkv, slots, Dh]
        self.data = torch.zeros(empty, dtype=dtype, device=device)
        self.rows: dict[int, int] = {}
        self.lengths: dict[int, int] = {}

    def admit(self, seq_id: int, slots: int) -> None:
        """A row for a sequence, with room for so many slots."""
        if seq_id not in self.rows:
            free = set(range(len(self.rows) + 1)) - set(self.rows.values())
            self.rows[seq_id], self.lengths[seq_id] = min(free), 0
        depth, _, rows, _, have, _ = self.data.shape
        need = self.rows[seq_id] + 1
        if need > rows or slots > have:
            slots = max(slots + slots // 2, have)
            data = self.data.new_zeros(depth, 2, max(need, rows), self._shape[0], slots, self._shape[1])
            data[:, :, :rows, :, :have] = self.data
            self.data = data

    def release(self, seq_id: int) -> None:
        self.rows.pop(seq_id, None)
        self.lengths.pop(seq_id, None)

    def base(self, seq_id: int) -> int:
        """Where a sequence's slots start, counted in slots of its first key head."""
        return self.rows[seq_id] * self._shape[0] * self.data.shape[4]

    def write(self, ids: Sequence[int], first: Tensor, keys: Tensor, values: Tensor, layer: int) -> None:
        """Keys and values [B, R, Hkv, Dh] of a layer into the slots from `first` [B] on."""
        slots = first[:, None] + torch.arange(keys.shape[1], device=first.device)  # [B, R]
        rows = torch.tensor([self.rows[i] for i in ids], device=first.device)[:, None].expand_as(slots)
        self.data[layer, 0][rows, :, slots] = keys
        self.data[layer, 1][rows, :, slots] = values

    def view(self, ids: Sequence[int], slots: int) -> Tensor:
        """[L, 2, B, Hkv, slots, Dh]: the sequence's own slots where it is alone, else a copy."""
        rows = [self.rows[i] for i in ids]
        if len(rows) == 1:
            return self.data[:, :, rows[0] : rows[0] + 1, :, :slots]
        return self.data[:, :, rows, :, :slots]
