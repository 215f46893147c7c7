"""HeadCache: the KV cache of a drafting head, one row of slots per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.drafters.eagle.config import EagleConfig


class HeadCache:
    """Keys and values of many sequences, a row of slots each, of which the first `length` are valid."""

    def __init__(self, config: EagleConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = config.kv_heads, config.head_dim
        self.data = torch.zeros(2, 0, self._shape[0], 0, self._shape[1], dtype=dtype, device=device)
        self.rows: dict[int, int] = {}
        self.lengths: dict[int, int] = {}

    def admit(self, seq_id: int, slots: int) -> None:
        """A row for a sequence, with room for so many slots."""
        if seq_id not in self.rows:
            free = set(range(len(self.rows) + 1)) - set(self.rows.values())
            self.rows[seq_id], self.lengths[seq_id] = min(free), 0
        rows, have = self.data.shape[1], self.data.shape[3]
        need = self.rows[seq_id] + 1
        if need > rows or slots > have:
            grown = (2, max(need, rows), self._shape[0], max(slots + slots // 2, have), self._shape[1])
            data = self.data.new_zeros(grown)
            data[:, :rows, :, :have] = self.data
            self.data = data

    def release(self, seq_id: int) -> None:
        self.rows.pop(seq_id, None)
        self.lengths.pop(seq_id, None)

    def base(self, seq_id: int) -> int:
        """Where a sequence's slots start, counted in slots of its first key head."""
        return self.rows[seq_id] * self._shape[0] * self.data.shape[3]

    def write(self, ids: Sequence[int], first: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values [B, R, Hkv, Dh] into the slots from `first` [B] on."""
        slots = first[:, None] + torch.arange(keys.shape[1], device=first.device)  # [B, R]
        rows = torch.tensor([self.rows[i] for i in ids], device=first.device)[:, None].expand_as(slots)
        self.data[0][rows, :, slots] = keys
        self.data[1][rows, :, slots] = values

    def view(self, ids: Sequence[int], slots: int) -> Tensor:
        """[2, B, Hkv, slots, Dh]: the sequence's own slots where it is alone, else a copy."""
        rows = [self.rows[i] for i in ids]
        if len(rows) == 1:
            return self.data[:, rows[0] : rows[0] + 1, :, :slots]
        return self.data[:, rows, :, :slots]
