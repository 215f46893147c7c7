"""GraphRunner: a block draft on a GPU as one captured graph, from the roots to the candidates that the host reads.

A graph is replayed for one number of sequences and one number of slots, a power of two, with shared noise or without;
lengths, roots and rows of the cache are its inputs, so it holds as texts grow. It reads the cache where it lies, and is
captured anew where the cache had to grow. The few rows that come with each round are read by graphs too. Drafts under a
temperature without noise run operation by operation.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from forerun.drafters.block.candidates import BlockCandidates, candidates_of
from forerun.drafters.block.head import BlockHead
from forerun.drafters.block.runner import BlockRunner
from forerun.drafters.captured import MOST, CapturedCalls, Work
from forerun.drafters.draft_law import has_noise
from forerun.drafters.eagle.cuda.draft_noise import DraftNoise, settings_of
from forerun.drafters.eagle.torch_runner import attend_to
from forerun.types import Seq

FEWEST = 256  # slots of the smallest graph
RESERVED = 1024  # slots of each sequence from the start: where the cache grows, graphs are captured anew
READ_AT_ONCE = (1, 2, 4, 8, 16, 32, 64, 128)  # rows that one graph reads: a round's; more are a prompt's


class GraphRunner(BlockRunner):
    """The same drafts as BlockRunner's."""

    def __init__(self, head: BlockHead) -> None:
        super().__init__(head)
        self.cache.reserve(MOST, RESERVED)
        self._calls, self._grown = CapturedCalls(), self.cache.grown
        self._noise = DraftNoise(head.vocabulary.ids)

    @torch.no_grad()
    def candidates(self, seqs: Sequence[Seq], levels: int) -> BlockCandidates:
        if len(seqs) > MOST or not all(seq.params.is_greedy or has_noise(seq) for seq in seqs):
            return super().candidates(seqs, levels)
        inputs, slots = self.inputs(seqs), self.slots_for(seqs)
        self._noise.send([settings_of(seq) for seq in seqs])
        key = len(seqs), slots, self._noise.is_on
        scored, tokens = self._call(key, lambda given: self.static(given, slots), inputs)
        return BlockCandidates(scored[:, :levels], tokens[:, :levels])

    def _write(self, features: Tensor, at: Tensor) -> None:
        count = len(features)
        size = next((some for some in READ_AT_ONCE if some >= count), None)
        if size is None:
            super()._write(features, at)
            return
        if size > count:  # the last once more: the same values at the same place
            rows = torch.arange(size, device=at.device).clamp_(max=count - 1)
            features, at = features[rows], at[:, rows]
        self._call(("read", size), self._written, features, at)

    def _written(self, features: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        super()._write(features, at)
        return ()

    def _call(self, key: Hashable, work: Work, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self._grown != self.cache.grown:
            self._grown = self.cache.grown
            self._calls.clear()  # they read a cache that is no more
        return self._calls.call(key, work, *inputs)

    @property
    def captures(self) -> int:
        return self._calls.made

    @property
    def usual_contexts(self) -> list[int]:
        """The longest of each number of slots that is there from the start."""
        slots = [FEWEST << i for i in range((RESERVED // FEWEST).bit_length())]
        return [some - self.head.config.rows for some in slots]

    def inputs(self, seqs: Sequence[Seq]) -> Tensor:
        """[3, B] roots, lengths, and rows of the cache."""
        cache = self.cache
        columns = [(seq.tokens[-1], cache.lengths[seq.id], cache.rows[seq.id]) for seq in seqs]
        return torch.tensor(columns, device=self.head.device).t().contiguous()

    def slots_for(self, seqs: Sequence[Seq]) -> int:
        """Slots that hold every context and a block behind it; the cache grows to as many."""
        need = max(self.cache.lengths[seq.id] for seq in seqs) + self.head.config.rows
        slots = FEWEST
        while slots < need:
            slots *= 2
        self.cache.admit(seqs[0].id, slots)
        return slots

    def static(self, inputs: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        """Scores and tokens of the candidates, whose shapes depend on the number of sequences and slots alone."""
        head, (roots, lengths, held) = self.head, inputs
        count, size = len(roots), head.config.rows
        kv = self.cache.data[:, :, :, :slots].index_select(2, held)  # [2, L, B, S, Hkv, Dh]
        places = lengths[:, None] + torch.arange(size, device=head.device)  # [B, R]
        which = torch.arange(count, device=head.device)[:, None]
        seen = torch.arange(slots, device=head.device) < lengths[:, None] + size
        mask = seen[:, None, None]  # [B, 1, 1, S]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv[0, layer, which, places] = torch.unflatten(k, 0, (count, size))
            kv[1, layer, which, places] = torch.unflatten(v, 0, (count, size))
            return attend_to(torch.unflatten(q, 0, (count, size)), kv[:, layer].transpose(2, 3), mask)

        noise, rows = self._noise, head.run(roots, lengths, attend)
        noised = noise.of((lengths - 1).int(), rows.shape[1]) if noise.is_on else None
        return candidates_of(head, rows, roots, noised, noise.factors(count) if noise.is_on else None)
