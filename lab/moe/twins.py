"""Two models of one function: a mixture of experts, and a dense model that reads as much for one node.

Both are made of the same small Llama model and write its text. In the mixture every expert is a copy of the
feed-forward layer (lab.inflate.upcycle); in the dense twin that layer is as many times wider as experts are picked,
by units that add nothing (lab.inflate.model). A pass over one node costs both the same; over more nodes the twin
reads nothing more, and the mixture the experts that are woken. Both may be made larger first, for a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.api.llm import LLM
from forerun.build.engine import make_engine
from forerun.build.fingerprint import find_head
from forerun.control.cost import WIDE, CostModel
from forerun.core.errors import UnsupportedModel
from forerun.core.params import EngineConfig, SpeculativeConfig
from forerun.models.base import Target
from forerun.models.config import DecoderConfig
from forerun.models.cuda.plan import MAX_ROWS, NARROW, Size, splits_to
from forerun.models.cuda.target import CudaDecoder
from forerun.models.native import library as native
from forerun.models.native.target import NativeDecoder
from forerun.models.native.weights import Mode
from forerun.verify.greedy import device_walk
from lab.inflate.heads import inflate_folder
from lab.inflate.model import PRESETS, InflatedWeights, Shape
from lab.inflate.upcycle import UpcycledWeights, make_routers, upcycled_config

if TYPE_CHECKING:
    from forerun.models.load.checkpoint import Checkpoint

LONGEST = 900  # tokens of a sequence on a GPU: one number of splits of the context


@dataclass(frozen=True, slots=True)
class Place:
    """Where models run, in which number format (on a GPU: bfloat16), and how large they are made first."""

    device: str = "cpu"
    mode: Mode = "q8"
    size: str = ""  # a preset of lab.inflate.model; "" = as it is
    plain_steps: bool = False  # on a CPU: the GPU decoder in torch and float32, for tests


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
    return _load(upcycled_config(weights.config, experts, per_token), UpcycledWeights(weights, routers), place)


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
    if place.device != "cpu" or place.plain_steps:
        device = torch.device(place.device)
        return CudaDecoder(
            parsed,
            weights,
            dtype=torch.bfloat16 if place.device != "cpu" else torch.float32,
            device=device,
            kv_slots=1 << 14,
            greedy_walk=device_walk(device),
        )
    if not native.available():
        raise UnsupportedModel(f"this benchmark needs the native kernels: {native.why_not()}")
    return NativeDecoder(parsed, weights, mode=place.mode, kv_slots=None)


def llm_of(checkpoint: Checkpoint, target: Target, drafter: str, size: str = "") -> LLM:
    """An LLM around a target; a drafter that needs a head gets the one that comes with the package, made as large.

    On a GPU one sequence at a time, and prompts in passes of two sizes: few kernels are compiled.
    """
    found, config = find_head(checkpoint, drafter), EngineConfig()
    head = None if found is None else found.head
    if isinstance(target, CudaDecoder):
        config = EngineConfig(max_batch=1, max_length=LONGEST)
        sizes = [Size(rows, rows // 8, splits_to(LONGEST)) for rows in (256, MAX_ROWS)]
        target.passes.take_sizes([(one, False) for one in sizes])
    with TemporaryDirectory() as folder:
        path = None if head is None else head.path
        if head is not None and size:
            path = inflate_folder(head.path, head.kind, PRESETS[size], Path(folder), target.device)
        chosen = SpeculativeConfig(drafter, draft_model=None if path is None else str(path))
        tokenizer = checkpoint.tokenizer()
        costs = _small_passes(target, Path(folder) / "costs.json") if isinstance(target, CudaDecoder) else None
        engine = make_engine(target, tokenizer.eos_ids, chosen, config, tokenizer, cost_file=costs)
        engine.drafters.get(engine.default_drafter)  # reads the head while it is there
    return LLM(engine, tokenizer, checkpoint.name)


def _small_passes(target: Target, file: Path) -> Path:
    """What passes cost, measured to 64 rows only: one sequence takes no more, and larger ones would be compiled."""
    seconds = CostModel.measure(target, [size for size in WIDE if size <= NARROW], repeats=2).seconds
    known = {size: seconds[min(size, NARROW)] * max(1.0, size / NARROW) for size in WIDE}
    file.write_text(json.dumps({"seconds": known, "busy": False}))
    return file
