"""ModelViews: what a draft model on the GPU has read of each sequence, and what its next draft must know of it.

ModelDraft: chains that a draft model drafts on the GPU, where they stay.

The target's verdict says what was accepted of a chain: so much of it need not be read again. Then the next draft starts
at once, as deep as the last: the device drafts while the host ends the round; or even before that round was read, from
what the device itself has decided (`follow`). Prompts are read beside the target, by
the draft model's own passes, unless the last sequences were written without drafts: then a prompt is read when the
first draft asks for it. While nothing is drafted, nothing is read.

DeviceModelDrafter: a draft model on the GPU; its chains are drafted on the device, without the host in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from torch import Tensor

from forerun.core.errors import ForerunError
from forerun.core.noise import mixed_seed
from forerun.core.offer import Form
from forerun.core.types import Needs, PlainSeq, Scores, Seq, TreeBatch, TreeForm, Verdict
from forerun.drafters.base import committed_tokens
from forerun.drafters.device.eagle import DeviceDrafter, contexts_of
from forerun.drafters.device.growth import Settings
from forerun.drafters.device.model_graphs import (
    BUCKETS,
    DEEPEST,
    MOST,
    PADDING,
    UNREAD,
    ChainGraphs,
    ChainMenu,
    Lane,
    forms_for,
)
from forerun.drafters.model.draft_law import has_noise
from forerun.models.base import Target
from forerun.models.cuda.device_trees import LastRound
from forerun.models.cuda.plan import MAX_ROWS, round_up
from forerun.models.cuda.target import CudaDecoder
from forerun.verify.warp import adjusts

if TYPE_CHECKING:
    from forerun.drafters.base import Drafter


NEEDS = Needs()
# sequences in a row that were read and never drafted for, after which prompts are not read at once
IN_VAIN = 2


@dataclass(slots=True, eq=False)
class View(PlainSeq):
    """A sequence as the draft model sees it: committed tokens, of which the first `read` are in its KV cache."""

    read: int = 0
    observed: int = 0  # tokens of the prompt that the target has read
    reading: bool = True  # the target still reads its prompt
    foreign: bool = False  # it holds a token outside the draft model's vocabulary
    was_drafted: bool = False


class ModelViews:
    """The sequences of one draft model."""

    def __init__(self, model: CudaDecoder) -> None:
        self.model = model
        self.in_vain = 0  # sequences that were forgotten since the last draft, and never drafted for
        self._views: dict[int, View] = {}

    def get(self, seq: Seq) -> View:
        view = self._views.get(seq.id)
        if view is None:
            length = min(seq.max_length, self.model.max_length)
            fields = (seq.prompt_length, seq.params, seq.seed, length, seq.stop_ids, seq.shares_noise)
            view = self._views[seq.id] = View(seq.id, [], *fields, cache_salt=seq.cache_salt)
            view.foreign = max(seq.tokens, default=0) >= self.model.vocab_size
        return view

    def read_prompts(self, seqs: Sequence[Seq], trees: TreeBatch) -> None:
        """Read as much of each prompt as the target has read; rounds without drafts are not read at all."""
        chunks = []
        for seq, size in zip(seqs, trees.sizes(), strict=True):
            view = self.get(seq)
            if view.reading and view.observed + size < len(seq.tokens):
                view.observed += size
                if self.in_vain < IN_VAIN and not view.foreign:
                    view.tokens = seq.tokens[: view.observed + 1]
                    chunks.append(view)
            else:
                view.reading = False
        self.read(chunks)

    def read(self, views: Sequence[View]) -> None:
        """Cache all tokens of these sequences but the last, in passes of the draft model over many rows."""
        behind = [view for view in views if view.read < len(view.tokens) - 1]
        behind = [view for view in behind if self._has_room(view, len(view.tokens))]
        if behind:
            self.model.prefill(behind, NEEDS)
        for view in behind:
            view.read = self.model.cached_tokens(view)

    def _has_room(self, view: View, positions: int) -> bool:
        """Are there pages for so many positions? A sequence without room is not drafted for in this round."""
        kv = self.model.kv
        if not kv.holds(view.id):
            return self.model.has_room(positions)
        return kv.has_pages(kv.lacking(view.id, positions))

    def count_read(
        self, seq: Seq, kept: Sequence[int], fresh: Sequence[int], is_followed: bool = False
    ) -> None:
        """A round committed these tokens: those that agree with inputs of the draft are in the cache.

        Where the next draft follows it, that has read all of them.
        """
        view = self._views.get(seq.id)
        if view is None or view.read != len(seq.tokens):  # its chain was padding
            return
        if is_followed:
            view.tokens += fresh
            view.foreign = view.foreign or max(fresh) >= self.model.vocab_size
            view.read = len(view.tokens)
        else:
            agreed = 0
            while agreed < min(len(kept), len(fresh)) and kept[agreed] == fresh[agreed]:
                agreed += 1
            view.read += agreed
        self.model.kv.extent(seq.id).length = view.read

    def catch_up(self, seq: Seq, tokens: list[int]) -> View | None:
        """The draft model's view with all committed tokens; None where it cannot draft for them."""
        view = self.get(seq)
        view.reading, fresh = False, tokens[len(view.tokens) :]
        view.tokens += fresh
        view.foreign = view.foreign or max(fresh, default=0) >= self.model.vocab_size
        # the root is read again where a draft was started from it and then not used
        view.read = min(view.read, len(tokens) - 1)
        self.model.truncate(view, view.read)
        return None if view.foreign or len(tokens) + DEEPEST >= self.model.max_length else view

    def lane(self, view: View | None, tokens: list[int], depth: int) -> Lane:
        if (
            view is None
            or len(view.tokens) - view.read > UNREAD
            or not self._has_room(view, len(tokens) + depth)
        ):
            return Lane(tokens[-1:], (), 0)
        if not self.model.kv.holds(view.id):  # a sequence of one or two tokens: nothing was read
            self.model.prefill([view], NEEDS)
            view.read = self.model.cached_tokens(view)
        extent = self.model.kv.grow(view.id, len(tokens) + depth)
        return Lane(view.tokens[view.read :], extent.pages, view.read)

    def lane_behind(self, seq: Seq, tree: int, depth: int, drafted: bool) -> Lane | None:
        """Behind its tree in a round that was not read, or of a sequence that joins (-1); None = read that first.

        So many tokens were drafted in that round, for this sequence too unless its chain was padding (`drafted`).
        """
        tokens = seq.tokens
        if tree < 0:
            view = self.catch_up(seq, tokens)
            self.read([view] if view is not None and len(tokens) - view.read > UNREAD else [])
            return self.lane(view, tokens, depth)
        view = self.get(seq)
        longest = len(tokens) + depth + 1
        if view.foreign or longest + DEEPEST >= self.model.max_length:
            return Lane(tokens[-1:], (), 0, tree, depth)
        if not drafted or view.read != len(tokens):
            return None
        if not self._has_room(view, longest + depth):
            return None
        extent = self.model.kv.grow(view.id, longest + depth)
        return Lane(tokens[-1:], extent.pages, len(tokens) - 1, tree, depth)

    def forget(self, seq_id: int) -> None:
        view = self._views.get(seq_id)
        if view is not None:
            self.model.release(view)
            self._views.pop(seq_id, None)
            self.in_vain += not view.was_drafted

    def note_draft(self, seq: Seq, lane: Lane) -> None:
        """A draft was launched for it: what it had not read counts as read, unless only the device knows what."""
        view = self._views[seq.id]
        view.was_drafted = True
        if lane.follows < 0:
            view.read = len(view.tokens)
            self.model.kv.extent(view.id).length = view.read


@dataclass(frozen=True, slots=True)
class Launched:
    """A draft that is under way: whose chains lie in the device's buffer, in this order."""

    wanted: tuple[tuple[int, int], ...]  # sequences and their roots; -1 = only the device knows it
    depth: int
    owners: dict[int, int]  # sequences that were not forgotten since, and their chains
    drafted: frozenset[int]  # sequences whose chains are not padding


class ModelDraft:
    """Implements forerun.drafters.device.eagle.DraftsOnDevice."""

    needs = NEEDS
    follows_undrafted = False  # it goes on behind its own chains, whose roots it has read

    def __init__(self, model: CudaDecoder, vocab_size: int, last: LastRound | None = None) -> None:
        """`last` is the target's record of its last round; without it, every round is read before the next draft."""
        self._follows = last is not None
        self.model, self.menu = model, ChainMenu()
        self.graphs = ChainGraphs(model, vocab_size, last or LastRound(model.device))
        self.views = ModelViews(model)
        self.complete_to = 0
        self._captured: set[tuple[int, int]] = set()  # (bucket, depth) whose target pass is captured
        self._ahead: Launched | None = None
        self._proposed: list[tuple[TreeBatch, Launched]] = []  # what is being verified: two where one follows

    def is_ready(self, seq: Seq) -> bool:
        """Can it be drafted for? What was not read is read first."""
        view = self.views.get(seq)
        return not view.foreign and len(seq.tokens) + DEEPEST < self.model.max_length

    def fitting(self, sequences: int, nodes: int, depth: int, width: int) -> Form | None:
        """A chain as deep as asked for, cut to the rows of a pass; None = none."""
        if sequences > MOST:
            return None
        depth = min(nodes, depth, DEEPEST, MAX_ROWS // round_up(sequences, BUCKETS) - 1)
        return Form(depth, depth, 1) if depth > 0 else None

    def knows(self, form: Form, sequences: int) -> bool:
        """Is the target's pass over such chains captured, or need it not be?"""
        captured = (round_up(sequences, BUCKETS), form.depth) in self._captured
        return captured or not self.graphs.replays.capture

    def note_captured(self, bucket: int, form: Form) -> None:
        """The target's pass over such chains has a graph."""
        self._captured.add((bucket, form.depth))

    def propose(self, seqs: Sequence[Seq], form: Form) -> TreeBatch:
        """A chain for each sequence; those that are not ready get any chain behind their root."""
        wanted = tuple((seq.id, seq.tokens[-1]) for seq in seqs)
        launched, self._ahead = self._ahead, None
        if launched is None or launched.depth != form.depth or not {*wanted} <= {*launched.wanted}:
            launched = self._launch(seqs, [seq.tokens for seq in seqs], form.depth)
        elif launched.wanted != wanted:  # some have left
            self.graphs.keep([launched.wanted.index(one) for one in wanted], form.depth)
            launched = _launched(wanted, form.depth, launched.drafted)
        self.views.in_vain = 0
        self.note_captured(round_up(len(seqs), BUCKETS), form)  # its pass follows, if it had none
        self._proposed = []
        return self._propose(launched)

    def _propose(self, launched: Launched, follows: tuple[int, ...] | None = None) -> TreeBatch:
        count, depth = len(launched.wanted), launched.depth
        trees = TreeForm(round_up(count, BUCKETS), depth + 1, depth, chain=True)
        tokens, parents = self.graphs.trees[:, : count * trees.nodes]
        seconds = self.menu.drafting(Form(depth, depth, 1), count)
        batch = TreeBatch(
            tokens,
            parents,
            trees.starts(count),
            form=trees,
            device_seconds=lambda: seconds,
            grower=self if self._follows else None,
            follows=follows,
        )
        self._proposed.append((batch, launched))
        return batch

    def follow(
        self, going: Sequence[tuple[Seq, int]], trees: TreeBatch, hidden: Mapping[int, Tensor]
    ) -> TreeBatch | None:
        """Draft behind chains that were not read, as deep as these: see forerun.core.tree.GrowsNext."""
        if len(self._proposed) != 1 or len(going) > MOST:
            return None
        last = self._proposed[0][1]
        if trees.form is None or not self.knows(Form(last.depth, last.depth, 1), len(going)):
            return None
        views, depth = self.views, last.depth
        lanes = [views.lane_behind(seq, tree, depth, seq.id in last.drafted) for seq, tree in going]
        known = [lane for lane in lanes if lane is not None]
        if len(known) < len(lanes):
            return None
        roots = [-1 if tree >= 0 else seq.tokens[-1] for seq, tree in going]
        launched = self._draft([seq for seq, _ in going], roots, known, last.depth)
        self._ahead = None
        return self._propose(launched, tuple(tree for _, tree in going))

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Count what was accepted as read, and start the next draft; or read a prompt."""
        if not self._proposed:
            known = {seq_id for seq_id, _ in self._ahead.wanted} if self._ahead is not None else set()
            if any(seq.id in known for seq in seqs):
                self._ahead = None  # nobody asked for it
            self.views.read_prompts(seqs, trees)
            return
        drafts, launched = self._proposed[0]
        ours = [b for b, seq in enumerate(seqs) if seq.id in launched.owners]
        if not ours:  # prompts, observed while the trees of others are not yet
            self.views.read_prompts(seqs, trees)
            return
        del self._proposed[0]
        grown = trees.form is not None  # then these are the chains, read with their verdict
        drafted, fresh = (trees if grown else drafts).to_host()[0], committed_tokens(trees, verdict)
        following = self._proposed[0][1].drafted if self._proposed else frozenset()
        for b in ours:
            seq = seqs[b]
            first = (trees.starts[b] if grown else drafts.starts[launched.owners[seq.id]]) + 1
            kept = drafted[first : first + launched.depth - 1]  # the last one was never an input
            self.views.count_read(seq, kept, fresh[b], seq.id in following)
        if grown and not self._proposed:
            self._go_ahead([seqs[b] for b in ours], [fresh[b] for b in ours], launched.depth)

    def forget(self, seq: Seq) -> None:
        for _, launched in self._proposed:
            launched.owners.pop(seq.id, None)
        self._proposed = [one for one in self._proposed if one[1].owners]  # the others failed, or all ended
        self.views.forget(seq.id)

    def _go_ahead(self, seqs: Sequence[Seq], fresh: Sequence[Sequence[int]], depth: int) -> None:
        """Start the next draft now, for all sequences that do not end here."""
        going = [
            (seq, [*seq.tokens, *more])
            for seq, more in zip(seqs, fresh, strict=True)
            if len(seq.tokens) + len(more) < seq.max_length and not seq.stop_ids.intersection(more)
        ]
        if going and self.knows(Form(depth, depth, 1), len(going)):
            self._ahead = self._launch([seq for seq, _ in going], [tokens for _, tokens in going], depth)

    def _launch(self, seqs: Sequence[Seq], tokens: Sequence[list[int]], depth: int) -> Launched:
        """Draft behind these committed tokens."""
        views = [self.views.catch_up(seq, some) for seq, some in zip(seqs, tokens, strict=True)]
        self.views.read([one for one in views if one is not None and len(one.tokens) - one.read > UNREAD])
        lanes = [self.views.lane(view, some, depth) for view, some in zip(views, tokens, strict=True)]
        return self._draft(seqs, [some[-1] for some in tokens], lanes, depth)

    def _draft(self, seqs: Sequence[Seq], roots: Sequence[int], lanes: list[Lane], depth: int) -> Launched:
        """Draft for these lanes, one for each sequence."""
        noise = [_noise_of(seq) if lane.pages else None for seq, lane in zip(seqs, lanes, strict=True)]
        padding = [PADDING] * (round_up(len(lanes), BUCKETS) - len(lanes))
        self.graphs.draft([*lanes, *padding], depth, noise)
        for seq, lane in zip(seqs, lanes, strict=True):
            if lane.pages:
                self.views.note_draft(seq, lane)
        drafted = frozenset(seq.id for seq, lane in zip(seqs, lanes, strict=True) if lane.pages)
        wanted = tuple((seq.id, root) for seq, root in zip(seqs, roots, strict=True))
        return _launched(wanted, depth, drafted)


def _launched(wanted: tuple[tuple[int, int], ...], depth: int, drafted: frozenset[int]) -> Launched:
    return Launched(wanted, depth, {seq_id: b for b, (seq_id, _) in enumerate(wanted)}, drafted)


def _noise_of(seq: Seq) -> Settings | None:
    """By what its tokens are drawn, where its verifier couples by noise; None = the likeliest are drafted."""
    return (mixed_seed(seq.seed), 1.0 / seq.params.temperature) if has_noise(seq) else None


log = logging.getLogger(__name__)
progress = logging.getLogger("forerun.progress")


class DeviceModelDrafter(DeviceDrafter[ModelDraft]):
    """Implements forerun.drafters.base.Drafter over a draft model on the device.

    It drafts its likeliest tokens, or, where the verifier couples by noise, those that the same noise draws. Sequences
    with penalties, bans or processors are drafted for by the host, which applies these to the draft model's law too.
    """

    def _grows(self, seq: Seq) -> bool:
        return not adjusts(seq)


def on_device(
    target: Target, draft: Target, make_plain: Callable[[], Drafter], max_batch: int, max_length: int
) -> DeviceModelDrafter | None:
    """A drafter on the device, where both models run there in our own decoder; its graphs are captured here."""
    if not (isinstance(target, CudaDecoder) and isinstance(draft, CudaDecoder)):
        return None
    if target.device != draft.device:
        return None
    try:
        model = ModelDraft(draft, target.vocab_size, target.grown.last)
        capture_chains(model, target, max_batch, max_length)
    except ForerunError:
        raise
    except Exception as error:  # no memory, no working Triton: neither stops generation
        log.warning("no drafts on the device, so the host drafts: %s: %s", type(error).__name__, error)
        return None
    return DeviceModelDrafter(model, make_plain)


def capture_chains(draft: ModelDraft, target: CudaDecoder, max_batch: int, max_length: int) -> float:
    """Capture all passes of both models that drafts take, and time them; seconds that it took, 0 = nothing to do.

    With each chain goes the target's pass over it, in contexts of every length that graphs are captured for.
    """
    if not draft.graphs.replays.capture:
        return 0.0
    started, reaches = perf_counter(), contexts_of(min(max_length, draft.model.max_length))
    buckets = [bucket for bucket in BUCKETS if bucket <= round_up(min(max_batch, MOST), BUCKETS)]
    draft.model.passes.warm_up((), min(max_length, draft.model.max_length), prompts_only=True)
    for i, bucket in enumerate(buckets):
        progress.info("capturing drafts of the draft model: %d of %d batch sizes", i + 1, len(buckets))
        for farthest in reaches:
            draft.graphs.rehearse(bucket, farthest)
            for form in forms_for(bucket):
                target.rehearse(TreeForm(bucket, form.nodes + 1, form.depth, chain=True), NEEDS, farthest)
        for form in forms_for(bucket):
            draft.graphs.rehearse_trees(bucket, form.depth)
            draft.note_captured(bucket, form)
        draft.menu.note(bucket, *draft.graphs.time(bucket))
    draft.complete_to = buckets[-1]
    spent = perf_counter() - started
    log.info("captured the draft model's passes for %d batch sizes in %.1f s", len(buckets), spent)
    return spent
