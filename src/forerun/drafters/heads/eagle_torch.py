"""TorchRunner: drafts with an EAGLE head in torch, on any device; the reference for the native one.

Rows that are new since a sequence's last draft are run with the target's true features; then one frontier per level is
written behind them, each node seen by its own descendants only. A row sees no further back than its layer reaches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.types import Budget, Seq
from forerun.drafters.heads.base import ObservedRows
from forerun.drafters.heads.eagle_head import EagleConfig, EagleHead
from forerun.drafters.heads.growth import LogitRanks


class HeadCache:
    """Keys and values of each layer of many sequences, a row of slots each, of which the first `length` are valid."""

    def __init__(self, config: EagleConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = config.kv_heads, config.head_dim
        empty = (config.depth, 2, 0, self._shape[0], 0, self._shape[1])  # [L, 2, rows, Hkv, slots, Dh]
        self.data = torch.zeros(empty, dtype=dtype, device=device)
        self.rows: dict[int, int] = {}
        self.lengths: dict[int, int] = {}

    def admit(self, seq_id: int, slots: int) -> None:
        """A row for a sequence, with room for `slots` slots."""
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


CHUNK = 512  # rows per sequence and pass while a prompt is read


class TorchRunner:
    """Keeps the head's KV cache of each sequence, and starts drafts."""

    def __init__(self, head: EagleHead) -> None:
        self.head = head
        self.cache = HeadCache(head.config, head.dtype, head.device)
        self._last: dict[int, Tensor] = {}  # [D] the output of each sequence's last row

    @torch.no_grad()
    def begin(self, seqs: Sequence[Seq], sequences: Sequence[ObservedRows], budgets: Sequence[Budget]) -> TorchSteps:
        """Run the observed rows of these sequences; the result drafts for them."""
        nodes = sum(frontier_sizes(budgets))
        out = self._catch_up(seqs, sequences, nodes)
        return TorchSteps(self.head, self.cache, [seq.id for seq in seqs], out, nodes)

    def forget(self, seq_id: int) -> None:
        self._last.pop(seq_id, None)
        self.cache.release(seq_id)

    def _catch_up(self, seqs: Sequence[Seq], sequences: Sequence[ObservedRows], extra: int) -> Tensor:
        """Run the rows that are new since each sequence's last draft; the output of the last one [B, D]."""
        device, cache = self.head.device, self.cache
        for seq, observed in zip(seqs, sequences, strict=True):
            cache.admit(seq.id, observed.seen + extra + CHUNK)
            cache.lengths[seq.id] = observed.seen - len(observed.tokens)  # some before these may never be read
        features = [torch.cat(observed.features) if observed.features else None for observed in sequences]
        longest = max(len(observed.tokens) for observed in sequences)
        for low in range(0, longest, CHUNK):
            some = [b for b, observed in enumerate(sequences) if len(observed.tokens) > low]
            counts = [min(CHUNK, len(sequences[b].tokens) - low) for b in some]
            wide = max(counts)
            rows, carried = list[list[int]](), list[Tensor]()
            for b, n in zip(some, counts, strict=True):
                fresh = features[b]
                assert fresh is not None
                rows.append(_padded(sequences[b].tokens[low : low + n], wide))
                carried.append(F.pad(fresh[low : low + n], (0, 0, 0, wide - n)))
            ids = [seqs[b].id for b in some]
            out = self._run_rows(ids, torch.tensor(rows, device=device), torch.stack(carried))
            for i, (seq_id, n) in enumerate(zip(ids, counts, strict=True)):
                cache.lengths[seq_id] += n
                self._last[seq_id] = out[i, n - 1]
        for observed in sequences:
            observed.features, observed.tokens = [], []
        return torch.stack([self._last[seq.id] for seq in seqs])

    def _run_rows(self, ids: Sequence[int], tokens: Tensor, features: Tensor) -> Tensor:
        """True rows [B, R] behind what each sequence has; pads write slots that nothing will read."""
        head, cache = self.head, self.cache
        lengths = torch.tensor([cache.lengths[i] for i in ids], device=head.device)
        count, wide = tokens.shape
        positions = lengths[:, None] + torch.arange(wide, device=head.device)  # [B, R]
        total = max(cache.lengths[i] for i in ids) + wide

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            keys, values = (torch.unflatten(part, 0, (count, wide)) for part in (k, v))
            cache.write(ids, lengths, keys, values, layer)
            mask, reach = None, head.config.reach(layer)
            if wide > 1 or count > 1 or total > reach:
                back = positions[:, :, None] - torch.arange(total, device=head.device)
                mask = ((back >= 0) & (back < reach))[:, None]
            return attend_to(torch.unflatten(q, 0, (count, wide)), cache.view(ids, total)[layer], mask)

        carried = head.fuse(features.flatten(0, 1))
        out = head.run(tokens.flatten(), carried, positions.flatten(), attend)
        return torch.unflatten(out, 0, (count, wide))


class TorchSteps:
    """The draft of one batch: rows written behind the true ones, each seen by its descendants only."""

    def __init__(self, head: EagleHead, cache: HeadCache, ids: Sequence[int], out: Tensor, nodes: int) -> None:
        self.head, self.levels = head, 1
        lengths = [cache.lengths[i] for i in ids]
        self._base = max(lengths)  # drafted slots start here, for all sequences
        self._kv = cache.view(ids, self._base + nodes)
        self._positions = torch.tensor(lengths, device=head.device)[:, None]  # [B, 1] of the next level
        self._out = out[:, None]  # [B, W, D] of the last frontier
        self._used, self._level_of = 0, list[int]()  # drafted slots, and which level wrote each
        # [B, W, drafted slots]
        self._seen = torch.zeros(len(ids), 1, 0, dtype=torch.bool, device=head.device)
        committed = torch.arange(self._base, device=head.device) < self._positions  # [B, base]
        self._committed = committed[:, None, None]

    def ranks(self, seqs: Sequence[Seq]) -> LogitRanks:
        return LogitRanks(self, seqs, self.head.vocabulary)

    @torch.no_grad()
    def first(self) -> Tensor:
        return self.head.logits(self._out[:, 0])

    @torch.no_grad()
    def after(self, parents: Tensor, tokens: Tensor) -> Tensor:
        count, wide = tokens.shape
        head, start = self.head, self._base + self._used
        at = parents[:, :, None]
        out = self._out.gather(1, at.expand(-1, -1, self._out.shape[-1]))
        own = torch.eye(wide, dtype=torch.bool, device=head.device).expand(count, -1, -1)
        self._seen = torch.cat((self._seen.gather(1, at.expand(-1, -1, self._used)), own), -1)
        self._level_of += [self.levels] * wide
        end = start + wide

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            kv = self._kv[layer]
            kv[0, :, :, start:end] = torch.unflatten(k, 0, (count, wide)).transpose(1, 2)
            kv[1, :, :, start:end] = torch.unflatten(v, 0, (count, wide)).transpose(1, 2)
            mask, reach = None, head.config.reach(layer)
            if wide > 1 or count > 1 or self._used >= self.levels or self._base + self.levels > reach:
                mask = self._mask(wide, reach)
            return attend_to(torch.unflatten(q, 0, (count, wide)), kv[:, :, :, :end], mask)

        positions = self._positions.expand(-1, wide)
        flat = head.run(tokens.flatten(), head.carry(out.flatten(0, 1)), positions.flatten(), attend)
        self._out = torch.unflatten(flat, 0, (count, wide))
        self._positions = self._positions + 1
        self._used += wide
        self.levels += 1
        return torch.unflatten(head.logits(flat), 0, (count, wide))

    def _mask(self, wide: int, reach: int) -> Tensor:
        """[B, 1, W, S] what the nodes of this level see."""
        known, drafted = self._committed, self._seen
        if self._base + self.levels > reach:
            places, device = self._positions[:, :, None, None], known.device
            known = known & (places - torch.arange(self._base, device=device) < reach)
            drafted = drafted & (torch.tensor(self._level_of, device=device) > self.levels - reach)
        return torch.cat((known.expand(-1, 1, wide, -1), drafted[:, None]), -1)


def attend_to(queries: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    """Queries [B, R, H, Dh] over keys and values [2, B, Hkv, S, Dh] -> [B R, H Dh]."""
    found = F.scaled_dot_product_attention(
        queries.transpose(1, 2), kv[0], kv[1], attn_mask=mask, enable_gqa=queries.shape[2] != kv.shape[2]
    )
    return found.transpose(1, 2).reshape(queries.shape[0] * queries.shape[1], -1)


def frontier_sizes(budgets: Sequence[Budget]) -> list[int]:
    """Nodes that each level of a draft may put through the head, for any of these sequences."""
    width = max(min(budget.width, budget.nodes) for budget in budgets)
    return [width] * max(budget.depth for budget in budgets)


def _padded(row: list[int], size: int) -> list[int]:
    return row + [0] * (size - len(row))
