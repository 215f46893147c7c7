"""The default model at the cost of a larger shape: a target that the GPU benchmarks measure, loaded once."""

from __future__ import annotations

from pathlib import Path

import torch

from forerun.api.llm import LLM
from forerun.build.engine import make_engine
from forerun.build.fingerprint import find_head
from forerun.core.errors import InvalidInput
from forerun.core.params import EngineConfig, SpeculativeConfig
from forerun.models.config import DecoderConfig
from forerun.models.cuda.target import CudaDecoder
from forerun.models.cuda.weights import WeightKind
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.verify.greedy import device_walk
from forerun.verify.sampled import SampledTokens
from lab.inflate.heads import inflate_folder
from lab.inflate.model import InflatedWeights, find_shape

OWN = "own"  # not inflated
PLACE_SLOTS = 1024  # of the KV cache for each sequence: prompt, answer and a tree
INFLATED = "inflated: the small model's tokens and acceptance at the cost of the larger shape"


def load_inflated(
    checkpoint: Checkpoint, preset: str, kv_slots: int, device: str = "cuda", kind: WeightKind = "plain"
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
        weight_kind=kind,
        greedy_walk=device_walk(torch.device(device)),
        sampling=SampledTokens(),
    )
    return target, large


def load_ready(
    model: str, preset: str, places: int, length: int, folder: Path, device: str = "cuda", drafter: str | None = None
) -> LLM:
    """A small model at that shape, ready to write; its head is written to the folder, from where drafters read it."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("a larger shape needs a GPU, and torch sees none")
    checkpoint = open_checkpoint(model)
    tokenizer = checkpoint.tokenizer()
    target, _ = load_inflated(checkpoint, preset, PLACE_SLOTS * (places + 1), device)
    settings = EngineConfig(max_batch=places, max_length=length, device=device)
    speculative = _inflated_head(checkpoint, preset, folder, drafter)
    engine = make_engine(target, tokenizer.eos_ids, speculative, settings, tokenizer)
    if target.device.type == "cuda":
        made = engine.drafters.get(engine.default_drafter)  # captures its graphs
        target.warm_up(made.needs, engine.max_batch, engine.max_length)
    return LLM(engine, tokenizer, f"{model}-at-{preset}")


def _inflated_head(checkpoint: Checkpoint, preset: str, folder: Path, drafter: str | None) -> SpeculativeConfig:
    """Drafting with the package's head for this model, written to a folder at the larger shape."""
    found = find_head(checkpoint, "eagle3")
    if found is None:
        return SpeculativeConfig(drafter=drafter or "ngram")
    written = inflate_folder(found.head.path, found.head.kind, find_shape(preset), folder / "head")
    return SpeculativeConfig(drafter=drafter or found.head.drafter, draft_model=str(written))
