"""CudaPart: some layers of a GPU decoder as a draft model, by the decoder's own kernels, over its own KV pool.

Keys and values of what is drafted go to the slots behind the committed tokens, where the target's pass over the draft
writes them again. That pass starts from the tokens, unlike a CPU's, which goes on where an early exit left off: the
last drafted token was never read, so the first layers' weights must be read for it in any case, and reading weights is
what a pass over few rows takes. Rows have the same bits in any company, so what is written twice is the same.

A draft step is a pass of the layers that are kept, captured for the usual sizes when the drafter is loaded, then a norm
or an exit adapter, and the LM head. Sizes that were not captured run step by step: nothing is captured in mid-text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.types import Needs, Seq
from forerun.models.attention import Span as Nodes
from forerun.models.base import LayerSubset
from forerun.models.cuda.graphs import Replays, menu, seconds_of
from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import (
    MAX_ROWS,
    ROW_SIZES,
    Need,
    Size,
    Span,
    joined,
    padding,
    plan_pass,
    round_up,
)
from forerun.models.paged import PagedKV
from forerun.models.partial import Leave, PartialTarget

if TYPE_CHECKING:
    from forerun.models.cuda.target import CudaDecoder

log = logging.getLogger(__name__)
progress = logging.getLogger("forerun.progress")

FEWEST = 16  # rows up to which passes are captured at least: a chain of a cascade's lower level


class CudaPart(PartialTarget):
    """Implements forerun.models.base.Target for sequences that the whole target has prefilled."""

    def __init__(self, target: CudaDecoder, layers: LayerSubset, leave: Leave | None = None) -> None:
        dtype = target.model.dtype
        self.runs = CudaLayers(target, layers)
        super().__init__(self.runs, layers, None if leave is None else lambda rows: leave(rows.to(dtype)))

    def warm_up(self, needs: Needs, max_batch: int, max_length: int) -> None:
        """Capture the passes that drafts for so many sequences take; run what follows them once in every size."""
        if not self.runs.replays.capture:
            return
        started = perf_counter()
        try:
            self.runs.capture(max_batch, min(max_length, self.max_length), self._leave)
        except Exception as error:  # no memory, no working Triton: neither stops generation
            self.runs.sizes = []
            log.warning("draft passes are not captured: %s: %s", type(error).__name__, error)
            return
        count, spent = self.runs.replays.captured, perf_counter() - started
        step = 1e3 * self.runs.step_seconds(self._leave)
        log.info("captured %d draft passes in %.1f s; a step of one row takes %.2f ms", count, spent, step)


class CudaLayers:
    """Implements forerun.models.partial.RunsLayers."""

    begun = None

    def __init__(self, target: CudaDecoder, layers: LayerSubset) -> None:
        self._target, self._layers = target, layers
        self._steps = target.passes.steps.on(target.model.part(layers))
        self.replays = Replays(target.device, capture=target.passes.capture)
        self.sizes: list[Size] = []  # that are captured, smallest first

    @property
    def kv(self) -> PagedKV:
        return self._target.kv

    @property
    def vocab_size(self) -> int:
        return self._target.vocab_size

    @property
    def max_length(self) -> int:
        return self._target.max_length

    @property
    def device(self) -> torch.device:
        return self._target.device

    @property
    def slots(self) -> int | None:
        return self._target.slots

    @property
    def pass_rows(self) -> int:
        return self._target.pass_rows

    def make_room(self, seqs: Sequence[Seq], rows: Sequence[int]) -> bool:
        return self._target.make_room(seqs, rows)

    @torch.inference_mode()
    def run_layers(
        self, tokens: Sequence[int], spans: Sequence[Nodes], seqs: Sequence[Seq], layers: LayerSubset
    ) -> Tensor:
        """[M, D] fp32, valid until the next pass: in one pass, or several where they are more than MAX_ROWS."""
        assert layers == self._layers, "a part runs its own layers"
        target, found = self._target, list[Tensor]()
        own = [Span(tokens[span.first : span.end], span.shape, span.pages, span.length) for span in spans]
        for some in _in_passes(own):
            plan = plan_pass(some, target.grown.group_nodes, self._size_for)
            target.buffers.send(plan)
            self._do_pass(plan.size)
            found.append(target.buffers.x[: plan.rows])
            if len(own) > len(some):
                found[-1] = found[-1].clone()  # another pass follows
        return joined(found)

    def final_norm_of(self, rows: Tensor) -> Tensor:
        model = self._target.model
        normed = F.rms_norm(rows, rows.shape[-1:], None, model.config.norm_eps)
        return (normed * model.final_norm.float()).to(model.dtype)

    @torch.inference_mode()
    def logits_of(self, rows: Tensor) -> Tensor:
        """[M, V] fp32, valid until the next pass."""
        buffers, found = self._target.buffers, list[Tensor]()
        for some in torch.split(rows, MAX_ROWS):
            buffers.rows[: len(some)].copy_(some)
            run = Run.of(Size(round_up(len(some), ROW_SIZES), 0, 0), buffers.ints)
            self._steps.head_of_normed(run)
            found.append(buffers.logits[: len(some)])
            if len(some) < len(rows):
                found[-1] = found[-1].clone()
        return joined(found)

    @torch.inference_mode()
    def capture(self, max_batch: int, max_length: int, leave: Leave) -> None:
        """Capture the passes of drafts for up to so many sequences, over rows that are written nowhere."""
        buffers, most = self._target.buffers, round_up(min(max(FEWEST, 2 * max_batch), MAX_ROWS), ROW_SIZES)
        sizes = dict.fromkeys(size for size, scored in menu(max_length) if scored and size.rows <= most)
        self.sizes = sorted(sizes, key=lambda size: (size.rows, size.groups, size.splits))
        for i, size in enumerate(self.sizes):
            progress.info("capturing passes of some layers: %d of %d", i + 1, len(sizes))
            buffers.send(padding(size))
            self._step(size, leave)

    @torch.inference_mode()
    def step_seconds(self, leave: Leave, repeats: int = 3) -> float:
        """What a draft step of one row takes on the device, in a short context; the choice of a token comes on top."""
        self._target.buffers.send(padding(self.sizes[0]))
        return seconds_of(lambda: self._step(self.sizes[0], leave), self.device, repeats)

    def _step(self, size: Size, leave: Leave) -> None:
        self._do_pass(size)
        self.logits_of(leave(self._target.buffers.x[: size.rows]))

    def _size_for(self, need: Need) -> Size:
        return next((size for size in self.sizes if need.fits(size)), need.rounded())

    def _do_pass(self, size: Size) -> None:
        if size in self.sizes:
            self.replays.do(size, lambda: self._launch(size))
        else:
            self._launch(size)

    def _launch(self, size: Size) -> None:
        """From tokens to what leaves the last layer, in `Buffers.x`."""
        run, steps, layers = Run.of(size, self._target.buffers.ints), self._steps, self._layers
        steps.embed(run)
        for i in range(layers.end):
            if i not in layers.without_attention:
                steps.qkv(run, i)
                steps.attend(run, i)
                steps.leave_attention(run, i)
            if i not in layers.without_mlp:
                steps.gate(run, i)
                steps.leave_mlp(run, i)


def _in_passes(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Cut so that each part has no more than MAX_ROWS rows."""
    some, rows = list[Span](), 0
    for span in spans:
        if rows + len(span.tokens) > MAX_ROWS:
            yield some
            some, rows = [], 0
        some.append(span)
        rows += len(span.tokens)
    yield some
