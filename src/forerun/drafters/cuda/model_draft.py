"""ModelDraft: chains that a draft model drafts on the GPU, where they stay.

The target's verdict says what was accepted of a chain: so much of it need not be read again. Then the next draft starts
at once, as deep as the last: the device drafts while the host ends the round; or even before that round was read, from
what the device itself has decided (`follow`). Prompts are read beside the target, by
the draft model's own passes, unless the last sequences were written without drafts: then a prompt is read when the
first draft asks for it. While nothing is drafted, nothing is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from forerun.drafters.base import committed_tokens
from forerun.drafters.cuda.chain_graphs import PADDING, ChainGraphs
from forerun.drafters.cuda.chain_menu import ChainMenu
from forerun.drafters.cuda.chain_plan import BUCKETS, DEEPEST, MOST, UNREAD, Lane
from forerun.drafters.cuda.model_views import NEEDS, ModelViews
from forerun.drafters.draft_law import has_noise
from forerun.drafters.eagle.cuda.draft_noise import Settings
from forerun.models.cuda.last_round import LastRound
from forerun.models.cuda.plan import MAX_ROWS, round_up
from forerun.models.cuda.target import CudaDecoder
from forerun.noise import mixed_seed
from forerun.offers import Form
from forerun.types import Scores, Seq, TreeBatch, TreeForm, Verdict


@dataclass(frozen=True, slots=True)
class Launched:
    """A draft that is under way: whose chains lie in the device's buffer, in this order."""

    wanted: tuple[tuple[int, int], ...]  # sequences and their roots; -1 = only the device knows it
    depth: int
    owners: dict[int, int]  # sequences that were not forgotten since, and their chains
    drafted: frozenset[int]  # sequences whose chains are not padding


class ModelDraft:
    """Implements forerun.drafters.eagle.cuda.drafter.DraftsOnDevice."""

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
        """Draft behind chains that were not read, as deep as these: see forerun.trees.GrowsNext."""
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
