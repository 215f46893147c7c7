"""DraftRunner: drafts of one head on the device, as graphs that are captured once and replayed, or step by step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.drafters.eagle.cuda.draft_completion import complete
from forerun.drafters.eagle.cuda.draft_noise import DraftNoise
from forerun.drafters.eagle.cuda.draft_plan import (
    MOST,
    DraftForm,
    Lane,
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
from forerun.models.cuda.last_round import LastRound
from forerun.models.cuda.pass_clock import seconds_of
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.pages import TREE_MARGIN
from forerun.offers import Form
from forerun.types import Needs

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
