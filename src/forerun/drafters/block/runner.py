"""BlockRunner: keeps the keys and values of the target's features, and runs blocks behind them, in torch on any device.

A sequence has a row of slots for every draft layer. What is committed is written once; a block is written behind it and
is overwritten by what comes next, so a draft never depends on earlier drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.drafters.block.candidates import BlockCandidates, candidates_of
from forerun.drafters.block.head import BlockHead
from forerun.drafters.draft_law import DraftLaw
from forerun.drafters.eagle.torch_runner import attend_to
from forerun.drafters.head_drafter import ObservedRows
from forerun.types import Seq

CHUNK = 512  # rows per pass while prompts are read


class ContextCache:
    """Keys and values of features [2, L, rows, slots, Hkv, Dh]: a row for each sequence, `lengths` slots are valid."""

    def __init__(self, head: BlockHead) -> None:
        config = head.config
        self._tail = config.kv_heads, config.head_dim
        with torch.inference_mode(False):  # whatever mode a text is written in: graphs write to it
            self.data = torch.zeros(2, config.depth, 0, 0, *self._tail, dtype=head.dtype, device=head.device)
        self.rows: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        self.grown = 0  # how often the data moved

    def admit(self, seq_id: int, slots: int) -> None:
        """A row for a sequence, with room for so many slots."""
        if seq_id not in self.rows:
            free = set(range(len(self.rows) + 1)) - set(self.rows.values())
            self.rows[seq_id], self.lengths[seq_id] = min(free), 0
        self.reserve(self.rows[seq_id] + 1, slots)

    def reserve(self, rows: int, slots: int) -> None:
        """Room for so many rows of so many slots; what there is grows twofold at least, so that it moves seldom."""
        _, depth, have, wide, *_ = self.data.shape
        if rows > have or slots > wide:
            more = max(rows, 2 * have) if rows > have else have
            wider = max(slots, 2 * wide) if slots > wide else wide
            with torch.inference_mode(False):
                data = self.data.new_zeros(2, depth, more, wider, *self._tail)
                data[:, :, :have, :wide] = self.data
            self.data, self.grown = data, self.grown + 1

    def release(self, seq_id: int) -> None:
        self.rows.pop(seq_id, None)
        self.lengths.pop(seq_id, None)

    def view(self, ids: Sequence[int], slots: int) -> Tensor:
        """[2, L, B, slots, Hkv, Dh]: the sequence's own slots where it is alone, else a copy."""
        rows = [self.rows[i] for i in ids]
        if len(rows) == 1:
            return self.data[:, :, rows[0] : rows[0] + 1, :slots]
        return self.data[:, :, rows, :slots]


class BlockRunner:
    """Reads features, and starts drafts."""

    def __init__(self, head: BlockHead) -> None:
        self.head, self.cache = head, ContextCache(head)

    @property
    def captures(self) -> int:
        """Graphs that were captured so far."""
        return 0

    @torch.no_grad()
    def read(self, seqs: Sequence[Seq], sequences: Sequence[ObservedRows]) -> None:
        """Keys and values of the rows that are new since each sequence's last draft."""
        rows, slots, features = list[int](), list[int](), list[Tensor]()
        for seq, observed in zip(seqs, sequences, strict=True):
            self.cache.admit(seq.id, observed.seen + self.head.config.rows)
            first = self.cache.lengths[seq.id]
            rows += [self.cache.rows[seq.id]] * (observed.seen - first)
            slots += range(first, observed.seen)
            features += observed.features
            self.cache.lengths[seq.id] = observed.seen
            observed.features, observed.tokens = [], []
        if not rows:
            return
        self._write(torch.cat(features), torch.tensor([rows, slots], device=self.head.device))

    def _write(self, features: Tensor, at: Tensor) -> None:
        """Keys and values of features [N, F] into rows and slots [2, N] of the cache."""
        for low in range(0, len(features), CHUNK):
            rows, slots = at[:, low : low + CHUNK]
            self.cache.data[:, :, rows, slots] = self.head.context(features[low : low + CHUNK], slots)

    @torch.no_grad()
    def begin(self, seqs: Sequence[Seq]) -> Tensor:
        """One pass over a block for each of these sequences: predicting rows [B, levels, D]."""
        head, ids = self.head, [seq.id for seq in seqs]
        lengths = [self.cache.lengths[i] for i in ids]
        base, size = max(lengths), head.config.rows
        kv = self.cache.view(ids, base + size)
        starts = torch.tensor(lengths, device=head.device)
        mask = None
        if len(ids) > 1:  # slots between a sequence's length and the longest's hold nothing of its own
            slots = torch.arange(base + size, device=head.device)
            mask = ((slots < starts[:, None]) | (slots >= base))[:, None, None]  # [B, 1, 1, S]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            shape = (len(ids), size)
            kv[0, layer, :, base:] = torch.unflatten(k, 0, shape)
            kv[1, layer, :, base:] = torch.unflatten(v, 0, shape)
            return attend_to(torch.unflatten(q, 0, shape), kv[:, layer].transpose(2, 3), mask)

        roots = torch.tensor([seq.tokens[-1] for seq in seqs], device=head.device)
        return head.run(roots, starts, attend)

    @torch.no_grad()
    def candidates(self, seqs: Sequence[Seq], levels: int) -> BlockCandidates:
        """One pass over a block for each of these sequences, as trees are grown from it; so many levels at most."""
        rows = self.begin(seqs)[:, :levels]
        roots = torch.tensor([seq.tokens[-1] for seq in seqs], device=self.head.device)
        law = DraftLaw(seqs, self.head.vocabulary, self.head.device)

        def noised(logits: Tensor, level: int) -> Tensor:
            return law.applied(logits[:, None], level)[:, 0]

        found = candidates_of(self.head, rows, roots, noised if law.changes else None, law.factors)
        return BlockCandidates(*found)

    def forget(self, seq_id: int) -> None:
        self.cache.release(seq_id)


class BlockSteps:
    """A draft to be drawn: whole laws of all positions from one pass, corrected by the token before in DSpark.

    Where a confidence head finds that too little is reached nothing is drawn: the laws are impossible there.
    """

    def __init__(self, head: BlockHead, rows: Tensor, seqs: Sequence[Seq], least: float = 0.0) -> None:
        """Predicting rows [B, levels, D] of one pass."""
        self.head, self.levels, self._least = head, 1, least
        self._rows, self._roots = rows, torch.tensor([seq.tokens[-1] for seq in seqs], device=rows.device)
        self._base = torch.unflatten(head.logits(rows.flatten(0, 1)), 0, rows.shape[:2])  # [B, levels, Vd]
        self._reach = torch.ones(len(rows), 1, device=rows.device)  # [B, W] of the last frontier
        self.sure: Tensor | None = None  # [B, W] confidence of what follows it

    @torch.no_grad()
    def first(self) -> Tensor:
        return self._after(self._roots[:, None])[:, 0]

    @torch.no_grad()
    def after(self, parents: Tensor, tokens: Tensor) -> Tensor:
        self.levels += 1
        self._reach = self._reach.gather(1, parents)
        return self._after(tokens)

    def _after(self, tokens: Tensor) -> Tensor:
        """[B, W, Vd] of the next position behind these tokens [B, W]."""
        level, shape = self.levels - 1, tokens.shape
        logits = self._base[:, level, None].expand(-1, shape[1], -1)
        if not self.head.has_markov:
            return logits.contiguous()
        previous = self.head.markov(tokens.flatten())
        logits = logits + torch.unflatten(self.head.bias(previous), 0, shape)
        rows = self._rows[:, level, None].expand(-1, shape[1], -1).flatten(0, 1)
        sure = self.head.confidence(rows, previous)
        if sure is not None:
            self.sure = sure.view(shape)
            self._reach = self._reach * self.sure
            if level:
                logits = logits.masked_fill((self._reach < self._least)[..., None], -torch.inf)
        return logits
