"""CudaHybrid: the GPU decoder for models with recurrent layers.

States are handled as StatefulDecoder says, and lie in the places of a StatePool. A pass writes the states behind lone
roots and behind ends of prompts and pages; of trees the accepted path says which are computed, one launch for all of
them, or one on the device behind a verdict that the host has not read.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from forerun.core.tree import ints_of
from forerun.core.types import Needs, Prompts, Scores, Seq, TreeBatch, TreeForm, Verdict
from forerun.models.config import DecoderConfig
from forerun.models.cuda.device_trees import TreesPass
from forerun.models.cuda.network import StateSteps
from forerun.models.cuda.plan import Plan, Span
from forerun.models.cuda.states import ENDS, Links, Nodes, Place, Trace
from forerun.models.cuda.target import CudaDecoder
from forerun.models.hybrid.stateful import Made, State, StatefulDecoder, States

EACH = 4  # places that a text may take: its state, those of two passes that are not committed, and one that is kept


def cuda_decoder(config: DecoderConfig) -> type[CudaDecoder]:
    """Which of our decoders on a GPU runs a model."""
    return CudaDecoder if config.recurrent is None else CudaHybrid


class CudaHybrid(StatefulDecoder, CudaDecoder):
    """Implements forerun.models.base.Target."""

    prompt_rows = None  # type: ignore[assignment]  # roots do not share a pass with the end of their prompt

    def __init__(self, *args: Any, **placed: Any) -> None:
        CudaDecoder.__init__(self, *args, **placed)
        assert self.buffers.states is not None
        self.places = self.buffers.states
        self._states = States(self.places.nbytes * (self.places.size // 2))
        self.places.spill = self._states.spill
        self._most_ends = max(1, self.places.size // (4 * EACH))
        self._written: dict[int, Place] = {}  # by sequence: where its last pass leaves the state
        self._follows: Sequence[int] = ()
        self._grown: list[Nodes] = []  # of the last pass over grown trees
        self._in_chains = False  # are all of its trees chains?
        self._rounds: weakref.WeakKeyDictionary[Trace, TreesPass] = weakref.WeakKeyDictionary()

    def _empty_state(self) -> State:
        return ((self.places.empty,),)

    def has_room(self, *lengths: int) -> bool:
        needed = EACH * (self.kv.sequences + len(lengths))
        return super().has_room(*lengths) and needed < self.places.size

    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        self._follows = trees.follows or (-1,) * len(seqs)
        return CudaDecoder.score(self, seqs, trees, needs, prompts)

    def _with_adapters(self, plan: Plan, seqs: Sequence[Seq], each: int, spans: Sequence[Span], first: int) -> Plan:
        """And which states rows start from."""
        plan, links, trace = (
            super()._with_adapters(plan, seqs, each, spans, first),
            Links(),
            self.places.trace(plan.rows),
        )
        self._grown = []
        for i, seq in enumerate(seqs):
            self._link_root(links, seq, i, each, trace)
        for span in spans:
            self._link_span(links, span, first, trace)
            first += len(span.tokens)
        return replace(plan, links=links.ints)

    def _link_root(self, links: Links, seq: Seq, index: int, each: int, trace: Trace) -> None:
        """A lone root, or a tree that was grown on the device, whose parents the device knows."""
        follows = self._follows[index] >= 0
        before = self._written[seq.id] if follows else self._states.now[seq.id].state[0][0]
        place, first, made = self.places.take(), index * each, dict[int, tuple[Place]]()
        if each == 1 or self._in_chains:
            links.add_chain(first, each, before)
        else:
            links.add_tree(first, (-1,) * each, before)
        found: Made = made
        if each == 1:
            links.keep(first, place)
            made[0] = (place,)
        else:
            links.ints[ENDS, index] = place.number
            found = Nodes(trace, first, (index, place))
            self._grown.append(found)
        self._written[seq.id] = place
        self._states.note(seq.id, [found], follows)

    def _link_span(self, links: Links, span: Span, first: int, trace: Trace) -> None:
        seq, nodes = span.owner, len(span.tokens)
        assert seq is not None
        before: Place = self._start_state(seq, span.length)[0][0]
        if span.shape.is_chain:
            links.add_chain(first, nodes, before)
        else:
            links.add_tree(first, span.shape.parents, before)
        if nodes > 1 and not span.is_read:
            self._states.note(seq.id, [Nodes(trace, first)])
            return
        kept = {node: (self.places.take(),) for node in self._kept_nodes(seq, span.length, nodes)}
        for node, (place,) in kept.items():
            links.keep(first + node, place)
        self._states.note(seq.id, [kept])

    def _score_grown(
        self, seqs: Sequence[Seq], trees: TreeBatch, form: TreeForm, layers: tuple[int, ...], chunks: Sequence[Span]
    ) -> tuple[Scores, dict[int, torch.Tensor]]:
        self._in_chains = form.chain
        found = super()._score_grown(seqs, trees, form, layers, chunks)
        if self._grown and self.placing.last is not None:
            self._rounds[self._grown[0].trace] = self.placing.last
        self._grown = []
        return found

    def _decided(self, form: TreeForm) -> None:
        """The states behind accepted paths, for passes that follow."""
        if form.nodes > 1:
            self.after.replays.do(("states", form), lambda: self._keep_ends(form))

    def _keep_ends(self, form: TreeForm) -> None:
        ends = self.places.links[ENDS, : form.trees]
        self._keep(self.places.trace(form.rows), self.grown.last_nodes(form), ends)

    def warm_up(self, needs: Needs, max_batch: int, max_length: int) -> None:
        super().warm_up(needs, max_batch, max_length)
        first = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._keep(self.places.trace(1), first, first - 1)  # compiled before a text is written

    def rehearse(self, form: TreeForm, needs: Needs, farthest: int) -> Scores:
        found = super().rehearse(form, needs, farthest)
        self._decided(form)
        return found

    def commit(self, seqs: Sequence[Seq], trees: TreeBatch, verdict: Verdict) -> None:
        paths, by_device = verdict.to_host()[0], verdict.outcome is not None
        asked = dict[Trace, list[tuple[Nodes, int]]]()
        for seq, path in zip(seqs, paths, strict=True):
            made = self._states.nodes[seq.id][0][0]
            if isinstance(made, Nodes):
                nodes = [0, *path]
                if by_device and self._was_decided(made, path):
                    assert made.end is not None
                    made[nodes[-1]] = (made.end[1],)
                ends = {node for _, node in self._page_ends(self._states.now[seq.id].length, nodes)}
                for node in {nodes[-1], *(ends if self.kv.extent(seq.id).start is not None else ())}:
                    if node not in made:
                        asked.setdefault(made.trace, []).append((made, node))
        for trace, some in asked.items():
            self._make_states(trace, some)
        super().commit(seqs, trees, verdict)

    def _was_decided(self, made: Nodes, path: Sequence[int]) -> bool:
        """Is it the path whose end the device has written?"""
        known = self._rounds.get(made.trace)
        return made.end is not None and known is not None and known.decided().path(made.end[0]) == [*path]

    def _make_states(self, trace: Trace, asked: Sequence[tuple[Nodes, int]]) -> None:
        """Write the states behind these nodes."""
        places = [self.places.take() for _ in asked]
        for (made, node), place in zip(asked, places, strict=True):
            made[node] = (place,)
        rows = [made.first + node for made, node in asked]
        numbers = ints_of([rows, [place.number for place in places]], self.device)
        self._keep(trace, numbers[0], numbers[1])

    @torch.inference_mode()
    def _keep(self, trace: Trace, rows: torch.Tensor, places: torch.Tensor) -> None:
        steps = self.passes.steps
        assert isinstance(steps, StateSteps)
        steps.keep_states(trace, rows, places)

    def release(self, seq: Seq) -> None:
        super().release(seq)
        self._written.pop(seq.id, None)
