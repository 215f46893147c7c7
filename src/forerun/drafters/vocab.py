"""DraftVocabulary: the tokens a head can draft, and how its rows become the target's ids.

The largest matrix of a small head is its LM head, and most of a large vocabulary is never accepted from a
draft. So a head may have only the most frequent ids. On disk this is `d2t`, an *offset* per row (the
target's id is row + d2t[row]), and `t2d`, a mask over the target's ids. Verification never sees any of this: it
stays over the full vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from forerun.errors import DamagedFile, InvalidInput


class DraftVocabulary:
    """Rows of a draft head, ascending in the target's ids."""

    def __init__(self, ids: Tensor, vocab_size: int) -> None:
        self.ids = ids  # [Vd] int64, ascending
        self.vocab_size = vocab_size  # the target's
        self.is_whole = len(ids) == vocab_size

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def whole(cls, vocab_size: int, device: torch.device | str = "cpu") -> DraftVocabulary:
        """Every id of the target."""
        return cls(torch.arange(vocab_size, device=device), vocab_size)

    @classmethod
    def most_frequent(cls, counts: Tensor, size: int, always: Sequence[int] = ()) -> DraftVocabulary:
        """The `size` ids with the largest counts [V] (the lowest id on a tie), and those named in any case."""
        if not 1 <= size <= len(counts):
            raise InvalidInput(
                f"a draft vocabulary of {size} is out of range: 1 to the target's {len(counts)}"
            )
        ranked = counts.to(torch.int64).clone()
        ranked[list(always)] = torch.iinfo(torch.int64).max
        order = ranked.argsort(descending=True, stable=True)
        return cls(order[:size].sort().values, len(counts))

    @classmethod
    def from_file(cls, weights: Mapping[str, Tensor], rows: int, vocab_size: int) -> DraftVocabulary:
        """From `d2t`; without it the head must have a row for every id of the target."""
        if "d2t" not in weights:
            if rows != vocab_size:
                raise DamagedFile(
                    f"a draft head of {rows} rows for a vocabulary of {vocab_size} has no d2t: which ids are they?"
                )
            return cls.whole(vocab_size)
        offsets = weights["d2t"].to(torch.int64).flatten()
        ids = torch.arange(len(offsets)) + offsets
        ascending = bool((ids[1:] > ids[:-1]).all()) if len(ids) > 1 else True
        if len(ids) != rows or not ascending or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise DamagedFile(
                f"d2t does not name {rows} different ids below {vocab_size} in order: it holds offsets "
                "(id - row), not ids; write the head again"
            )
        return cls(ids, vocab_size)

    def tensors(self) -> dict[str, Tensor]:
        """`d2t` and `t2d` as files hold them."""
        ids = self.ids.cpu()
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[ids] = True
        return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}

    def to(self, device: torch.device) -> DraftVocabulary:
        return DraftVocabulary(self.ids.to(device), self.vocab_size)

    def rows_of(self, weight: Tensor) -> Tensor:
        """The rows of a full LM head [V, D] that this vocabulary keeps [Vd, D]."""
        return weight if self.is_whole else weight[self.ids.to(weight.device)].contiguous()

    def spread(self, logits: Tensor) -> Tensor:
        """Draft logits [..., Vd] over the target's ids [..., V]; what cannot be drafted is impossible."""
        if self.is_whole:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        full[..., self.ids] = logits
        return full
