"""How large the KV pool of a GPU is, and which kernels it runs: both follow from the device."""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from forerun.errors import InvalidInput, MissingDependency
from forerun.models.cuda.network import Model
from forerun.models.kv import TREE_MARGIN

POOL_SHARE = 0.8  # of the memory that is free once the weights are loaded
POOL_SEQUENCES = 16  # sequences of full length that the pool need not exceed
Kind = Literal["auto", "triton", "torch"]


def pool_slots(model: Model) -> int:
    """As many as memory allows, but no more than several sequences of full length need."""
    enough = POOL_SEQUENCES * (model.max_length + TREE_MARGIN)
    if model.device.type != "cuda":
        return min(enough, 1 << 15)
    free, _ = torch.cuda.mem_get_info(model.device)
    config, item = model.config, model.embedding.element_size()
    slot = 2 * config.layers * config.kv_heads * config.head_dim * item
    return max(1, min(enough, int(POOL_SHARE * free) // slot))


def pick_kernels(kernels: Kind, device: torch.device, dtype: torch.dtype) -> Literal["triton", "torch"]:
    """Triton where there is a GPU for it; its products are for 16-bit weights."""
    there = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    fits = dtype in (torch.bfloat16, torch.float16)
    if kernels == "triton" and not there:
        raise MissingDependency("kernels='triton' needs a CUDA device and the package triton; use 'torch'")
    if kernels == "triton" and not fits:
        raise InvalidInput(
            f"kernels='triton' cannot run {dtype}: use bfloat16 or float16, or kernels='torch'"
        )
    if kernels == "auto":
        return "triton" if there and fits else "torch"
    return kernels
