"""Graphs: a GPU pass is captured once per size and replayed, so that the host launches it in one call.

Everything that changes between passes is in the integers that `Buffers.send` copies; a size fixes the rest. All that
can occur in the usual course is captured by `warm_up`, before texts are written: a pass then takes the smallest size
that was captured and has room for it. All but the few that a short text needs may be left for later (`few_first`):
until then they run step by step, without a graph. What comes before and after a pass (trees grown on the
device, the tokens of a plain pass that follows another) is launched apart, or captured with the pass where a form of
trees is rehearsed.
Seconds of passes come from events in the stream (`PassClock`), read later, without waiting.

Graphs of drafts wait in `LaterCaptures` (compile/later.py). Until they are there, texts are written without these
drafts. Kernels of a group are compiled by other processes first, while texts are written.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import cycle
from time import perf_counter
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from forerun.core.tree import Seconds
from forerun.core.types import Scores, TreeForm
from forerun.models.cuda.compile.together import compile_together
from forerun.models.cuda.device_trees import GrownBuffers
from forerun.models.cuda.network import Buffers, Model, Run, Steps, one_of_each_kind, run_pass
from forerun.models.cuda.plain_rounds import PlainResults, PlainStep, complete_roots
from forerun.models.cuda.plan import (
    MAX_ROWS,
    NARROW,
    ROW_SIZES,
    SHORT,
    SPLIT_SIZES,
    Need,
    Plan,
    Size,
    padding,
    round_up,
    splits_to,
)
from forerun.models.cuda.plan import Span as Chunk
from forerun.models.cuda.steps.tiles import copies_prompts

log = logging.getLogger(__name__)
progress = logging.getLogger("forerun.progress")

MOST_SCORED = 384  # rows with logits of passes that are captured beforehand and have more than 512 rows
FEW_SCORED = (128, 256)  # where many rows are of prompts, these numbers with logits are captured too: see scored_rows
PROMPT_ROWS = (64, 128, 192, 256, 384, 512, 768, 1024)  # of passes without logits
ROWS_OF_A_GROUP, FEW_GROUPS = 8, 16  # in these, on average; and groups that they have at least


Job = tuple[Size, int]  # and how many rows have logits
Work = Callable[..., tuple[Tensor, ...]]
Capture = Callable[[], None]


class _Key(NamedTuple):
    """What passes must agree in to be replays of one graph."""

    size: Size
    hidden: tuple[int, ...]
    scored: int  # rows with logits
    form: TreeForm | None = None  # trees grown on the device, whose filling and verdict are part of the graph
    adapted: bool = False  # some rows have LoRA adapters


class Passes:
    """Runs planned passes: as graphs on a GPU, step by step elsewhere."""

    def __init__(
        self, model: Model, buffers: Buffers, grown: GrownBuffers, steps: Steps, capture: bool, kv: Tensor | None = None
    ) -> None:
        """`kv`: where keys and values are."""
        self.model, self.buffers, self.grown, self.steps, self.capture = model, buffers, grown, steps, capture
        self._kv = kv
        copied = [] if kv is None else [rows for rows in PROMPT_ROWS if copies_prompts(rows, model.config, kv)]
        self.tiled_prompts = copied[0] if copied and capture else MAX_ROWS + 1  # see `menu`
        self.few_first = False  # does `warm_up` leave most for later?
        self._waiting: set[_Key] = set()  # those that it has left
        self.plain = PlainResults(buffers)
        self.clock = PassClock(model.device)
        self._graphs: dict[_Key, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._last = _Key(Size(0, 0, 0), (), 0)
        self._compiled: set[tuple[int, bool, tuple[int, ...]]] = set()  # what `compile` was asked for
        self._layers: tuple[int, ...] = ()  # hidden rows that the sizes captured beforehand leave
        # with logits or without, smallest first; and how many rows of each may have them
        self._ready: dict[bool, dict[Size, list[int]]] = {True: {}, False: {}}
        buffers.adapters.moved = self._forget_adapted

    @property
    def captured(self) -> int:
        return len(self._graphs)

    @property
    def captured_grown(self) -> int:
        """How many of these are passes over trees that were grown on the device, and nothing beside them."""
        return sum(key.form is not None for key in self._graphs)

    @torch.inference_mode()
    def warm_up(self, hidden: tuple[int, ...], max_length: int, prompts_only: bool = False) -> list[Capture]:
        """Capture all sizes that plain rounds, drafts of the host and prompts take, with hidden rows as needed.

        Returns what captures those that were left for later.
        """
        if not self.capture:
            return []
        started, self._layers = perf_counter(), tuple(sorted({*self._layers, *hidden}))
        self.compile(max_length, prompts_only)
        jobs = [job for job in self._menu(max_length) if not (prompts_only and job[1])]
        keys = [_Key(size, self._layers, scored, adapted=kind) for kind in self.kinds() for size, scored in jobs]
        left = [key for key in keys if self.few_first and key not in self._graphs and not _is_first(key)]
        self._waiting = {*left}
        soon = [key for key in keys if key not in self._waiting]
        for i, key in enumerate(soon):
            progress.info("capturing passes%s: %d of %d", " of adapters" * key.adapted, i + 1, len(soon))
            self._capture(key)
        self.take_sizes(jobs)
        log.info("captured %d passes in %.1f s; %d are left", len(soon), perf_counter() - started, len(left))
        return [partial(self._capture, key) for key in left]

    @torch.inference_mode()
    def _capture(self, key: _Key) -> None:
        """Over padding."""
        self._waiting.discard(key)
        self.buffers.send(self.padded(padding(key.size), key.adapted))
        self._replay(key)

    @torch.inference_mode()
    def compile(self, max_length: int, prompts_only: bool = False) -> None:
        """Compile all kernels of these sizes side by side: captures would do it one by one, which takes minutes.

        No kernel is launched; hidden rows are copied, from one buffer to another. If one was, it would see padding.
        """
        which = (max_length, prompts_only, self._layers)
        if not self.capture or which in self._compiled:
            return
        self._compiled.add(which)
        some, what = one_of_each_kind(self.model.layers), self.what("passes", *which)

        def launch() -> None:
            for size, scored in self._menu(max_length):
                if not (prompts_only and scored):
                    self.buffers.send(padding(size))
                    for adapted in self.kinds():
                        self._launch(_Key(size, self._layers, scored, adapted=adapted), some)

        compile_together(launch, what)

    def what(self, *more: object) -> object:
        """What kernels follow from, this and the model: see `compile_together`."""
        if self.buffers.adapters.in_use:  # of any shapes
            return None
        model, kv = self.model, self._kv
        # of its size Triton asks this alone
        of_kv = None if kv is None else (kv.dtype, *((step % 16, step >> 31) for step in kv.stride()))
        nodes = self.grown.group_nodes, self.grown.tiled_nodes
        return type(self.steps).__name__, model.config, model.dtype, model.kind, of_kv, nodes, more

    def ask_for_grown(self, plan: Plan, hidden: tuple[int, ...], form: TreeForm) -> None:
        """Launch what `run_grown` captures, in one layer of each kind: within `compile_together`."""
        for adapted in self.kinds():
            self.buffers.send(self.padded(plan, adapted))
            key = _Key(plan.size, hidden, plan.size.rows, form, adapted)
            self._launch(key, one_of_each_kind(self.model.layers))

    def kinds(self) -> tuple[bool, ...]:
        """Of passes that are captured beforehand: without adapters, and with them where some are loaded."""
        if not self.buffers.adapters.in_use:
            return (False,)
        self.buffers.adapters.prepare()
        return False, True

    def padded(self, plan: Plan, adapted: bool) -> Plan:
        """A plan of padding, as one whose rows have adapters perhaps."""
        return replace(plan, units=self.buffers.adapters.padding(plan.size.rows)) if adapted else plan

    def _menu(self, max_length: int) -> Iterator[Job]:
        return menu(max_length, self.grown.tiled_nodes, self.tiled_prompts, self.grown.group_nodes)

    def _forget_adapted(self) -> None:
        """Stacks of adapters have moved."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if not key.adapted}

    def take_sizes(self, jobs: Iterable[Job]) -> None:
        """From now on passes take one of these sizes, if it has room."""
        self._ready = {True: {}, False: {}}
        for size, scored in sorted(jobs, key=lambda job: (job[0].rows, job[0].groups, job[0].splits, job[1])):
            self._ready[scored > 0].setdefault(size, []).append(scored)

    def scored_size(self, need: Need) -> Size:
        """Of a pass with logits: the smallest that has a graph and room for so much, else the next of the usual."""
        return next((size for size in self._ready[True] if need.fits(size)), need.rounded())

    def prompt_size(self, need: Need) -> Size:
        """The same of a pass without logits."""
        return next((size for size in self._ready[False] if need.fits(size)), need.rounded())

    @torch.inference_mode()
    def run(self, plan: Plan, hidden: tuple[int, ...], scored: int) -> None:
        """A pass with logits of the first `scored` rows, at least. Results lie in the buffers until the next pass."""
        self.buffers.send(plan)
        self.clock.start()
        self._replay(self._key(plan, hidden, scored))
        self.clock.stop()

    @torch.inference_mode()
    def run_grown(self, plan: Plan, hidden: tuple[int, ...], form: TreeForm) -> None:
        """A pass over trees grown on the device, and their verdict; chunks of prompts may follow behind the trees."""
        self.buffers.send(plan)
        self.clock.start()
        if plan.rows == form.rows:
            self._replay(_Key(plan.size, hidden, plan.size.rows, form, plan.units is not None))
        else:
            key, ints = self._key(plan, hidden, form.rows), self.buffers.ints
            self._fill(ints, plan.size, form)
            self._replay(key)
            self.grown.decide(ints, plan.size, form, self.buffers.logits[: form.rows])
        self.clock.stop()

    @torch.inference_mode()
    def run_plain(self, plan: Plan, hidden: tuple[int, ...], step: PlainStep) -> None:
        """A pass over lone roots, and its argmax; chunks of prompts may follow behind the roots.

        What follows another pass and what is decided lie outside of the graph, which is captured in mid-text perhaps.
        """
        self.buffers.send(plan)
        self.clock.start()
        self.plain.follow(Run.of(plan.size, self.buffers.ints).tokens, step)
        if step.behind_trees:
            complete_roots(self.buffers.ints, plan.size, step.rows, self.grown.last)
        self._replay(self._key(plan, hidden, step.rows))
        self.plain.decide(step)
        self.clock.stop()

    @torch.inference_mode()
    def replay_last(self) -> None:
        """Run the last pass again, from the same integers: for timing."""
        self._replay(self._last)

    def _key(self, plan: Plan, hidden: tuple[int, ...], scored: int) -> _Key:
        layers = self._layers if {*hidden} <= {*self._layers} else hidden
        captured = self._ready[True].get(plan.size, ()) if scored else ()
        known = next((rows for rows in captured if rows >= scored), None)
        rows = _rounded(scored, plan) if known is None else known
        return _Key(plan.size, layers, rows, adapted=plan.units is not None)

    def _replay(self, key: _Key) -> None:
        self._last = key
        if not self.capture or key in self._waiting:
            self._launch(key)
            return
        if key in self._graphs:
            self._graphs[key].replay()
        else:  # which runs it: a second time it would follow its own verdict, not that of the round before
            started = perf_counter()
            self._graphs[key] = capture(lambda: self._launch(key), self.model.device, self._pool)
            log.info("captured a pass of %s in %.2f s", key.size, perf_counter() - started)

    def _fill(self, ints: Tensor, size: Size, form: TreeForm) -> None:
        """Complete the integers of a pass over grown trees."""
        self.grown.fill(ints, size, form)
        if self.buffers.states is not None:
            self.buffers.states.join_trees(self.grown.tree_ints[1, : form.rows], form.trees)

    def _run(self, size: Size, adapted: bool) -> Run:
        return Run.of(size, self.buffers.ints, self.buffers.adapters.sent_with(size.rows) if adapted else None)

    def _launch(self, key: _Key, only: Sequence[int] | None = None) -> None:
        """All layers, or some: see run_pass."""
        size, hidden, scored, form, adapted = key
        run, buffers = self._run(size, adapted), self.buffers
        if form is not None:
            self._fill(run.ints, size, form)
        run_pass(self.steps, self.model, buffers, run, hidden, scored, only)
        if form is not None:
            self.grown.decide(run.ints, size, form, buffers.logits[: form.rows])


def _is_first(key: _Key) -> bool:
    """Is it of a short text and its trees? On wider passes a device works longer than the host launches."""
    return key.scored > 0 and key.size.rows <= NARROW and key.size.splits <= SPLIT_SIZES[0]


def menu(
    max_length: int, tiled_nodes: int = 0, tiled_prompts: int = MAX_ROWS + 1, group_nodes: int = ROWS_OF_A_GROUP
) -> Iterator[Job]:
    """Sizes to capture; `group_nodes` of a sequence attend together, `tiled_nodes` in tiled passes (0 = no such).

    Passes over prompts alone are tiled from `tiled_prompts` rows on, also where others are not.

    Rows of different sequences attend in groups of their own: lone roots need a group each, nodes of a tree that
    branches one each and some more, chunks of prompts few. Empty groups cost time where there are many, so larger
    passes have a size with few and one with many.
    """
    reaches = dict.fromkeys(splits_to(min(length, max_length)) for length in (1, 1024, 16_000, max_length))
    for splits in reaches:
        tiled = tiled_nodes > 0 and splits > SHORT
        for rows in ROW_SIZES:
            many = 1 << (rows - 1).bit_length()
            few = many if rows <= NARROW else max(NARROW, many // 4)
            sizes = [Size(rows, groups, splits) for groups in (few, many, 2 * many if rows <= NARROW else many)]
            if tiled:
                sizes = tiled_sizes(rows, splits, tiled_nodes, few, many)
            for size in dict.fromkeys(sizes):
                for scored in scored_rows(rows):
                    yield size, scored
        for rows in PROMPT_ROWS:
            tiled = tiled_nodes > 0 and (splits > SHORT or (rows >= tiled_prompts and splits > SPLIT_SIZES[0]))
            yield Size(rows, prompt_groups(rows, ROWS_OF_A_GROUP if tiled else group_nodes), splits, tiled=tiled), 0


def prompt_groups(rows: int, group_nodes: int) -> int:
    """Of a size for chunks of prompts: where few nodes attend together, as many as are full, and some for the ends."""
    return max(
        FEW_GROUPS, rows // ROWS_OF_A_GROUP, (rows // group_nodes + FEW_GROUPS) * (group_nodes < ROWS_OF_A_GROUP)
    )


def prompt_rows_for(spans: Sequence[Chunk], group_nodes: int) -> int:
    """Rows of the size of `menu` that has room for chunks of prompts, and for their groups where it is not tiled."""
    sizes = [len(span.tokens) for span in spans]
    total, groups = sum(sizes), sum([-(-size // group_nodes) for size in sizes])
    fitting = (rows for rows in PROMPT_ROWS if rows >= total and prompt_groups(rows, group_nodes) >= groups)
    return next(fitting, MAX_ROWS)


def tiled_sizes(rows: int, splits: int, nodes: int, few: int, many: int) -> list[Size]:
    """Of passes without trees that branch and with them; a tree or a chunk of a prompt has a group for `nodes` rows.

    How many groups there are decides how attention works on them.
    """
    few = -(-rows // nodes) if rows <= NARROW else few
    sizes = [Size(rows, groups, splits, tiled=True) for groups in (few, many)]
    branch = (few, many) if 2 < rows <= NARROW else (few,) if rows > 2 else ()
    return sizes + [Size(rows, groups + rows, splits, lone=rows, tiled=True) for groups in branch]


def scored_rows(rows: int) -> list[int]:
    """How many rows of a pass of this size may have logits; those behind them are of prompts.

    They leave out the last layer but for keys and values, and the LM head: the fewer, the faster.
    """
    return [*(few for few in FEW_SCORED if 2 * few <= rows), rows if rows <= 512 else MOST_SCORED]


def _rounded(scored: int, plan: Plan) -> int:
    """Rows with logits, rounded up as all rows are; many where all rows are many.

    Products of many rows hand the norm on in another way than products of few: all of a pass are of one kind.
    """
    if not scored:
        return 0
    least = NARROW + 1 if plan.size.rows > NARROW else 1
    return min(plan.size.rows, round_up(max(scored, least), ROW_SIZES))


class Replays:
    """Small pieces of work by name: captured when first done on a GPU, plain calls elsewhere."""

    def __init__(self, device: torch.device, capture: bool) -> None:
        self.device, self.capture = device, capture
        self.captured = 0  # so far: work that needed a capture says nothing of what it takes
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._calls: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], list[Tensor]]] = {}
        self._pool = torch.cuda.graph_pool_handle() if capture and device.type == "cuda" else None

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Work is done, and not captured: for `compile_together`, which launches nothing."""
        captures, self.capture = self.capture, False
        try:
            yield
        finally:
            self.capture = captures

    @torch.inference_mode()
    def do(self, name: Hashable, work: Callable[[], None]) -> None:
        """Do what `work` does, once; it must be the same work on the same memory whenever it has this name."""
        if not self.capture:
            work()
        elif name in self._graphs:
            self._graphs[name].replay()
        else:
            started = perf_counter()
            self._graphs[name] = capture(work, self.device, self._pool)
            self.captured += 1
            log.info("captured %s in %.3f s", name, perf_counter() - started)

    @torch.no_grad()
    def call(self, name: Hashable, work: Work, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What `work` makes of these inputs, which are copied to where its graph reads them.

        The next call overwrites it. Work of one name reads inputs of the same shapes, and the same memory besides.
        """
        if name not in self._calls:
            given, found = list[Tensor](), list[Tensor]()

            def keep() -> None:
                found[:] = work(*given)

            with torch.inference_mode(False):
                given += [value.clone() for value in inputs]
                self._calls[name] = capture(keep, self.device, None), given, found
            self.captured += 1
        graph, given, found = self._calls[name]
        for place, value in zip(given, inputs, strict=True):
            place.copy_(value, non_blocking=True)
        graph.replay()
        return tuple(found)

    def clear(self) -> None:
        """Memory that the graphs of calls read has moved."""
        self._calls.clear()


def capture(work: Callable[[], None], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of some work, which is done once on the way: that compiles kernels and makes buffers when needed.

    No garbage is collected meanwhile: graphs of a model that is no longer used cannot be freed during a capture.
    """
    graph = torch.cuda.CUDAGraph()
    work()
    torch.cuda.synchronize(device)
    collects = gc.isenabled()
    gc.disable()
    try:
        # another thread may use the device meanwhile: only what this one does may spoil the capture
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
    finally:
        if collects:
            gc.enable()
    return graph


LAST = 32  # calls whose times can still be asked for

P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(slots=True)
class Span:
    """From the start of a call's first pass to the end of its last."""

    start: Any = None  # torch.cuda.Event, or seconds where there is no device
    end: Any = None
    uses: int = 0

    def seconds(self) -> float | None:
        """None where the device has not got so far."""
        if isinstance(self.end, float):
            return self.end - float(self.start)
        return float(self.start.elapsed_time(self.end)) / 1e3 if self.end.query() else None


class PassClock:
    """Marks where passes start and end. Events are used again after LAST calls."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        spans = [Span() for _ in range(LAST)]
        if self._on_gpu:
            for span in spans:
                span.start, span.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._spans = cycle(spans)
        self._open: Span | None = None

    def start(self) -> None:
        if self._open is None:
            span = self._open = next(self._spans)
            span.uses += 1
            if self._on_gpu:
                span.start.record()
            else:
                span.start = perf_counter()

    def stop(self) -> None:
        assert self._open is not None
        if self._on_gpu:
            self._open.end.record()
        else:
            self._open.end = perf_counter()

    def taken(self) -> Seconds:
        """What the passes since the last call of this took, to be asked once they are done."""
        span, self._open = self._open, None
        if span is None:
            return lambda: None
        uses = span.uses
        return lambda: span.seconds() if span.uses == uses else None


class HasPasses(Protocol):
    """A target whose passes are timed."""

    passes: Passes


Target = TypeVar("Target", bound=HasPasses)


def timed(method: Callable[Concatenate[Target, P], Result]) -> Callable[Concatenate[Target, P], Result]:
    """Add what a method's passes took to the scores that it returns, alone or last."""

    @wraps(method)
    def run(self: Target, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        self.passes.clock.taken()  # what a call that failed has left
        result: Any = method(self, *args, **kwargs)
        if isinstance(result, Scores):
            if result.seconds is not None:  # a plain pass, launched in an earlier call perhaps
                return result  # type: ignore[return-value]
            return replace(result, seconds=self.passes.clock.taken())  # type: ignore[return-value]
        chains, scores = result
        return chains, replace(scores, seconds=self.passes.clock.taken())  # type: ignore[return-value]

    return run


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of some work, the mean of several; on a GPU between two events of the device."""
    if device.type != "cuda":
        started = perf_counter()
        for _ in range(repeats):
            work()
        return (perf_counter() - started) / repeats
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    events[0].record()
    for _ in range(repeats):
        work()
    events[1].record()
    events[1].synchronize()
    return float(events[0].elapsed_time(events[1])) / 1e3 / repeats
