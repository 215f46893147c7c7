"""Which number format the native decoder holds a checkpoint's weights in, and whether it can run it at all."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.models.config import DecoderConfig
from forerun.models.load.weights import GgufWeights
from forerun.models.native import library as native
from forerun.models.native.packing import is_packable
from forerun.models.native.target import NativeDecoder
from forerun.models.native.weights import Mode


def native_decoder(
    config: DecoderConfig,
    weights: Mapping[str, Tensor],
    dtype: str,
    kv_slots: int | None,
    kv_memory: int | None,
) -> NativeDecoder | None:
    """The native decoder of a checkpoint; None where it runs in torch."""
    mode = choose_mode(config, weights, dtype)
    if mode is None:
        return None
    return NativeDecoder(config, weights, mode=mode, kv_slots=kv_slots, kv_memory=kv_memory)


def choose_mode(config: DecoderConfig, weights: Mapping[str, Tensor], dtype: str) -> Mode | None:
    """How a CPU should hold these weights; None = in torch. Raises where `dtype` asks for what cannot be had."""
    required = dtype in ("gguf", "q8")
    if not (native.available() and NativeDecoder.supports(config)):
        if required:
            reason = native.why_not() or f"the {config.family} family runs in torch"
            raise InvalidInput(f"dtype={dtype!r} needs the native kernels: {reason}; or use dtype='float32'")
        return None
    if dtype == "gguf" and not isinstance(weights, GgufWeights):
        raise InvalidInput("dtype='gguf' needs a .gguf file; use q8, float32 or bfloat16 for this checkpoint")
    if dtype == "auto":
        return "gguf" if isinstance(weights, GgufWeights) and _all_packable(weights) else "float32"
    modes: dict[str, Mode] = {"gguf": "gguf", "q8": "q8", "float32": "float32", "bfloat16": "bfloat16"}
    return modes.get(dtype)


def _all_packable(weights: GgufWeights) -> bool:
    tensors = weights.file.tensors
    return all(is_packable(tensors[origin.tensor].kind) for origin in weights.origins.values())
