"""The plan of a draft by a draft model: a few integers of every sequence from the host, all others from the device.

The first pass reads what the model has not read of every sequence, one token or two: after a draft that was accepted
whole, its last token and the target's own; after any other, the target's own. Each further pass reads one drafted
token per sequence, whose id only the device knows. Positions, slots and groups follow from a sequence's pages and
length. Where the last round was not read yet, the host knows neither these tokens nor the length: then it names the
sequence's tree in that round, and the device takes them from its own record of it. Batch sizes are rounded up to a few
buckets; rows of padding are written nowhere and attend to nothing.

ChainGraphs: the passes of a draft model, captured, each fed with the token that the last one chose.

A chain of k tokens is k passes and nothing that waits: the host sends a few integers of each sequence in one copy, then
launches the first pass, which ends with the choice of a token, and such a pass again for every further token. All
further passes of a batch size are replays of one graph, which counts for itself how far the draft is. What lies between
passes is kernels on a GPU (kernels.py), and the same in torch elsewhere, step by step where nothing is captured.

Where the target itself drafts (`SparseDraft`), over some pages of its own cache, one token is unread, the root: its
pass over the last draft has read all others. Positions are then those among the pages that a lane names, and rotations
count the positions that were left out before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.core.noise import mixed_seed
from forerun.core.types import Seq
from forerun.drafters.device.growth import DraftNoise, Settings
from forerun.drafters.device.plan import DEEPEST, MOST, aligned
from forerun.drafters.model.draft_law import has_noise
from forerun.models.cuda.device_trees import STEPS, LastRound
from forerun.models.cuda.graphs import PassClock, Replays, seconds_of
from forerun.models.cuda.network import Run, run_pass
from forerun.models.cuda.plan import FIELDS, MAX_ROWS, NARROW, SentInts, Size, splits_at, splits_to
from forerun.models.cuda.target import CudaDecoder
from forerun.models.pages import PAGE, Ints

UNREAD = 2  # tokens per sequence that the first pass reads, at most
KNOWN = 7  # integers of a sequence that the host sends, beside its pages


class Lane(NamedTuple):
    """One sequence of a draft: what the host sends of it to the device."""

    tokens: Sequence[int]  # not read yet, the root last; of no account where it follows an unread round
    pages: Sequence[int]  # of the draft model's slots, with room for the draft; none = nothing is drafted
    first: int  # position of the first of these tokens, among these pages
    follows: int = -1  # its tree in the last round, which was not read: `tokens` was that tree's root
    deep: int = 0  # tokens that were drafted in that round
    skipped: int = 0  # positions that the pages leave out, all of them before the root

    @property
    def root_at(self) -> int:
        """Position of the root; before the last round, where it follows one that was not read."""
        return self.first + len(self.tokens) - 1

    @property
    def farthest(self) -> int:
        """Where the root may be, at most."""
        return self.root_at + (self.deep + 1 if self.follows >= 0 else 0)


@dataclass(frozen=True, slots=True)
class ChainForm:
    """What passes must agree in to be replays of one graph."""

    sequences: int  # B, a bucket
    splits: int  # of the context
    unread: int = UNREAD

    @property
    def first(self) -> Size:
        """The roots, then what comes before each of them."""
        return Size(self.unread * self.sequences, self.unread * self.sequences, self.splits)

    @property
    def further(self) -> Size:
        return Size(self.sequences, self.sequences, self.splits)

    @property
    def scored(self) -> int:
        """Rows of the first pass with logits: the roots; all where products are those of many rows."""
        rows = self.first.rows
        return rows if rows > NARROW else self.sequences

    @property
    def passes_at(self) -> int:
        """The further passes, each [positions | slots | groups], behind [tokens | positions | slots | groups]."""
        return 3 * aligned(self.first.rows) + FIELDS * self.first.groups

    @property
    def extent(self) -> int:
        """Integers of a further pass."""
        return 2 * aligned(self.sequences) + FIELDS * self.sequences

    @property
    def sent_at(self) -> int:
        """What the host sends: [KNOWN, B], then the pages of all sequences."""
        return self.passes_at + (DEEPEST - 1) * self.extent


def plan_chain(lanes: Sequence[Lane], depth: int, farthest: int = 0, unread: int = UNREAD) -> tuple[ChainForm, Ints]:
    """What is sent for a draft so deep, for as many lanes as a bucket has.

    `farthest` asks for as many splits as a context that long needs.
    """
    count, real = len(lanes), [lane for lane in lanes if lane.pages]
    form = ChainForm(count, splits_to(max(farthest, 0, *(lane.farthest for lane in real)) + depth), unread)
    ints = np.zeros(KNOWN * count + sum(len(lane.pages) for lane in real), dtype=np.int32)
    table, at = ints[: KNOWN * count].reshape(KNOWN, count), KNOWN * count
    for b, lane in enumerate(lanes):
        before = lane.tokens[0] if len(lane.tokens) > 1 else -1  # unread beside the root
        start = MAX_ROWS + form.sent_at + at if lane.pages else 0
        table[:, b] = lane.root_at, lane.tokens[-1], before, start, lane.follows, lane.deep, lane.skipped
        ints[at : at + len(lane.pages)] = lane.pages
        at += len(lane.pages)
    return form, ints


def complete(ints: Tensor, form: ChainForm, last: LastRound, vocab_size: int) -> Tensor:
    """Work out all integers of a draft from what was sent, on the device; further passes as if it were deepest.

    Returns the roots [B]. One outside the draft model's vocabulary is read as another token: the host learns of it when
    it reads the round, and does not draft for that sequence from then on.
    """
    count, at = form.sequences, MAX_ROWS + form.sent_at
    root_at, root, before, starts, follows, deep, _ = ints[at : at + KNOWN * count].view(KNOWN, count)
    decided, trees = follows >= 0, follows.clamp(min=0).long()
    accepted, path = last.accepted[trees], last.tokens[trees]  # [B], and [B, STEPS] the path, then the bonus
    places = torch.stack((accepted, (accepted - 1).clamp_(min=0)), 1)
    bonus, end = path.gather(1, places).int().unbind(1)
    whole = torch.where(accepted == deep, end, -1)  # accepted whole: its last token was never an input
    tokens = torch.stack((torch.where(decided, bonus, root), torch.where(decided, whole, before)))  # [2, B]
    first = torch.where(decided, root_at + accepted.int() + 1, root_at)
    _write(ints, form, tokens[: form.unread].clamp(max=vocab_size - 1), first, starts)
    return tokens[0]


def _write(ints: Tensor, form: ChainForm, tokens: Tensor, root_at: Tensor, starts: Tensor) -> None:
    """Rows of roots, of tokens before these, and of each further pass; fields of groups: models/cuda/plan.py.

    A row attends alone, to all before it and to itself. Rows that are not there attend to nothing.
    """
    count, unread, device = form.sequences, form.unread, ints.device
    steps = torch.arange(-1, DEEPEST, dtype=torch.int32, device=device)
    steps = torch.cat((steps[1:2], steps[2 - unread : 1], steps[2:]))[:, None]  # 0, -1, 1, 2, ...
    real = (starts > 0).expand(len(steps), count)
    real = real & torch.cat((real[:1], tokens[1:] >= 0, real[unread:]))
    at = torch.where(real, root_at + steps, 0)  # [unread + DEEPEST - 1, B]
    pages = ints[(starts + at // PAGE).clamp_(max=len(ints) - 1)]  # of deeper drafts than this one, any
    slots = torch.where(real, pages * PAGE + at % PAGE, -1)
    lanes = torch.arange(count, dtype=torch.int32, device=device).expand_as(at)
    lanes = torch.cat((lanes[:1], lanes[1:unread] + count, lanes[unread:]))  # rows of their passes
    none, one = torch.zeros_like(at), torch.ones_like(at)
    groups = torch.stack((none, splits_at(at) + 1, lanes, one, none, at, none, starts.expand_as(at)), -1)
    groups = groups * real[..., None]
    own, rows, wide = ints[MAX_ROWS:], aligned(form.first.rows), aligned(count)
    parts = own[: 3 * rows].view(3, rows)[:, : form.first.rows].view(3, unread, count)
    parts[0].copy_(tokens.clamp(min=0))
    parts[1].copy_(at[:unread])
    parts[2].copy_(slots[:unread])
    own[3 * rows : form.passes_at].view(unread, count, FIELDS).copy_(groups[:unread])
    passes = own[form.passes_at : form.sent_at].view(DEEPEST - 1, form.extent)
    passes[:, :count].copy_(at[unread:])
    passes[:, wide : wide + count].copy_(slots[unread:])
    passes[:, 2 * wide :].copy_(groups[unread:].flatten(1))


INTEGERS = 1 << 18  # room for the largest draft, and for the pages of all sequences
PADDING = Lane((0,), (), 0)


def noise_of(seq: Seq) -> Settings | None:
    """By what its tokens are drawn, where its verifier couples by noise; None = the likeliest are drafted."""
    return (mixed_seed(seq.seed), 1.0 / seq.params.temperature) if has_noise(seq) else None


class ChainGraphs:
    """Drafts chains for sequences of one CUDA decoder."""

    def __init__(
        self, model: CudaDecoder, vocab_size: int, last: LastRound, fused: bool | None = None, is_target: bool = False
    ) -> None:
        """`vocab_size` is the target's: ids beyond it are never drafted. `last`: what its last round decided.

        `is_target`: the model is the target itself.
        """
        self.is_target, self.clock = is_target, PassClock(model.device)
        self.fused = model.kernels == "triton" if fused is None else fused  # by kernels, or in plain torch
        self.model, self._last, device = model, last, model.device
        self.replays = Replays(device, capture=model.kernels == "triton")
        self._vocab = min(vocab_size, model.vocab_size)
        self.noise = DraftNoise(torch.arange(self._vocab, device=device))
        self.ints = SentInts(device, INTEGERS, torch.int32, first=MAX_ROWS)
        with torch.inference_mode(False):
            self.trees = torch.zeros(2, MAX_ROWS, dtype=torch.long, device=device)  # tokens and parents
            self._drafted = torch.zeros(DEEPEST, MOST, dtype=torch.long, device=device)
            self._roots = torch.zeros(MOST, dtype=torch.long, device=device)
            self._tokens = torch.zeros(MOST, dtype=torch.int32, device=device)  # of the next pass
            self._now = torch.zeros(2 * MOST + FIELDS * MOST, dtype=torch.int32, device=device)  # its integers
            self._count = torch.zeros(1, dtype=torch.long, device=device)  # tokens drafted so far
            # of each sequence, for kernels: the root's position, where its pages start, tokens drafted so far, and
            # positions left out
            self._lanes = torch.zeros(4, MOST, dtype=torch.int32, device=device)

    @torch.no_grad()
    def draft(
        self, lanes: Sequence[Lane], depth: int, noise: Sequence[Settings | None] = (), farthest: int = 0
    ) -> None:
        """Leave a chain so deep behind the root of every lane in `trees`; `noise`: by which tokens are drawn."""
        form, ints = self._plan(lanes, depth, farthest)
        self.ints.send(ints, form.sent_at)
        self.noise.send(noise)
        self.clock.start()
        self._do_first(form)
        for _ in range(depth - 1):
            self._do_further(form)
        self._do_layout(len(lanes), depth)
        self.clock.stop()

    def draft_for(self, seqs: Sequence[Seq], lanes: Sequence[Lane], bucket: int, depth: int, farthest: int = 0) -> None:
        """For these lanes, one for each sequence, and as much padding as the bucket has room for."""
        noise = [noise_of(seq) if lane.pages else None for seq, lane in zip(seqs, lanes, strict=True)]
        self.draft([*lanes, *[PADDING] * (bucket - len(lanes))], depth, noise, farthest)

    def _plan(self, lanes: Sequence[Lane], depth: int, farthest: int) -> tuple[ChainForm, Ints]:
        return plan_chain(lanes, depth, farthest, 1 if self.is_target else UNREAD)

    def rehearse(self, bucket: int, depth: int, farthest: int) -> None:
        """Capture a draft for a batch size, in contexts up to `farthest`; its passes are written nowhere."""
        both = self._padded(bucket, farthest)
        both()
        self.noise.rehearse(both)
        self._do_layout(bucket, depth)

    def time(self, bucket: int, farthest: int = 0, repeats: int = 3) -> tuple[float, float]:
        """Seconds of the first pass and of a further one with its choice, on the device, over padding."""
        both = self._padded(bucket, farthest)
        both()
        works = (lambda: both(further=False)), both
        one, two = (seconds_of(work, self.model.device, repeats) for work in works)
        return one, max(two - one, 0.0)

    def _padded(self, bucket: int, farthest: int) -> Callable[..., None]:
        """The first two passes of a draft, or the first alone, over padding."""
        form, ints = self._plan([PADDING] * bucket, 2, farthest)
        self.ints.send(ints, form.sent_at)
        self.noise.is_on = False

        def run(further: bool = True) -> None:
            self._do_first(form)
            if further:
                self._do_further(form)

        return run

    def _do_layout(self, count: int, depth: int) -> None:
        """Lay out so many chains that were drafted last."""
        self.replays.do(("trees", count, depth), lambda: self._lay_out(count, depth))

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
        self._run(Run(size, ints, tokens, positions, slots, groups), form, form.scored)
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
        self._run(Run(size, self.ints.all, self._tokens[:count], positions, slots, groups), form, count)
        self._take_tokens(form)

    def _run(self, run: Run, form: ChainForm, scored: int) -> None:
        model, rotated = self.model, None
        if self.is_target:
            rotated = replace(run, positions=run.positions + self._skipped(form))
        run_pass(model.passes.steps, model.model, model.buffers, run, (), scored, rotated=rotated)

    def _skipped(self, form: ChainForm) -> Tensor:
        """[B] as the host sent it."""
        at = MAX_ROWS + form.sent_at + (KNOWN - 1) * form.sequences
        return self.ints.all[at : at + form.sequences]

    def _take_tokens(self, form: ChainForm) -> None:
        """The likeliest token behind every row, or the one that the verifier's noise would draw."""
        count, first = form.sequences, MAX_ROWS + aligned(form.first.rows)
        logits = self.model.buffers.logits[:count, : self._vocab]
        if self.fused:
            self._choose(form, logits)
            return
        # a root's position; the token drafted first is one behind it, which DraftNoise counts from the row before it
        before = self.ints.all[first : first + count] - 1 + self._count + self._skipped(form)
        chosen = self.noise.of(before, 1)(logits, 0).argmax(-1)
        self._drafted[:, :count].index_copy_(0, self._count, chosen[None])
        self._tokens[:count].copy_(chosen)
        self._count += 1

    def _begin(self, form: ChainForm) -> None:
        from forerun.drafters.device import kernels

        rows = aligned(form.first.rows)
        kernels.begin[(form.sequences,)](
            self.ints.all, self._last.accepted, self._last.tokens, self._roots, self._lanes, MAX_ROWS,
            MAX_ROWS + form.sent_at, rows, MAX_ROWS + 3 * rows, form.sequences, STEPS, self.model.vocab_size, MOST,
            UNREAD=form.unread, num_warps=1,
        )  # fmt: skip

    def _choose(self, form: ChainForm, logits: Tensor) -> None:
        from forerun.drafters.device import kernels

        count, chunk = form.sequences, kernels.CHUNK
        chunks = -(-self._vocab // chunk)
        highs = torch.empty(count, chunks, device=logits.device)
        spots = torch.empty(count, chunks, dtype=torch.int32, device=logits.device)
        kernels.look[(count, chunks)](
            logits, self._lanes, self.noise.sent, highs, spots, logits.stride(0), self._vocab, MOST, CHUNK=chunk,
            NOISE=self.noise.is_on, num_warps=4,
        )  # fmt: skip
        kernels.choose[(count,)](
            self.ints.all, highs, spots, self._lanes, self._drafted, self._tokens, self._now, aligned(count), count,
            MOST, C=chunks, C_UP=1 << max(2, (chunks - 1).bit_length()), num_warps=1,
        )  # fmt: skip

    def _lay_out(self, count: int, depth: int) -> None:
        if self.fused:
            from forerun.drafters.device import kernels

            kernels.lay_out[(count,)](
                self._roots, self._drafted, self.trees, depth, MOST, self.trees.stride(0), UP=32, num_warps=1
            )
            return
        trees = self.trees[:, : count * (depth + 1)].view(2, count, depth + 1)
        trees[0, :, 0] = self._roots[:count]
        trees[0, :, 1:] = self._drafted[:depth, :count].t()
        trees[1] = torch.arange(-1, depth, device=trees.device)
