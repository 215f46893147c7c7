"""Loads an encoder-decoder from an opened checkpoint: on a CPU by the native kernels, elsewhere in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from forerun.core.errors import InvalidInput
from forerun.models.encoder_decoder.config import EncoderDecoderConfig
from forerun.models.encoder_decoder.config import supports as is_encoder_decoder
from forerun.models.encoder_decoder.target import EncoderDecoder
from forerun.models.load.checkpoint import Checkpoint
from forerun.models.load.tokenizer import read_json
from forerun.models.native import library as native
from forerun.models.native.packing import FloatMode

__all__ = ["is_encoder_decoder", "load_encoder_decoder"]
_MODES: dict[str, FloatMode] = {"auto": "float32", "float32": "float32", "q8": "q8"}


def load_encoder_decoder(
    checkpoint: Checkpoint,
    dtype: str,
    torch_dtype: Callable[[str, torch.device], torch.dtype],
    device: torch.device,
    kv_slots: int | None,
) -> EncoderDecoder:
    """`dtype` as the user gave it: q8 needs the native kernels, one byte per weight on a GPU is not supported."""
    if dtype in ("int8", "fp8", "gguf"):
        raise InvalidInput(f"dtype={dtype!r} is not for encoder-decoders; use float32, bfloat16 or q8")
    config = EncoderDecoderConfig.from_hf(
        checkpoint.config, read_json(checkpoint.path / "generation_config.json")
    )
    mode = _MODES.get(dtype) if device.type == "cpu" and native.available() else None
    if mode is None and dtype == "q8":
        raise InvalidInput(
            f"dtype='q8' needs a CPU and the native kernels: {native.why_not() or 'use float32'}"
        )
    kept = torch.float32 if mode is not None else torch_dtype(dtype, device)
    return EncoderDecoder(config, checkpoint.weights, dtype=kept, device=device, mode=mode, kv_slots=kv_slots)
