"""DeviceDraft: EAGLE-3 drafting on the GPU; a whole draft is one CUDA graph, and its trees stay on the device.

`DeviceDraft` keeps a head's keys and values in slots of its own and replays, per form (sequences, width, depth, nodes),
a graph that reads the rows of the last round with the target's true features, runs the head level by level and leaves
the trees in the buffers that the target's pass reads. The host sends one array of integers and reads nothing; the
verdict says what was accepted. Then the next draft starts at once, in the form of the last: the device drafts while
the host ends the round, and drafts again if the next round needs another form. The same code runs step by step where
nothing is captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from forerun.drafters.eagle.cuda.draft_plan import CapturedShapes, DraftForm, DraftShape, aligned, plan_draft
from forerun.drafters.eagle.cuda.feature_fusion import FeatureFusion
from forerun.drafters.eagle.cuda.head import HeadNet
from forerun.drafters.eagle.cuda.tree_growth import Frontier, HeadOutput, Pool, cut_trees, grow_level
from forerun.drafters.head_drafter import ObservedRows, observe_rows
from forerun.errors import InvalidInput
from forerun.models.cuda.graphs import Replays
from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import FIELDS, MAX_ROWS, Ints, Size
from forerun.models.kv import TREE_MARGIN
from forerun.types import DeviceOutcome, Scores, Seq, TreeBatch, TreeForm, Verdict

DEEPEST = 16  # levels of a draft
MOST = 64  # sequences in one draft
CHUNK = 256  # rows per pass while a prompt is read


@dataclass(frozen=True, slots=True)
class Ahead:
    """A draft that was started before it was asked for."""

    ids: tuple[int, ...]
    roots: list[int]
    shape: DraftShape
    trees: TreeBatch


class DeviceDraft:
    """Drafts of chosen tokens for sequences of one CUDA target; captured as graphs, or run step by step."""

    def __init__(
        self, net: HeadNet, feature_fusion: FeatureFusion, head_output: HeadOutput, *, capture: bool
    ) -> None:
        self.net, self.feature_fusion, self.head_output = net, feature_fusion, head_output
        self.seconds = 0.0  # per level, measured when a form is first captured
        device, width = net.model.device, feature_fusion.feature_width
        self._sequences: dict[int, ObservedRows] = {}
        self._captured = CapturedShapes()
        self._held: set[int] = set()  # sequences that have slots
        self._replays = Replays(device, capture=capture)
        config = net.model.config
        self._group_nodes = 64 // (1 << (config.heads // config.kv_heads - 1).bit_length())
        with torch.inference_mode(False):
            self.ints = torch.zeros(1 << 17, dtype=torch.int32)
            self.ints[:MAX_ROWS] = torch.arange(MAX_ROWS)
            self.ints = self.ints.to(device)
            shape = MOST, DEEPEST + 1, width
            self._features = torch.zeros(shape, dtype=net.model.dtype, device=device)
            self._tree_ints = torch.zeros(2, MAX_ROWS, dtype=torch.long, device=device)
            self._host = torch.zeros(1 << 17, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host_array = self._host.numpy()
        self._slices: dict[int, tuple[Tensor, Tensor]] = {}
        on_gpu = device.type == "cuda"
        self._sent = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._staged: tuple[int, ...] = ()  # sequences whose new rows lie in `_features`, in this order
        self._tokens: list[list[int]] = []  # the token after each of those rows
        self._drafted = False  # a draft has read them
        self._last: DraftForm | None = None
        self._shape: DraftShape = 0, 0, 0  # of the last draft
        self._ahead: Ahead | None = None

    def is_ready(self, seq: Seq, depth: int) -> bool:
        """Are there rows for all tokens of this sequence, and room for a draft behind them?"""
        observed, longest = self._sequences.get(seq.id), self.net.model.max_length - depth
        return observed is not None and 0 < observed.seen == len(seq.tokens) - 1 <= longest

    def propose(
        self, seqs: Sequence[Seq], nodes: int, depth: int, width: int, *, ends: bool = False
    ) -> TreeBatch | None:
        """One tree of at most so many nodes for each sequence; None where no graph fits and capturing one does not pay.

        Where a sequence ends within such a draft, it may be deeper than asked for: a captured graph is cheaper.
        """
        wanted = self._fitting(len(seqs), nodes, depth, width)
        shape = self._captured.choose(len(seqs), wanted, ends) if self._replays.capture else wanted
        if shape is None:
            return None
        ids, roots = tuple(seq.id for seq in seqs), [seq.tokens[-1] for seq in seqs]
        ahead, self._ahead = self._ahead, None
        if ahead is not None and (ahead.ids, ahead.roots, ahead.shape) == (ids, roots, shape):
            return ahead.trees
        if not self._hold(seqs):
            return None
        self._stage(ids, shape[1] + 1)
        return self._launch(roots, shape)

    def _fitting(self, sequences: int, nodes: int, depth: int, width: int) -> DraftShape:
        """The shape, cut to the rows of a pass and the slots behind each sequence."""
        room, slots = MAX_ROWS // sequences, TREE_MARGIN - 1
        depth = min(depth, nodes, DEEPEST, room - 1)
        width = min(width, nodes, len(self.head_output.ids), room, slots // max(1, depth - 1))
        return min(nodes, width + (depth - 1) * width * width, slots), depth, width

    def _launch(self, roots: Sequence[int], shape: DraftShape) -> TreeBatch:
        """Draft for the sequences whose rows are staged; nothing is counted as read until the round is observed."""
        extents = [self.net.kv.extent(seq_id) for seq_id in self._staged]
        places = [(extent.base, extent.length) for extent in extents]
        form, ints = plan_draft(places, self._tokens, roots, shape, self._group_nodes)
        self._send(ints)
        known = self._replays.knows(form) or not self._replays.capture
        self._last, self._shape, self._drafted = form, shape, True
        self.replay_last()
        if not known or self.seconds == 0.0:
            self._time()
        tokens, parents = self._tree_ints[:, : form.trees.rows]
        seconds = self.seconds * form.depth
        return TreeBatch(tokens, parents, form.trees.starts, form=form.trees, device_seconds=seconds)

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """After a round on the device its rows are still in the target's buffers: one replay copies them."""
        if self._staged and {seq.id for seq in seqs}.isdisjoint(self._staged):
            # sequences that join: what is staged waits for its own round
            observe_rows(self._sequences, self.feature_fusion.layers, seqs, trees, scores, verdict)
            return
        if self._drafted:  # the draft has written the keys and values of the staged rows
            for seq_id, tokens in zip(self._staged, self._tokens, strict=True):
                self.net.kv.extent(seq_id).length += len(tokens)
            self._staged, self._tokens, self._drafted, self._ahead = (), [], False, None
        form, outcome = trees.form, verdict.outcome
        if form is None or outcome is None or self._staged or len(seqs) > MOST or form.depth > DEEPEST:
            self._unstage()
            observe_rows(self._sequences, self.feature_fusion.layers, seqs, trees, scores, verdict)
            return
        self._replays.do(("observe", form), lambda: self._gather(scores, outcome, form))
        (paths, bonus), (tokens, _) = verdict.to_host(), trees.to_host()
        self._tokens = [
            [*(tokens[b * form.nodes + node] for node in path), token]
            for b, (path, token) in enumerate(zip(paths, bonus, strict=True))
        ]
        self._staged = tuple(seq.id for seq in seqs)
        for seq, fresh in zip(seqs, self._tokens, strict=True):
            self._sequences[seq.id].seen += len(fresh)
        self._go_ahead(seqs, bonus)

    def _gather(self, scores: Scores, outcome: DeviceOutcome, form: TreeForm) -> None:
        """The hidden rows of root and path of every tree, side by side, to where a draft reads them."""
        rows = outcome.path_rows()
        parts = [scores.hidden[layer].index_select(0, rows) for layer in self.feature_fusion.layers]
        into = self._features[: form.trees, : form.depth + 1]
        into.copy_(torch.cat(parts, -1).view(into.shape))

    def _go_ahead(self, seqs: Sequence[Seq], roots: list[int]) -> None:
        """Start the next draft now, unless a sequence has come to its end."""
        longest = self.net.model.max_length - self._shape[1]
        for seq, fresh in zip(seqs, self._tokens, strict=True):
            if len(seq.tokens) + len(fresh) >= seq.max_length or self._sequences[seq.id].seen > longest:
                return
        self._ahead = Ahead(self._staged, roots, self._shape, self._launch(roots, self._shape))

    def forget(self, seq: Seq) -> None:
        if seq.id in self._staged:
            self._unstage()
        self._sequences.pop(seq.id, None)
        self.net.kv.release(seq.id)
        self._held.discard(seq.id)

    def unread(self, seq: Seq) -> Tensor | None:
        """Features [T, F] of all rows of a sequence, while the head has read none of them; None = it has."""
        rows = self._sequences.get(seq.id)
        return torch.cat(rows.features) if rows is not None and 0 < rows.seen == len(rows.tokens) else None

    def _unstage(self) -> None:
        """Give the rows that wait in the buffer back to their sequences."""
        for b, (seq_id, tokens) in enumerate(zip(self._staged, self._tokens, strict=True)):
            observed = self._sequences[seq_id]
            observed.features.append(self._features[b, : len(tokens)].clone())
            observed.tokens += tokens
        self._staged, self._tokens, self._drafted, self._ahead = (), [], False, None

    def _hold(self, seqs: Sequence[Seq]) -> bool:
        """Slots for all sequences that have none yet, or for none of them."""
        new = [seq for seq in seqs if seq.id not in self._held]
        sizes = [
            max(min(seq.max_length, self.net.model.max_length), self._sequences[seq.id].seen) + TREE_MARGIN
            for seq in new
        ]
        if not self.net.kv.has_room(*sizes):
            return False
        for seq, size in zip(new, sizes, strict=True):
            self.net.kv.reserve(seq.id, size)
            self._held.add(seq.id)
        return True

    def _stage(self, ids: Sequence[int], behind: int) -> None:
        """Copy unread rows into the buffer, in this order; a long prompt is read first."""
        if self._staged == tuple(ids) and not any(self._sequences[seq_id].tokens for seq_id in ids):
            return
        self._unstage()
        for b, seq_id in enumerate(ids):
            observed = self._sequences[seq_id]
            features = torch.cat(observed.features)
            fresh = max(0, len(observed.tokens) - behind)
            if fresh:
                self._keep(seq_id, observed.tokens[:fresh], features[:fresh])
            self._features[b, : len(features) - fresh].copy_(features[fresh:])
            self._tokens.append(observed.tokens[fresh:])
            observed.features, observed.tokens = [], []
        self._staged = tuple(ids)

    def _keep(self, seq_id: int, tokens: Sequence[int], features: Tensor) -> None:
        """Write keys and values of rows that no draft starts from."""
        extent = self.net.kv.extent(seq_id)
        for low in range(0, len(tokens), CHUNK):
            some = tokens[low : low + CHUNK]
            at = np.arange(extent.length, extent.length + len(some))
            ints = np.zeros((3, aligned(len(some))), dtype=np.int32)
            ints[:, : len(some)] = some, at, extent.base + at
            self._send(ints.ravel())
            size = Size(len(some), 0, 0)
            self.net.keep(self._run(size, 0), self.feature_fusion.fuse(features[low : low + len(some)]))
            extent.length += len(some)

    def _send(self, ints: Ints) -> None:
        """One copy from pinned memory; waits until the device has read the last one."""
        if len(ints) + MAX_ROWS > len(self.ints):
            raise InvalidInput(f"a draft of {len(ints)} integers is too large; lower the budget or the batch")
        if self._sent is not None:
            self._sent.synchronize()
        self._host_array[: len(ints)] = ints
        into, source = self._spans(len(ints))
        into.copy_(source, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def _spans(self, size: int) -> tuple[Tensor, Tensor]:
        """So many integers on the device and on the host; cached, since a slice takes as long as a copy."""
        if size not in self._slices:
            self._slices[size] = self.ints[MAX_ROWS : MAX_ROWS + size], self._host[:size]
        return self._slices[size]

    def _run(self, size: Size, first: int) -> Run:
        """The integers of one pass, which start behind the identity at `first`."""
        at, rows = MAX_ROWS + first, aligned(size.rows)
        tokens, positions, slots = self.ints[at : at + 3 * rows].view(3, rows)[:, : size.rows].unbind(0)
        at += 3 * rows
        groups = self.ints[at : at + FIELDS * size.groups].view(size.groups, FIELDS)
        return Run(size, self.ints, tokens, positions, slots, groups)

    def _draft(self, form: DraftForm) -> None:
        """From the rows of the last round to trees."""
        net, sequences, width, trees = self.net, form.sequences, form.width, form.trees
        features = self._features[:sequences, : form.behind].reshape(sequences * form.behind, -1)
        net.run(self._run(form.caught, 0), self.feature_fusion.fuse(features))
        at = MAX_ROWS + form.roots_at
        roots, ends = self.ints[at : at + 2 * aligned(sequences)].view(2, -1)[:, :sequences].long()
        out, logits = net.out.index_select(0, ends), net.logits.index_select(0, ends)
        pool = Pool(sequences, width, width, form.depth, out.device)
        frontier = Frontier.of_roots(sequences, out.device)
        for i in range(form.depth - 1):
            run, ancestors = self._run(form.level, form.level_at(i)), MAX_ROWS + form.ancestors_at(i)
            into = run.tokens, self.ints[ancestors : ancestors + form.level.rows * (i + 1)]
            frontier = grow_level(pool, frontier, logits, self.head_output, into)
            if width > 1:  # the nodes of a chain lie where their parents lie
                out = out.index_select(0, frontier.parents)
            net.run(run, self.feature_fusion.carry(out))
            out, logits = net.out[: sequences * width], net.logits[: sequences * width]
        grow_level(pool, frontier, logits, self.head_output)
        self._tree_ints[:, : trees.rows].copy_(cut_trees(pool, roots, form.nodes).view(2, -1))

    def replay_last(self) -> None:
        """Run the last draft again, from the same integers: it reads and writes the same."""
        form = self._last
        assert form is not None
        self._replays.do(form, lambda: self._draft(form))

    def _time(self) -> None:
        """What a level costs."""
        assert self._last is not None
        self._wait()
        started = perf_counter()
        for _ in range(3):
            self.replay_last()
        self._wait()
        self.seconds = (perf_counter() - started) / 3 / self._last.depth

    def _wait(self) -> None:
        if self._sent is not None:
            torch.cuda.synchronize(self.ints.device)
