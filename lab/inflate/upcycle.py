"""Upcycles a dense Llama model to a Mixtral with the same function: the same tokens and acceptance, experts' cost.

Every expert is a copy of the dense feed-forward layer, and the weights of the experts that a row picks sum to one, so
whichever are picked, the output is the dense one. What a pass costs is what a mixture of experts costs: more nodes wake
more experts, and each has memory of its own. Routers are made from rows of real text: random directions after the rows'
mean is taken out and their spread evened, so that all experts are picked about equally often, as trained routers are
made to. Every figure from such a model must say that it is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.core.errors import InvalidInput, UnsupportedModel
from forerun.core.types import Needs, PlainSeq
from forerun.models.base import LayerSubset
from forerun.models.blocks import Block
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder

_ROUTER = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.gate\.weight")
_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_SEED = 20261115
_EVEN = 0.05  # of the mean spread: directions that rows hardly use are not blown up further than this allows


def upcycled_config(config: Mapping[str, Any], experts: int, per_token: int) -> dict[str, Any]:
    if DecoderConfig.from_hf(config).family != "llama" or config.get("mlp_bias"):
        raise UnsupportedModel("only Llama models without biases can be upcycled")
    if not 1 <= per_token <= experts:
        raise InvalidInput(f"{per_token} of {experts} experts per token cannot be picked")
    kept = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    return {
        **kept,
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": experts,
        "num_experts_per_tok": per_token,
        "sliding_window": None,
    }


class UpcycledWeights(Mapping[str, Tensor]):
    """The mixture's weights by their Hugging Face names: each expert's are the dense layer's."""

    def __init__(self, weights: Mapping[str, Tensor], routers: Sequence[Tensor]) -> None:
        """`routers` [E, D] by layer."""
        self.weights, self.routers = weights, routers
        self._names = dict[str, str]()  # to the dense model's; a router's to nothing
        for name in weights:
            at, found, part = name.partition(".mlp.")
            if not found:
                self._names[name] = name
                continue
            new = next(key for key, value in _PARTS.items() if part.startswith(value))
            for i in range(len(routers[0])):
                self._names[f"{at}.block_sparse_moe.experts.{i}.{new}.weight"] = name
        for i in range(len(routers)):
            self._names[f"model.layers.{i}.block_sparse_moe.gate.weight"] = ""

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Tensor:
        if (match := _ROUTER.fullmatch(name)) is not None and name in self._names:
            return self.routers[int(match[1])]
        return self.weights[self._names[name]]


def make_routers(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], texts: Sequence[Sequence[int]], experts: int
) -> list[Tensor]:
    """[E, D] for every layer, from what its feed-forward layer reads in these texts."""
    dense = _Listener(DecoderConfig.from_hf(config), weights, dtype=torch.float32, device="cpu", kv_slots=None)
    for i, text in enumerate(texts):
        seq = PlainSeq(i, list(text), max_length=len(text) + 1)
        dense.prefill([seq], Needs((-1,)))  # or it would end before the last feed-forward layer
        dense.release(seq)
    made = torch.Generator().manual_seed(_SEED)
    return [_even_directions(torch.cat(rows), experts, made) for rows in dense.heard]


def _even_directions(rows: Tensor, experts: int, made: torch.Generator) -> Tensor:
    """[E, D] directions along which these rows [N, D] spread alike, and on which their mean does not lie."""
    mean = rows.mean(0)
    spread, axes = torch.linalg.eigh(torch.cov((rows - mean).t()))
    scale = (spread.clamp(min=0) + _EVEN * spread.mean()).rsqrt()
    directions = torch.randn(experts, rows.shape[1], generator=made) * scale @ axes.t()
    along = mean / mean.norm()
    found: Tensor = directions - (directions @ along)[:, None] * along
    return found


class _Listener(Decoder):
    """A dense decoder that keeps what every feed-forward layer reads."""

    heard: list[list[Tensor]]

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Tensor], **where: Any) -> None:
        super().__init__(config, weights, **where)
        self.heard = [[] for _ in range(config.layers)]

    def _add_mlp(self, x: Tensor, block: Block, index: int, layers: LayerSubset) -> None:
        self.heard[index].append(self._normed(x, block.mlp_norm))
        super()._add_mlp(x, block, index, layers)
