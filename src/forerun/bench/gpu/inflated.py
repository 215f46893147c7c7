"""The default model at the cost of a larger shape: a target that the GPU benchmarks measure, loaded once."""

from __future__ import annotations

import torch

from forerun.models.config import DecoderConfig
from forerun.models.cuda.target import CudaDecoder
from forerun.models.inflate import InflatedWeights, find_shape
from forerun.models.load.checkpoint import Checkpoint
from forerun.verify.greedy import device_walk
from forerun.verify.sampled import SampledTokens

OWN = "own"  # not inflated
INFLATED = "inflated: the small model's tokens and acceptance at the cost of the larger shape"


def load_inflated(
    checkpoint: Checkpoint, preset: str, kv_slots: int, device: str = "cuda"
) -> tuple[CudaDecoder, InflatedWeights | None]:
    """Our GPU decoder around a checkpoint at this shape, and its weights; None where it keeps its own shape.

    On a CPU it runs in torch and float32: for tests.
    """
    large: InflatedWeights | None = None
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    if preset != OWN:
        shape = find_shape(preset)
        large = InflatedWeights(checkpoint.config, checkpoint.weights, shape, dtype=dtype, device=device)
    target = CudaDecoder(
        DecoderConfig.from_hf(checkpoint.config if large is None else large.config),
        checkpoint.weights if large is None else large,
        dtype=dtype,
        device=device,
        kv_slots=kv_slots,
        greedy_walk=device_walk(torch.device(device)),
        sampling=SampledTokens(),
    )
    return target, large
