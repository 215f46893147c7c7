"""EAGLE-1: one layer that runs ahead on the target's last hidden row; a chain, or a tree of one shape.

EAGLE-2 and EAGLE-3 are the same drafter with a tree that follows the head's confidence, and with another head.
Each text has keys and values of its own for the head, one slot per row. When a text is drafted for, the rows that
came since are run with the target's *true* features and kept; the rows of the draft itself are written behind
them, seen by their own descendants only, and forgotten. So a draft never depends on earlier drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters.base import Parts
from forerun.drafters.eagle.config import EagleConfig, Kind, default_layers
from forerun.drafters.eagle.files import read_head
from forerun.drafters.eagle.head import EagleHead
from forerun.drafters.growth import grow_trees, lay_out, sample_chains
from forerun.drafters.heads import (
    Meter,
    Rows,
    borrow,
    head_dtype,
    is_ready,
    layer_count,
    observe_rows,
    wants_sampling,
)
from forerun.errors import InvalidInput
from forerun.models.base import Target
from forerun.types import Budget, Needs, Scores, Seq, TreeBatch, Verdict

CHUNK = 512  # rows per text and pass while a prompt is caught up with
# How often EAGLE-1's first ranks are right, by level: what a head without measured rates is drafted with.
_RATES = ((0.6, 0.15, 0.07, 0.04, 0.03), *[(0.5, 0.13, 0.06, 0.035, 0.025)] * 7)


class Shelf:
    """Keys and values of many texts, a row of slots each; a text's length says which slots mean anything."""

    def __init__(self, config: EagleConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = config.kv_heads, config.head_dim
        self._data = torch.zeros(2, 0, self._shape[0], 0, self._shape[1], dtype=dtype, device=device)
        self.rows: dict[int, int] = {}
        self.lengths: dict[int, int] = {}

    def admit(self, seq_id: int, slots: int) -> None:
        """A row for a text, with room for so many slots."""
        if seq_id not in self.rows:
            free = set(range(len(self.rows) + 1)) - set(self.rows.values())
            self.rows[seq_id], self.lengths[seq_id] = min(free), 0
        rows, have = self._data.shape[1], self._data.shape[3]
        need = max(self.rows.values()) + 1
        if need > rows or slots > have:
            grown = (2, max(need, rows), self._shape[0], max(slots + slots // 2, have), self._shape[1])
            data = self._data.new_zeros(grown)
            data[:, :rows, :, :have] = self._data
            self._data = data

    def release(self, seq_id: int) -> None:
        self.rows.pop(seq_id, None)
        self.lengths.pop(seq_id, None)

    def write(self, ids: Sequence[int], first: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values [B, R, Hkv, Dh] into the slots from `first` [B] on."""
        slots = first[:, None] + torch.arange(keys.shape[1], device=first.device)  # [B, R]
        rows = torch.tensor([self.rows[i] for i in ids], device=first.device)[:, None].expand_as(slots)
        self._data[0][rows, :, slots] = keys
        self._data[1][rows, :, slots] = values

    def view(self, ids: Sequence[int], slots: int) -> Tensor:
        """[2, B, Hkv, slots, Dh]: the text's own slots where it is alone, else a copy."""
        rows = [self.rows[i] for i in ids]
        if len(rows) == 1:
            return self._data[:, rows[0] : rows[0] + 1, :, :slots]
        return self._data[:, rows, :, :slots]


class EagleDrafter:
    """EAGLE heads; `dynamic` trees follow the head's confidence, static ones the measured rates of its ranks."""

    kind: Kind = "eagle"
    dynamic = False

    def __init__(self, head: EagleHead, *, sampled: bool = False) -> None:
        self.head, self.sampled = head, sampled
        config = head.config
        self.needs = Needs(tuple(sorted(set(config.layers))))
        self._texts: dict[int, Rows] = {}
        self._last: dict[int, Tensor] = {}  # [D] the output of each text's last row
        self._shelf = Shelf(config, head.dtype, head.device)
        self._meter = Meter()
        self._rates = None if self.dynamic else torch.tensor(config.rates or _RATES, device=head.device)

    @classmethod
    def build(cls, parts: Parts) -> EagleDrafter:
        folder = parts.speculative.draft_model
        if folder is None:
            raise InvalidInput(f"the drafter {cls.kind!r} needs a trained head; pass draft_model=FOLDER")
        return cls(load_head(Path(folder), parts.target, cls.kind), sampled=wants_sampling(parts.speculative))

    @property
    def cost(self) -> float:
        return self._meter.seconds

    @torch.no_grad()
    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        trees = [([seq.tokens[-1]], [-1]) for seq in seqs]
        rows, laws = [[-1] for _ in seqs], list[Tensor]()
        limit = self.head.config.max_length
        live = [
            b
            for b, seq in enumerate(seqs)
            if is_ready(self._texts.get(seq.id), seq, budgets[b])
            and len(seq.tokens) + budgets[b].depth <= limit
        ]
        if live:
            some, wishes = [seqs[b] for b in live], [budgets[b] for b in live]
            out = self._catch_up(some, sum(_frontiers(wishes)))
            self._meter.start()
            steps = _Walk(self.head, self._shelf, [seq.id for seq in some], out, sum(_frontiers(wishes)))
            head = self.head
            if self.sampled:
                grown, their_rows, laws = sample_chains(steps, some, wishes, head.vocabulary)
                for b, theirs in zip(live, their_rows, strict=True):
                    rows[b] = theirs
            else:
                grown = grow_trees(steps, some, wishes, head.vocabulary, head.config.calibration, self._rates)
            for b, tree in zip(live, grown, strict=True):
                trees[b] = tree
            self._meter.stop(steps.levels)
        return lay_out(trees, rows, laws)

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        observe_rows(self._texts, self.head.config.layers, seqs, trees, scores, verdict)

    def forget(self, seq: Seq) -> None:
        self._texts.pop(seq.id, None)
        self._last.pop(seq.id, None)
        self._shelf.release(seq.id)

    def _catch_up(self, seqs: Sequence[Seq], extra: int) -> Tensor:
        """Run the rows that came since each text was last drafted for; the output of the last one [B, D]."""
        device, shelf = self.head.device, self._shelf
        texts = [self._texts[seq.id] for seq in seqs]
        for seq, text in zip(seqs, texts, strict=True):
            shelf.admit(seq.id, text.seen + extra + CHUNK)
        features = [torch.cat(text.features) if text.features else None for text in texts]
        longest = max(len(text.tokens) for text in texts)
        for low in range(0, longest, CHUNK):
            some = [b for b, text in enumerate(texts) if len(text.tokens) > low]
            counts = [min(CHUNK, len(texts[b].tokens) - low) for b in some]
            wide = max(counts)
            rows, carried = list[list[int]](), list[Tensor]()
            for b, n in zip(some, counts, strict=True):
                fresh = features[b]
                assert fresh is not None
                rows.append(_padded(texts[b].tokens[low : low + n], wide))
                carried.append(F.pad(fresh[low : low + n], (0, 0, 0, wide - n)))
            ids = [seqs[b].id for b in some]
            out = self._run_rows(ids, torch.tensor(rows, device=device), torch.stack(carried))
            for i, (seq_id, n) in enumerate(zip(ids, counts, strict=True)):
                shelf.lengths[seq_id] += n
                self._last[seq_id] = out[i, n - 1]
        for text in texts:
            text.features, text.tokens = [], []
        return torch.stack([self._last[seq.id] for seq in seqs])

    def _run_rows(self, ids: Sequence[int], tokens: Tensor, features: Tensor) -> Tensor:
        """True rows [B, R] behind what each text has; pads write slots that nothing will read."""
        head, shelf = self.head, self._shelf
        lengths = torch.tensor([shelf.lengths[i] for i in ids], device=head.device)
        count, wide = tokens.shape
        positions = lengths[:, None] + torch.arange(wide, device=head.device)  # [B, R]
        total = max(shelf.lengths[i] for i in ids) + wide

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            shelf.write(
                ids, lengths, torch.unflatten(k, 0, (count, wide)), torch.unflatten(v, 0, (count, wide))
            )
            mask = None
            if wide > 1 or count > 1:
                mask = (torch.arange(total, device=head.device) <= positions[:, :, None])[:, None]
            return attend_to(torch.unflatten(q, 0, (count, wide)), shelf.view(ids, total), mask)

        carried = head.fuse(features.flatten(0, 1))
        out = head.run(tokens.flatten(), carried, positions.flatten(), attend)
        return torch.unflatten(out, 0, (count, wide))


class _Walk:
    """The draft of one batch: rows written behind the true ones, each seen by its descendants only."""

    def __init__(self, head: EagleHead, shelf: Shelf, ids: Sequence[int], out: Tensor, nodes: int) -> None:
        self.head, self.levels = head, 1
        lengths = [shelf.lengths[i] for i in ids]
        self._base = max(lengths)  # drafted slots start here for everybody
        self._kv = shelf.view(ids, self._base + nodes)
        self._positions = torch.tensor(lengths, device=head.device)[:, None]  # [B, 1] of the next level
        self._out = out[:, None]  # [B, W, D] of the last frontier
        self._used = 0
        self._seen = torch.zeros(
            len(ids), 1, 0, dtype=torch.bool, device=head.device
        )  # [B, W, drafted slots]
        committed = torch.arange(self._base, device=head.device) < self._positions  # [B, base]
        self._committed = committed[:, None, None]

    def first(self) -> Tensor:
        return self.head.logits(self._out[:, 0])

    def after(self, parents: Tensor, tokens: Tensor) -> Tensor:
        count, wide = tokens.shape
        head, start = self.head, self._base + self._used
        at = parents[:, :, None]
        out = self._out.gather(1, at.expand(-1, -1, self._out.shape[-1]))
        own = torch.eye(wide, dtype=torch.bool, device=head.device).expand(count, -1, -1)
        self._seen = torch.cat((self._seen.gather(1, at.expand(-1, -1, self._used)), own), -1)
        end = start + wide

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._kv[0, :, :, start:end] = torch.unflatten(k, 0, (count, wide)).transpose(1, 2)
            self._kv[1, :, :, start:end] = torch.unflatten(v, 0, (count, wide)).transpose(1, 2)
            mask = None
            if wide > 1 or count > 1 or self._used >= self.levels:
                known = self._committed.expand(-1, 1, wide, -1)
                mask = torch.cat((known, self._seen[:, None]), -1)  # [B, 1, W, S]
            return attend_to(torch.unflatten(q, 0, (count, wide)), self._kv[:, :, :, :end], mask)

        positions = self._positions.expand(-1, wide)
        flat = head.run(tokens.flatten(), head.carry(out.flatten(0, 1)), positions.flatten(), attend)
        self._out = torch.unflatten(flat, 0, (count, wide))
        self._positions = self._positions + 1
        self._used += wide
        self.levels += 1
        return torch.unflatten(head.logits(flat), 0, (count, wide))


def load_head(folder: Path, target: Target, kind: Kind | None = None) -> EagleHead:
    """A head from its folder, for this target; layers that the file does not name are the usual ones."""
    config, weights = read_head(folder, kind=kind)
    if not config.layers:
        count = layer_count(target)
        if count is None:
            raise InvalidInput(
                f"{folder} does not say which hidden layers its head reads; add them to config.json"
            )
        values = {name: getattr(config, name) for name in EagleConfig.__dataclass_fields__}
        config = EagleConfig(**{**values, "layers": default_layers(count)})
    lent = borrow(target)
    return EagleHead(config, weights, lent, dtype=head_dtype(target, lent), device=target.device)


def attend_to(queries: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    """Queries [B, R, H, Dh] over keys and values [2, B, Hkv, S, Dh] -> [B R, H Dh]."""
    found = F.scaled_dot_product_attention(
        queries.transpose(1, 2), kv[0], kv[1], attn_mask=mask, enable_gqa=queries.shape[2] != kv.shape[2]
    )
    return found.transpose(1, 2).reshape(queries.shape[0] * queries.shape[1], -1)


def _frontiers(budgets: Sequence[Budget]) -> list[int]:
    """Nodes that each level of a draft may put through the head."""
    width = max(min(budget.width, budget.nodes) for budget in budgets)
    return [width] * max(budget.depth for budget in budgets)


def _padded(row: list[int], size: int) -> list[int]:
    return row + [0] * (size - len(row))
