"""Sampler: the tokens of sampled sequences after a GPU pass, found on the device; captured when first needed.

The host sends a few numbers of every sequence (seed, temperature, what is cut), and only where they have changed since
the last pass. `forerun.verify.sampled`, which `build` hands over, knows what they mean.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from forerun.core.types import DeviceSampling, Seq, TreeForm
from forerun.models.cuda.graphs import Replays
from forerun.models.cuda.grown import GrownBuffers, Places
from forerun.models.cuda.integers import SentInts
from forerun.models.cuda.network import Buffers, Run
from forerun.models.cuda.plain_rounds import MOST_ROWS, PlainResults, PlainStep
from forerun.models.cuda.plan import MAX_ROWS, ROW_SIZES, Plan, Size, round_up


class Sampler:
    """Decides about passes again, by the argmax of greedy sequences and the samples of others."""

    def __init__(
        self,
        rule: DeviceSampling | None,
        buffers: Buffers,
        grown: GrownBuffers,
        plain: PlainResults,
        replays: Replays,
    ) -> None:
        self._rule, self._buffers, self._grown, self._plain = rule, buffers, grown, plain
        self._replays, device = replays, buffers.logits.device
        fields = rule.fields if rule else 0
        self._ints = SentInts(device, fields * MAX_ROWS, torch.long)
        self._table = self._ints.all.view(fields, MAX_ROWS)
        with torch.inference_mode(False):
            self._positions = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
            self._found = torch.zeros(MAX_ROWS, dtype=torch.long, device=device)
        self._sent: tuple[object, ...] = ()

    def kinds(self, seqs: Sequence[Seq]) -> Hashable | None:
        """What these sequences need, which is sent; None = all are greedy, or the host must decide."""
        kinds = None if self._rule is None else self._rule.kinds(seqs)
        if kinds is not None:
            self._send(seqs, kinds)
        return kinds

    def decide_grown(self, seqs: Sequence[Seq], plan: Plan, form: TreeForm) -> bool:
        """About the last pass over grown trees; False where there is nothing to add to the greedy verdict."""
        kinds = self.kinds(seqs)
        if kinds is not None:
            decide = self._decide_grown if plan.rows == form.rows else self._decide_beside_prompts
            decide(plan.size, form, kinds)
        return kinds is not None

    def rehearse(self, size: Size, form: TreeForm) -> None:
        """Capture what usual requests need."""
        for kinds in () if self._rule is None else self._rule.usual():
            self._decide_grown(size, form, kinds)
            self._take_tokens(form, kinds)

    def warm_up(self, max_batch: int) -> None:
        """Capture what plain rounds of usual requests need."""
        sizes = [rows for rows in ROW_SIZES if rows <= min(MOST_ROWS, round_up(max_batch, ROW_SIZES))]
        for kinds in self._rule.usual() if self._rule is not None and self._replays.capture else ():
            for rows, into in product(sizes, (0, 1)):
                self.decide_plain(Size(rows, 0, 0), PlainStep(rows, into, kinds=kinds))

    def decide_plain(self, size: Size, step: PlainStep) -> None:
        """About the last pass over lone roots, whose sequences were sent before it; prompts may have shared it."""
        rows, into, kinds = round_up(step.rows, ROW_SIZES), step.into, step.kinds
        if kinds is None:
            return
        positions, logits = self._positions[:rows], self._buffers.logits[:rows]
        positions.copy_(Run.of(size, self._buffers.ints).positions[:rows])

        def sample() -> None:
            tokens = self._tokens(logits[:, None], positions[:, None], kinds, 0)
            self._plain.tops[into, :rows].copy_(tokens[:, 0])

        self._replays.do(("sample", rows, into, kinds), sample)

    def _decide_grown(self, size: Size, form: TreeForm, kinds: Hashable) -> None:
        ints, logits = self._buffers.ints, self._buffers.logits[: form.rows]

        def samples(rows: Tensor, positions: Tensor) -> Tensor:
            return self._tokens(rows, positions, kinds, form.depth)

        name = "sample", form, Places.of(size, form), kinds
        self._replays.do(name, lambda: self._grown.decide(ints, size, form, logits, samples))

    def _decide_beside_prompts(self, size: Size, form: TreeForm, kinds: Hashable) -> None:
        """The same where prompts share the pass, which has any size: only the tokens are found by a graph.

        A graph for each form and size would be captured while texts are written.
        """

        def samples(rows: Tensor, positions: Tensor) -> Tensor:
            self._positions[: form.rows].copy_(positions.flatten())
            return self._take_tokens(form, kinds)

        logits = self._buffers.logits[: form.rows]
        self._grown.decide(self._buffers.ints, size, form, logits, samples)

    def _take_tokens(self, form: TreeForm, kinds: Hashable) -> Tensor:
        """[B, N] after every node, by the positions that were copied."""
        shape, found = (form.trees, form.nodes), self._found[: form.rows]
        logits = self._buffers.logits[: form.rows].view(*shape, -1)

        def sample() -> None:
            tokens = self._tokens(logits, self._positions[: form.rows].view(shape), kinds, form.depth)
            found.copy_(tokens.flatten())

        self._replays.do(("tokens", form, kinds), sample)
        return found.view(shape)

    def _tokens(self, logits: Tensor, positions: Tensor, kinds: Hashable, depth: int) -> Tensor:
        """[B, N] after every node of the trees of the sequences that were sent last; padding gets any tokens."""
        assert self._rule is not None, "there are kinds where there is a rule"
        return self._rule.tokens(logits, positions, self._table[:, : len(logits)], kinds, depth)

    def _send(self, seqs: Sequence[Seq], kinds: Hashable) -> None:
        """One copy, that is not waited for; none where the sequences are those of the last."""
        assert self._rule is not None, "there are kinds where there is a rule"
        sent = (kinds, *((seq.seed, seq.params, seq.shares_noise) for seq in seqs))
        if sent != self._sent:
            table = np.zeros(self._table.shape, dtype=np.int64)
            table[:, : len(seqs)] = self._rule.settings(seqs, kinds)
            self._ints.send(table)
            self._sent = sent
