"""DeviceDraft: EAGLE-3 drafting on the GPU; a whole draft is one CUDA graph, and its trees stay on the device.

`DeviceDraft` keeps a head's keys and values in slots of its own and replays, per form (nodes, depth, width) and batch
bucket, a graph that reads the rows of the last round with the target's true features, runs the head level by level and
leaves the trees in the buffers that the target's pass reads. The host sends one array of integers and reads nothing:
the verdict says what was accepted. Then the next draft starts at once, in the form of the last: the device drafts while
the host ends the round; sequences whose prompts were read in the same pass are drafted for with the others. If a
sequence then leaves, its tree is dropped; if another joins, it alone is drafted for; another form is drafted anew. The
same code runs step by step where nothing is captured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.drafters.eagle.cuda.draft_completion import complete
from forerun.drafters.eagle.cuda.draft_noise import DraftNoise
from forerun.drafters.eagle.cuda.draft_plan import (
    MOST,
    DraftForm,
    Lane,
    behind,
    below,
    bucket_of,
    caught_run,
    last_run,
    plan_draft,
    run_at,
)
from forerun.drafters.eagle.cuda.feature_fusion import FeatureFusion
from forerun.drafters.eagle.cuda.feature_rows import DEEPEST, FeatureRows
from forerun.drafters.eagle.cuda.head import HeadNet
from forerun.drafters.eagle.cuda.menu import DraftMenu
from forerun.drafters.eagle.cuda.tree_growth import Frontier, HeadOutput, Pool, cut_trees, grow_level
from forerun.models.cuda.graphs import Replays
from forerun.models.cuda.integers import SentInts
from forerun.models.cuda.last_round import STEPS, LastRound
from forerun.models.cuda.pass_clock import seconds_of
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.pages import TREE_MARGIN
from forerun.offers import Form
from forerun.trees import ints_of
from forerun.types import Needs, Scores, Seq, TreeBatch, TreeForm, Verdict

INTEGERS = 1 << 18  # room for the largest draft, and for the pages of all sequences

Wanted = tuple[int, int]  # a sequence, and the root of its tree


@dataclass(frozen=True, slots=True)
class Ahead:
    """A draft that was started before it was asked for."""

    trees: dict[Wanted, int]  # which tree is whose
    form: Form


class DeviceDraft:
    """Drafts of chosen tokens for sequences of one CUDA target; captured as graphs, or run step by step."""

    follows_undrafted = True

    def __init__(
        self,
        net: HeadNet,
        feature_fusion: FeatureFusion,
        head_output: HeadOutput,
        last: LastRound,
        *,
        capture: bool,
        menu: DraftMenu | None = None,
    ) -> None:
        self.net, self.feature_fusion, self.head_output = net, feature_fusion, head_output
        self._decided, self.noise = last, DraftNoise(head_output.ids)
        self.menu = menu or DraftMenu()
        device = net.model.device
        self.replays = Replays(device, capture=capture)
        self.ints = SentInts(device, INTEGERS, torch.int32, first=MAX_ROWS)
        self.rows = FeatureRows(net, feature_fusion, last, self.replays, self.ints)
        self._group_nodes = net.group_nodes
        with torch.inference_mode(False):
            self._tree_ints = torch.zeros(2, MAX_ROWS, dtype=torch.long, device=device)
        self.complete_to = 0  # batches up to this size have all graphs of the menu that they will get
        self._captured: dict[Form, set[int]] = {}  # buckets that have a graph
        self._last: DraftForm | None = None
        self._proposed: tuple[TreeForm, Form] | None = None  # what the trees of the round under way are
        self._ahead: Ahead | None = None
        self._joining: dict[int, Seq] = {}  # whose prompts were read since the last draft

    @property
    def needs(self) -> Needs:
        return Needs(tuple(sorted(set(self.feature_fusion.layers))))

    def is_ready(self, seq: Seq) -> bool:
        """Are there rows for all tokens of this sequence, and room for a draft behind them?"""
        return self.rows.ready(seq) is not None

    def fitting(self, sequences: int, nodes: int, depth: int, width: int) -> Form | None:
        """A form as large as asked for, cut to the rows of a pass and the slots behind each sequence; None = none."""
        if sequences > MOST:
            return None
        room, slots = MAX_ROWS // bucket_of(sequences), TREE_MARGIN - 1
        nodes = min(nodes, room - 1)
        if nodes < 1 or depth < 1:
            return None
        depth = min(depth, nodes, DEEPEST)
        width = min(width, nodes, len(self.head_output.ids), slots // max(1, depth - 1))
        return Form(min(nodes, width + (depth - 1) * width * width, slots), depth, width)

    def knows(self, form: Form, sequences: int) -> bool:
        """Is there a graph of this form for so many sequences, or none needed?"""
        return not self.replays.capture or self._bucket(form, sequences) in self._captured.get(form, ())

    def propose(self, seqs: Sequence[Seq], form: Form) -> TreeBatch:
        """One tree of this form for each sequence; those that are not ready get any tree behind their root."""
        if not self.knows(form, len(seqs)):  # not on the menu: somebody insists on it
            self.rehearse(form, bucket_of(len(seqs)), max(len(seq.tokens) for seq in seqs))
        wanted = [(seq.id, seq.tokens[-1]) for seq in seqs]
        ahead, self._ahead = self._ahead, None  # none where something was captured: that overwrites its trees
        known = ahead.trees if ahead is not None and ahead.form == form else {}
        missing = [one for one in wanted if one not in known]
        trees = TreeForm(self._bucket(form, len(seqs)), form.nodes + 1, form.depth, chain=form.width == 1)
        if len(missing) == len(wanted):
            self._launch([self._state(seq) for seq in seqs], wanted, form)
        elif missing or list(known) != wanted:
            self._rearrange(seqs, known, missing, form)
        return self._batch(trees, form, len(wanted))

    def _batch(
        self, trees: TreeForm, form: Form, count: int, follows: tuple[int, ...] | None = None
    ) -> TreeBatch:
        tokens, parents = self._tree_ints[:, : count * trees.nodes]
        self._proposed, starts, seconds = (trees, form), trees.starts(count), self.menu.drafting(form, count)
        return TreeBatch(
            tokens, parents, starts, form=trees, device_seconds=lambda: seconds, grower=self, follows=follows
        )

    def follow(
        self, going: Sequence[tuple[Seq, int]], trees: TreeBatch, hidden: Mapping[int, Tensor]
    ) -> TreeBatch | None:
        """Draft behind trees that were not read, in their form: see forerun.trees.GrowsNext."""
        grown = trees.form
        if self._proposed is None or grown is None or grown != self._proposed[0] or grown.depth >= STEPS:
            return None
        if grown.nodes + grown.depth + 1 > TREE_MARGIN:
            return None  # no room for such trees behind each other
        form = self._proposed[1]
        if len(going) > MOST or not self.knows(form, len(going)):
            return None
        found = self.rows.lanes_behind(going, form)
        if found is None:
            return None
        self.rows.append_decided(found.owners, [hidden[layer] for layer in self.feature_fusion.layers], grown)
        self.noise.send([None if state is None else state.noise for state in found.states])
        planned = self._draft_for(self._padded(found.lanes, form), form)
        for state in found.new:
            state.read = state.seen
        self._ahead, self._joining = None, {}
        return self._batch(planned.trees, form, len(going), tuple([tree for _, tree in going]))

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Keep the rows of root and path, and start the next draft in the form of the last."""
        started = () if self._ahead is None else {seq_id for seq_id, _ in self._ahead.trees}
        if started and any([seq.id in started for seq in seqs]):  # noqa: C419
            self._ahead = None  # nobody asked for it
        self.rows.observe(seqs, trees, scores, verdict)
        if verdict.outcome is not None and not verdict.outcome.is_latest:
            return  # the next draft, and the pass over its trees, are under way
        if trees.form is not None and self._last is not None:
            self._go_ahead(seqs, verdict, self._last.shape)
            self._joining = {}
        elif not trees.is_plain():  # plain rounds tell nothing new of who is there
            self._joining |= {seq.id: seq for seq in seqs if self.is_ready(seq)}

    def forget(self, seq: Seq) -> None:
        self._joining.pop(seq.id, None)
        self.rows.forget(seq.id)

    def rehearse(self, form: Form, bucket: int, farthest: int) -> TreeForm:
        """Capture the draft of a form for so many sequences, in contexts up to `farthest`, and time it."""
        lanes, self.noise.is_on = [self.rows.lane(None, 0)] * bucket, False
        planned = self._draft_for(lanes, form, farthest)  # all of them padding
        if self.replays.capture:
            self.noise.rehearse(self.replay_last)
            self.menu.note(bucket, form, self._time())
        self._captured.setdefault(form, set()).add(bucket)
        self._last, self._proposed, self._ahead = None, None, None  # whose trees were overwritten
        return planned.trees

    def _state(self, seq: Seq) -> int | None:
        """Whose rows to draft from; None = padding."""
        return seq.id if self.is_ready(seq) else None

    def _bucket(self, form: Form, sequences: int) -> int:
        """The smallest batch size with a graph of this form, or the one that it would be captured for."""
        captured = [bucket for bucket in self._captured.get(form, ()) if bucket >= sequences]
        return min(captured) if captured and self.replays.capture else bucket_of(sequences)

    def _go_ahead(self, seqs: Sequence[Seq], verdict: Verdict, form: Form) -> None:
        """Start the next draft now, for all sequences that do not end here."""
        paths, bonus = verdict.to_host()
        going = [
            (seq, root)
            for seq, path, root in zip(seqs, paths, bonus, strict=True)
            if len(seq.tokens) + len(path) + 1 < seq.max_length
        ]
        here = {seq.id for seq in seqs}
        joining = [seq for seq in self._joining.values() if seq.id not in here and self.is_ready(seq)]
        going += [(seq, seq.tokens[-1]) for seq in joining[: MOST - len(going)]]
        if not going or not self.knows(form, len(going)):
            return
        longest = self.net.model.max_length - DEEPEST
        wanted, states = [(seq.id, root) for seq, root in going], list[int | None]()
        for seq, _ in going:
            state = self.rows.get(seq.id)
            states.append(seq.id if state is not None and 0 < state.seen <= longest else None)
        if any(state is not None for state in states):
            self._launch(states, wanted, form)
            self._ahead = Ahead({one: i for i, one in enumerate(wanted)}, form)

    def _launch(self, owners: Sequence[int | None], wanted: Sequence[Wanted], form: Form) -> None:
        """Draft for some sequences; their rows count as read, since whatever follows runs behind this."""
        states = [None if owner is None else self.rows.get(owner) for owner in owners]
        more = below(form)
        states = [one if one and self.rows.has_room(one, one.seen + more) else None for one in states]
        real = [state for state in states if state is not None]
        self.rows.read_ahead(real, behind(form))
        lanes = [self.rows.lane(state, root) for state, (_, root) in zip(states, wanted, strict=True)]
        self.noise.send([None if state is None else state.noise for state in states])
        self._draft_for(self._padded(lanes, form), form)
        for state in real:
            state.read = state.seen

    def _padded(self, lanes: list[Lane], form: Form) -> list[Lane]:
        return [*lanes, *[self.rows.lane(None, 0)] * (self._bucket(form, len(lanes)) - len(lanes))]

    def _draft_for(self, lanes: Sequence[Lane], form: Form, farthest: int = 0) -> DraftForm:
        """Draft for as many lanes as a bucket has."""
        planned, ints = plan_draft(lanes, form, self._group_nodes, farthest, self.net.attends)
        self.ints.send(ints, planned.sent_at(self._group_nodes))
        self._last = planned
        self.replay_last()
        return planned

    def _rearrange(
        self, seqs: Sequence[Seq], known: dict[Wanted, int], missing: Sequence[Wanted], form: Form
    ) -> None:
        """The trees that are there, without those of sequences that left, and new ones for those that joined."""
        nodes = form.nodes + 1
        trees = self._tree_ints[:, : len(known) * nodes].view(2, -1, nodes)
        if missing:
            trees = trees.clone()
            by_id = {seq.id: seq for seq in seqs}
            self._launch([self._state(by_id[seq_id]) for seq_id, _ in missing], missing, form)
            fresh = self._tree_ints[:, : len(missing) * nodes].view(2, -1, nodes)
            trees = torch.cat((trees, fresh), 1)
        places = known | {one: len(known) + i for i, one in enumerate(missing)}
        order = ints_of([places[seq.id, seq.tokens[-1]] for seq in seqs], trees.device)
        self._tree_ints[:, : len(seqs) * nodes].view(2, -1, nodes).copy_(trees.index_select(1, order))

    def _draft(self, form: DraftForm) -> None:
        """From the rows of the last round to trees."""
        complete(self.ints.all, form, self._group_nodes, self._decided)
        net, shape, count, trees = self.net, form.shape, form.sequences, form.trees
        ints, sources = self.ints.all, MAX_ROWS + form.sources_at
        features = self.rows.rows.index_select(0, ints[sources : sources + form.unread])
        last, roots, ends = last_run(ints, form)
        unread, carried = caught_run(ints, form, self._group_nodes), self.feature_fusion.fuse(features)
        net.run_some(unread, carried, last, ends)
        out, logits = net.out[:count], net.logits[:count]
        noised = self.noise.of(last.positions, shape.depth)
        pool = Pool(count, shape.width, shape.width, shape.depth, out.device)
        frontier = Frontier.of_roots(count, out.device)
        for i in range(shape.depth - 1):
            size, first = form.level(self._group_nodes), MAX_ROWS + form.ancestors_at(i, self._group_nodes)
            run = run_at(ints, size, form.level_at(i, self._group_nodes))
            into = run.tokens, ints[first : first + size.rows * (i + 1)]
            frontier = grow_level(pool, frontier, noised(logits, i), self.head_output, into)
            parents = frontier.parents if shape.width > 1 else None  # those of a chain lie where it lies
            net.run(run, self.feature_fusion.carry(out), parents)
            out, logits = net.out[: size.rows], net.logits[: size.rows]
        grow_level(pool, frontier, noised(logits, shape.depth - 1), self.head_output)
        cut_trees(pool, roots, shape.nodes, self._tree_ints[:, : trees.rows].view(2, count, -1))

    def replay_last(self) -> None:
        """Run the last draft again, from the same integers: it reads and writes the same."""
        form = self._last
        assert form is not None, "something was drafted"
        self.replays.do((form, self.noise.is_on), lambda: self._draft(form))

    def _time(self, repeats: int = 3) -> float:
        """Seconds of the last draft; the first replay of a graph takes longer."""
        self.replay_last()
        return seconds_of(self.replay_last, self.ints.all.device, repeats)
