"""ModelDraft: what a draft model on the GPU has read of each sequence, and its chains, which stay on the device.

The target's verdict says what was accepted of a chain: so much of it need not be read again. Then the next draft starts
at once, as deep as the last: the device drafts while the host ends the round. Prompts are read beside the target, by
the draft model's own passes, unless the last sequences were written without drafts: then a prompt is read when the
first draft asks for it. While nothing is drafted, nothing is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.drafters.base import committed_tokens
from forerun.drafters.cuda.chain_graphs import PADDING, ChainGraphs
from forerun.drafters.cuda.chain_menu import ChainMenu
from forerun.drafters.cuda.chain_plan import BUCKETS, DEEPEST, MOST, UNREAD, Lane, Noise
from forerun.models.cuda.plan import MAX_ROWS, round_up
from forerun.models.cuda.target import CudaDecoder
from forerun.offers import Form
from forerun.types import Needs, PlainSeq, Scores, Seq, TreeBatch, TreeForm, Verdict

NEEDS = Needs()
IN_VAIN = (
    2  # sequences in a row that were read and never drafted for, after which prompts are not read at once
)


@dataclass(slots=True, eq=False)
class View(PlainSeq):
    """A sequence as the draft model sees it: committed tokens, of which the first `read` are in its KV cache."""

    read: int = 0
    observed: int = 0  # tokens of the prompt that the target has read
    reading: bool = True  # the target still reads its prompt
    foreign: bool = False  # it holds a token outside the draft model's vocabulary
    was_drafted: bool = False


@dataclass(frozen=True, slots=True)
class Launched:
    """A draft that is under way: whose chains lie in the device's buffer, in this order."""

    wanted: tuple[tuple[int, int], ...]  # sequences and their roots
    depth: int


class ModelDraft:
    """Implements forerun.drafters.eagle.cuda.drafter.DraftsOnDevice."""

    needs = NEEDS

    def __init__(self, model: CudaDecoder, vocab_size: int) -> None:
        self.model, self.graphs, self.menu = model, ChainGraphs(model, vocab_size), ChainMenu()
        self.complete_to = 0
        self._views: dict[int, View] = {}
        self._captured: set[tuple[int, int]] = set()  # (bucket, depth) whose target pass is captured
        self._ahead: Launched | None = None
        self._proposed: tuple[TreeBatch, Launched] | None = None  # what is being verified
        self._in_vain = 0

    def is_ready(self, seq: Seq) -> bool:
        """Can it be drafted for? What was not read is read first."""
        view = self._view(seq)
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
            launched = Launched(wanted, form.depth)
        self._in_vain = 0
        self.note_captured(round_up(len(seqs), BUCKETS), form)  # its pass follows, if it had none
        trees = TreeForm(round_up(len(seqs), BUCKETS), form.depth + 1, form.depth, chain=True)
        tokens, parents = self.graphs.trees[:, : len(seqs) * trees.nodes]
        seconds = self.menu.drafting(form, len(seqs))
        batch = TreeBatch(tokens, parents, trees.starts(len(seqs)), form=trees, device_seconds=seconds)
        self._proposed = batch, launched
        return batch

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Count what was accepted as read, and start the next draft; or read a prompt."""
        proposed, self._proposed = self._proposed, None
        if proposed is None:
            known = {seq_id for seq_id, _ in self._ahead.wanted} if self._ahead is not None else set()
            if any(seq.id in known for seq in seqs):
                self._ahead = None  # nobody asked for it
            self._read_prompts(seqs, trees)
            return
        drafts, launched = proposed
        places, drafted = {seq_id: b for b, (seq_id, _) in enumerate(launched.wanted)}, drafts.to_host()[0]
        ours = [b for b, seq in enumerate(seqs) if seq.id in places]
        if not ours:  # prompts, observed while the trees of others are not yet
            self._proposed = proposed
            self._read_prompts(seqs, trees)
            return
        fresh = committed_tokens(trees, verdict)
        for b in ours:
            first = drafts.starts[places[seqs[b].id]] + 1
            kept = drafted[first : first + launched.depth - 1]  # the last one was never an input
            self._count_read(seqs[b], kept, fresh[b])
        if trees.form is not None:
            self._go_ahead([seqs[b] for b in ours], [fresh[b] for b in ours], launched.depth)

    def forget(self, seq: Seq) -> None:
        proposed = self._proposed
        if proposed is not None and any(seq_id == seq.id for seq_id, _ in proposed[1].wanted):
            self._proposed = None  # the round failed: nothing of it is observed
        view = self._views.get(seq.id)
        if view is not None:
            self.model.release(view)
            self._views.pop(seq.id, None)
            self._in_vain += not view.was_drafted

    def _view(self, seq: Seq) -> View:
        view = self._views.get(seq.id)
        if view is None:
            length = min(seq.max_length, self.model.max_length)
            fields = (seq.prompt_length, seq.params, seq.seed, length, seq.stop_ids, seq.shares_noise)
            view = self._views[seq.id] = View(seq.id, [], *fields, cache_salt=seq.cache_salt)
            view.foreign = max(seq.tokens, default=0) >= self.model.vocab_size
        return view

    def _read_prompts(self, seqs: Sequence[Seq], trees: TreeBatch) -> None:
        """Read as much of each prompt as the target has read; rounds without drafts are not read at all."""
        chunks = []
        for seq, size in zip(seqs, trees.sizes(), strict=True):
            view = self._view(seq)
            if view.reading and view.observed + size < len(seq.tokens):
                view.observed += size
                if self._in_vain < IN_VAIN and not view.foreign:
                    view.tokens = seq.tokens[: view.observed + 1]
                    chunks.append(view)
            else:
                view.reading = False
        self._read(chunks)

    def _read(self, views: Sequence[View]) -> None:
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

    def _count_read(self, seq: Seq, kept: Sequence[int], fresh: Sequence[int]) -> None:
        """A round committed these tokens: those that agree with inputs of the draft are in the cache."""
        view = self._views.get(seq.id)
        if view is None or view.read != len(seq.tokens):  # its chain was padding
            return
        agreed = 0
        while agreed < min(len(kept), len(fresh)) and kept[agreed] == fresh[agreed]:
            agreed += 1
        view.read += agreed
        self.model.kv.extent(seq.id).length = view.read

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
        views = [self._follow(seq, some) for seq, some in zip(seqs, tokens, strict=True)]
        self._read([one for one in views if one is not None and len(one.tokens) - one.read > UNREAD])
        lanes = [self._lane(view, some, depth) for view, some in zip(views, tokens, strict=True)]
        self.graphs.draft([*lanes, *[PADDING] * (round_up(len(lanes), BUCKETS) - len(lanes))], depth)
        for view, lane in zip(views, lanes, strict=True):
            if view is not None and lane.pages:
                view.read, view.was_drafted = len(view.tokens), True
                self.model.kv.extent(view.id).length = view.read
        return Launched(tuple((seq.id, some[-1]) for seq, some in zip(seqs, tokens, strict=True)), depth)

    def _follow(self, seq: Seq, tokens: list[int]) -> View | None:
        """The draft model's view with all committed tokens; None where it cannot draft for them."""
        view = self._view(seq)
        view.reading, fresh = False, tokens[len(view.tokens) :]
        view.tokens += fresh
        view.foreign = view.foreign or max(fresh, default=0) >= self.model.vocab_size
        # the root is read again where a draft was started from it and then not used
        view.read = min(view.read, len(tokens) - 1)
        self.model.truncate(view, view.read)
        return None if view.foreign or len(tokens) + DEEPEST >= self.model.max_length else view

    def _lane(self, view: View | None, tokens: list[int], depth: int) -> Lane:
        if (
            view is None
            or len(view.tokens) - view.read > UNREAD
            or not self._has_room(view, len(tokens) + depth)
        ):
            return Lane(tokens[-1:], (), 0)
        if not self.model.kv.holds(view.id):  # a sequence of one or two tokens: nothing was read
            self.model.prefill([view], NEEDS)
            view.read = self.model.cached_tokens(view)
        extent, params = self.model.kv.grow(view.id, len(tokens) + depth), view.params
        noise = None
        if view.shares_noise and not params.is_greedy:
            noise = Noise(view.seed, params.temperature)
        return Lane(view.tokens[view.read :], extent.pages, view.read, noise)
