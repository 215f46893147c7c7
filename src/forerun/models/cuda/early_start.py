"""Whether kernels of a device may be launched before the one ahead of them has ended, and wait for it themselves."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=16)
def starts_early(device: torch.device) -> bool:
    """From compute capability 9.0 on; never where kernels are interpreted."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
