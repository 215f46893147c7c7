"""SpecDecDrafter: drafts a block for an encoder-decoder in one pass over the encoder's rows (Xia et al. 2022).

The paper accepts what lies among the target's likeliest few; here the target's own verifier decides, so texts are the
target's. The encoder's rows come from the target with the prompt, once; the last hidden row comes with every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun.drafters.base import Parts
from forerun.drafters.block.candidates import CANDIDATES, BlockCandidates
from forerun.drafters.draft_law import DraftLaw, likeliest
from forerun.drafters.head_drafter import LastRowDrafter, ObservedRows
from forerun.drafters.specdec.config import KIND
from forerun.drafters.specdec.head import SpecDecHead, load_specdec, look_one_by_one
from forerun.drafters.tree_growth import grow_ranked, lay_out
from forerun.errors import InvalidInput
from forerun.models.native import library as native
from forerun.types import Budget, Needs, Scores, Seq, TreeBatch, Verdict


class SpecDecDrafter(LastRowDrafter):
    """Its tokens are chosen: trees grow from the laws of the block's places."""

    needs = Needs((-1,), encoded=True)
    one_pass = True

    def __init__(self, head: SpecDecHead) -> None:
        super().__init__()
        self.head = head
        self._sources: dict[int, Tensor] = {}  # [L, 2, 1, H, S, Dh]

    @classmethod
    def build(cls, parts: Parts) -> SpecDecDrafter:
        if parts.target.source_rules is None:
            raise InvalidInput(
                f"the drafter {KIND!r} reads an encoder's rows, and this target has no encoder"
            )
        head = load_specdec(parts.head_folder(KIND), parts.target.device)
        if head.config.vocab_size != parts.target.vocab_size:
            raise InvalidInput(
                f"this head was trained for {head.config.target!r} with {head.config.vocab_size} tokens, and the "
                f"target has {parts.target.vocab_size}; use a head of this target"
            )
        return cls(head)

    @torch.inference_mode()
    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        trees = [([seq.tokens[-1]], [-1]) for seq in seqs]
        live = self._ready(seqs, budgets)
        if live:
            self._meter.start()
            some, levels = [seqs[b] for b in live], self.head.config.levels
            limits = [replace(budgets[b], depth=min(budgets[b].depth, levels)) for b in live]
            candidates = self._candidates(some, max(limit.depth for limit in limits))
            grown, _ = grow_ranked(candidates, some, limits, self.head.config.calibration)
            for b, tree in zip(live, grown, strict=True):
                trees[b] = tree
            self._meter.stop(1)
        return lay_out(trees)

    @torch.inference_mode()
    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        super().observe(seqs, trees, scores, verdict)
        if scores.encoded is None:
            return
        self._match_threads()
        for seq, encoded in zip(seqs, scores.encoded, strict=True):
            self._sources[seq.id] = self.head.read(encoded[None])

    def forget(self, seq: Seq) -> None:
        super().forget(seq)
        self._sources.pop(seq.id, None)

    def _ready(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> list[int]:
        """Those whose sources were read, and of which every row was seen; before the first token there is none."""
        return [
            b
            for b, seq in enumerate(seqs)
            if budgets[b].runs
            and seq.id in self._sources
            and self._sequences[seq.id].seen == len(seq.tokens) - 1
        ]

    def _candidates(self, seqs: Sequence[Seq], levels: int) -> BlockCandidates:
        self._match_threads()
        head, device = self.head, self.head.device
        roots = torch.tensor([seq.tokens[-1] for seq in seqs], device=device)
        hidden = torch.cat([self._last_row(self._sequences[seq.id]) for seq in seqs])
        rows = head.run(head.start(hidden, roots), look_one_by_one([self._sources[seq.id] for seq in seqs]))
        logits = head.logits(rows[:, :levels].contiguous())  # [B, L, Vd]
        law = DraftLaw(seqs, head.vocabulary, device)
        if law.changes:
            logits = torch.cat([law.applied(logits[:, i, None], i) for i in range(levels)], 1)
        values, places = likeliest(logits, min(CANDIDATES, logits.shape[-1]))
        return BlockCandidates(values[:, :, None], head.vocabulary.ids[places])

    def _last_row(self, observed: ObservedRows) -> Tensor:
        """[1, D]; zeros before the first token."""
        if observed.features:
            return observed.features[0].to(self.head.dtype)
        return torch.zeros(1, self.head.config.width, device=self.head.device, dtype=self.head.dtype)

    def _match_threads(self) -> None:
        if self.head.device.type == "cpu" and native.available():
            native.match_threads(torch.get_num_threads())
