"""How large the KV pool of a GPU is, and which kernels it runs: both follow from the device."""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch
from torch import Tensor

from forerun.core.errors import InvalidInput, MissingDependency, UnsupportedModel
from forerun.models.config import DecoderConfig
from forerun.models.cuda.cubin.products import FILES, path_of
from forerun.models.cuda.network import Buffers, Model, Steps
from forerun.models.cuda.steps.plain import (
    PlainExpertSteps,
    PlainLatentSteps,
    PlainRecurrentSteps,
    PlainSizedSteps,
    PlainSteps,
)
from forerun.models.cuda.weights import WeightKind
from forerun.models.pages import TREE_MARGIN
from forerun.models.slots import allowed_bytes, slot_bytes

POOL_SEQUENCES = 16  # sequences of full length that the pool need not exceed
Kind = Literal["auto", "triton", "torch"]


def pool_slots(model: Model, kv_memory: int | float | None = None, kv_dtype: torch.dtype | None = None) -> int:
    """As many as memory allows; by default no more than several sequences of full length need."""
    enough = POOL_SEQUENCES * (model.max_length + TREE_MARGIN)
    if model.device.type != "cuda":
        return min(enough, 1 << 15)
    allowed = allowed_bytes(kv_memory, model.device) or 0
    fits = max(1, allowed // slot_bytes(model.config, kv_dtype or model.dtype))
    return fits if kv_memory is not None else min(enough, fits)


def pick_kernels(kernels: Kind, device: torch.device, dtype: torch.dtype) -> Literal["triton", "torch"]:
    """Triton where there is a GPU for it; its products are for 16-bit weights."""
    there = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    fits = dtype in (torch.bfloat16, torch.float16)
    if kernels == "triton" and not there:
        raise MissingDependency("kernels='triton' needs a CUDA device and the package triton; use 'torch'")
    if kernels == "triton" and not fits:
        raise InvalidInput(f"kernels='triton' cannot run {dtype}: use bfloat16 or float16, or kernels='torch'")
    if kernels == "auto":
        return "triton" if there and fits else "torch"
    return kernels


def has_compiled(
    kind: WeightKind,
    config: DecoderConfig,
    device: torch.device,
    kernels: str,
    rows: torch.dtype = torch.bfloat16,
    setting: str = "dtype",
) -> bool:
    """Are there products compiled ahead for weights of this kind here? Weights of four bits have no others.

    `setting`: what the caller calls the kind.
    """
    names = {"int8": ("int8",), "fp8": ("e4m3", "e4m3_weights", "quantise"), "w4": ("int4_128", "int8")}
    names |= {"file": ("quantise", *FILES)}
    reason = ""
    if kind == "plain":
        return False
    if kernels != "triton" or torch.cuda.get_device_capability(device)[0] != 9:
        reason = "the GPU is not of the Hopper generation (H100, H200)"
    elif not all(path_of(name).exists() for name in names[kind]):
        reason = "this installation has no compiled kernels"
    elif rows != torch.bfloat16:
        reason = f"rows are {rows}, not bfloat16".replace("torch.", "")
    else:
        reason = against_compiled(config)
    if reason and kind == "w4":
        raise UnsupportedModel(f"weights of four bits cannot be used: {reason}; use {setting}='int8' or 'bfloat16'")
    return not reason


def against_compiled(config: DecoderConfig) -> str:
    """Why no model of this shape has products compiled ahead; empty where it can have them."""
    depths = config.width, config.heads * config.head_dim, config.inner
    if config.moe is not None:
        return "the model has experts"
    if config.special is not None:
        return f"the model has {config.special}"
    odd = any(depth % 128 for depth in depths)
    return f"widths {', '.join(map(str, depths))} must be multiples of 128" if odd else ""


def make_steps(
    kernels: Literal["triton", "torch"], model: Model, buffers: Buffers, kv: Tensor, scales: Tensor | None = None
) -> Steps:
    routed = model.config.moe is not None
    if kernels == "torch":
        plain = PlainExpertSteps if routed else PlainSteps
        if model.config.special is not None:
            plain = PlainSizedSteps if model.config.latent is None else PlainLatentSteps
        if model.config.recurrent is not None:
            plain = PlainRecurrentSteps
        return plain(model, buffers, kv, scales)
    if model.config.recurrent is not None:
        from forerun.models.cuda.steps.recurrent import RecurrentExpertSteps, RecurrentSteps

        return (RecurrentExpertSteps if routed else RecurrentSteps)(model, buffers, kv, scales)
    if model.config.latent is not None:
        from forerun.models.cuda.steps.latent import LatentSteps

        return LatentSteps(model, buffers, kv, scales)
    if routed:
        from forerun.models.cuda.steps.experts import FusedExpertSteps

        return FusedExpertSteps(model, buffers, kv, scales)
    if model.config.varied is not None:
        from forerun.models.cuda.steps.sized import SizedSteps

        return SizedSteps(model, buffers, kv, scales)
    if model.compiled:
        from forerun.models.cuda.steps.compiled import CompiledSteps

        return CompiledSteps(model, buffers, kv, scales)
    from forerun.models.cuda.steps.fused import FusedSteps

    return FusedSteps(model, buffers, kv, scales)
