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

import torch
from torch import Tensor

from forerun.core.tree import chain_of
from forerun.core.types import Seq, TreeBatch, Verdict
from forerun.models.attention import PassRows, Span
from forerun.models.decoder import CHUNK, Decoder
from forerun.models.paged import Extent
from forerun.models.pages import PAGE, digest_of
from forerun.models.slots import Piece

LayerState = tuple[Tensor, ...]
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
        self.nodes: dict[int, Sequence[Made]] = {}  # by sequence and layer: behind nodes of its last pass
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
            self._bytes -= _size(self._kept.popitem(last=False)[1])

    def find(self, digest: bytes) -> State | None:
        found = self._kept.get(digest)
        if found is not None:
            self._kept.move_to_end(digest)
        return found

    def drop(self, seq_id: int) -> None:
        self.now.pop(seq_id, None)
        self.nodes.pop(seq_id, None)


def _size(state: State) -> int:
    return sum(part.nbytes for layer in state for part in layer)


class StatefulDecoder(Decoder):
    """A pass leaves in `_states.nodes` the states of nodes that may be asked for."""

    _states: States

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
            self._advance(piece.seq, piece.seq.tokens, range(len(piece.tokens)))
            self._keep_end(piece.seq)

    def commit(self, seqs: Sequence[Seq], trees: TreeBatch, verdict: Verdict) -> None:
        super().commit(seqs, trees, verdict)
        drafted = trees.to_host()[0]
        for b, (seq, path) in enumerate(zip(seqs, verdict.to_host()[0], strict=True)):
            nodes, first = (0, *path), trees.starts[b]
            tokens = seq.tokens[: self._states.now[seq.id].length] + [drafted[first + node] for node in nodes]
            self._advance(seq, tokens, nodes)

    def _advance(self, seq: Seq, tokens: Sequence[int], nodes: Sequence[int]) -> None:
        """These nodes of the last pass, one below the other, are committed; the tokens are the text with them."""
        extent, before, made = self.kv.extent(seq.id), self._states.now[seq.id], self._states.nodes.pop(seq.id)
        length = before.length + len(nodes)
        assert length == extent.length, (length, extent.length)
        self._states.now[seq.id] = Reached(length, self._state_of(made, nodes[-1]))
        if extent.start is None or length // PAGE == before.length // PAGE:
            return
        self.kv.keep(seq.id, tokens[:length])
        for end in range(before.length // PAGE + 1, length // PAGE + 1):
            state = self._state_of(made, nodes[end * PAGE - before.length - 1])
            self._states.keep(extent.digests[end - 1], state)

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
        for first in range(reached.length, length, CHUNK):
            piece = Piece(seq, extent, seq.tokens[first : min(length, first + CHUNK)])
            span = Span(0, len(piece.tokens), extent.pages, extent.length, chain_of(len(piece.tokens)))
            self._run(PassRows(piece.tokens, [span], [seq], {}))
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

    def _kept_nodes(self, seq: Seq, span: Span) -> list[int]:
        """Of a prompt's rows, the last one keeps its state, and those that end a page if others may find them."""
        if self.kv.extent(seq.id).start is None:
            return [span.nodes - 1]
        ends = range(-(span.length + 1) % PAGE, span.nodes, PAGE)
        return sorted({*ends, span.nodes - 1})

    def _start_state(self, seq: Seq, span: Span) -> State:
        reached = self._states.now[seq.id]
        assert reached.length == span.length, f"the state is that of {reached.length} tokens, not {span.length}"
        return reached.state
