"""CudaDecoder: our decoder on a GPU, a Target; and CudaPart, some of its layers as a draft model.

Keys and values live in a pool of pages made once; the nodes of a tree are written behind its sequence's committed
tokens, and only an accepted path that is not yet in place is moved. Nothing here waits for the device: plans are made
from what the host knows, and logits stay where they are.

A part drafts by the decoder's own kernels, over its own KV pool: keys and values go to the slots behind the committed
tokens, where the target's pass over the draft writes the same bits again. That pass starts from the tokens, unlike a
CPU's, which goes on where an early exit left off: the last drafted token was never read, so the first layers' weights
must be read for it in any case, and reading weights is what a pass over few rows takes. A draft step is a pass of the
layers that are kept, captured for the usual sizes when the drafter is loaded, then a norm or an exit adapter, and the
LM head. Sizes that were not captured run step by step: nothing is captured in mid-text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.errors import ForerunError, UnsupportedModel
from forerun.core.tree import TreeBatch, TreeForm
from forerun.core.types import DeviceSampling, Greedy, GreedyWalk, Needs, Prompts, Scores, Seq, Verdict
from forerun.models.adapters import Adapter
from forerun.models.attention import Span as Nodes
from forerun.models.attention import SparseContext
from forerun.models.base import LayerSubset, SharedWeights
from forerun.models.config import DecoderConfig
from forerun.models.cuda.adapters import CudaAdapter
from forerun.models.cuda.after_pass import AfterPass, Sampler
from forerun.models.cuda.compile.later import LaterCaptures
from forerun.models.cuda.device_trees import GrownBuffers, Placing, TreesPass, plan_grown
from forerun.models.cuda.graphs import Passes, Replays, menu, prompt_rows_for, seconds_of, timed
from forerun.models.cuda.network import Buffers, Model, Run, has_long_rope
from forerun.models.cuda.plain_rounds import PlainRounds, PlainStep
from forerun.models.cuda.plan import (
    MAX_ROWS,
    ROW_SIZES,
    Found,
    Need,
    Plan,
    SentInts,
    Size,
    Span,
    adapter_runs,
    beside_trees,
    chunks_of,
    group_sizes,
    joined,
    least_rows,
    padding,
    plan_pass,
    round_up,
    rows_beside,
    rows_of,
)
from forerun.models.cuda.pool import Kind, has_compiled, make_steps, pick_kernels, pool_slots
from forerun.models.cuda.weights import WeightKind
from forerun.models.layers import Rotations
from forerun.models.pages import PAGE, TREE_MARGIN
from forerun.models.partial import Leave, PartialTarget
from forerun.models.slots import Piece, SlotTarget

log = logging.getLogger(__name__)

CHUNK = MAX_ROWS  # rows of prompts per pass


class CudaDecoder(SlotTarget):
    """Implements forerun.models.base.Target."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cuda",
        kv_slots: int | None = None,
        kv_memory: int | float | None = None,
        kv_dtype: torch.dtype | None = None,
        kernels: Kind = "auto",
        weight_kind: WeightKind = "plain",
        greedy_walk: GreedyWalk,
        sampling: DeviceSampling | None = None,
    ) -> None:
        """`kv_dtype`: torch.int8 or torch.float8_e4m3fn, or that of the rows."""
        self.kernels = pick_kernels(kernels, torch.device(device), dtype)
        compiled = has_compiled(weight_kind, config, torch.device(device), self.kernels)
        if weight_kind == "file" and not compiled:
            weight_kind = "plain"
        self.model = Model(config, weights, dtype, torch.device(device), weight_kind, compiled)
        self.buffers = Buffers(self.model, queries=None if kv_dtype is None else torch.float16)
        slots = kv_slots or pool_slots(self.model, kv_memory, kv_dtype)
        super().__init__(
            config, dtype=dtype, device=self.model.device, kv_slots=slots, kv_dtype=kv_dtype,
            scales_apart=kv_dtype is not None,
        )  # fmt: skip
        self.max_length = self.model.max_length
        if has_long_rope(config):
            self._follow_lengths()
        steps = make_steps(self.kernels, self.model, self.buffers, self.kv.data, self.kv.scales)
        self._group_nodes, self._tiled_nodes = group_sizes(config)
        self.grown = GrownBuffers(self.device, greedy_walk, self._group_nodes, tiled_nodes=self._tiled_nodes)
        fused = self.kernels == "triton"
        self.passes = Passes(self.model, self.buffers, self.grown, steps, capture=fused, kv=self.kv.data)
        replays = Replays(self.device, capture=fused)
        self.sampler = Sampler(sampling, self.buffers, self.grown, self.passes.plain, replays)
        self.placing = Placing(self.kv, self._extent_for)
        self.plain = PlainRounds(
            self.passes.plain, self.buffers, self._run_plain, self.placing, self._group_nodes, self._tiled_nodes,
            self.passes.scored_size, self.sampler.kinds, self.grown.last, self._with_adapters,
        )  # fmt: skip
        self.after = AfterPass(self.kv, self.buffers, self.grown, replays, fused)
        self.later = LaterCaptures()
        self._prompt_pace = PromptPace(self.device)
        self._takes_grown = True  # until a pass over trees grown on the device has failed
        log.info("KV pool: %d slots, %.2f GB", self.kv.capacity, self.pool_bytes / 1e9)

    def _follow_lengths(self) -> None:
        """Rotations of a row follow from its page: pages are of texts of one kind, short or long (decisions/16)."""
        pages, far = self.kv.capacity // PAGE, self.max_length + TREE_MARGIN
        known = np.zeros(pages, dtype=np.int32)
        with torch.inference_mode(False):
            turns = self.buffers.page_turns = torch.zeros(pages, dtype=torch.int32, device=self.device)

        def note(owner: int, taken: Sequence[int]) -> None:
            length = self._lengths.get(owner, 0)  # drafts of texts that were never read
            value = far if any(rope.regime(length) for rope in self.config.ropes) else 0
            if changed := [page for page in taken if known[page] != value]:
                known[changed] = value
                turns[changed] = value  # behind the passes that were launched

        self.kv.pool.taken = note

    @property
    def pool_bytes(self) -> int:
        """Memory that the KV pool takes, full or not."""
        return self.kv.nbytes

    def shared(self) -> SharedWeights:
        model, apart = self.model, self.config.special is None  # do layers run by themselves?
        return SharedWeights(
            embed=lambda ids: model.embedding[ids.to(self.device)],
            head_rows=lambda ids: model.head[ids.to(self.device)].to(model.dtype),
            vocab_size=self.vocab_size,
            width=self.config.width,
            dtype=model.dtype,
            layers=model.layers if apart else (),
            final_norm=model.final_norm,
            rotations=[Rotations(rope, self.device) for rope in self.config.ropes],
            config=self.config,
            partial=partial(CudaPart, self) if apart else None,
        )

    @property
    def pass_rows(self) -> int:
        return CHUNK

    @timed
    @torch.no_grad()
    def prefill(self, seqs: Sequence[Seq], needs: Needs, rows: int | None = None) -> tuple[TreeBatch, Scores]:
        """Cache tokens that are not cached yet, in passes of at most CHUNK rows."""
        fresh, found = self._admit(seqs, needs, rows), Found(self._layers(needs))
        self._note_layers(seqs, needs)
        for _, pieces in self._passes(seqs, fresh, CHUNK):
            self._run(chunks_of(pieces), 0, found)
        self._prompt_pace.launched()
        chains, hidden = self._with_found(seqs, fresh, self._hidden(found))
        return TreeBatch.chains(chains), Scores(None, hidden)

    @timed
    @torch.no_grad()
    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        """One pass over every node, and over prompts behind them; or several where they are more than MAX_ROWS."""
        layers = self._layers(needs)
        if prompts is None:
            self._note_layers(seqs, needs)
            return self._score(seqs, trees, layers, ())[0]
        fresh = self._admit(prompts.seqs, needs)
        self._note_layers([*seqs, *prompts.seqs], needs)
        fresh = beside_trees(fresh, trees, prompts.rows, least_rows(prompts.seqs, fresh, seqs))
        pieces = self._pieces(prompts.seqs, fresh)
        for piece in pieces:  # roots may lie behind them
            piece.extent.coming = len(piece.tokens)
        scores, behind = self._score(seqs, trees, layers, chunks_of(pieces))
        self._keep_pieces(pieces)
        behind = behind or self._hidden(Found(layers))  # prompts of one token have no rows
        chains, behind = self._with_found(prompts.seqs, fresh, behind)
        return replace(scores, read=(TreeBatch.chains(chains), Scores(None, behind)))

    prompt_rows = staticmethod(rows_beside)

    def _score(
        self, seqs: Sequence[Seq], trees: TreeBatch, layers: tuple[int, ...], chunks: Sequence[Span]
    ) -> tuple[Scores, dict[int, Tensor]]:
        """Scores of the trees, and hidden rows of chunks of prompts."""
        if trees.form is None and self.plain.takes(trees):
            if trees.follows is not None and self.placing.last is not None:  # roots behind trees
                self.after.move_decided()
                self.grown.superseded = self.grown.passes
            return self.plain.score(seqs, trees, layers, chunks)
        return self._score_trees(seqs, trees, layers, chunks)

    def _score_trees(
        self, seqs: Sequence[Seq], trees: TreeBatch, layers: tuple[int, ...], chunks: Sequence[Span]
    ) -> tuple[Scores, dict[int, Tensor]]:
        form = trees.form
        if form is not None and form.rows + rows_of(chunks) <= MAX_ROWS and self._takes_grown:
            try:
                return self._score_grown(seqs, trees, form, layers, chunks)
            except ForerunError:
                raise
            except Exception as error:  # compiling or capturing: the same trees can be scored like all others
                if trees.follows is not None:  # but not where the host does not know what they are behind
                    raise
                self._takes_grown = False
                log.warning("trees on the device are read by the host, as their own pass failed: %r", error)
        assert trees.follows is None, "the host does not know what they are behind"
        found, spans = Found(layers), list[Span]()
        tokens, shapes = [max(0, token) for token in trees.to_host()[0]], trees.topology()  # CUT: any will do
        for b, seq in enumerate(seqs):
            first, end = trees.starts[b : b + 2]
            extent = self._extent_for(seq, end - first)
            if rows_of(spans) + end - first > MAX_ROWS:
                self._run(spans, rows_of(spans), found)
                found.logits[-1] = found.logits[-1].clone()  # another pass follows
                spans = []
            place = extent.length + extent.coming
            spans.append(Span(tokens[first:end], shapes[b], extent.pages, place, seq.adapter, seq))
        scored = rows_of(spans)
        if scored + rows_of(chunks) <= MAX_ROWS:
            spans, chunks = [*spans, *chunks], ()
        self._run(spans, scored, found)
        self._run(chunks, 0, found)
        rows, nodes = self._hidden(found), trees.nodes
        behind = {layer: some[nodes:] for layer, some in rows.items()}
        return Scores(joined(found.logits), {layer: some[:nodes] for layer, some in rows.items()}), behind

    def _score_grown(
        self, seqs: Sequence[Seq], trees: TreeBatch, form: TreeForm, layers: tuple[int, ...], chunks: Sequence[Span]
    ) -> tuple[Scores, dict[int, Tensor]]:
        """Trees grown on the device: nothing is read, and all results stay in the buffers until the next pass."""
        if trees.follows is not None and self.placing.last is not None:
            self.after.move_decided()
        places, added = self.placing.places(seqs, trees.follows, form), self.placing.added
        size_for = self.passes.scored_size
        plan = plan_grown(
            places, form, self._group_nodes, chunks, size_for=size_for, added=added, tiled_nodes=self._tiled_nodes
        )
        plan = self._with_adapters(plan, seqs, form.nodes, chunks, form.rows)
        self.grown.take(trees, form)
        self.passes.run_grown(plan, layers, form)
        sampled = self.sampler.decide_grown(seqs, plan, form)
        self._decided(form)
        number = self.grown.send(form)
        self.after.keep_rows(plan, layers)
        if trees.follows is not None:  # it is decided; and now, before those that have ended give pages back
            self.after.move_decided()
        rows = {layer: self.buffers.hidden(layer) for layer in layers}
        hidden = {layer: found[: form.rows] for layer, found in rows.items()}  # padding too: graphs read all of it
        behind = {layer: found[form.rows : plan.rows].clone() for layer, found in rows.items() if chunks}
        logits = self.buffers.logits[: trees.nodes]
        this = self.placing.last = TreesPass(form, lambda: self.grown.read(trees, form, number))
        known = Greedy(
            verdict=this.decided,
            sampled=sampled,
            next_roots=lambda going: self.plain.next_roots(this, going),
            tokens=lambda: self.grown.committed(form)[: trees.nodes],
        )
        return Scores(logits, hidden, known), behind

    def compile_ahead(self, max_length: int) -> None:
        self.passes.compile(min(max_length, self.max_length))

    def capture_few_first(self) -> None:
        self.passes.few_first = True

    @torch.no_grad()
    def warm_up(self, needs: Needs, max_batch: int, max_length: int) -> None:
        """Capture the passes of plain rounds, of drafts that the host makes, and of prompts."""
        layers = self._layers(needs)
        left = self.passes.warm_up(layers, min(max_length, self.max_length))
        if left:
            self.later.add("passes", range(1, max_batch + 1), lambda: None, left)
        self.sampler.warm_up(max_batch)
        self.after.warm_up(layers)

    @torch.no_grad()
    def rehearse(self, form: TreeForm, needs: Needs, farthest: int) -> Scores:
        """Capture the pass over trees of a form, in contexts up to `farthest`, and their commit; writes to no slot.

        Returns scores of padding, whose hidden rows lie where those of real trees of this form will lie.
        """
        layers = self._layers(needs)
        plan = plan_grown([], form, self._group_nodes, farthest=farthest, tiled_nodes=self._tiled_nodes)
        for adapted in self.passes.kinds():
            self.grown.take_padding(form)
            self.passes.run_grown(self.passes.padded(plan, adapted), layers, form)
        self.sampler.rehearse(plan.size, form)
        self.after.keep_rows(plan, layers)
        self.after.move(form)
        return Scores(None, {layer: self.buffers.hidden(layer)[: form.rows] for layer in layers})

    @torch.inference_mode()
    def ask_for(self, form: TreeForm, needs: Needs, farthest: int) -> Scores:
        """Launch what `rehearse` captures: within `compile_together`, which launches nothing."""
        layers = self._layers(needs)
        plan = plan_grown([], form, self._group_nodes, farthest=farthest, tiled_nodes=self._tiled_nodes)
        with self.after.replays.uncaptured():
            self.passes.ask_for_grown(plan, layers, form)
            self.sampler.rehearse(plan.size, form)
            self.after.keep_rows(plan, layers)
            self.after.move(form)
        return Scores(None, {layer: self.buffers.hidden(layer)[: form.rows] for layer in layers})

    @torch.no_grad()
    def commit(self, seqs: Sequence[Seq], trees: TreeBatch, verdict: Verdict) -> None:
        """Paths that are already in place cost nothing; all others move in one call, in all layers."""
        moves = self._accept(seqs, verdict)
        outcome = verdict.outcome
        if outcome is None:
            self.kv.move(moves)
        elif moves and not outcome.is_moved:
            self.after.move_decided()

    def load_adapter(self, name: str, key: int, adapter: Adapter) -> CudaAdapter:
        if self.model.compiled:
            raise UnsupportedModel(
                f"the adapter {name!r} cannot be added to weights of kind {self.model.kind!r}: their products are "
                "compiled ahead; load the base in bfloat16"
            )
        return self.buffers.adapters.load(name, key, adapter)

    def _with_adapters(self, plan: Plan, seqs: Sequence[Seq], each: int, spans: Sequence[Span], first: int) -> Plan:
        """A pass over sequences of `each` rows and, from row `first` on, over spans: which rows have which adapter."""
        if all([one.adapter is None for one in seqs]) and all([one.adapter is None for one in spans]):  # noqa: C419
            return plan
        runs = adapter_runs(seqs, each, spans, first)
        return replace(plan, units=self.buffers.adapters.units_of(plan.size.rows, runs))

    def _decided(self, form: TreeForm) -> None:
        """The verdict on grown trees has its place on the device, and is final unless the host decides."""

    def _run_plain(self, plan: Plan, hidden: tuple[int, ...], step: PlainStep) -> None:
        self.passes.run_plain(plan, hidden, step)
        self.sampler.decide_plain(plan.size, step)
        self.after.keep_rows(plan, hidden)

    def _run(self, spans: Sequence[Span], scored: int, found: Found) -> None:
        """One pass; hidden rows are copied out of the buffers, logits stay there until the next pass over trees."""
        if not spans:
            return
        size_for = self.passes.scored_size if scored else self.passes.prompt_size
        alone = not scored and prompt_rows_for(spans, self._group_nodes) >= self.passes.tiled_prompts
        plan = plan_pass(spans, self._group_nodes, size_for, tiled_nodes=self._tiled_nodes, prompts=alone)
        plan = self._with_adapters(plan, (), 0, spans, 0)
        self.passes.run(plan, tuple(found.hidden), scored)
        self.after.keep_rows(plan, tuple(found.hidden))
        for layer, rows in found.hidden.items():
            rows.append(self.buffers.hidden(layer)[: plan.rows].clone())
        if scored:
            found.logits.append(self.buffers.logits[:scored])

    def _read_piece(self, piece: Piece) -> None:
        self._run(chunks_of([piece]), 0, Found(()))

    def _hidden(self, found: Found) -> dict[int, Tensor]:
        return {layer: joined(rows) if rows else self._empty_rows(0) for layer, rows in found.hidden.items()}


class PromptPace:
    """Keeps the host one pass over prompts ahead of the device: a request that comes waits for two at most."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._last: Any = None

    def launched(self) -> None:
        """One more is launched: wait for the one before, beside which it was launched."""
        if not self._on_gpu:
            return
        before, self._last = self._last, torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last.record()
        if before is not None:
            before.synchronize()


progress = logging.getLogger("forerun.progress")

FEWEST = 16  # rows up to which passes are captured at least: a chain of a cascade's lower level


class CudaPart(PartialTarget):
    """Implements forerun.models.base.Target for sequences that the whole target has prefilled."""

    def __init__(
        self, target: CudaDecoder, layers: LayerSubset, leave: Leave | None = None, context: SparseContext | None = None
    ) -> None:
        dtype = target.model.dtype
        self.runs = CudaLayers(target, layers, is_sparse=context is not None)
        super().__init__(self.runs, layers, None if leave is None else lambda rows: leave(rows.to(dtype)), context)

    def warm_up(self, needs: Needs, max_batch: int, max_length: int) -> None:
        """Capture the passes that drafts for `max_batch` sequences take; run what follows them once in every size."""
        if not self.runs.replays.capture:
            return
        started, longest = perf_counter(), min(max_length, self.max_length)
        try:
            farthest = longest if self.context is None else min(longest, self.context.farthest)
            self.runs.capture(max_batch, farthest, self._leave)
        except Exception as error:  # no memory, no working Triton: neither stops generation
            self.runs.sizes = []
            log.warning("draft passes are not captured: %s: %s", type(error).__name__, error)
            return
        count, spent = self.runs.replays.captured, perf_counter() - started
        step = 1e3 * self.runs.step_seconds(self._leave)
        log.info("captured %d draft passes in %.1f s; a step of one row takes %.2f ms", count, spent, step)


class CudaLayers:
    """Implements forerun.models.partial.RunsLayers."""

    early_exits = None

    def __init__(self, target: CudaDecoder, layers: LayerSubset, is_sparse: bool = False) -> None:
        """`is_sparse`: spans may have pages left out."""
        self._target, self._layers = target, layers
        # the positions that rows are rotated by, where attention has others
        self._rotated = SentInts(target.device, MAX_ROWS, torch.int32) if is_sparse else None
        self.kv, self.slots, self.device, self.make_room = (target.kv, target.slots, target.device, target.make_room)
        self.vocab_size, self.max_length, self.pass_rows = (target.vocab_size, target.max_length, target.pass_rows)
        self._steps = target.passes.steps.on(target.model.part(layers))
        self.replays = Replays(target.device, capture=target.passes.capture)
        self.sizes: list[Size] = []  # that are captured, smallest first

    @torch.inference_mode()
    def run_layers(
        self, tokens: Sequence[int], spans: Sequence[Nodes], seqs: Sequence[Seq], layers: LayerSubset
    ) -> Tensor:
        """[M, D] fp32, valid until the next pass: in one pass, or several where they are more than MAX_ROWS."""
        assert layers == self._layers, "a part runs its own layers"
        target, found = self._target, list[Tensor]()
        own = [Span(tokens[span.first : span.end], span.shape, span.pages, span.length) for span in spans]
        turned = [span.length + span.skipped + depth for span in spans for depth in span.shape.depths]
        for some in _in_passes(own):
            plan = plan_pass(some, target.grown.group_nodes, self._size_for)
            target.buffers.send(plan)
            if self._rotated is not None:
                self._rotated.send(np.array(turned[: plan.rows], dtype=np.int32))
                del turned[: plan.rows]
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
        """Capture the passes of drafts for up to `max_batch` sequences, over rows that are written nowhere."""
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
        turned = run if self._rotated is None else replace(run, positions=self._rotated.all[: size.rows])
        steps.embed(turned)
        for i in range(layers.end):
            if i not in layers.without_attention:
                steps.qkv(turned, i)
                steps.attend(run, i)
                steps.leave_attention(run, i)
            if i not in layers.without_mlp:
                steps.gate(run, i)
                steps.leave_mlp(run, i)


def _in_passes(spans: Iterable[Span]) -> Iterator[list[Span]]:
    some, rows = list[Span](), 0
    for span in spans:
        if rows + len(span.tokens) > MAX_ROWS:
            yield some
            some, rows = [], 0
        some.append(span)
        rows += len(span.tokens)
    yield some
