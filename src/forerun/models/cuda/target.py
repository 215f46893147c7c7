"""CudaDecoder: our decoder on a GPU, a Target.

Keys and values live in a pool made once; a sequence's slots follow each other, the nodes of a tree are written
behind its committed tokens, and only an accepted path that is not yet in place is moved. Nothing here waits
for the device: plans are made from what the host knows, and logits stay where they are.
"""

from __future__ import annotations

import importlib.util
import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from forerun.errors import ForerunError, InvalidInput, MissingDependency
from forerun.models.config import DecoderConfig
from forerun.models.cuda.graphs import Passes, Replays
from forerun.models.cuda.grown import GrownBuffers, Outcome, plan_grown
from forerun.models.cuda.network import Buffers, Model, Steps
from forerun.models.cuda.packed import WeightKind
from forerun.models.cuda.pass_clock import timed
from forerun.models.cuda.plain import PlainSteps
from forerun.models.cuda.plan import MAX_ROWS, ROW_SIZES, Span, plan_pass
from forerun.models.kv import TREE_MARGIN
from forerun.models.layers import Rotations
from forerun.models.shared import SharedWeights
from forerun.models.slots import Piece, SlotTarget
from forerun.topology import chain_of
from forerun.trees import DeviceOutcome, TreeBatch, TreeForm, Verdict
from forerun.types import Greedy, GreedyWalk, Needs, Prompts, Scores, Seq, first_rows

log = logging.getLogger(__name__)

CHUNK = MAX_ROWS  # rows of prompts per pass
POOL_SHARE = 0.8  # of the memory that is free once the weights are loaded
POOL_SEQUENCES = 16  # sequences of full length that the pool need not exceed
_QUERIES = 64  # rows that one program of attention has: nodes times heads per key-value head

Kind = Literal["auto", "triton", "torch"]


class Found:
    """What several passes have computed, in order."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.logits: list[Tensor] = []
        self.hidden: dict[int, list[Tensor]] = {layer: [] for layer in layers}


class CudaDecoder(SlotTarget):
    """Implements forerun.models.base.Target."""

    tree_limit = TREE_MARGIN

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cuda",
        kv_slots: int | None = None,
        kernels: Kind = "auto",
        weight_kind: WeightKind = "plain",
        greedy_walk: GreedyWalk,
    ) -> None:
        self.model = Model(config, weights, dtype, torch.device(device), weight_kind)
        self.buffers = Buffers(self.model)
        slots = kv_slots or _pool_slots(self.model)
        super().__init__(config, dtype=dtype, device=self.model.device, kv_slots=slots)
        self.kernels = _pick(kernels, self._device, dtype)
        steps = self._steps()
        self.grown = GrownBuffers(self._device, greedy_walk)
        self.passes = Passes(self.model, self.buffers, self.grown, steps, capture=self.kernels == "triton")
        self._moves = Replays(self._device, capture=self.kernels == "triton")
        self._takes_grown = True  # until a pass over trees grown on the device has failed
        self._group_nodes = _QUERIES // (1 << (config.heads // config.kv_heads - 1).bit_length())
        log.info("KV pool: %d slots, %.2f GB", self.kv.capacity, self.pool_bytes / 1e9)

    @property
    def max_length(self) -> int:
        return self.model.max_length

    @property
    def pool_bytes(self) -> int:
        """Memory that the KV pool takes, full or not."""
        return self.kv.data.numel() * self.kv.data.element_size()

    def shared(self) -> SharedWeights:
        model = self.model
        return SharedWeights(
            embed=lambda ids: model.embedding[ids.to(self.device)],
            head_rows=lambda ids: model.head[ids.to(self.device)].to(model.dtype),
            vocab_size=self.vocab_size,
            width=self.config.width,
            dtype=model.dtype,
            layers=model.layers,
            final_norm=model.final_norm,
            rotations=[Rotations(rope, self.device) for rope in self.config.ropes],
            config=self.config,
        )

    @property
    def pass_rows(self) -> int:
        return CHUNK

    @timed
    @torch.no_grad()
    def prefill(self, seqs: Sequence[Seq], needs: Needs, rows: int | None = None) -> tuple[TreeBatch, Scores]:
        """Cache tokens that are not cached yet, in passes of at most CHUNK rows."""
        fresh, found = self._admit(seqs, rows), Found(self._layers(needs))
        for _, pieces in self._passes(seqs, fresh, CHUNK):
            self._run(_chunks(pieces), 0, found)
        return TreeBatch.chains(fresh), Scores(None, self._hidden(found))

    @timed
    @torch.no_grad()
    def score(
        self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None
    ) -> Scores:
        """One pass over every node, and over prompts behind them; or several where they are more than MAX_ROWS."""
        layers = self._layers(needs)
        if prompts is None:
            return self._score(seqs, trees, layers, ())[0]
        fresh = self._admit(prompts.seqs, prompts.rows)
        if sum(map(len, fresh)) == prompts.rows:  # there may be more: fill a size that passes have, pad none
            fresh = first_rows(
                fresh, _fitting(trees.nodes if trees.form is None else trees.form.rows, prompts.rows)
            )
        pieces, chains = self._pieces(prompts.seqs, fresh), TreeBatch.chains(fresh)
        scores, behind = self._score(seqs, trees, layers, _chunks(pieces))
        self._keep_pieces(pieces)
        return replace(scores, read=(chains, Scores(None, behind)))

    def _score(
        self, seqs: Sequence[Seq], trees: TreeBatch, layers: tuple[int, ...], chunks: Sequence[Span]
    ) -> tuple[Scores, dict[int, Tensor]]:
        """Scores of the trees, and hidden rows of chunks of prompts."""
        form = trees.form
        if form is not None and form.rows + _rows(chunks) <= MAX_ROWS and self._takes_grown:
            try:
                return self._score_grown(seqs, trees, form, layers, chunks)
            except ForerunError:
                raise
            except Exception as error:  # compiling or capturing: the same trees can be scored like all others
                self._takes_grown = False
                log.warning("trees on the device are read by the host, as their own pass failed: %r", error)
        found, spans = Found(layers), list[Span]()
        tokens, shapes = trees.to_host()[0], trees.topology()
        for b, seq in enumerate(seqs):
            first, end = trees.starts[b : b + 2]
            extent = self._extent_for(seq, end - first)
            if _rows(spans) + end - first > MAX_ROWS:
                self._run(spans, _rows(spans), found)
                spans = []
            spans.append(Span(tokens[first:end], shapes[b], extent.base, extent.length))
        scored = _rows(spans)
        if scored + _rows(chunks) <= MAX_ROWS:
            spans, chunks = [*spans, *chunks], ()
        self._run(spans, scored, found)
        self._run(chunks, 0, found)
        rows = self._hidden(found)
        hidden = {layer: some[: trees.nodes] for layer, some in rows.items()}
        return Scores(_joined(found.logits), hidden), {
            layer: some[trees.nodes :] for layer, some in rows.items()
        }

    def _score_grown(
        self,
        seqs: Sequence[Seq],
        trees: TreeBatch,
        form: TreeForm,
        layers: tuple[int, ...],
        chunks: Sequence[Span],
    ) -> tuple[Scores, dict[int, Tensor]]:
        """Trees grown on the device: nothing is read, and all results stay in the buffers until the next pass."""
        extents = [self._extent_for(seq, form.nodes) for seq in seqs]
        places = [(extent.base, extent.length) for extent in extents]
        plan = plan_grown(places, form, self._group_nodes, chunks)
        self.grown.take(trees, form)
        self.passes.run(plan, layers, form.rows, form)
        rows = {layer: self.buffers.hidden(layer) for layer in layers}
        hidden = {layer: found[: trees.nodes] for layer, found in rows.items()}
        behind = (
            {layer: found[form.rows : plan.rows].clone() for layer, found in rows.items()} if chunks else {}
        )
        logits = self.buffers.logits[: trees.nodes]
        return Scores(logits, hidden, Greedy(verdict=lambda: self.grown.read(trees, form))), behind

    @torch.no_grad()
    def rehearse(self, form: TreeForm, needs: Needs, farthest: int) -> Scores:
        """Capture the pass over trees of a form, in contexts up to `farthest`, and their commit; writes to no slot.

        Returns scores of padding, whose hidden rows lie where those of real trees of this form will lie.
        """
        layers = self._layers(needs)
        plan = plan_grown([], form, self._group_nodes, farthest=farthest)
        self.grown.take_padding(form)
        self.passes.run(plan, layers, form.rows, form)
        outcome = Outcome(self.grown, form)
        self._moves.do(form, lambda: self._move(outcome))
        return Scores(None, {layer: self.buffers.hidden(layer)[: form.rows] for layer in layers})

    @torch.no_grad()
    def commit(self, seqs: Sequence[Seq], trees: TreeBatch, verdict: Verdict) -> None:
        """Paths that are already in place cost nothing; all others move in one call, in all layers."""
        moves = self._accept(seqs, verdict)
        outcome = verdict.outcome
        if moves and outcome is not None:
            self._moves.do(trees.form, lambda: self._move(outcome))  # computed by the device itself
        else:
            self.kv.move(moves)

    def _move(self, outcome: DeviceOutcome) -> None:
        sources, places = outcome.moves()
        self.kv.data.index_copy_(3, places, self.kv.data.index_select(3, sources))

    def _run(self, spans: Sequence[Span], scored: int, found: Found) -> None:
        """One pass; its results are copied out of the buffers, which the next pass overwrites."""
        if not spans:
            return
        plan = plan_pass(spans, self._group_nodes)
        self.passes.run(plan, tuple(found.hidden), scored)
        for layer, rows in found.hidden.items():
            rows.append(self.buffers.hidden(layer)[: plan.rows].clone())
        if scored:
            found.logits.append(self.buffers.logits[:scored].clone())

    def _hidden(self, found: Found) -> dict[int, Tensor]:
        return {layer: _joined(rows) if rows else self._empty_rows(0) for layer, rows in found.hidden.items()}

    def _steps(self) -> Steps:
        if self.kernels == "torch":
            return PlainSteps(self.model, self.buffers, self.kv.data)
        from forerun.models.cuda.fused import FusedSteps

        return FusedSteps(self.model, self.buffers, self.kv.data)


def _chunks(pieces: Sequence[Piece]) -> list[Span]:
    """Pieces of prompts as rows of a pass."""
    return [
        Span(piece.tokens, chain_of(len(piece.tokens)), piece.extent.base, piece.extent.length)
        for piece in pieces
    ]


def _fitting(nodes: int, rows: int) -> int:
    """So many rows of prompts beside these nodes that the pass has a size without padding, if that is most of them."""
    size = ROW_SIZES[bisect_right(ROW_SIZES, nodes + rows) - 1]
    return size - nodes if size > 64 and 2 * (size - nodes) >= rows else rows


def _rows(spans: Sequence[Span]) -> int:
    return sum(len(span.tokens) for span in spans)


def _joined(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _pool_slots(model: Model) -> int:
    """As many as memory allows, but no more than several sequences of full length need."""
    enough = POOL_SEQUENCES * (model.max_length + TREE_MARGIN)
    if model.device.type != "cuda":
        return min(enough, 1 << 15)
    free, _ = torch.cuda.mem_get_info(model.device)
    config, item = model.config, model.embedding.element_size()
    slot = 2 * config.layers * config.kv_heads * config.head_dim * item
    return max(1, min(enough, int(POOL_SHARE * free) // slot))


def _pick(kernels: Kind, device: torch.device, dtype: torch.dtype) -> Literal["triton", "torch"]:
    """Triton where there is a GPU for it; its products are for 16-bit weights."""
    there = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    fits = dtype in (torch.bfloat16, torch.float16)
    if kernels == "triton" and not there:
        raise MissingDependency("kernels='triton' needs a CUDA device and the package triton; use 'torch'")
    if kernels == "triton" and not fits:
        raise InvalidInput(
            f"kernels='triton' cannot run {dtype}: use bfloat16 or float16, or kernels='torch'"
        )
    if kernels == "auto":
        return "triton" if there and fits else "torch"
    return kernels
