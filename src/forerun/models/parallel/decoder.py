"""ParallelDecoder: one rank's part of a decoder; rank 0's is a Target, the others replay its passes.

Every rank holds the residual stream whole. After attention, and after the feed-forward layer, the ranks' parts are
added in the order of the ranks; so hidden rows need not be gathered, and drafters run on rank 0 alone. The embedding is
on every rank, the LM head is cut by vocabulary and its logits are put together on rank 0.

Rank 0 alone knows requests, pages and verdicts. What the others need comes with each pass as one list of integers: the
slots that were copied since the last pass, then tokens, positions, ancestors and pages of the rows. Passes run on a
thread of their own, so that an interrupt of the caller (Ctrl-C), which could come between any two calls, never splits
one: ranks must all make the same calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from queue import SimpleQueue
from threading import Thread
from typing import Protocol, Unpack

import torch
from torch import Tensor

from forerun.core.errors import ModelError, brief
from forerun.core.tree import chain_of, topology_of
from forerun.core.types import PlainSeq
from forerun.models.attention import PassRows, Span
from forerun.models.base import LayerSubset, SharedWeights
from forerun.models.blocks import Checkpoint
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.layers import linear
from forerun.models.pages import pages_for
from forerun.models.parallel.group import Group
from forerun.models.parallel.split import Part, SplitWeights, config_of
from forerun.models.slots import Placement

Job = tuple["Future[None]", Callable[[], None]]


class PassThread:
    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        Thread(target=_serve, args=(self._jobs,), name="forerun-passes", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def run(self, work: Callable[[], None]) -> None:
        """Do it on the thread: an interrupt comes before it has begun, and then it is dropped, or after it."""
        job: Future[None] = Future()
        interrupt: BaseException | None = None
        try:
            self._jobs.put((job, work))
            wait([job])
        except BaseException as error:
            interrupt = error
        while not job.done() and not (interrupt is not None and job.cancel()):
            try:
                wait([job])
            except BaseException as error:
                interrupt = error
        if not job.cancelled():
            job.result()
        if interrupt is not None:
            raise interrupt

    def close(self) -> None:
        """End the thread when what it does now is done."""
        self._jobs.put(None)


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    """Not a method: the thread must not keep its owner alive."""
    while (job := jobs.get()) is not None:
        future, work = job
        if future.set_running_or_notify_cancel():
            try:
                work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
        del job, future, work


Copies = Sequence[tuple[int, int]]  # slots, as (from, to), read before any of them is written


@dataclass(frozen=True, slots=True)
class PassPlan:
    slots: int  # that the KV cache must have by now
    copies: Sequence[Copies]  # in order
    tokens: Sequence[int]
    spans: Sequence[Span]
    limits: Sequence[int]  # per span, how long its sequence may become: ropes may depend on it
    scored: int  # of the first rows the logits are computed
    ends_with_keys: bool  # of the last layer: nobody reads what leaves it

    def to_numbers(self) -> list[int]:
        numbers = [self.slots, self.scored, int(self.ends_with_keys), len(self.copies)]
        for copies in self.copies:
            numbers.append(len(copies))
            numbers += [slot for pair in copies for slot in pair]
        numbers += [len(self.tokens), *self.tokens, len(self.spans)]
        for span, limit in zip(self.spans, self.limits, strict=True):
            pages = span.pages[: pages_for(span.length + span.nodes)]
            numbers += [span.nodes, span.length, limit, len(pages), *pages, int(span.shape.is_chain)]
            if not span.shape.is_chain:
                numbers += span.shape.parents
        return numbers

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> PassPlan:
        rest = iter(numbers)
        slots, scored, ends = _take(rest, 3)
        copies = [_pairs(_take(rest, 2 * next(rest))) for _ in range(next(rest))]
        tokens = _take(rest, next(rest))
        spans, limits, first = list[Span](), list[int](), 0
        for _ in range(next(rest)):
            nodes, length, limit = _take(rest, 3)
            pages = _take(rest, next(rest))
            shape = chain_of(nodes) if next(rest) else topology_of(tuple(_take(rest, nodes)))
            spans.append(Span(first, first + nodes, pages, length, shape))
            limits.append(limit)
            first += nodes
        return cls(slots, copies, tokens, spans, limits, scored, bool(ends))


def _take(numbers: Iterator[int], count: int) -> list[int]:
    return list(islice(numbers, count))


def _pairs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


class ParallelDecoder(Decoder):
    group: Group

    def __init__(
        self, config: DecoderConfig, weights: Mapping[str, Tensor], part: Part, **placed: Unpack[Placement]
    ) -> None:
        self.part, self.whole = part, config
        super().__init__(config_of(config, part), SplitWeights(weights, config, part), **placed)
        rows = self._head[part.of(config.vocab_size)]
        self._head = rows if config.tied else rows.clone()  # a view would keep all of them
        self._widths = [other.count(config.vocab_size) for other in part.all]

    def _whole(self, part: Tensor) -> Tensor:
        return self.group.sum_in_order(part)

    def _add(self, x: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None) -> None:
        """As on one rank, with the sum over inputs made of the ranks' parts."""
        total = self._whole(linear(rows, weight))
        if bias is not None:
            total.add_(bias)
        x.add_(self._normed(total, norm), alpha=self.config.residual_scale)

    def _fill_logits(self, x: Tensor, logits: Tensor) -> None:
        whole = self.group.join_columns(linear(x, self._head), self._widths)
        if whole is not None:
            logits.copy_(whole)


class Others(Protocol):
    """The processes of the other ranks, as rank 0 sees them."""

    def problem(self) -> str | None:
        """Which of them has ended, and why; None while all run."""

    def end_after_failure(self) -> str | None:
        """End them all; which of them had ended by itself, if one had."""

    def close(self) -> None: ...


class ParallelTarget(ParallelDecoder):
    """Rank 0: implements forerun.models.base.Target, and ServedByProcesses, for all ranks."""

    def __init__(
        self, config: DecoderConfig, weights: Mapping[str, Tensor], part: Part, **placed: Unpack[Placement]
    ) -> None:
        super().__init__(config, weights, part, **placed)
        self._weights = weights
        self._thread = PassThread()
        self._broken: str | None = None
        self._others: Others | None = None
        self.kv.journal = []

    def join(self, group: Group, others: Others | None) -> None:
        """Connect it with the other ranks, if there are any."""
        self.group, self._others = group, others

    @property
    def problem(self) -> str | None:
        return self._broken or (None if self._others is None else self._others.problem())

    def close(self) -> None:
        self._broken = self._broken or "the model was closed; load it again"
        self._thread.close()
        if self._others is not None:
            self._others.close()

    def shared(self) -> SharedWeights:
        """The model's own shape; rows of the LM head, of which this rank has a part, come from the checkpoint.

        No layers run apart: other ranks only compute whole passes.
        """
        own = super().shared()
        return replace(own, config=self.whole, partial=None, head_rows=lambda ids: self._lm_head[ids.to(self.device)])

    @cached_property
    def _lm_head(self) -> Tensor:
        if self.whole.tied:
            return self._embedding
        with torch.no_grad(), torch.inference_mode(False):
            return Checkpoint(self._weights, self.whole, self._dtype, self.device).head(self._embedding)

    def _run(self, given: PassRows, layers: LayerSubset | None = None, rows: Tensor | None = None) -> list[int] | None:
        """The pass on all ranks. It happens whole or not at all: one that an error splits ends them."""
        if self.problem is not None:
            raise ModelError(self.problem)
        assert layers is None, "no layers run apart"
        assert rows is None
        tokens, spans, seqs, hidden, logits, _ = given
        if not 0 <= min(tokens) <= max(tokens) < self.vocab_size:  # would end all ranks
            raise IndexError(f"tokens {tokens} in a vocabulary of {self.vocab_size}")
        limits = [self._lengths[seq.id] for seq in seqs]

        def work() -> None:
            journal, self.kv.journal = self.kv.journal or [], []
            scored = 0 if logits is None else len(logits)
            ends = not scored and not LayerSubset(self.config.layers).output_is_in(hidden)
            plan = PassPlan(self.kv.capacity, journal, tokens, spans, limits, scored, ends)
            try:
                self.group.send_plan(plan.to_numbers())
                super(ParallelTarget, self)._run(given)
            except BaseException as error:
                found = None if self._others is None else self._others.end_after_failure()
                self._broken = found or f"rank 0 of {self.part.size} failed: {brief(error)}"
                raise ModelError(self._broken) from error

        self._thread.run(work)
        return None


class ParallelFollower(ParallelDecoder):
    """Another rank: no requests, no pages; it computes what plans say."""

    def serve(self) -> None:
        while True:
            self.replay(PassPlan.from_numbers(self.group.receive_plan()))

    def replay(self, plan: PassPlan) -> None:
        """Bring the KV cache to where rank 0's is, and compute this rank's part of the pass."""
        self._have_slots(plan.slots)
        with torch.inference_mode():
            for copies in plan.copies:
                self.kv.move(copies)
        self._lengths = dict(enumerate(plan.limits))
        seqs = [PlainSeq(i, []) for i in range(len(plan.spans))]
        logits, hidden = None, dict[int, Tensor]()
        if plan.scored:
            logits = torch.empty(plan.scored, 0, dtype=self._dtype, device=self.device)
        elif not plan.ends_with_keys:  # rank 0 needs this rank's part of the whole last layer
            hidden[self.config.layers] = self._empty_rows(len(plan.tokens))
        self._run(PassRows(plan.tokens, plan.spans, seqs, hidden, logits))

    def _have_slots(self, slots: int) -> None:
        old = self.kv.data
        if slots > old.shape[3]:
            with torch.inference_mode(False):
                larger = old.new_empty(*old.shape[:3], slots, old.shape[4])
                larger[:, :, :, : old.shape[3]] = old
            self.kv.data = larger
