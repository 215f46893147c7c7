"""SparseDraft: the target itself drafts on the GPU, over a few pages of its own KV cache (models/attention.py).

A draft is that of a draft model (model_graphs.py) whose keys and values lie in the target's own slots: each level is a
replay of one captured pass, the next token is chosen and read on the device, and the host sends the pages and the
length of each sequence once, before the first level. The target's pass over the chain writes keys and values of all its
nodes anew, so nothing of a draft is left, nothing must be read to catch up, and a draft may follow any unread round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forerun.core.types import NEVER, Form, Offer, Scores, Seq, TreeBatch, TreeForm, Verdict
from forerun.drafters.base import Drafter
from forerun.drafters.device.drafter import Going, Launched, OnDevice, built
from forerun.drafters.device.model import NEEDS, ChainDraft
from forerun.drafters.device.model_graphs import ChainGraphs, Lane
from forerun.drafters.device.plan import DEEPEST, DraftMenu, trees_of
from forerun.drafters.device.protocol import Seats, Unread
from forerun.models.attention import SparseContext
from forerun.models.base import Target
from forerun.models.cuda.device_trees import STEPS
from forerun.models.cuda.plan import MAX_ROWS
from forerun.models.cuda.target import CudaDecoder
from forerun.models.pages import TREE_MARGIN, pages_for
from forerun.verify.warp import adjusts

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


def on_device(
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
