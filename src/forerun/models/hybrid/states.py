"""States: the recurrent states of sequences, of the nodes scored last, and of texts that another may continue.

A state that is kept is named by the digest of all tokens before it, as pages of the KV cache are: where a page ends,
and where a text ended. It is never written again, so sequences share it. Those used least recently go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

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
