"""Block drafters on disk: the authors' names of weights, in bfloat16 or in int8 with a scale per row.

Embedding and LM head may be absent: the target shares its own. DSpark's Markov head is stored as the authors have it,
two tables of a row per token (`markov_w1`, `markov_w2`), or as what this package trains: two small matrices (`down`,
`up`) which make the same tables out of the target's embedding and LM head, at a hundredth of the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from forerun.drafters.block.config import NAMES, BlockConfig, BlockKind
from forerun.drafters.head_formats import read_config, read_tensors, write_config, write_shards
from forerun.drafters.head_shape import Sizes
from forerun.errors import DamagedFile, InvalidInput
from forerun.heads import kind_of

Stored = Literal["bfloat16", "int8"]
_SCALE = "_scale"
_SMALLEST = 1 << 14  # numbers in a matrix that is worth storing as int8


def read_block(
    folder: Path, *, kind: BlockKind | None = None, pickle: bool = False
) -> tuple[BlockConfig, dict[str, Tensor]]:
    """Config and weights under the authors' names; `kind` is what the caller wants to use it as."""
    values, weights = read_config(folder), read_tensors(folder, pickle=pickle)
    weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    found = kind_of(values, lambda: weights)
    if found != "dflash" and found != "dspark":
        raise InvalidInput(f"{folder} holds no block drafter; try `forerun drafters check`")
    if kind is not None and found != kind:
        raise InvalidInput(f"{folder} holds a {NAMES[found]} head, not {NAMES[kind]}; use drafter={found!r}")
    config = BlockConfig.from_json(values, "dflash" if found == "dflash" else "dspark")
    weights = _from_int8(weights)
    check_shapes(config, weights, folder)
    return config, weights


def write_block(
    folder: Path, config: BlockConfig, weights: Mapping[str, Tensor], stored: Stored = "bfloat16"
) -> None:
    """config.json and safetensors; a head of more than 15 MiB is cut into several files with an index."""
    write_config(folder, config.to_json())
    kept = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    write_shards(folder, _to_int8(kept) if stored == "int8" else kept)


def check_shapes(config: BlockConfig, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Every weight against the config."""
    if config.rows <= config.first:
        raise DamagedFile(f"config.json of {folder} says blocks of {config.rows}; fetch it again")
    tables = "markov_head.markov_w1.weight" in weights
    needed = expected_shapes(config, tables=tables)
    config.check(folder, weights, needed, {"mask_embedding": (config.width,)})


def expected_shapes(config: BlockConfig, *, tables: bool = False) -> Sizes:
    """What must be there; `tables` = with DSpark's Markov head as its authors store it."""
    width, dim, rank = config.width, config.head_dim, config.markov_rank
    shapes: Sizes = {
        "fc.weight": (width, config.feature_width), "hidden_norm.weight": (width,), "norm.weight": (width,),
    }  # fmt: skip
    layer = config.layer_weights(width) | {
        "self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,), "input_layernorm.weight": (width,),
    }  # fmt: skip
    shapes |= {f"layers.{i}.{name}": size for i in range(config.depth) for name, size in layer.items()}
    if rank and tables:
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
    elif rank:
        shapes |= {"markov_head.down.weight": (rank, width), "markov_head.up.weight": (width, rank)}
    if config.confidence:
        shapes |= {"confidence_head.proj.weight": (1, width + rank), "confidence_head.proj.bias": (1,)}
    return shapes


def _to_int8(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as int8 with a scale per row. Not `fc`: its columns are as unequal as the features that they read."""
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() == 2 and weight.numel() >= _SMALLEST and name.startswith("layers."):
            scale = weight.float().abs().amax(1).clamp(min=1e-12) / 127.0
            stored[name] = (weight.float() / scale[:, None]).round_().to(torch.int8)
            stored[name + _SCALE] = scale
        else:
            stored[name] = weight
    return stored


def _from_int8(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for name, weight in stored.items():
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) in stored:
            continue
        scale = stored.get(name + _SCALE)
        if scale is not None and (weight.dim() != 2 or scale.shape != weight.shape[:1]):
            raise DamagedFile(f"{name + _SCALE!r} does not fit {name!r}; fetch the head again")
        weights[name] = weight if scale is None else weight.float() * scale.float()[:, None]
    return weights
