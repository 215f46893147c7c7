"""DraftLaw: a head's logits under each sequence's temperature and shared noise, and their likeliest tokens.

Where the verifier couples by noise, the noise is added to the logits and the likeliest token is the one that
the target would sample if its law were the head's. Elsewhere a temperature only rescales the confidence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forerun.core.noise import coupling_key, exponential
from forerun.core.types import Seq
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.models.native import head_library
from forerun.models.native import library as native

Noised = Callable[[Tensor, int], Tensor]  # logits [N, Vd] of what follows nodes of a level -> as drafts read them

SHARPER = 1.2  # under shared noise: a head's law is flatter than the target's, and agrees more often when it is less so


class DraftLaw:
    """How the logits of one batch are read."""

    def __init__(self, seqs: Sequence[Seq], vocabulary: DraftVocabulary, device: torch.device) -> None:
        self.seqs, self.vocabulary, self.device = seqs, vocabulary, device
        factors = [factor_of(seq) for seq in seqs]
        self._cool: Tensor | None = None
        if any(factor != 1.0 for factor in factors):
            self._cool = torch.tensor(factors, device=device)[:, None, None]
        self._noisy = [has_noise(seq) for seq in seqs]

    @property
    def changes(self) -> bool:
        """Does any sequence have a temperature or noise?"""
        return self._cool is not None or any(self._noisy)

    @property
    def factors(self) -> Tensor | None:
        """[B, 1, 1] what logits are multiplied by; None = nothing."""
        return self._cool

    def applied(self, logits: Tensor, level: int) -> Tensor:
        """Logits [B, W, Vd] of what follows a node at depth `level`."""
        if self._cool is not None:
            logits = logits * self._cool
        if any(self._noisy):
            logits = logits - self._log_noise(logits, level)
        return logits

    def _log_noise(self, logits: Tensor, level: int) -> Tensor:
        rows = []
        for seq, noisy in zip(self.seqs, self._noisy, strict=True):
            if noisy:
                whole = exponential(seq.seed, len(seq.tokens) + level, self.vocabulary.vocab_size, self.device)
                rows.append(self.vocabulary.rows_of(whole).log_())
            else:
                rows.append(logits.new_zeros(len(self.vocabulary)))
        return torch.stack(rows)[:, None]


def has_noise(seq: Seq) -> bool:
    return seq.shares_noise and not seq.params.is_greedy


def factor_of(seq: Seq) -> float:
    factor = 1.0 / seq.params.temperature if seq.params.temperature else 1.0
    return factor * SHARPER if has_noise(seq) else factor


class KernelDraftLaw:
    """The same for kernels that scale and add noise themselves: a factor for each row, and keys."""

    def __init__(self, seqs: Sequence[Seq]) -> None:
        self._seqs = seqs
        factors = [factor_of(seq) for seq in seqs]
        self._cool = factors if any(factor != 1.0 for factor in factors) else None
        self._noisy = [has_noise(seq) for seq in seqs]

    def scales(self, counts: Sequence[int]) -> list[float] | None:
        """A factor for each row, `counts` rows per sequence; None = all one."""
        if self._cool is None:
            return None
        return [factor for factor, count in zip(self._cool, counts, strict=True) for _ in range(count)]

    @property
    def is_noisy(self) -> bool:
        return any(self._noisy)

    def noise(self, counts: Sequence[int], level: int) -> tuple[list[tuple[int, int]], list[int]]:
        """The keys of depth `level`, and for each row, `counts` per sequence, which of them it has; -1 = none."""
        keys: list[tuple[int, int]] = []
        rows: list[int] = []
        for seq, noisy, count in zip(self._seqs, self._noisy, counts, strict=True):
            rows += [len(keys) if noisy else -1] * count
            if noisy:
                keys.append(coupling_key(seq.seed, len(seq.tokens) + level))
        return keys, rows


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and rows of the likeliest tokens [B, W, k], best first."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and native.available():
        values, rows = head_library.top_rows(logits.flatten(0, -2), count)
        shape = (*logits.shape[:-1], count)
        return values.view(shape), rows.view(shape)
    totals = logits.logsumexp(-1, keepdim=True)
    values, rows = logits.topk(count)
    return (values - totals).clamp_(max=0.0), rows
