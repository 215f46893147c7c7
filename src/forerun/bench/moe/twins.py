"""Two models of one function: a mixture of experts, and a dense model that reads as much for one node.

Both are made of the same small Llama model and write its text. In the mixture every expert is a copy of the
feed-forward layer (forerun.models.upcycle); in the dense twin that layer is as many times wider as experts are picked,
by units that add nothing (forerun.models.inflate). A pass over one node costs both the same; over more nodes the twin
reads nothing more, and the mixture the experts that are woken. Both may be made larger first, for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.build import make_engine
from forerun.errors import UnsupportedModel
from forerun.heads import find_head
from forerun.llm import LLM
from forerun.models.base import Target
from forerun.models.config import DecoderConfig
from forerun.models.inflate import PRESETS, InflatedWeights, Shape
from forerun.models.native import library as native
from forerun.models.native.target import NativeDecoder
from forerun.models.native.weights import Mode
from forerun.models.upcycle import UpcycledWeights, make_routers, upcycled_config
from forerun.params import SpeculativeConfig

if TYPE_CHECKING:
    from forerun.models.load.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Place:
    """Where models run, in which number format (on a GPU: bfloat16), and how large they are made first."""

    device: str = "cpu"
    mode: Mode = "q8"
    size: str = ""  # a preset of forerun.models.inflate; "" = as it is


def make_mixture(
    checkpoint: Checkpoint, texts: Sequence[Sequence[int]], experts: int, per_token: int, place: Place
) -> Target:
    """`texts` are what its routers are balanced on."""
    routers = make_routers(checkpoint.config, checkpoint.weights, texts, experts)
    weights = _enlarged(checkpoint, place, 1)
    shape = _shape(checkpoint, place)
    # a larger model's rows are the small one's with zeros behind, and its further layers add nothing
    missing = shape.width - routers[0].shape[1]
    routers = [F.pad(router, (0, missing)) for router in routers]
    routers += [routers[-1]] * (shape.layers - len(routers))
    return _load(
        upcycled_config(weights.config, experts, per_token), UpcycledWeights(weights, routers), place
    )


def make_twin(checkpoint: Checkpoint, per_token: int, place: Place) -> Target:
    """The dense model that reads as much for one node."""
    weights = _enlarged(checkpoint, place, per_token)
    return _load(weights.config, weights, place)


def _shape(checkpoint: Checkpoint, place: Place) -> Shape:
    small = DecoderConfig.from_hf(checkpoint.config)
    own = Shape(small.width, small.layers, small.heads, small.kv_heads, small.head_dim, small.inner)
    return PRESETS[place.size] if place.size else own


def _enlarged(checkpoint: Checkpoint, place: Place, wider: int) -> InflatedWeights:
    shape = _shape(checkpoint, place)
    shape = replace(shape, inner=wider * shape.inner)
    dtype = torch.float32 if place.device == "cpu" else torch.bfloat16
    return InflatedWeights(checkpoint.config, checkpoint.weights, shape, dtype=dtype, device=place.device)


def _load(config: Mapping[str, Any], weights: Mapping[str, Tensor], place: Place) -> Target:
    parsed = DecoderConfig.from_hf(config)
    if place.device != "cpu":
        from forerun.models.cuda.target import CudaDecoder
        from forerun.verify.greedy import device_walk

        device = torch.device(place.device)
        return CudaDecoder(
            parsed,
            weights,
            dtype=torch.bfloat16,
            device=device,
            kv_slots=1 << 14,
            greedy_walk=device_walk(device),
        )
    if not native.available():
        raise UnsupportedModel(f"this benchmark needs the native kernels: {native.why_not()}")
    return NativeDecoder(parsed, weights, mode=place.mode, kv_slots=None)


def llm_of(checkpoint: Checkpoint, target: Target, drafter: str) -> LLM:
    """An LLM around a target; a drafter that needs a head gets the one that comes with the package."""
    names = [checkpoint.name, checkpoint.path.name]
    head = find_head(checkpoint.config, names, drafter)
    chosen = SpeculativeConfig(drafter, draft_model=None if head is None else str(head.path))
    tokenizer = checkpoint.tokenizer()
    engine = make_engine(target, tokenizer.eos_ids, chosen, tokenizer=tokenizer)
    if target.device.type == "cuda":
        needs = engine.drafters.get(engine.default_drafter).needs
        target.warm_up(needs, engine.max_batch, engine.max_length)
    return LLM(engine, tokenizer, checkpoint.name)
