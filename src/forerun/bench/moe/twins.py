"""Two models of one function: a mixture of experts, and a dense model that reads as much for one node.

Both are made of the same small Llama model and write its text. In the mixture every expert is a copy of the
feed-forward layer (forerun.models.upcycle); in the dense twin that layer is as many times wider as experts are picked,
by units that add nothing (forerun.models.inflate). A pass over one node costs both the same; over more nodes the twin
reads nothing more, and the mixture the experts that are woken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.build import make_engine
from forerun.errors import UnsupportedModel
from forerun.heads import find_head
from forerun.llm import LLM
from forerun.models.config import DecoderConfig
from forerun.models.inflate import InflatedWeights, Shape
from forerun.models.native import library as native
from forerun.models.native.target import NativeDecoder
from forerun.models.native.weights import Mode
from forerun.models.upcycle import UpcycledWeights, make_routers, upcycled_config
from forerun.params import SpeculativeConfig

if TYPE_CHECKING:
    from forerun.models.load.checkpoint import Checkpoint


def make_mixture(
    checkpoint: Checkpoint, texts: Sequence[Sequence[int]], experts: int, per_token: int, mode: Mode
) -> NativeDecoder:
    """`texts` are what its routers are balanced on."""
    routers = make_routers(checkpoint.config, checkpoint.weights, texts, experts)
    config = upcycled_config(checkpoint.config, experts, per_token)
    return _load(config, UpcycledWeights(checkpoint.weights, routers), mode)


def make_twin(checkpoint: Checkpoint, per_token: int, mode: Mode) -> NativeDecoder:
    """The dense model that reads as much for one node."""
    small = DecoderConfig.from_hf(checkpoint.config)
    shape = Shape(
        small.width, small.layers, small.heads, small.kv_heads, small.head_dim, per_token * small.inner
    )
    weights = InflatedWeights(checkpoint.config, checkpoint.weights, shape, dtype=torch.float32)
    return _load(weights.config, weights, mode)


def _load(config: Mapping[str, Any], weights: Mapping[str, Tensor], mode: Mode) -> NativeDecoder:
    if not native.available():
        raise UnsupportedModel(f"this benchmark needs the native kernels: {native.why_not()}")
    return NativeDecoder(DecoderConfig.from_hf(config), weights, mode=mode, kv_slots=None)


def llm_of(checkpoint: Checkpoint, target: NativeDecoder, drafter: str) -> LLM:
    """An LLM around a target; a drafter that needs a head gets the one that comes with the package."""
    names = [checkpoint.name, checkpoint.path.name]
    head = find_head(checkpoint.config, names, drafter)
    chosen = SpeculativeConfig(drafter, draft_model=None if head is None else str(head.path))
    tokenizer = checkpoint.tokenizer()
    engine = make_engine(target, tokenizer.eos_ids, chosen, tokenizer=tokenizer)
    return LLM(engine, tokenizer, checkpoint.name)
