"""ParallelDecoder: one rank's part of a decoder; rank 0's is a Target, the others replay its passes.

Every rank holds the residual stream whole. After attention, and after the feed-forward layer, the ranks' parts are
added in the order of the ranks; so hidden rows need not be gathered, and drafters run on rank 0 alone. The embedding is
on every rank, the LM head is cut by vocabulary and its logits are put together on rank 0.

Rank 0 alone knows requests, pages and verdicts. What the others need comes with each pass as one list of integers: the
slots that were copied since the last pass, then tokens, positions, ancestors and pages of the rows. Passes run on a
thread of their own, so that an interrupt of the caller (Ctrl-C), which could come between any two calls, never splits
one: ranks must all make the same calls.

A rank's decoder is the ordinary one with a smaller config and weights that are cut when they are read (`SplitWeights`):
projections into a layer (queries, keys, values, gate, up) by output, those out of it (o, down) by input. Parts may
differ by one: three KV heads on two ranks are two and one, the larger first. A sum that goes round a ring adds in an
order of its own; in a `Group` every rank gets all parts and adds them in the order of the ranks. Plans travel as
integers through gloo, which may wait for ever; tensors go through gloo on CPUs and through NCCL on GPUs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal, Protocol, Unpack

import torch
from torch import Tensor, distributed

from forerun.core.errors import InvalidInput, ModelError, brief
from forerun.core.tree import chain_of, topology_of
from forerun.core.types import PlainSeq
from forerun.models.attention import PassRows, Span
from forerun.models.base import LayerSubset, SharedWeights
from forerun.models.blocks import Checkpoint
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.layers import linear
from forerun.models.load.quantized.unstacked import unstack
from forerun.models.load.weights import LazyTensors
from forerun.models.pages import pages_for
from forerun.models.slots import Placement

dist: Any = distributed  # process groups are not typed
Backend = Literal["gloo", "nccl"]
PLAN = 1024  # numbers of a plan that are sent at once; a longer one comes in two messages
FOR_EVER = timedelta(days=3650)  # a rank waits for the next plan as long as nobody asks for a text
PATIENCE = timedelta(minutes=5)  # for the others of a pass, and for all to connect


class Group:
    """One rank's connection with the others. All ranks must make the same calls in the same order."""

    def __init__(self, store: Path, part: Part, backend: Backend, device: torch.device) -> None:
        self.part, self.backend, self.device = part, backend, device
        shared = dist.FileStore(str(store), part.size)
        self._plans = _gloo(dist.PrefixStore("plans", shared), part, FOR_EVER)
        self._tensors: Any
        if backend == "nccl":
            self._tensors = _nccl(dist.PrefixStore("tensors", shared), part)
        else:
            self._tensors = _gloo(dist.PrefixStore("tensors", shared), part, PATIENCE)
        self._plan = torch.zeros(PLAN, dtype=torch.int64)
        self.sum_in_order(torch.zeros(1, 1, device=device))  # behind it all ranks are connected

    def send_plan(self, numbers: Sequence[int]) -> None:
        """Rank 0: to all others."""
        plan = torch.tensor([len(numbers), *numbers], dtype=torch.int64)
        self._plan[: min(PLAN, len(plan))] = plan[:PLAN]
        self._broadcast(self._plan)
        if len(plan) > PLAN:
            self._broadcast(plan[PLAN:].contiguous())

    def receive_plan(self) -> list[int]:
        """Another rank: what rank 0 sends next, whenever that is."""
        self._broadcast(self._plan)
        total = int(self._plan[0])
        numbers: list[int] = self._plan[1 : 1 + total].tolist()
        if total >= PLAN:
            rest = torch.empty(1 + total - PLAN, dtype=torch.int64)
            self._broadcast(rest)
            numbers += rest.tolist()
        return numbers

    def sum_in_order(self, mine: Tensor) -> Tensor:
        """The sum over ranks: first rank 0's part, then rank 1's, and so on; the same on every rank."""
        sent = self._sent(mine)
        parts = sent.new_empty(self.part.size, *sent.shape)
        self._tensors.allgather([list(parts.unbind())], [sent]).wait()
        total = parts[0].to(self.device, torch.float32 if mine.dtype != torch.float64 else mine.dtype)
        for part in parts[1:]:
            total = total.add_(part.to(self.device))
        return total.to(mine.dtype)

    def join_columns(self, mine: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Rank 0: the columns of all ranks [M, sum(widths)], side by side; None elsewhere."""
        sent = self._sent(mine)
        wide = max(widths)
        if sent.shape[1] < wide:  # ranks must send alike
            sent = torch.nn.functional.pad(sent, (0, wide - sent.shape[1]))
        options = dist.GatherOptions()
        options.rootRank = 0
        is_root = self.part.rank == 0
        parts = [torch.empty_like(sent) for _ in widths] if is_root else []
        self._tensors.gather([parts] if is_root else [], [sent], options).wait()
        if not is_root:
            return None
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1).to(self.device)

    def _sent(self, mine: Tensor) -> Tensor:
        """As the backend takes it: gloo reads memory of the CPU."""
        return (mine.cpu() if self.backend == "gloo" else mine).contiguous()

    def _broadcast(self, numbers: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._plans.broadcast([numbers], options).wait()


def _gloo(store: Any, part: Part, patience: timedelta) -> Any:
    """Ranks on this machine: nothing listens on an address that others reach."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = patience
    return dist.ProcessGroupGloo(store, part.rank, part.size, options)


def _nccl(store: Any, part: Part) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = PATIENCE
    return dist.ProcessGroupNCCL(store, part.rank, part.size, options)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Part:
    """One rank of several."""

    rank: int
    size: int

    def of(self, total: int) -> slice:
        """Its range of `total` things: neighbours, and as many as others have or one more."""
        each, more = divmod(total, self.size)
        low = self.rank * each + min(self.rank, more)
        return slice(low, low + each + (self.rank < more))

    def count(self, total: int) -> int:
        mine = self.of(total)
        return int(mine.stop - mine.start)

    @property
    def all(self) -> list[Part]:
        return [Part(rank, self.size) for rank in range(self.size)]


def check_split(config: DecoderConfig, size: int) -> None:
    """Raise where there is not a KV head for every rank, or a norm or a state is that of all heads."""
    if size > 1 and config.special is not None:
        raise InvalidInput(f"tensor_parallel_size={size}: {config.family} has {config.special}; use 1")
    if size > 1 and config.qk_norm == "all":
        raise InvalidInput(f"tensor_parallel_size={size}: {config.family} norms all heads at once; use 1")
    if size > config.kv_heads:
        raise InvalidInput(
            f"tensor_parallel_size={size} is too many for this model: it has {config.kv_heads} KV heads, and every "
            f"rank needs one of its own; use at most {config.kv_heads}"
        )


def config_of(config: DecoderConfig, part: Part) -> DecoderConfig:
    check_split(config, part.size)
    kv_heads, moe = part.count(config.kv_heads), config.moe
    if moe is not None:
        shared = moe.shared_inner
        moe = replace(moe, inner=part.count(moe.inner), shared_inner=None if shared is None else part.count(shared))
    return replace(
        config,
        heads=kv_heads * (config.heads // config.kv_heads),
        kv_heads=kv_heads,
        inner=part.count(config.inner),
        moe=moe,
    )


class SplitWeights(LazyTensors):
    """One rank's part of a checkpoint's weights, cut one at a time when they are asked for."""

    def __init__(self, whole: Mapping[str, Tensor], config: DecoderConfig, part: Part) -> None:
        self._whole = self.names = unstack(config.family, whole)
        self._part, self._config = part, config
        group = config.heads // config.kv_heads * config.head_dim
        mine = part.of(config.kv_heads)
        self._queries = slice(mine.start * group, mine.stop * group)
        self._keys = slice(mine.start * config.head_dim, mine.stop * config.head_dim)

    def __getitem__(self, name: str) -> Tensor:
        weight = self._whole[name]
        module, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind == "bias":
            kind = module.rpartition(".")[2]
            if kind == "down_proj" and ".experts." in module and self._part.rank:
                return torch.zeros_like(weight)  # ranks add up what experts give: the first has the biases
            return weight if kind in ("o_proj", "down_proj") else self._rows(kind, weight)
        if kind == "o_proj":
            return weight[:, self._queries]
        if kind in ("down_proj", "w2", "output_linear"):
            return weight[..., self._part.of(weight.shape[-1])]
        return self._rows(kind, weight)

    def _rows(self, kind: str, weight: Tensor) -> Tensor:
        """What belongs to this rank's outputs; weights that are not split come back whole."""
        config = self._config
        if kind == "q_proj":
            return weight[self._queries]
        if kind == "sinks":
            return weight[self._queries.start // config.head_dim : self._queries.stop // config.head_dim]
        if kind in ("k_proj", "v_proj"):
            return weight[self._keys]
        if kind == "qkv_proj":
            sizes = [config.heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2]
            cuts = (self._queries, self._keys, self._keys)
            return torch.cat([part[cut] for part, cut in zip(torch.split(weight, sizes), cuts, strict=True)])
        if kind in ("gate_proj", "up_proj", "w1", "w3"):
            return weight[self._part.of(weight.shape[0])]
        if kind in ("gate_up_proj", "input_linear"):  # [2I, D], of experts [E, 2I, D]
            at = weight.dim() - 2
            halves = weight.chunk(2, at)
            mine = self._part.of(halves[0].shape[at])
            return torch.cat([half.narrow(at, mine.start, mine.stop - mine.start) for half in halves], at)
        return weight


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
