"""Write a block drafter for vLLM: whole tables where this package keeps small matrices, bfloat16, and its keys.

vLLM reads the authors' names of DFlash and DSpark. It has no int8 with a scale per row, does not borrow LM head rows
for a reduced vocabulary, and wants DSpark's Markov head as two tables, which are made here of the target's embedding
and LM head: the same numbers, computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.core.errors import DamagedFile, InvalidInput
from forerun.drafters.heads.block_head import BlockConfig, read_block, write_block
from forerun.drafters.heads.formats import read_config, write_config

Rows = Callable[[Tensor], Tensor]  # rows of a table of the target's, by token


def export_block(folder: Path, out: Path, head_rows: Rows | None, embed_rows: Rows | None) -> None:
    """For vLLM; rows that the head borrows from its target are written with it."""
    config, weights = read_block(folder)
    down, up = weights.pop("markov_head.down.weight", None), weights.pop("markov_head.up.weight", None)
    if config.draft_vocab_size != config.vocab_size or up is not None:
        ids = torch.arange(config.draft_vocab_size) + weights.get("d2t", torch.tensor(0))
        rows = _own_or_borrowed(weights, "lm_head.weight", ids, head_rows)
        if "d2t" in weights:
            weights["lm_head.weight"] = rows
        if up is not None and down is not None:
            every = torch.arange(config.vocab_size)
            table = _own_or_borrowed(weights, "embed_tokens.weight", every, embed_rows)
            weights["markov_head.markov_w1.weight"] = table @ down.float().t()
            weights["markov_head.markov_w2.weight"] = rows @ up.float()
    kept = {name: weight for name, weight in weights.items() if name != "t2d"}
    half = {name: w.to(torch.bfloat16) if w.is_floating_point() else w for name, w in kept.items()}
    write_block(out, config, half)
    write_config(out, _engine_keys(read_config(out), config))
    _read_back(out, half)


def _own_or_borrowed(weights: Mapping[str, Tensor], name: str, ids: Tensor, rows: Rows | None) -> Tensor:
    """Rows that a head stores, or else those of its target."""
    if name in weights:
        return weights[name].float()
    if rows is None:
        raise InvalidInput(
            f"vllm needs the rows of {name} that this head borrows from its target; name it with --target"
        )
    return rows(ids).float()


def copy_block(folder: Path, out: Path, *, pickle: bool = False) -> None:
    """The same head in this package's own form."""
    config, weights = read_block(folder, pickle=pickle)
    half = {name: w.to(torch.bfloat16) if w.is_floating_point() else w for name, w in weights.items()}
    write_block(out, config, half)
    _read_back(out, half)


def _engine_keys(values: dict[str, Any], config: BlockConfig) -> dict[str, Any]:
    """What vLLM looks for beside the authors' keys; what only we read is left out."""
    values = {name: value for name, value in values.items() if name != "forerun"}
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    return {**values, "dtype": "bfloat16", "torch_dtype": "bfloat16", "rope_parameters": rope}


def _read_back(out: Path, weights: Mapping[str, Tensor]) -> None:
    _, found = read_block(out)
    wrong = [
        name for name, weight in weights.items() if name not in found or not torch.equal(weight, found[name])
    ]
    if wrong or found.keys() != weights.keys():
        raise DamagedFile(
            f"{out} was written, but reads back otherwise ({', '.join(wrong)}); is the disk full?"
        )
