"""DraftRunner: drafts of one head on the device, as graphs that are captured once and replayed, or step by step.

DeviceDraft: EAGLE-3 drafting on the GPU; a whole draft is one CUDA graph, and its trees stay on the device.

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

from forerun.core.offer import Form
from forerun.core.tree import ints_of
from forerun.core.types import Budget, Needs, Scores, Seq, TreeBatch, TreeForm, Verdict
from forerun.drafters.device.eagle_plan import (
    MOST,
    DraftForm,
    DraftMenu,
    Lane,
    behind,
    below,
    bucket_of,
    caught_run,
    last_run,
    lone_roots,
    plan_draft,
    run_at,
)
from forerun.drafters.device.features import DEEPEST, FeatureRows, RowState
from forerun.drafters.device.fusion import FeatureFusion
from forerun.drafters.device.growth import (
    DraftNoise,
    Frontier,
    HeadOutput,
    Pool,
    complete,
    cut_trees,
    grow_level,
)
from forerun.drafters.device.head import HeadNet
from forerun.models.cuda.device_trees import STEPS, LastRound
from forerun.models.cuda.graphs import Replays, seconds_of
from forerun.models.cuda.plan import MAX_ROWS, SentInts
from forerun.models.pages import TREE_MARGIN

INTEGERS = 1 << 18  # room for the largest draft, and for the pages of all sequences


class DraftRunner:
    """Runs drafts for lanes; their trees lie in one buffer until the next draft."""

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
        self._captured: dict[Form, set[int]] = {}  # buckets that have a graph
        self._last: DraftForm | None = None

    @property
    def needs(self) -> Needs:
        return Needs(tuple(sorted(set(self.feature_fusion.layers))))

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

    def _bucket(self, form: Form, sequences: int) -> int:
        """The smallest batch size with a graph of this form, or the one that it would be captured for."""
        captured = [bucket for bucket in self._captured.get(form, ()) if bucket >= sequences]
        return min(captured) if captured and self.replays.capture else bucket_of(sequences)

    def _padded(self, lanes: list[Lane], form: Form) -> list[Lane]:
        return [*lanes, *[self.rows.lane(None, 0)] * (self._bucket(form, len(lanes)) - len(lanes))]

    def _draft_for(self, lanes: Sequence[Lane], form: Form, farthest: int = 0) -> DraftForm:
        """Draft for as many lanes as a bucket has."""
        planned, ints = plan_draft(lanes, form, self._group_nodes, farthest, self.net.attends)
        self.ints.send(ints, planned.sent_at(self._group_nodes))
        self._last = planned
        self.replay_last()
        return planned

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


Wanted = tuple[int, int]  # a sequence, and the root of its tree


@dataclass(frozen=True, slots=True)
class Ahead:
    """A draft that was started before it was asked for."""

    trees: dict[Wanted, int]  # which tree is whose
    form: Form


class DeviceDraft(DraftRunner):
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
        super().__init__(net, feature_fusion, head_output, last, capture=capture, menu=menu)
        self.complete_to = 0  # batches up to this size have all graphs of the menu that they will get
        self._proposed: tuple[TreeForm, Form] | None = None  # what the trees of the round under way are
        self._ahead: Ahead | None = None
        self._joining: dict[int, Seq] = {}  # whose prompts were read since the last draft

    def is_ready(self, seq: Seq) -> bool:
        """Are there rows for all tokens of this sequence, and room for a draft behind them?"""
        return self.rows.ready(seq) is not None

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
        """Draft behind trees that were not read, in their form: see forerun.core.tree.GrowsNext."""
        return None if self._proposed is None else self._behind(going, trees, hidden, self._proposed[1])

    def switch(
        self, going: Sequence[tuple[Seq, int]], trees: TreeBatch, hidden: Mapping[int, Tensor], budget: Budget
    ) -> TreeBatch | None:
        """The same in another form, and behind lone roots: see forerun.drafters.base.SwitchesForms."""
        return self._behind(going, trees, hidden, Form(budget.nodes, budget.depth, budget.width))

    def _behind(
        self, going: Sequence[tuple[Seq, int]], trees: TreeBatch, hidden: Mapping[int, Tensor], form: Form
    ) -> TreeBatch | None:
        forms, grown = self._forms_behind(trees, form), trees.form or lone_roots(len(trees))
        if not forms or grown.depth >= STEPS or form.nodes + grown.depth + 2 > TREE_MARGIN:
            return None  # no room for such trees behind each other
        if len(going) > MOST or bucket_of(len(going)) * max(one.nodes + 1 for one in forms) > MAX_ROWS:
            return None
        if not all([self.knows(one, len(going)) for one in forms]):  # noqa: C419
            return None
        drafted = max(map(below, forms))
        found = self.rows.lanes_behind(going, grown.depth + 1, behind(form), drafted)
        if found is None:
            return None
        self._keep(found.owners, hidden, grown, read=True)
        self.noise.send([None if state is None else state.noise for state in found.states])
        farthest = (
            0 if grown.depth == form.depth else max([one.first for one in found.lanes]) + grown.depth + 1
        )
        for one in forms:
            planned = self._draft_for(self._padded(found.lanes, one), one, farthest)
        for state in found.new:
            state.read = state.seen
        self._ahead, self._joining = None, {}
        return self._batch(planned.trees, form, len(going), tuple([tree for _, tree in going]))

    def _forms_behind(self, trees: TreeBatch, form: Form) -> tuple[Form, ...]:
        """The drafts to make behind these; () = it is not known what grew them.

        A draft reads as many rows as its own trees can have accepted. Behind deeper ones another draft of theirs, whose
        trees nobody asks for, reads the rest.
        """
        if trees.form is None:
            return (form,)
        if self._proposed is None or trees.form != self._proposed[0]:
            return ()
        return (form,) if trees.form.depth <= form.depth else (self._proposed[1], form)

    def rest(self, going: Sequence[tuple[Seq, int]], trees: TreeBatch, hidden: Mapping[int, Tensor]) -> None:
        """A plain round follows: keep the rows of root and path, which nobody reads now."""
        assert trees.form is not None, "the rows of lone roots are copies"
        states = {tree: self.rows.ready(seq, least=0) for seq, tree in going if tree >= 0}
        owners = {tree: state for tree, state in states.items() if state is not None}
        self.rows.read_ahead([state for state in owners.values() if state.read < state.seen], 0)
        self._keep(owners, hidden, trees.form, read=False)
        self._ahead = None

    def _keep(
        self, owners: Mapping[int, RowState], hidden: Mapping[int, Tensor], form: TreeForm, read: bool
    ) -> None:
        """Put the rows of a round that was not read into their places; has the head read them with that?"""
        self.rows.append_decided(owners, [hidden[layer] for layer in self.feature_fusion.layers], form)
        for state in owners.values():
            state.kept = read

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
