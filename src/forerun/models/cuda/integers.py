"""SentInts: integers that the host sends to the device, in one copy that it does not wait for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from forerun.core.errors import InvalidInput

PAGES = 8  # pinned buffers, used in turn: more than two rounds fill, so that none waits for its copy


class SentInts:
    """One array on the device, of which the part behind `first` is replaced by what is sent."""

    def __init__(self, device: torch.device, size: int, dtype: torch.dtype, first: int = 0) -> None:
        self._first, on_gpu = first, device.type == "cuda"
        with torch.inference_mode(False):
            self.all = torch.zeros(size, dtype=dtype)
            self.all[:first] = torch.arange(first)  # the ancestors of every chain: see models/cuda/plan.py
            self.all = self.all.to(device)
            self._pages = [torch.zeros(size - first, dtype=dtype, pin_memory=on_gpu) for _ in range(PAGES)]
        self._arrays = [page.numpy() for page in self._pages]
        self._sent: list[Any] = [torch.cuda.Event() if on_gpu else None for _ in self._pages]  # type: ignore[no-untyped-call]
        self._turn = 0

    def send(self, ints: np.ndarray[Any, Any], at: int = 0) -> None:
        """Copied behind `first`, or `at` places further, in the order of the device's work.

        Waits only if the copy of PAGES calls ago is not done.
        """
        first, size = self._first + at, ints.size
        if first + size > len(self.all):
            raise InvalidInput(
                f"a draft or a pass of {size} integers is too large; lower the budget or the batch"
            )
        self._turn = (self._turn + 1) % PAGES
        page, sent = self._pages[self._turn], self._sent[self._turn]
        if sent is not None:
            sent.synchronize()
        self._arrays[self._turn][:size] = ints.ravel()
        self.all[first : first + size].copy_(page[:size], non_blocking=True)
        if sent is not None:
            sent.record()
