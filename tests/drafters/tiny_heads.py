"""Random heads for targets whose hidden rows are a few columns wide, TableLM's eight by default."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.core import registry
from forerun.drafters.heads import block_head as block_files
from forerun.drafters.heads import eagle as mtp
from forerun.drafters.heads.block_config import KINDS, BlockConfig, BlockKind
from forerun.drafters.heads.block_head import write_block
from forerun.drafters.heads.eagle_head import EagleConfig, Kind, expected_shapes, write_head
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.drafters.heads.medusa import Family, HeadsConfig, write_heads

# of decoders
HEADS = tuple(spec.name for spec in registry.drafters.specs() if spec.needs == "head" and not spec.reads_source)
DEEP = "eagle3 of three layers, two with windows"  # beside the drafters' own names
BLOCKS: dict[str, dict[str, Any]] = {
    "dflash 2": {
        "kind": "dflash", "taps": 2, "group": 4, "markov": "selector", "markov_rank": 3, "candidates": 3,
    },
    "dflash causal": {"kind": "dflash", "causal": "all"},
    "dflash windowed": {"kind": "dflash", "window": 4, "windowed": (True, False), "causal": "windowed"},
    "dspark gated": {"kind": "dspark", "markov": "gated", "window": 5, "windowed": (False, True)},
    "peagle windowed": {"kind": "peagle", "window": 6, "windowed": (False, True), "norm_before_residual": True},
}  # fmt: skip


def eagle_config(kind: Kind, vocab: int, width: int = 8, draft_vocab: int | None = None, **more: Any) -> EagleConfig:
    config = EagleConfig(
        kind=kind,
        width=width,
        inner=2 * width,
        heads=4,
        kv_heads=2,
        head_dim=4,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab or vocab,
        layers=(1, 2, 3) if kind == "eagle3" else (-1,),
        target_width=width,
        max_length=1 << 20,
    )
    return replace(config, **more)


def eagle_weights(config: EagleConfig, seed: int = 0, borrows: bool = False) -> dict[str, Tensor]:
    shapes = expected_shapes(config)
    return random_weights(shapes, config.vocab_size, config.draft_vocab_size, config.width, seed, borrows)


def random_weights(
    shapes: Mapping[str, tuple[int, ...]], vocab: int, draft_vocab: int, width: int, seed: int, borrows: bool
) -> dict[str, Tensor]:
    """Random weights, large enough that everything matters; norms near one."""
    generator = torch.Generator().manual_seed(seed)

    def random(shape: tuple[int, ...]) -> Tensor:
        scale = 0.1 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        return torch.randn(shape, generator=generator) * scale + (1.0 if len(shape) == 1 else 0.0)

    weights = {name: random(shape) for name, shape in shapes.items()}
    if not borrows:
        weights["embed_tokens.weight"] = torch.randn(vocab, width, generator=generator)
        weights["lm_head.weight"] = 1.5 * torch.randn(draft_vocab, width, generator=generator)
    if draft_vocab < vocab:
        counts = torch.rand(vocab, generator=generator) * 1000
        weights |= DraftVocabulary.most_frequent(counts, draft_vocab).tensors()
    return weights


def heads_config(family: Family, vocab: int, width: int = 8, blocks: int = 2) -> HeadsConfig:
    rates = ((0.5, 0.3, 0.1), (0.4, 0.2, 0.1), (0.3, 0.2, 0.1), (0.2, 0.1, 0.1))
    return HeadsConfig(family, count=4, blocks=blocks, width=width, vocab_size=vocab, rates=rates)


def heads_weights(config: HeadsConfig, seed: int = 0, own: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for i in range(config.count):
        for j in range(config.blocks):
            into = config.width * (2 + i) if config.family == "hydra" and j == 0 else config.width
            weights[f"{i}.{j}.linear.weight"] = torch.randn(config.width, into, generator=generator) * into**-0.5
            weights[f"{i}.{j}.linear.bias"] = torch.randn(config.width, generator=generator) * 0.1
        if own:
            weights[f"{i}.{config.blocks}.weight"] = torch.randn(config.vocab_size, config.width, generator=generator)
    if not own:
        weights["lm_head.weight"] = torch.randn(config.vocab_size, config.width, generator=generator)
    if config.family == "hydra":
        weights["embed_tokens.weight"] = torch.randn(config.vocab_size, config.width, generator=generator)
    return weights


def block_config(
    kind: BlockKind, vocab: int, width: int = 8, draft_vocab: int | None = None, **more: Any
) -> BlockConfig:
    config = BlockConfig(
        kind=kind,
        width=width,
        inner=2 * width,
        heads=4,
        kv_heads=2,
        head_dim=4,
        depth=2,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab or vocab,
        layers=(1, 2, 3),
        target_width=width,
        rows=6,
        mask_token=vocab - 1,
        first=int(kind == "dflash"),
        causal="all" if kind == "peagle" else "none",
        markov="vanilla" if kind == "dspark" else "none",
        markov_rank=3 if kind == "dspark" else 0,
        confidence=kind == "dspark",
        max_length=1 << 20,
    )
    return replace(config, **more)


def block_weights(
    config: BlockConfig, seed: int = 0, *, tables: bool = False, borrows: bool = False
) -> dict[str, Tensor]:
    shapes = block_files.expected_shapes(config, tables=tables)
    return random_weights(shapes, config.vocab_size, config.draft_vocab_size, config.width, seed, borrows)


def mtp_weights(config: EagleConfig, seed: int = 0, borrows: bool = False) -> dict[str, Tensor]:
    shapes = mtp.expected_shapes(config)
    return random_weights(shapes, config.vocab_size, config.draft_vocab_size, config.width, seed, borrows)


def save_head(drafter: str, folder: Path, vocab: int) -> Path:
    """Random weights for a drafter, on disk."""
    seed = zlib.crc32(drafter.encode())
    if drafter in ("medusa", "hydra"):
        heads = heads_config("medusa" if drafter == "medusa" else "hydra", vocab)
        write_heads(folder, heads, heads_weights(heads, seed, own=drafter == "medusa"))
    elif drafter.partition(" ")[0] in KINDS:
        block = block_config(draft_vocab=vocab - 2, vocab=vocab, **BLOCKS.get(drafter, {"kind": drafter}))
        write_block(folder, block, block_weights(block, seed))
    elif drafter == "mtp":
        layer = eagle_config("mtp", vocab)
        mtp.write_mtp(folder, layer, mtp_weights(layer, seed))
    else:
        kind: Kind = "eagle3" if drafter in ("eagle3", DEEP) else "eagle"
        few = vocab - 2 if kind == "eagle3" else None
        deep = {"depth": 3, "window": 6, "windowed": (True, False, True)} if drafter == DEEP else {}
        config = eagle_config(kind, vocab, draft_vocab=few, **deep)
        write_head(folder, config, eagle_weights(config, seed))
    return folder
