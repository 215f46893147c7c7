"""DraftNoise: temperature and shared noise in drafts on the device, where the verifier couples by noise.

With the verifier's own noise added to a head's logits, the likeliest tokens are those that the target would sample if
its law were the head's (drafters/draft_law.py does the same on the host). Noise is hashed from seed and position: the
host sends the seeds, the device knows positions. What is drafted never changes a coupled text, so nothing here has to
round as the verifier does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from forerun.drafters.draft_law import Noised, factor_of, has_noise
from forerun.drafters.eagle.cuda.draft_plan import MOST
from forerun.models.cuda.integers import SentInts
from forerun.noise import device_uniforms, mixed_seed
from forerun.types import Seq

BLOCK = 1024  # numbers of one program
AT_ONCE = 1 << 23  # numbers that are made together; more are made level by level

Settings = tuple[int, float]  # mixed seed, and what logits are multiplied by


def settings_of(seq: Seq) -> Settings | None:
    """None where no noise is shared."""
    return (mixed_seed(seq.seed), factor_of(seq)) if has_noise(seq) else None


class DraftNoise:
    """The noise of the sequences of one draft."""

    def __init__(self, ids: Tensor, fused: bool | None = None) -> None:
        """`ids` are the target's ids of the head's vocabulary."""
        has_kernels = ids.device.type == "cuda" and find_spec("triton") is not None
        self.fused = has_kernels if fused is None else fused  # by a kernel, or in plain torch
        self._ids = ids.int()
        self._sent = SentInts(ids.device, 3 * MOST, torch.long)
        self._last: list[Settings | None] = []
        self.is_on = False  # has a sequence of the draft noise?

    @property
    def sent(self) -> Tensor:
        """[3 MOST] mixed seeds, factors as fp64 bits, and whether there is noise: of each sequence."""
        return self._sent.all

    def send(self, settings: Sequence[Settings | None]) -> None:
        """Of the sequences of the next draft; padding may be left out."""
        self.is_on = any([one is not None for one in settings])  # noqa: C419 - quicker
        if self.is_on and self._last != settings:
            table = np.zeros((3, MOST), dtype=np.int64)  # padding has none
            factors = np.ones(MOST)
            for b, one in enumerate(settings):
                if one is not None:
                    table[0, b], factors[b], table[2, b] = *one, 1
            table[1] = factors.view(np.int64)
            self._sent.send(table)
            self._last = list(settings)

    def factors(self, count: int) -> Tensor:
        """[B, 1, 1] what the logits of so many sequences are multiplied by."""
        bits = self._sent.all[MOST : MOST + count]
        return bits.contiguous().view(torch.float64).float()[:, None, None]

    def rehearse(self, draft: Callable[[], None]) -> None:
        """Capture a draft with noise too."""
        self.is_on = True
        draft()
        self.is_on = False

    def of(self, positions: Tensor, depth: int) -> Noised:
        """For a draft so deep behind rows at these positions [B]: the first token it drafts lies two further."""
        if not self.is_on:
            return lambda logits, level: logits
        if self.fused:
            return partial(self._add_noise, positions)
        count = len(positions)
        seeds, _, noisy = self._sent.all.view(3, MOST)[:, :count, None]
        factors, firsts = self.factors(count), positions.long()[:, None] + 2
        steps = torch.arange(depth, device=positions.device)
        many = count * depth * len(self._ids) > AT_ONCE
        whole = None if many else self._log_noise(seeds, firsts + steps, noisy)  # [B, depth, Vd]

        def noised(logits: Tensor, level: int) -> Tensor:
            own = self._log_noise(seeds, firsts + level, noisy) if whole is None else whole[:, level, None]
            found: Tensor = logits.view(count, -1, logits.shape[-1]) * factors - own
            return found.view_as(logits)

        return noised

    def _add_noise(self, positions: Tensor, logits: Tensor, level: int) -> Tensor:
        """The same by a kernel; logits may be the first columns of wider rows."""
        from forerun.drafters.eagle.cuda import kernels_head

        rows, vocab = logits.shape
        found = logits.new_empty(rows, vocab)
        kernels_head.add_noise[(rows, -(-vocab // BLOCK))](
            logits, found, self._ids, self._sent.all, positions, logits.stride(0), vocab, rows // len(positions), level,
            MOST, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        return found

    def _log_noise(self, seeds: Tensor, positions: Tensor, noisy: Tensor) -> Tensor:
        """[B, n, Vd] log E of positions [B, n]; 0 where no noise is shared."""
        noise = device_uniforms(seeds, positions, self._ids).neg_().log1p_().neg_().log_()
        return torch.where(noisy[..., None] > 0, noise, 0.0)
