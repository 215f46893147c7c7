"""HeadDraft: EAGLE heads and multi-token-prediction layers on the GPU; a whole draft is one CUDA graph.

It keeps a head's keys and values in slots of its own and replays, per form (nodes, depth, width) and batch size, a
graph that reads the rows of the last round with the target's true features, runs the head level by level and leaves the
trees in the buffer that the target's pass reads. The host sends one array of integers and reads nothing: the verdict
says what was accepted. The same code runs step by step where nothing is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forerun.core.errors import UnsupportedModel
from forerun.core.params import DraftDtype
from forerun.core.tree import committed_tokens
from forerun.core.types import Form, Needs, Scores, Seq, TreeBatch, TreeForm, Verdict
from forerun.drafters.base import Drafter
from forerun.drafters.device.drafter import DeviceDraft, Going, Launched, OnDevice, built
from forerun.drafters.device.features import FeatureRows, RowState
from forerun.drafters.device.growth import DraftNoise, Frontier, HeadOutput, Pool, complete, cut_trees, grow_level
from forerun.drafters.device.head import FeatureFusion, HeadNet, make_net, why_not
from forerun.drafters.device.plan import (
    DraftForm,
    DraftJob,
    DraftMenu,
    Lane,
    behind,
    below,
    caught_run,
    form_of,
    last_run,
    plan_draft,
    run_at,
)
from forerun.drafters.device.protocol import Seats, Unread
from forerun.drafters.heads.eagle_head import EagleConfig, default_layers, read_head
from forerun.models.base import Target
from forerun.models.cuda.compile.together import Compiling, begin_compiling, compile_together
from forerun.models.cuda.device_trees import STEPS, LastRound
from forerun.models.cuda.graphs import Replays, seconds_of
from forerun.models.cuda.plan import MAX_ROWS, SentInts
from forerun.models.cuda.target import CudaDecoder
from forerun.models.cuda.weights import WeightKind
from forerun.models.pages import TREE_MARGIN

KINDS: Mapping[DraftDtype, WeightKind | None] = {
    "auto": None,
    "bfloat16": "plain",
    "int8": "int8",
    "fp8": "fp8",
    "w4": "w4",
}
PRICED = 64  # numbers of nodes that have a price: more than the largest form of a menu has
INTEGERS = 1 << 18  # room for the largest draft, and for the pages of all sequences


class HeadDraft(DeviceDraft):
    """Drafts of chosen tokens for sequences of one CUDA target. Implements drafters.device.protocol.DeviceDrafter."""

    def __init__(
        self,
        net: HeadNet,
        feature_fusion: FeatureFusion,
        head_output: HeadOutput,
        last: LastRound,
        *,
        capture: bool,
        rates: Sequence[Sequence[float]] = (),
        cuts: bool = False,
    ) -> None:
        """`last`: what the target's last round decided; `rates`: see DraftMenu.

        `cuts`: nodes that do not gain their price are left out, as each activates experts.
        """
        graphs = Replays(net.model.device, capture=capture)
        with torch.inference_mode(False):
            trees = torch.zeros(2, MAX_ROWS, dtype=torch.long, device=graphs.device)
        super().__init__(DraftMenu(rates, widest=len(head_output.ids), graphs=graphs), graphs, trees)
        self.net, self.feature_fusion, self.head_output = net, feature_fusion, head_output
        self._decided, self.noise = last, DraftNoise(head_output.ids)
        self.needs = Needs(tuple(sorted(set(feature_fusion.layers))))
        self.ints = SentInts(graphs.device, INTEGERS, torch.int32, first=MAX_ROWS)
        self.rows = FeatureRows(net, feature_fusion, last, graphs, self.ints)
        self.prices = SentInts(graphs.device, PRICED, torch.float32) if cuts else None
        self._sent_price: tuple[float, ...] | None = ()
        self._last: DraftForm | None = None
        self._joining: dict[int, Seq] = {}  # whose prompts were read since the last draft

    def is_ready(self, seq: Seq) -> bool:
        """Are there rows for all tokens of this sequence, and room for a draft behind them?"""
        return self.rows.ready(seq) is not None

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Keep the rows of root and path, and start the next draft in the form of the last."""
        self._drop_ahead(seqs)
        self.rows.observe(seqs, trees, scores, verdict)
        if verdict.outcome is not None and not verdict.outcome.is_latest:
            return  # the next draft, and the pass over its trees, are under way
        if trees.form is not None and self._last is not None:
            here, fresh = {seq.id for seq in seqs}, committed_tokens(trees, verdict)
            joined = [seq for seq in self._joining.values() if seq.id not in here and self.is_ready(seq)]
            going = [*zip(seqs, fresh, strict=True), *[(seq, list[int]()) for seq in joined]]
            self._go_ahead(going, self._last.shape)
            self._joining = {}
        elif not trees.is_plain():  # plain rounds tell nothing new of who is there
            self._joining |= {seq.id: seq for seq in seqs if self.is_ready(seq)}

    def forget(self, seq: Seq) -> None:
        self._joining.pop(seq.id, None)
        self.rows.forget(seq.id)

    def _start(self, going: Going, form: Form) -> frozenset[int]:
        """Draft for some sequences; their rows count as read, since whatever follows runs behind this."""
        states, more = [self.rows.ready(seq, coming=len(fresh)) for seq, fresh in going], below(form)
        states = [one if one and self.rows.has_room(one, one.seen + more) else None for one in states]
        real = [state for state in states if state is not None]
        self.rows.read_ahead(real, behind(form))
        roots = [fresh[-1] if fresh else seq.tokens[-1] for seq, fresh in going]
        lanes = [self.rows.lane(state, root) for state, root in zip(states, roots, strict=True)]
        self.noise.send([None if state is None else state.noise for state in states])
        self._draft_for(self._padded(lanes, form), form)
        for state in real:
            state.read = state.seen
        return frozenset([state.seq_id for state in real])

    def _follow(self, seats: Seats, form: Form, behind_of: Unread) -> TreeBatch | None:
        """Draft behind a round that was not read: trees of its own, in any form, or lone roots."""
        trees = behind_of.trees
        forms, grown = self._forms_behind(trees, form), trees.form or TreeForm(len(trees), 1, 0, 1)
        if not forms or grown.depth >= STEPS or form.nodes + grown.depth + 2 > TREE_MARGIN:
            return None  # no room for such trees behind each other
        if not all([self._fits(one, len(seats)) for one in forms]):  # noqa: C419
            return None
        found = self.rows.lanes_behind(seats, grown.depth + 1, behind(form), max(map(below, forms)))
        if found is None:
            return None
        self._keep(found.owners, behind_of.hidden, grown, read=True)
        self.noise.send([None if state is None else state.noise for state in found.states])
        farthest = 0 if grown.depth == form.depth else max([one.first for one in found.lanes]) + grown.depth + 1
        for one in forms:
            self._draft_for(self._padded(found.lanes, one), one, farthest)
        for state in found.new:
            state.read = state.seen
        self._ahead, self._joining = None, {}
        launched = Launched({(seq.id, -1): i for i, (seq, _) in enumerate(seats)}, form, frozenset())
        return self._propose(launched, tuple([tree for _, tree in seats]))

    def _fits(self, form: Form, sequences: int) -> bool:
        """Is this form captured, and has a pass room for its trees?"""
        nodes, known = form.nodes + 1, self.menu.knows(form, sequences)
        return known and self.menu.bucket(form, sequences) * nodes <= MAX_ROWS

    def _forms_behind(self, trees: TreeBatch, form: Form) -> tuple[Form, ...]:
        """The drafts to make behind these; () = it is not known what grew them.

        A draft reads as many rows as its own trees can have accepted. Behind deeper ones another draft of theirs, whose
        trees nobody asks for, reads the rest.
        """
        if trees.form is None:
            return (form,)
        if not self._proposed or trees.form != self._proposed[-1][0].form:
            return ()
        return (form,) if trees.form.depth <= form.depth else (form_of(trees.form), form)

    def rest(self, seats: Seats, behind: Unread) -> None:
        """A plain round follows: keep the rows of root and path, which nobody reads now."""
        assert behind.trees.form is not None, "the rows of lone roots are copies"
        states = {tree: self.rows.ready(seq, least=0) for seq, tree in seats if tree >= 0}
        owners = {tree: state for tree, state in states.items() if state is not None}
        self.rows.read_ahead([state for state in owners.values() if state.read < state.seen], 0)
        self._keep(owners, behind.hidden, behind.trees.form, read=False)
        self._ahead = None

    def _keep(self, owners: Mapping[int, RowState], hidden: Mapping[int, Tensor], form: TreeForm, read: bool) -> None:
        """Put the rows of a round that was not read into their places; has the head read them with that?"""
        self.rows.append_decided(owners, [hidden[layer] for layer in self.feature_fusion.layers], form)
        for state in owners.values():
            state.kept = read

    # ---- graphs

    def _padded(self, lanes: list[Lane], form: Form) -> list[Lane]:
        return [*lanes, *[self.rows.lane(None, 0)] * (self.menu.bucket(form, len(lanes)) - len(lanes))]

    def _draft_for(self, lanes: Sequence[Lane], form: Form, farthest: int = 0) -> DraftForm:
        """Draft for as many lanes as a bucket has."""
        planned, ints = plan_draft(lanes, form, self.net.group_nodes, farthest, self.net.attends)
        self.ints.send(ints, planned.sent_at)
        self._last = planned
        self._send_price()
        self._replay_last()
        return planned

    def _send_price(self) -> None:
        """What nodes cost, if that has changed; without a price more nodes are always better."""
        price = self.menu.price
        if self.prices is not None and price != self._sent_price:
            self._sent_price = price
            table = -np.arange(PRICED, dtype=np.float32)
            if price is not None:
                table[:] = price[-1]
                table[: len(price)] = price[:PRICED]
            self.prices.send(table)

    def _replay_last(self) -> None:
        """Run the last draft again, from the same integers: it reads and writes the same."""
        form = self._last
        assert form is not None, "something was drafted"
        self.replays.do((form, self.noise.is_on), lambda: self._draft(form))

    def _draft(self, form: DraftForm) -> None:
        """From the rows of the last round to trees."""
        net, shape, count = self.net, form.shape, form.sequences
        complete(self.ints.all, form, self._decided)
        ints, sources = self.ints.all, MAX_ROWS + form.sources_at
        features = self.rows.rows.index_select(0, ints[sources : sources + form.unread])
        last, roots, ends = last_run(ints, form)
        unread, carried = caught_run(ints, form), self.feature_fusion.fuse(features)
        net.run_some(unread, carried, last, ends)
        out, logits = net.out[:count], net.logits[:count]
        noised = self.noise.of(last.positions, shape.depth)
        pool = Pool(count, shape.width, shape.width, shape.depth, out.device)
        frontier = Frontier.of_roots(count, out.device)
        for i in range(shape.depth - 1):
            size, first = form.level, MAX_ROWS + form.ancestors_at(i)
            run = run_at(ints, size, form.level_at(i))
            into = run.tokens, ints[first : first + size.rows * (i + 1)]
            frontier = grow_level(pool, frontier, noised(logits, i), self.head_output, into)
            parents = frontier.parents if shape.width > 1 else None  # those of a chain lie where it lies
            net.run(run, self.feature_fusion.carry(out), parents)
            out, logits = net.out[: size.rows], net.logits[: size.rows]
        grow_level(pool, frontier, noised(logits, shape.depth - 1), self.head_output)
        # noise says which token comes, not how likely it is
        priced = self.prices if shape.nodes < PRICED and not self.noise.is_on else None
        prices = None if priced is None else priced.all
        cut_trees(pool, roots, shape.nodes, self.trees[:, : form.trees.rows].view(2, count, -1), prices=prices)

    def _prepare(self, target: CudaDecoder, max_length: int) -> int:
        target.passes.compile(min(max_length, target.max_length))  # passes over trees share most of these kernels
        if self._compiles:
            with self.replays.uncaptured():
                compile_together(self.rows.rehearse_reading, self._what(target, "reading"))
        self.rows.rehearse_reading()  # prompts are read whether anything is drafted or not
        return max_length

    @property
    def _compiles(self) -> bool:
        return self.net.model.mix is None  # whose rows are chosen outside of kernels

    @torch.inference_mode()
    def _compile(self, target: CudaDecoder, jobs: Sequence[DraftJob]) -> Compiling | None:
        if not self._compiles:
            return None
        self._proposed, self._ahead = [], None  # whose trees are overwritten
        with self.replays.uncaptured():
            begun = begin_compiling(lambda: self._ask_for(target, jobs), self._what(target, *jobs))
        self.noise.is_on = False
        return begun

    def _what(self, target: CudaDecoder, *more: object) -> object:
        net, ids = self.net, self.head_output.ids
        return target.passes.what(type(self.feature_fusion), self.needs, net.model.config, net.attends, len(ids), *more)

    def _ask_for(self, target: CudaDecoder, jobs: Sequence[DraftJob]) -> None:
        """All of it, of padding. Nothing is launched: integers are zero, and what kernels would choose is not read."""
        self.ints.all[MAX_ROWS:].zero_()
        for job in jobs:
            lanes = [self.rows.lane(None, 0)] * job.bucket
            for farthest in job.reaches:
                planned, _ = plan_draft(lanes, job.form, self.net.group_nodes, farthest, self.net.attends)
                self._draft(planned)
                self.rows.rehearse(target.ask_for(planned.trees, self.needs, farthest), planned.trees)
        self.noise.is_on = True
        self._draft(planned)

    def _capture(self, target: CudaDecoder | None, bucket: int, form: Form, farthest: int) -> None:
        lanes, self.noise.is_on = [self.rows.lane(None, 0)] * bucket, False
        trees = self._draft_for(lanes, form, farthest).trees  # all of them padding
        if self.replays.capture:
            self.noise.rehearse(self._replay_last)
            if not self.menu.is_timed(bucket, form):  # in a short context
                self._replay_last()  # the first replay of a graph takes longer
                self.menu.note(bucket, form, seconds_of(self._replay_last, self.replays.device, 3))
        self._last = None
        if target is not None:
            self.rows.rehearse(target.rehearse(trees, self.needs, farthest), trees)


def on_device(
    folder: Path,
    target: Target,
    make_plain: Callable[[], Drafter],
    *,
    read: Callable[[Path], tuple[EagleConfig, dict[str, Tensor]]] = read_head,
    sampled: bool = False,
    max_batch: int = 1,
    max_length: int | None = None,
    dtype: DraftDtype = "auto",
) -> OnDevice[HeadDraft] | None:
    """A drafter that drafts on the target's device, where head and target allow it; its graphs are captured here.

    A format that was asked for by name is refused where they do not.
    """
    config, weights = read(folder)
    if (reason := why_not(config, target)) and dtype != "auto":
        raise UnsupportedModel(f"draft_dtype={dtype!r} cannot be used: {reason}; leave it out")
    if reason or not isinstance(target, CudaDecoder):
        return None
    if not config.layers:
        config = replace(config, layers=default_layers(target.config.layers))
    target.shared().must_fit(config.target_width, config.vocab_size, config.target)

    def make() -> OnDevice[HeadDraft]:
        net, capture = make_net(config, weights, target, KINDS[dtype]), target.kernels == "triton"
        cuts = target.config.moe is not None and target.config.recurrent is None
        draft = HeadDraft(*net, capture=capture, rates=config.rates, cuts=cuts)
        return OnDevice(draft, make_plain, sampled=sampled, stops=cuts)

    return built(make, target, max_batch, max_length or target.max_length)
