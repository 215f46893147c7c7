"""SharedWeights: what a target lets drafters read of its own weights (embedding, LM head, layers, rotary tables).

A target answers `shared()` with one of these, or with None where it has nothing to read. Heads take embedding and LM
head rows from it instead of storing them again; drafters that run the target's own layers find the layers here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.errors import InvalidInput, VocabularyMismatch
from forerun.models.config import DecoderConfig
from forerun.models.layer_subset import LayerSubset
from forerun.models.layers import Rotations
from forerun.models.load.quants import Blocks

if TYPE_CHECKING:
    from forerun.models.base import Target


class MakesPartial(Protocol):
    """Makes a draft model of some of a target's layers, which reads the target's own KV cache."""

    def __call__(self, layers: LayerSubset, leave: Callable[[Tensor], Tensor] | None = None) -> Target:
        """`leave` turns what leaves the last of them [M, D] into what the LM head reads; None = the final norm."""
        ...


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Tables are read row by row: a target may hold neither as one tensor."""

    embed: Callable[[Tensor], Tensor]  # [N] ids -> [N, D] rows of the embedding
    head_rows: Callable[[Tensor], Tensor]  # [N] ids -> [N, D] rows of the LM head
    vocab_size: int
    width: int
    dtype: torch.dtype  # of rows: weights may be held in fewer bits
    table: Tensor | Blocks | None = None  # [V, D] what `embed` reads, where others can read it in place
    head_table: Tensor | Blocks | None = None  # [V, D] what `head_rows` reads
    layers: Sequence[object] = ()  # one per layer, in the target's own form: Block, Layer, C struct or module
    final_norm: Tensor | None = None  # [D] in front of the LM head, where it is a plain RMS norm
    rotations: Sequence[Rotations] = ()  # rotary tables, one per kind of rope; () = inside the layers
    config: DecoderConfig | None = None  # the target's shape; None where it is not one of our families
    partial: MakesPartial | None = None  # some of `layers` as a draft model; None where they cannot run apart

    @classmethod
    def of(cls, embedding: Tensor, head: Tensor) -> SharedWeights:
        """From whole tables [V, D]."""
        size, width = embedding.shape
        return cls(
            lambda ids: F.embedding(ids, embedding),
            lambda ids: head[ids],
            size,
            width,
            embedding.dtype,
            embedding,
        )

    def must_fit(self, width: int, vocab_size: int, trained_for: str) -> None:
        """Raise unless a head of this width and vocabulary can use what is shared."""
        other = f"it was trained for another target ({trained_for or 'unnamed'})"
        if self.width != width:
            raise InvalidInput(f"the head is {width} wide and the target {self.width}: {other}")
        if self.vocab_size < vocab_size:
            raise VocabularyMismatch(
                f"the head knows a vocabulary of {vocab_size} and the target one of {self.vocab_size}: {other}"
            )
