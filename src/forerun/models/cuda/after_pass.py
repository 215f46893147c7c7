"""What follows a pass on the device: accepted paths to their places, hidden rows beside keys and values, sampling.

On a GPU one or two kernels do each (kernels/trees.py), elsewhere torch. For sampled sequences the host sends seed,
temperature and truncation, and only where they have changed since the last pass. `forerun.verify.sampled`, which
`build` hands over, knows what they mean.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from forerun.core.types import DeviceSampling, Seq, TreeForm
from forerun.models.cuda.device_trees import GrownBuffers, Places
from forerun.models.cuda.graphs import Replays
from forerun.models.cuda.network import Buffers, Run
from forerun.models.cuda.plain_rounds import MOST_ROWS, PlainResults, PlainStep
from forerun.models.cuda.plan import MAX_ROWS, ROW_SIZES, Plan, SentInts, Size, padding, round_up
from forerun.models.pages import PagedKV

AT_ONCE = 4096  # numbers that one program moves


class AfterPass:
    """Small pieces of work on the KV pool, captured when they are first done."""

    def __init__(self, kv: PagedKV, buffers: Buffers, grown: GrownBuffers, replays: Replays, fused: bool) -> None:
        self.kv, self.buffers, self.grown, self.replays = kv, buffers, grown, replays
        self.fused = fused  # by kernels, or in plain torch

    def move_decided(self) -> None:
        """Move the paths of the last pass over grown trees to their places, if that was not done."""
        grown = self.grown
        if grown.form is not None and grown.moved < grown.passes:
            if not grown.form.chain:  # whose paths are where they belong
                self.move(grown.form)
            grown.moved = grown.passes

    def move(self, form: TreeForm) -> None:
        """In all layers; which slots, the device itself has computed."""
        name = "move", form, tuple(self.kv.hidden)
        self.replays.do(name, lambda: self._move(form))

    def _move(self, form: TreeForm) -> None:
        if not self.fused:
            self.kv.move_on_device(*self.grown.moves_of(form))
            return
        for store in self.kv.stores:
            slots, size = store.shape[3], store.shape[4] if store.dim() > 4 else 1
            self._move_fused(form, (store.view(*store.shape[:4], size),), size, slots * size, size)
        if rows := tuple(self.kv.hidden.values()):
            width = rows[0].shape[1]
            self._move_fused(form, rows, size := width & -width, size, width)

    def _move_fused(
        self, form: TreeForm, tensors: tuple[Tensor, ...], size: int, plane_stride: int, row_stride: int
    ) -> None:
        """Tensors of one layout: planes, and numbers of each slot in a plane."""
        from forerun.models.cuda.kernels import trees as tree_kernels

        moves, columns = self.grown.moves, tensors[0][..., 0, :].numel()
        steps = 1 << max(2, (form.depth - 1).bit_length())
        tree_kernels.move[(form.trees, -(-columns * steps // AT_ONCE))](
            tensors, moves, moves.stride(0), plane_stride, row_stride, columns // size, form.depth, SIZE=size,
            STEPS_UP=steps, COLUMNS=AT_ONCE // steps, num_warps=4,
        )  # fmt: skip

    def warm_up(self, layers: tuple[int, ...]) -> None:
        """Capture what keeps the rows of these layers, for passes of every size; what is kept is dropped."""
        for rows in ROW_SIZES if self.replays.capture else ():
            plan = padding(Size(rows, 1, 1))
            self.buffers.send(plan)
            self.keep_rows(plan, layers)

    def keep_rows(self, plan: Plan, layers: tuple[int, ...]) -> None:
        """Keep the hidden rows of a pass beside keys and values, from buffer to slot: one replay per size of pass."""
        config, dtype = self.buffers.model.config, self.buffers.model.dtype
        kept, rows = [self.kv.rows_of(layer, config.width, dtype) for layer in layers], plan.size.rows
        if layers:
            hidden = [self.buffers.hidden(layer) for layer in layers]
            self.replays.do(("keep", rows, layers), lambda: self._keep(hidden, kept, rows))

    def _keep(self, hidden: Sequence[Tensor], kept: Sequence[Tensor], rows: int) -> None:
        ints, slots_at, width = self.buffers.ints, MAX_ROWS + 2 * rows, hidden[0].shape[1]
        if self.fused:
            from forerun.models.cuda.kernels import trees as tree_kernels

            tree_kernels.keep[(rows,)](
                tuple(hidden), tuple(kept), ints, slots_at, WIDTH=width, UP=1 << (width - 1).bit_length(),
                num_warps=4,
            )  # fmt: skip
            return
        places = ints[slots_at : slots_at + rows].long()
        places = torch.where(places < 0, self.kv.capacity, places)  # padding
        for some, into in zip(hidden, kept, strict=True):
            into.index_copy_(0, places, some[:rows])


class Sampler:
    """Decides about passes again, by the argmax of greedy sequences and the samples of others."""

    def __init__(
        self, rule: DeviceSampling | None, buffers: Buffers, grown: GrownBuffers, plain: PlainResults, replays: Replays
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
