"""Check that a trained head fits its target: files, shapes, and tokens per round on a few prompts.

A head for another target, or read as another kind, drafts as fast as the right one and is always rejected: nothing
fails, nothing is gained. So a head of which almost nothing is accepted is reported, with the likely cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.build.engine import load_target, make_engine
from forerun.core.errors import InvalidInput, VocabularyMismatch
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.drafters.heads.block_config import NAMES as BLOCKS
from forerun.drafters.heads.block_config import BlockConfig
from forerun.drafters.heads.block_head import read_block
from forerun.drafters.heads.eagle import read_mtp
from forerun.drafters.heads.eagle_head import NAMES, EagleConfig, read_head
from forerun.drafters.heads.medusa import read_heads
from forerun.drafters.heads.specdec import read_specdec
from forerun.engine.driver import Driver
from forerun.heads import open_head
from forerun.models.base import Target
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.load.tokenizer import Tokenizer

PROMPTS = (
    "Explain why the sky is blue.",
    "Write a Python function that reverses a list.",
    "Name three large rivers and the countries they flow through.",
    "Write a short letter that thanks a friend for a book.",
)
TOO_LITTLE = 1.1  # tokens per round under which a head does not belong to the target


@dataclass(frozen=True, slots=True)
class HeadReport:
    folder: str
    kind: str
    about: str  # shape in a line
    trained_for: str
    tokens_per_round: float
    accepted_per_position: list[float]
    fits: bool

    @property
    def verdict(self) -> str:
        if self.fits:
            return f"fits: {self.tokens_per_round:.2f} tokens per round"
        named = f" (its config names {self.trained_for!r})" if self.trained_for else ""
        return (
            f"almost nothing is accepted ({self.tokens_per_round:.2f} tokens per round): "
            f"it was trained for another target{named}, on other layers, or hardly at all"
        )


def kind_of_head(folder: Path, *, pickle: bool = False) -> str:
    """What a folder holds; raises where it holds no head."""
    found = open_head(folder)
    return read_head(folder, pickle=pickle)[0].kind if found is None else found.kind


def check_head(folder: Path, model: str, config: EngineConfig | None = None, *, tokens: int = 64) -> HeadReport:
    """Check a head with a target; raises with the reason where the two cannot work together."""
    kind = kind_of_head(folder)
    checkpoint = open_checkpoint(model)
    target = load_target(checkpoint, config or EngineConfig())
    about, trained_for = _compare(folder, kind, target)
    per_round, rates = _accepted(folder, kind, target, checkpoint.tokenizer(), tokens)
    return HeadReport(str(folder), kind, about, trained_for, per_round, rates, per_round >= TOO_LITTLE)


def _compare(folder: Path, kind: str, target: Target) -> tuple[str, str]:
    if kind in ("medusa", "hydra"):
        heads, _ = read_heads(folder, "medusa" if kind == "medusa" else "hydra", vocab_size=target.vocab_size)
        _check_vocabulary(heads.vocab_size, target, heads.target)
        return f"{heads.count} heads of {heads.blocks} blocks, {heads.width} wide", heads.target
    if kind in BLOCKS:
        block, _ = read_block(folder)
        _check_vocabulary(block.vocab_size, target, block.target)
        _check_layers(block.layers, target, block.target)
        layers = f"{block.depth} layers of width {block.width}, {block.levels} tokens a pass"
        about = f"{BLOCKS[kind]}, {layers}, reads layers {', '.join(map(str, block.layers))}, {_sees(block)}"
        return about, block.target
    if kind == "specdec":
        found, _, _ = read_specdec(folder)
        _check_vocabulary(found.vocab_size, target, found.target)
        size = f"{found.depth} layers of width {found.width}, {found.levels} tokens a pass"
        return f"SpecDec, {size}, {found.draft_vocab_size} of {found.vocab_size} tokens", found.target
    config, _ = read_mtp(folder) if kind == "mtp" else read_head(folder)
    _check_vocabulary(config.vocab_size, target, config.target)
    _check_layers(config.layers, target, config.target)
    layers = "the last row" if kind != "eagle3" else f"layers {', '.join(map(str, config.layers)) or 'by default'}"
    depth = f"{config.depth} layers, " if config.depth > 1 else ""
    size = f"{depth}{config.width} wide, {config.draft_vocab_size} of {config.vocab_size} tokens"
    return f"{NAMES[config.kind]}, {size}, reads {layers}, {_sees(config)}", config.target


def _sees(config: EagleConfig | BlockConfig) -> str:
    reaches = sorted({config.reach(i) for i in range(config.depth)})
    return f"sees {' or '.join(map(str, reaches))} positions"


def _check_layers(layers: Sequence[int], target: Target, trained_for: str) -> None:
    shared = target.shared()
    count = 0 if shared is None else len(shared.layers)
    beyond = [layer for layer in layers if count and layer > count]
    if beyond:
        raise InvalidInput(
            f"the head reads layer {beyond[0]} and the target has {count}: it was trained for another target "
            f"({trained_for or 'unnamed'})"
        )


def _check_vocabulary(size: int, target: Target, trained_for: str) -> None:
    if size > target.vocab_size or target.vocab_size - size > 1024:
        raise VocabularyMismatch(
            f"the head was trained for a vocabulary of {size}, the target has {target.vocab_size}: "
            f"it belongs to another target ({trained_for or 'unnamed'})"
        )


def _accepted(folder: Path, kind: str, target: Target, tokenizer: Tokenizer, tokens: int) -> tuple[float, list[float]]:
    """Tokens per round of greedy chains, and how often they were accepted to each depth."""
    speculative = SpeculativeConfig(drafter=kind, draft_model=str(folder), budget=5, controller="fixed")
    engine = make_engine(target, tokenizer.eos_ids, speculative, EngineConfig(max_batch=len(PROMPTS)))
    prompts: Sequence[list[int]] = [
        tokenizer.chat_ids([{"role": "user", "content": text}])
        if tokenizer.has_chat_template
        else tokenizer.encode(text)
        for text in PROMPTS
    ]
    params = SamplingParams(max_tokens=tokens)
    seqs = Driver(engine).write(Request(tuple(ids), params) for ids in prompts)
    rows = [seq.stats.accepted_per_position for seq in seqs]
    depth = max((len(row) for row in rows), default=0)
    rates = [sum(row[i] for row in rows if i < len(row)) / len(rows) for i in range(depth)]
    return sum(seq.stats.tokens for seq in seqs) / sum(seq.stats.rounds for seq in seqs), rates
