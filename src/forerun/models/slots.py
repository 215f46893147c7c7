"""SlotTarget: the part of our own decoders that manages KV slots: admission, prefill passes, commit, release.

A sequence takes its slots when it is first prefilled and gives them back when it is released; prompts are cut into
passes, trees are checked against the slots behind a sequence, and a verdict says which slots move where. How a pass is
run is left to the decoders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import InvalidInput
from forerun.models.config import DecoderConfig
from forerun.models.kv import TREE_MARGIN, Extent, KVStore
from forerun.types import Needs, Seq, Verdict, first_rows, offsets


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one prompt that a pass takes: tokens to write behind what the extent holds."""

    seq: Seq
    extent: Extent
    tokens: list[int]


class SlotTarget:
    """The part of forerun.models.base.Target that is about slots; `prefill` and `score` are the decoders'."""

    tree_limit: int | None = None  # nodes that a pass can take of one tree; None = as many as there are slots

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, kv_slots: int | None
    ) -> None:
        self.config, self._dtype, self._device = config, dtype, device
        self._lengths: dict[int, int] = {}  # sequence -> how long it may become
        self.kv = KVStore(
            config.layers, config.kv_heads, config.head_dim, dtype=dtype, device=device, capacity=kv_slots
        )

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_length(self) -> int:
        return self.config.max_length

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def used_slots(self) -> int:
        """KV slots that sequences hold now."""
        return self.kv.used

    def truncate(self, seq: Seq, length: int) -> None:
        self.kv.truncate(seq.id, length)

    def has_room(self, *lengths: int) -> bool:
        return self.kv.has_room(*(length + TREE_MARGIN for length in lengths))

    def cached_tokens(self, seq: Seq) -> int:
        try:  # no check before: another thread may release it in between
            return self.kv.extent(seq.id).length
        except InvalidInput:
            return 0

    def release(self, seq: Seq) -> None:
        self.kv.release(seq.id)
        self._lengths.pop(seq.id, None)

    def _admit(self, seqs: Sequence[Seq], rows: int | None = None) -> list[list[int]]:
        """Slots for all that have none yet, or for none of them; which tokens of each are to be cached now.

        These are all that are not, but the last, or the first `rows` of them.
        """
        new = [seq for seq in seqs if not self.kv.holds(seq.id)]
        try:
            for seq in new:
                length = max(min(seq.max_length, self.max_length), len(seq.tokens))
                self._lengths[seq.id] = length
                self.kv.reserve(seq.id, length + TREE_MARGIN)
        except BaseException:
            for seq in new:
                self.release(seq)
            raise
        extents = [self.kv.extent(seq.id) for seq in seqs]
        for seq, extent in zip(seqs, extents, strict=True):
            if len(seq.tokens) > extent.size:
                raise InvalidInput(
                    f"sequence {seq.id} has {len(seq.tokens)} tokens but {extent.size} slots: release it first"
                )
        fresh = [seq.tokens[extent.length : -1] for seq, extent in zip(seqs, extents, strict=True)]
        return fresh if rows is None else first_rows(fresh, rows)

    def _passes(
        self, seqs: Sequence[Seq], fresh: Sequence[list[int]], size: int
    ) -> Iterator[tuple[int, list[Piece]]]:
        """Prompts in passes of at most `size` rows: the first row of each, and its pieces, cached once it was run."""
        starts = offsets([len(tokens) for tokens in fresh])
        for first in range(0, starts[-1], size):
            pieces = []
            for seq, tokens, start in zip(seqs, fresh, starts, strict=False):
                if some := tokens[max(0, first - start) : max(0, first + size - start)]:
                    pieces.append(Piece(seq, self.kv.extent(seq.id), some))
            yield first, pieces
            self._keep_pieces(pieces)

    def _pieces(self, seqs: Sequence[Seq], fresh: Sequence[list[int]]) -> list[Piece]:
        """Prompts as pieces of one pass; `_keep_pieces` counts them as cached once it was run."""
        return [
            Piece(seq, self.kv.extent(seq.id), some) for seq, some in zip(seqs, fresh, strict=True) if some
        ]

    def _keep_pieces(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            piece.extent.length += len(piece.tokens)

    def _extent_for(self, seq: Seq, nodes: int) -> Extent:
        """A sequence's slots, if they take a tree of so many nodes."""
        extent = self.kv.extent(seq.id)
        if extent.length + nodes > extent.size or nodes > (self.tree_limit or nodes):
            raise InvalidInput(
                f"a tree of {nodes} nodes on {extent.length} tokens does not fit the {extent.size} "
                f"slots of sequence {seq.id}: at most {TREE_MARGIN} nodes beyond its max_length"
            )
        return extent

    def _accept(self, seqs: Sequence[Seq], verdict: Verdict) -> list[tuple[int, int]]:
        """Count root and path of every tree as committed; the slots that must move for it."""
        paths = zip(seqs, verdict.to_host()[0], strict=True)
        return [move for seq, path in paths for move in self.kv.accept(seq.id, path)]

    def _layers(self, needs: Needs) -> tuple[int, ...]:
        """The hidden layers needed: i = what enters layer i, -1 = what leaves the last norm."""
        for layer in needs.hidden_layers:
            if not -1 <= layer <= self.config.layers:
                raise InvalidInput(f"hidden layer {layer} is not one of -1 to {self.config.layers}")
        return needs.hidden_layers

    def _empty_rows(self, count: int) -> Tensor:
        """[count, D] where hidden rows will go."""
        return torch.empty(count, self.config.width, dtype=self._dtype, device=self._device)
