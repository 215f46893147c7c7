"""LayerSubset: which of a model's layers a pass runs, and which attentions and MLPs it leaves out of them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from forerun.core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class LayerSubset:
    """Layers `first` to `end`, without the attention of some and without the MLP of some; counted from 0."""

    end: int
    first: int = 0
    without_attention: frozenset[int] = frozenset()
    without_mlp: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        inside = range(self.first, self.end)
        if self.first > self.end or any(
            i not in inside for i in (*self.without_attention, *self.without_mlp)
        ):
            raise InvalidInput(f"a skipped layer is not one of layers {self.first} to {self.end}")

    @property
    def is_prefix(self) -> bool:
        """Does it run the first layers whole? Then their keys and values are those of the whole model."""
        return self.first == 0 and not self.skips

    @property
    def skips(self) -> bool:
        """Does it leave out a part of a layer that it runs?"""
        return bool(self.without_attention or self.without_mlp)

    def output_is_in(self, hidden: Container[int]) -> bool:
        """Does somebody read what leaves the last of them, of every row? Else rows without logits end with its keys."""
        return self.end in hidden or -1 in hidden

    @property
    def sublayers(self) -> int:
        """Attentions and MLPs that are run."""
        inside = range(self.first, self.end)
        left_out = sum(i in some for some in (self.without_attention, self.without_mlp) for i in inside)
        return 2 * len(inside) - left_out
