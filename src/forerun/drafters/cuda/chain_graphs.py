"""ChainGraphs: the passes of a draft model, captured, each fed with the token that the last one chose.

A chain of k tokens is k passes and nothing that waits: the host sends a few integers of each sequence in one copy, then
launches the first pass, which ends with the choice of a token, and such a pass again for every further token. All
further passes of a batch size are replays of one graph, which counts for itself how far the draft is. What lies between
passes is kernels on a GPU (kernels_chain.py), and the same in torch elsewhere, step by step where nothing is captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.drafters.cuda.chain_plan import DEEPEST, MOST, ChainForm, Lane, complete, plan_chain
from forerun.drafters.eagle.cuda.draft_noise import DraftNoise, Settings
from forerun.drafters.eagle.cuda.draft_plan import aligned
from forerun.models.cuda.graphs import Replays
from forerun.models.cuda.integers import SentInts
from forerun.models.cuda.last_round import STEPS, LastRound
from forerun.models.cuda.network import Run, run_pass
from forerun.models.cuda.pass_clock import seconds_of
from forerun.models.cuda.plan import FIELDS, MAX_ROWS
from forerun.models.cuda.target import CudaDecoder

INTEGERS = 1 << 18  # room for the largest draft, and for the pages of all sequences
PADDING = Lane((0,), (), 0)


class ChainGraphs:
    """Drafts chains for sequences of one CUDA decoder."""

    def __init__(
        self, model: CudaDecoder, vocab_size: int, last: LastRound, fused: bool | None = None
    ) -> None:
        """`vocab_size` is the target's: ids beyond it are never drafted. `last`: what its last round decided."""
        self.fused = model.kernels == "triton" if fused is None else fused  # by kernels, or in plain torch
        self.model, self._last, device = model, last, model.device
        self._vocab = min(vocab_size, model.vocab_size)
        self.noise = DraftNoise(torch.arange(self._vocab, device=device))
        self.replays = Replays(device, capture=model.kernels == "triton")
        self.ints = SentInts(device, INTEGERS, torch.int32, first=MAX_ROWS)
        with torch.inference_mode(False):
            self.trees = torch.zeros(2, MAX_ROWS, dtype=torch.long, device=device)  # tokens and parents
            self._drafted = torch.zeros(DEEPEST, MOST, dtype=torch.long, device=device)
            self._roots = torch.zeros(MOST, dtype=torch.long, device=device)
            self._tokens = torch.zeros(MOST, dtype=torch.int32, device=device)  # of the next pass
            self._now = torch.zeros(
                2 * MOST + FIELDS * MOST, dtype=torch.int32, device=device
            )  # its integers
            self._count = torch.zeros(1, dtype=torch.long, device=device)  # tokens drafted so far
            # of each sequence, for kernels: the root's position, where its pages start, tokens drafted so far
            self._lanes = torch.zeros(3, MOST, dtype=torch.int32, device=device)

    @torch.no_grad()
    def draft(
        self, lanes: Sequence[Lane], depth: int, noise: Sequence[Settings | None] = (), farthest: int = 0
    ) -> None:
        """Leave a chain so deep behind the root of every lane in `trees`; `noise`: by which tokens are drawn."""
        form, ints = plan_chain(lanes, depth, farthest)
        self.ints.send(ints, form.sent_at)
        self.noise.send(noise)
        self._do_first(form)
        for _ in range(depth - 1):
            self._do_further(form)
        self.rehearse_trees(len(lanes), depth)

    def rehearse_trees(self, count: int, depth: int) -> None:
        """Lay out so many chains that were drafted last."""
        self.replays.do(("trees", count, depth), lambda: self._lay_out(count, depth))

    @torch.no_grad()
    def keep(self, which: Sequence[int], depth: int) -> None:
        """Keep only these of the chains that were drafted last, in this order."""
        trees = self.trees.view(2, -1)[:, : (MAX_ROWS // (depth + 1)) * (depth + 1)].view(2, -1, depth + 1)
        order = torch.tensor(which).to(trees.device, non_blocking=True)
        trees[:, : len(which)] = trees.index_select(1, order)

    def rehearse(self, bucket: int, farthest: int) -> None:
        """Capture the passes of a batch size, in contexts up to `farthest`; they are written nowhere."""
        form, ints = plan_chain([PADDING] * bucket, 2, farthest)
        self.ints.send(ints, form.sent_at)
        self.noise.is_on = False

        def both() -> None:
            self._do_first(form)
            self._do_further(form)

        both()
        self.noise.rehearse(both)

    def time(self, bucket: int, repeats: int = 3) -> tuple[float, float]:
        """Seconds of the first pass and of a further one with its choice, on the device, in a short context."""
        form, ints = plan_chain([PADDING] * bucket, 2)
        self.ints.send(ints, form.sent_at)
        self.noise.is_on = False

        def both() -> None:
            self._do_first(form)
            self._do_further(form)

        both()
        works = (lambda: self._do_first(form)), both
        one, two = (seconds_of(work, self.model.device, repeats) for work in works)
        return one, max(two - one, 0.0)

    def _do_first(self, form: ChainForm) -> None:
        self.replays.do(("first", form, self.noise.is_on), lambda: self._first(form))

    def _do_further(self, form: ChainForm) -> None:
        self.replays.do(("further", form, self.noise.is_on), lambda: self._further(form))

    def _first(self, form: ChainForm) -> None:
        """Over what was not read, the roots first; then a token behind each root."""
        if self.fused:
            self._begin(form)
        else:
            roots = complete(self.ints.all, form, self._last, self.model.vocab_size)
            self._roots[: form.sequences].copy_(roots)
            self._count.zero_()
        size, ints, rows = form.first, self.ints.all, aligned(form.first.rows)
        parts = ints[MAX_ROWS : MAX_ROWS + 3 * rows].view(3, rows)[:, : size.rows]
        groups = ints[MAX_ROWS + 3 * rows : MAX_ROWS + form.passes_at].view(size.groups, FIELDS)
        tokens, positions, slots = parts.unbind(0)
        self._run(Run(size, ints, tokens, positions, slots, groups), form.scored)
        self._take_tokens(form)

    def _further(self, form: ChainForm) -> None:
        """Over the tokens that were chosen last; then a token behind each of these."""
        size, count = form.further, form.sequences
        now, wide = self._now[: form.extent], aligned(count)
        if not self.fused:  # there the choice leaves them
            at = MAX_ROWS + form.passes_at
            passes = self.ints.all[at : at + (DEEPEST - 1) * form.extent].view(DEEPEST - 1, form.extent)
            now.copy_(passes.index_select(0, self._count - 1)[0])
        groups = now[2 * wide :].view(count, FIELDS)
        positions, slots = now[:count], now[wide : wide + count]
        self._run(Run(size, self.ints.all, self._tokens[:count], positions, slots, groups), count)
        self._take_tokens(form)

    def _run(self, run: Run, scored: int) -> None:
        model = self.model
        run_pass(model.passes.steps, model.model, model.buffers, run, (), scored)

    def _take_tokens(self, form: ChainForm) -> None:
        """The likeliest token behind every row, or the one that the verifier's noise would draw."""
        count, first = form.sequences, MAX_ROWS + aligned(form.first.rows)
        logits = self.model.buffers.logits[:count, : self._vocab]
        if self.fused:
            self._choose(form, logits)
            return
        # a root's position; the token drafted first is one behind it, which DraftNoise counts from the row before it
        before = self.ints.all[first : first + count] - 1 + self._count
        chosen = self.noise.of(before, 1)(logits, 0).argmax(-1)
        self._drafted[:, :count].index_copy_(0, self._count, chosen[None])
        self._tokens[:count].copy_(chosen)
        self._count += 1

    def _begin(self, form: ChainForm) -> None:
        from forerun.drafters.cuda import kernels_chain

        rows = aligned(form.first.rows)
        kernels_chain.begin[(form.sequences,)](
            self.ints.all, self._last.accepted, self._last.tokens, self._roots, self._lanes, MAX_ROWS,
            MAX_ROWS + form.sent_at, rows, MAX_ROWS + 3 * rows, form.sequences, STEPS, self.model.vocab_size, MOST,
            num_warps=1,
        )  # fmt: skip

    def _choose(self, form: ChainForm, logits: Tensor) -> None:
        from forerun.drafters.cuda import kernels_chain

        count, chunk = form.sequences, kernels_chain.CHUNK
        chunks = -(-self._vocab // chunk)
        highs = torch.empty(count, chunks, device=logits.device)
        spots = torch.empty(count, chunks, dtype=torch.int32, device=logits.device)
        kernels_chain.look[(count, chunks)](
            logits, self._lanes, self.noise.sent, highs, spots, logits.stride(0), self._vocab, MOST, CHUNK=chunk,
            NOISE=self.noise.is_on, num_warps=4,
        )  # fmt: skip
        kernels_chain.choose[(count,)](
            self.ints.all, highs, spots, self._lanes, self._drafted, self._tokens, self._now, aligned(count), count,
            MOST, C=chunks, C_UP=1 << max(2, (chunks - 1).bit_length()), num_warps=1,
        )  # fmt: skip

    def _lay_out(self, count: int, depth: int) -> None:
        if self.fused:
            from forerun.drafters.cuda import kernels_chain

            kernels_chain.lay_out[(count,)](
                self._roots, self._drafted, self.trees, depth, MOST, self.trees.stride(0), UP=32, num_warps=1
            )
            return
        trees = self.trees[:, : count * (depth + 1)].view(2, count, depth + 1)
        trees[0, :, 0] = self._roots[:count]
        trees[0, :, 1:] = self._drafted[:depth, :count].t()
        trees[1] = torch.arange(-1, depth, device=trees.device)
