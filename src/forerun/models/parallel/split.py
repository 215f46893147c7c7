"""How a decoder is split over ranks: whole KV heads with their query heads, inner columns, rows of the LM head.

A rank's decoder is the ordinary one with a smaller config and weights that are cut when they are read. Projections into
a layer (queries, keys, values, gate, up) are cut by output, those out of it (o, down) by input, so that each rank adds
a part of the layer's result. Parts may differ by one: three KV heads on two ranks are two and one, the larger first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.models.config import DecoderConfig
from forerun.models.load.quantized.unstacked import unstack
from forerun.models.load.weights import LazyTensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Part:
    """One rank of several."""

    rank: int
    size: int

    def of(self, total: int) -> slice:
        """Its range of `total` things: neighbours, and as many as others have or one more."""
        each, more = divmod(total, self.size)
        low = self.rank * each + min(self.rank, more)
        return slice(low, low + each + (self.rank < more))

    def count(self, total: int) -> int:
        mine = self.of(total)
        return int(mine.stop - mine.start)

    @property
    def all(self) -> list[Part]:
        return [Part(rank, self.size) for rank in range(self.size)]


def check_split(config: DecoderConfig, size: int) -> None:
    """Raise where there is not a KV head for every rank, or a norm or a state is that of all heads."""
    if size > 1 and config.special is not None:
        raise InvalidInput(f"tensor_parallel_size={size}: {config.family} has {config.special}; use 1")
    if size > 1 and config.qk_norm == "all":
        raise InvalidInput(f"tensor_parallel_size={size}: {config.family} norms all heads at once; use 1")
    if size > config.kv_heads:
        raise InvalidInput(
            f"tensor_parallel_size={size} is too many for this model: it has {config.kv_heads} KV heads, and every "
            f"rank needs one of its own; use at most {config.kv_heads}"
        )


def config_of(config: DecoderConfig, part: Part) -> DecoderConfig:
    check_split(config, part.size)
    kv_heads, moe = part.count(config.kv_heads), config.moe
    if moe is not None:
        shared = moe.shared_inner
        moe = replace(moe, inner=part.count(moe.inner), shared_inner=None if shared is None else part.count(shared))
    return replace(
        config,
        heads=kv_heads * (config.heads // config.kv_heads),
        kv_heads=kv_heads,
        inner=part.count(config.inner),
        moe=moe,
    )


class SplitWeights(LazyTensors):
    """One rank's part of a checkpoint's weights, cut one at a time when they are asked for."""

    def __init__(self, whole: Mapping[str, Tensor], config: DecoderConfig, part: Part) -> None:
        self._whole = self.names = unstack(config.family, whole)
        self._part, self._config = part, config
        group = config.heads // config.kv_heads * config.head_dim
        mine = part.of(config.kv_heads)
        self._queries = slice(mine.start * group, mine.stop * group)
        self._keys = slice(mine.start * config.head_dim, mine.stop * config.head_dim)

    def __getitem__(self, name: str) -> Tensor:
        weight = self._whole[name]
        module, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind == "bias":
            kind = module.rpartition(".")[2]
            if kind == "down_proj" and ".experts." in module and self._part.rank:
                return torch.zeros_like(weight)  # ranks add up what experts give: the first has the biases
            return weight if kind in ("o_proj", "down_proj") else self._rows(kind, weight)
        if kind == "o_proj":
            return weight[:, self._queries]
        if kind in ("down_proj", "w2"):
            return weight[..., self._part.of(weight.shape[-1])]
        return self._rows(kind, weight)

    def _rows(self, kind: str, weight: Tensor) -> Tensor:
        """What belongs to this rank's outputs; weights that are not split come back whole."""
        config = self._config
        if kind == "q_proj":
            return weight[self._queries]
        if kind == "sinks":
            return weight[self._queries.start // config.head_dim : self._queries.stop // config.head_dim]
        if kind in ("k_proj", "v_proj"):
            return weight[self._keys]
        if kind == "qkv_proj":
            sizes = [config.heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2]
            cuts = (self._queries, self._keys, self._keys)
            return torch.cat([part[cut] for part, cut in zip(torch.split(weight, sizes), cuts, strict=True)])
        if kind in ("gate_proj", "up_proj", "w1", "w3"):
            return weight[self._part.of(weight.shape[0])]
        if kind == "gate_up_proj":  # [2I, D], of experts [E, 2I, D]
            at = weight.dim() - 2
            halves = weight.chunk(2, at)
            mine = self._part.of(halves[0].shape[at])
            return torch.cat([half.narrow(at, mine.start, mine.stop - mine.start) for half in halves], at)
        return weight
