"""ModelViews: what a draft model on the GPU has read of each sequence, and what its next draft must know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.drafters.cuda.chain_plan import DEEPEST, UNREAD, Lane
from forerun.models.cuda.target import CudaDecoder
from forerun.types import Needs, PlainSeq, Seq, TreeBatch

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
