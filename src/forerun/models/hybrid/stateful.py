"""StatefulDecoder: what decoders with recurrent layers share: where a state starts, and what a verdict keeps of it.

A pass computes the state of every node from its parent's; a verdict keeps the one behind the accepted path, and the
others are gone. A state that is kept for others is named by the digest of all tokens before it, as pages of the KV
cache are: where a page ends, and where a text ended. It is never written again, so sequences share it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forerun.core.types import Seq, TreeBatch, Verdict
from forerun.models.pages import PAGE, Extent, digest_of
from forerun.models.slots import Piece, SlotTarget

LayerState = tuple[Any, ...]  # tensors, or places for such; they have `nbytes`
Made = Mapping[int, LayerState]  # node -> its state
State = tuple[LayerState, ...]  # by recurrent layer
KEPT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Reached:
    """The state of a sequence behind its first `length` tokens."""

    length: int
    state: State


class States:
    """Everything is a reference: no state is copied, and none is changed."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self.now: dict[int, Reached] = {}  # by sequence
        # by sequence, pass and layer: behind nodes of its passes that are not committed yet
        self.nodes: dict[int, list[Sequence[Made]]] = {}
        self._kept: OrderedDict[bytes, State] = OrderedDict()
        self._most, self._bytes = kept_bytes, 0

    def keep(self, digest: bytes, state: State) -> None:
        """For whoever starts with the tokens of this digest."""
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return
        self._kept[digest] = state
        self._bytes += _size(state)
        while self._bytes > self._most:
            self.spill()

    def find(self, digest: bytes) -> State | None:
        found = self._kept.get(digest)
        if found is not None:
            self._kept.move_to_end(digest)
        return found

    def note(self, seq_id: int, made: Sequence[Made], follows: bool = False) -> None:
        """What a pass has made, which may follow one that is not committed yet."""
        self.nodes[seq_id] = [*(self.nodes.get(seq_id, ()) if follows else ()), made]

    def spill(self) -> bool:
        """Forget the state that was not asked for the longest; False = none is kept."""
        if self._kept:
            self._bytes -= _size(self._kept.popitem(last=False)[1])
        return bool(self._kept)

    def drop(self, seq_id: int) -> None:
        self.now.pop(seq_id, None)
        self.nodes.pop(seq_id, None)


def _size(state: State) -> int:
    return sum(part.nbytes for layer in state for part in layer)


class StatefulDecoder(SlotTarget):
    """In front of a decoder, whose passes leave in `_states.nodes` the states of nodes that may be asked for."""

    _states: States
    _most_ends = 1 << 30  # of pages: where a pass ends more, the last ones have their states kept

    @abstractmethod
    def _empty_state(self) -> State:
        """Before the first token."""

    def _begin(self, seq: Seq, extent: Extent) -> None:
        """From the longest start that has both its keys and values and its state."""
        tokens, reached = seq.tokens, Reached(0, self._empty_state())
        if extent.start is not None and extent.length:
            reached = self._last_kept(tokens, extent, extent.length) or reached
            self.kv.truncate(seq.id, reached.length)
            extent.reused = extent.found = reached.length
        self._states.now[seq.id] = reached

    def occupy(self, seq: Seq) -> None:
        """As before the first token."""
        super().occupy(seq)
        self._states.now[seq.id] = Reached(self.kv.extent(seq.id).length, self._empty_state())

    def _last_kept(self, tokens: Sequence[int], extent: Extent, length: int) -> Reached | None:
        """The last state that is kept of a sequence within its first `length` tokens, whose pages have names."""
        assert extent.start is not None
        chain = [extent.start, *extent.digests]
        whole = min(length // PAGE, len(extent.digests))
        if whole == length // PAGE and length % PAGE:
            state = self._states.find(digest_of(chain[whole], tokens[whole * PAGE : length]))
            if state is not None:
                return Reached(length, state)
        for pages in range(whole, 0, -1):
            state = self._states.find(chain[pages])
            if state is not None:
                return Reached(pages * PAGE, state)
        return None

    def _keep_pieces(self, pieces: Sequence[Piece]) -> None:
        super()._keep_pieces(pieces)
        for piece in pieces:
            self._advance(piece.seq, piece.tokens, range(len(piece.tokens)))
            self._keep_end(piece.seq)

    def commit(self, seqs: Sequence[Seq], trees: TreeBatch, verdict: Verdict) -> None:
        super().commit(seqs, trees, verdict)
        drafted = trees.to_host()[0]
        for b, (seq, path) in enumerate(zip(seqs, verdict.to_host()[0], strict=True)):
            nodes, first = (0, *path), trees.starts[b]
            self._advance(seq, [drafted[first + node] for node in nodes], nodes)

    def _advance(self, seq: Seq, tokens: Sequence[int], nodes: Sequence[int]) -> None:
        """These nodes of the first pass that is not committed, one below the other, are; the tokens are theirs."""
        extent, before, made = self.kv.extent(seq.id), self._states.now[seq.id], self._states.nodes[seq.id].pop(0)
        length = before.length + len(nodes)
        assert length == extent.length, (length, extent.length)
        self._states.now[seq.id] = Reached(length, self._state_of(made, nodes[-1]))
        if extent.start is None or length // PAGE == before.length // PAGE:
            return
        self.kv.keep(seq.id, [*seq.tokens[: before.length], *tokens])
        for end, node in self._page_ends(before.length, nodes):
            self._states.keep(extent.digests[end - 1], self._state_of(made, node))

    def _page_ends(self, length: int, nodes: Sequence[int]) -> list[tuple[int, int]]:
        """Pages that nodes behind so many tokens end, counted from 1, and the node that ends each."""
        ends = range(length // PAGE + 1, (length + len(nodes)) // PAGE + 1)[-self._most_ends :]
        return [(end, nodes[end * PAGE - length - 1]) for end in ends]

    def _state_of(self, made: Sequence[Made], node: int) -> State:
        return tuple(layer[node] for layer in made)

    @torch.no_grad()
    def truncate(self, seq: Seq, length: int) -> None:
        """From the last state that is kept before that, the tokens between are read again."""
        if not self.kv.holds(seq.id) or length >= self.kv.extent(seq.id).length:
            return
        extent = self.kv.extent(seq.id)
        found = min(extent.found, length)
        kept = None if extent.start is None else self._last_kept(seq.tokens, extent, length)
        reached = kept or Reached(0, self._empty_state())
        self.kv.truncate(seq.id, reached.length)
        self._states.now[seq.id] = reached
        self.kv.grow(seq.id, max(1, length))
        for first in range(reached.length, length, self.pass_rows):
            piece = Piece(seq, extent, seq.tokens[first : min(length, first + self.pass_rows)])
            self._read_piece(piece)
            self._keep_pieces([piece])
        extent.found = found

    def release(self, seq: Seq) -> None:
        """What it has read and written stays, for others to continue, until the room is needed."""
        self._keep_end(seq)
        super().release(seq)
        self._states.drop(seq.id)

    def _keep_end(self, seq: Seq) -> None:
        """The state behind all that is read of a text, if all but its last token is, and it does not end a page."""
        reached = self._states.now.get(seq.id)
        if reached is None or reached.length != len(seq.tokens) - 1 or not reached.length % PAGE:
            return
        if not self.kv.holds(seq.id):  # it was released, and that was interrupted
            return
        extent, pages = self.kv.extent(seq.id), reached.length // PAGE
        if extent.start is None or extent.length != reached.length:
            return
        self.kv.keep(seq.id, seq.tokens[:-1])
        before = extent.digests[pages - 1] if pages else extent.start
        self._states.keep(digest_of(before, seq.tokens[pages * PAGE : reached.length]), reached.state)

    def _kept_nodes(self, seq: Seq, length: int, nodes: int) -> list[int]:
        """Of a prompt's rows, the last one keeps its state, and those that end a page if others may find them."""
        if self.kv.extent(seq.id).start is None:
            return [nodes - 1]
        ends = range(-(length + 1) % PAGE, nodes, PAGE)[-self._most_ends :]
        return sorted({*ends, nodes - 1})

    def _start_state(self, seq: Seq, length: int) -> State:
        reached = self._states.now[seq.id]
        assert reached.length == length, f"the state is that of {reached.length} tokens, not {length}"
        return reached.state
