"""Chains that a draft model (`ModelDraft`), or the target itself (`SparseDraft`), drafts on the GPU, where they stay.

The target's verdict says what was accepted of a chain: so much of it need not be read again. Prompts are read beside
the target, by the draft model's own passes, unless the last sequences were written without drafts: then a prompt is
read when the first draft asks for it. While nothing is drafted, nothing is read. `ModelViews` has what the draft model
has read of each sequence; model_graphs.py the passes of a draft.

`SparseDraft`: the target itself drafts, over a few pages of its own KV cache (models/attention.py). Keys and values of
such a chain lie in the target's own slots: each level is a replay of one captured pass, the next token is chosen and
read on the device, and the host sends the pages and the length of each sequence once, before the first level. The
target's pass over the chain writes keys and values of all its nodes anew, so nothing of a draft is left, nothing must
be read to catch up, and a draft may follow any unread round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.core.tree import Seconds, committed_tokens
from forerun.core.types import NEVER, Form, Needs, Offer, PlainSeq, Scores, Seq, TreeBatch, TreeForm, Verdict
from forerun.drafters.base import Drafter
from forerun.drafters.device.drafter import DeviceDraft, Going, Launched, OnDevice, built
from forerun.drafters.device.model_graphs import UNREAD, ChainGraphs, Lane
from forerun.drafters.device.plan import DEEPEST, DraftMenu, trees_of
from forerun.drafters.device.protocol import Seats, Unread
from forerun.models.attention import SparseContext
from forerun.models.base import Target
from forerun.models.cuda.device_trees import STEPS, LastRound
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.cuda.target import CudaDecoder
from forerun.models.pages import TREE_MARGIN, pages_for
from forerun.verify.warp import adjusts

NEEDS = Needs()
# sequences in a row that were read and never drafted for, after which prompts are not read at once
IN_VAIN = 2
UNTIMED = 8  # drafts whose seconds are not known yet, at most


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

    def count_read(self, seq: Seq, kept: Sequence[int], fresh: Sequence[int], is_followed: bool = False) -> None:
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
        if view is None or len(view.tokens) - view.read > UNREAD or not self._has_room(view, len(tokens) + depth):
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


class ChainDraft(DeviceDraft):
    """What drafts of ChainGraphs have in common: what each takes is timed on the device, and noted once it is known."""

    needs = NEEDS

    def __init__(self, graphs: ChainGraphs, menu: DraftMenu) -> None:
        super().__init__(menu, graphs.replays, graphs.trees)
        self.graphs = graphs
        self._timed = deque[tuple[int, Form, Seconds]](maxlen=UNTIMED)

    def _draft_lanes(self, seqs: Sequence[Seq], lanes: Sequence[Lane], form: Form, farthest: int = 0) -> None:
        """Draft for these lanes, one for each sequence."""
        self._note_times()
        bucket = self.menu.bucket(form, len(lanes))
        self.graphs.draft_for(seqs, lanes, bucket, form.depth, farthest)
        self._timed.append((bucket, form, self.graphs.clock.taken()))

    def _note_times(self) -> None:
        while self._timed:
            bucket, form, seconds = self._timed[0]
            if (taken := seconds()) is None:  # it is under way
                return
            self.menu.correct(bucket, form, taken)
            del self._timed[0]

    def _time(self, bucket: int, farthest: int = 0) -> None:
        """Of all chains for a batch size, unless that was done; over padding."""
        if self.replays.capture and not self.menu.is_timed(bucket, Form(1, 1, 1)):
            first, further = self.graphs.time(bucket, farthest)
            for depth in range(1, DEEPEST + 1):
                self.menu.note(bucket, Form(depth, depth, 1), first + (depth - 1) * further)


class ModelDraft(ChainDraft):
    """Implements forerun.drafters.device.protocol.DeviceDrafter."""

    def __init__(self, model: CudaDecoder, vocab_size: int, last: LastRound | None = None) -> None:
        """`last` is the target's record of its last round; without it, every round is read before the next draft."""
        graphs = ChainGraphs(model, vocab_size, last or LastRound(model.device))
        super().__init__(graphs, DraftMenu(chains=True, graphs=graphs.replays))
        self.model, self.views, self._follows = model, ModelViews(model), last is not None

    def is_ready(self, seq: Seq) -> bool:
        """Can it be drafted for? What was not read is read first."""
        view = self.views.get(seq)
        return not view.foreign and len(seq.tokens) + DEEPEST < self.model.max_length

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Count what was accepted as read, and start the next draft; or read a prompt."""
        drafts, launched = self._proposed[0] if self._proposed else (None, None)
        owners = {} if launched is None else {seq_id: b for (seq_id, _), b in launched.trees.items()}
        ours = [b for b, seq in enumerate(seqs) if seq.id in owners]
        if drafts is None or launched is None or not ours:  # prompts, observed while trees of others are not yet
            self._drop_ahead(seqs)
            self.views.read_prompts(seqs, trees)
            return
        del self._proposed[0]
        grown, depth = (trees.form is not None, launched.form.depth)  # these are the chains, read with their verdict
        drafted, fresh = (trees if grown else drafts).to_host()[0], committed_tokens(trees, verdict)
        following = self._proposed[0][1].drafted if self._proposed else frozenset()
        for b in ours:
            seq = seqs[b]
            first = (trees.starts[b] if grown else drafts.starts[owners[seq.id]]) + 1
            kept = drafted[first : first + depth - 1]  # the last one was never an input
            self.views.count_read(seq, kept, fresh[b], seq.id in following)
        if grown and not self._proposed:
            self._go_ahead([(seqs[b], fresh[b]) for b in ours], launched.form)

    def forget(self, seq: Seq) -> None:
        for _, launched in self._proposed:
            for one in [one for one in launched.trees if one[0] == seq.id]:
                del launched.trees[one]
        self._proposed = [one for one in self._proposed if one[1].trees]  # the others failed, or all ended
        self.views.forget(seq.id)

    def _start(self, going: Going, form: Form) -> frozenset[int]:
        """Draft behind these committed tokens."""
        seqs, tokens = [seq for seq, _ in going], [[*seq.tokens, *fresh] for seq, fresh in going]
        views = [self.views.catch_up(seq, some) for seq, some in zip(seqs, tokens, strict=True)]
        self.views.read([one for one in views if one is not None and len(one.tokens) - one.read > UNREAD])
        lanes = [self.views.lane(view, some, form.depth) for view, some in zip(views, tokens, strict=True)]
        self.views.in_vain = 0
        return self._draft(seqs, lanes, form)

    def _follow(self, seats: Seats, form: Form, behind: Unread) -> TreeBatch | None:
        """Draft behind chains of its own that were not read, as deep as these."""
        if len(self._proposed) != 1 or not self._follows or behind.trees.form is None:
            return None
        last, depth = self._proposed[0][1], form.depth
        if last.form != form or not self.menu.knows(form, len(seats)):
            return None
        lanes = [self.views.lane_behind(seq, tree, depth, seq.id in last.drafted) for seq, tree in seats]
        known = [lane for lane in lanes if lane is not None]
        if len(known) < len(lanes):
            return None
        wanted = {(seq.id, -1 if tree >= 0 else seq.tokens[-1]): i for i, (seq, tree) in enumerate(seats)}
        drafted, self._ahead = self._draft([seq for seq, _ in seats], known, form), None
        return self._propose(Launched(wanted, form, drafted), tuple(tree for _, tree in seats))

    def _draft(self, seqs: Sequence[Seq], lanes: list[Lane], form: Form) -> frozenset[int]:
        """Draft for these lanes, one for each sequence; which of them are not padding."""
        self._draft_lanes(seqs, lanes, form)
        real = [(seq, lane) for seq, lane in zip(seqs, lanes, strict=True) if lane.pages]
        for seq, lane in real:
            self.views.note_draft(seq, lane)
        return frozenset([seq.id for seq, _ in real])

    def _prepare(self, target: CudaDecoder, max_length: int) -> int:
        longest = min(max_length, self.model.max_length)
        self.model.passes.warm_up((), longest, prompts_only=True)
        return longest

    def _capture(self, target: CudaDecoder | None, bucket: int, form: Form, farthest: int) -> None:
        self.graphs.rehearse(bucket, form.depth, farthest)
        self._time(bucket)
        if target is not None:
            target.rehearse(trees_of(form, bucket), NEEDS, farthest)


def over_model(draft: ModelDraft, make_plain: Callable[[], Drafter]) -> OnDevice[ModelDraft]:
    """A drafter over a draft model on the device.

    It drafts its likeliest tokens, or, where the verifier couples by noise, those that the same noise draws. Sequences
    with penalties, bans or processors are drafted for by the host, which applies these to the draft model's law too.
    """
    return OnDevice(draft, make_plain, excludes=adjusts)


def on_device(
    target: Target, draft: Target, make_plain: Callable[[], Drafter], max_batch: int, max_length: int
) -> OnDevice[ModelDraft] | None:
    """A drafter on the device, where both models run there in our own decoder; its graphs are captured here."""
    if not (isinstance(target, CudaDecoder) and isinstance(draft, CudaDecoder)):
        return None
    if target.device != draft.device:
        return None

    def make() -> OnDevice[ModelDraft]:
        return over_model(ModelDraft(draft, target.vocab_size, target.grown.last), make_plain)

    return built(make, target, max_batch, max_length)


ACCEPTED = 0.85  # of the tokens that are drafted behind accepted ones, before any were tested


class SparseDraft(ChainDraft):
    """Implements forerun.drafters.device.protocol.DeviceDrafter."""

    def __init__(self, target: CudaDecoder, context: SparseContext) -> None:
        graphs = ChainGraphs(target, target.vocab_size, target.grown.last, is_target=True)
        super().__init__(graphs, DraftMenu(((ACCEPTED,),), chains=True, switches=True, graphs=graphs.replays))
        self.target, self.context = target, context

    def is_ready(self, seq: Seq) -> bool:
        """Has the target read all of it, and is there room for a draft behind it?"""
        length = len(seq.tokens)
        fits = self.menu.holds(length) and length + DEEPEST < self.target.max_length
        return fits and self.target.cached_tokens(seq) == length - 1

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """The target's pages have all that was committed."""

    def forget(self, seq: Seq) -> None:
        self.context.forget(seq.id)

    def _start(self, going: Going, form: Form) -> frozenset[int]:
        seqs = [seq for seq, _ in going]
        return self._draft(seqs, [self._lane(seq, form.depth) for seq in seqs], form)

    def _follow(self, seats: Seats, form: Form, behind: Unread) -> TreeBatch | None:
        """Behind lone roots, or chains of its own."""
        grown = behind.trees.form or TreeForm(len(seats), 1, 0, 1)
        if grown.width > 1 or grown.depth >= STEPS or form.nodes + grown.depth + 2 > TREE_MARGIN:
            return None
        rows = self.menu.bucket(form, len(seats)) * (form.nodes + 1)
        if not self.menu.knows(form, len(seats)) or rows > MAX_ROWS:
            return None
        lanes = [self._lane(seq, form.depth, tree, grown.depth) for seq, tree in seats]
        drafted = self._draft([seq for seq, _ in seats], lanes, form)
        wanted = {(seq.id, -1 if tree >= 0 else seq.tokens[-1]): i for i, (seq, tree) in enumerate(seats)}
        return self._propose(Launched(wanted, form, drafted), tuple([tree for _, tree in seats]))

    def _propose(self, launched: Launched, follows: tuple[int, ...] | None = None) -> TreeBatch:
        batch, self._proposed = super()._propose(launched, follows), []  # of what is verified nothing need be known
        return batch

    def _lane(self, seq: Seq, depth: int, tree: int = -1, deep: int = 0) -> Lane:
        """`tree`: its place in the unread round, whose trees have `deep` levels; -1 = it was in none.

        The steps are as many whatever the length of the sequence.
        """
        root, kv = (seq.tokens[-1],), self.target.kv
        if not self.is_ready(seq):
            return Lane(root, (), 0, tree, deep)
        length = len(seq.tokens) - 1
        end = length + depth + (deep + 1 if tree >= 0 else 0)
        if end > kv.extent(seq.id).writable and not kv.has_pages(kv.lacking(seq.id, end)):
            return Lane(root, (), 0, tree, deep)
        pages, skipped = self.context.pages_of(seq, length, kv.grow(seq.id, end).pages, pages_for(end))
        return Lane(root, pages, length - skipped, tree, deep, skipped)

    def _draft(self, seqs: Sequence[Seq], lanes: Sequence[Lane], form: Form) -> frozenset[int]:
        """For these lanes, one for each sequence; which of them are not padding."""
        self._draft_lanes(seqs, lanes, form, self.context.farthest)
        return frozenset([seq.id for seq, lane in zip(seqs, lanes, strict=True) if lane.pages])

    def _prepare(self, target: CudaDecoder, max_length: int) -> int:
        return max_length

    def _capture(self, target: CudaDecoder | None, bucket: int, form: Form, farthest: int) -> None:
        self.graphs.rehearse(bucket, form.depth, self.context.farthest)
        self._time(bucket, self.context.farthest)
        if target is not None:
            target.rehearse(trees_of(form, bucket), NEEDS, farthest)


class SparseOnDevice(OnDevice[SparseDraft]):
    """Implements forerun.drafters.base.Drafter."""

    def __init__(self, draft: SparseDraft, make_plain: Callable[[], Drafter], least: int) -> None:
        """`least`: tokens of a sequence from which on it offers to draft."""
        super().__init__(draft, make_plain, excludes=_excludes)
        self._least = least

    def offer(self, seq: Seq) -> Offer:
        return NEVER if len(seq.tokens) < self._least else super().offer(seq)


def _excludes(seq: Seq) -> bool:
    """Is it drafted for by the host, which applies penalties and the like to drafts too, and LoRA adapters?"""
    return seq.adapter is not None or adjusts(seq)


def sparse_on_device(
    target: Target,
    context: SparseContext,
    least: int,
    make_plain: Callable[[], Drafter],
    max_batch: int,
    max_length: int,
) -> OnDevice[SparseDraft] | None:
    """A drafter on the target's device, where that is our own decoder; its graphs are captured here or later."""
    if not isinstance(target, CudaDecoder):
        return None

    def make() -> OnDevice[SparseDraft]:
        return SparseOnDevice(SparseDraft(target, context), make_plain, least)

    return built(make, target, max_batch, max_length)
