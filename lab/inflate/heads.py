"""Inflates trained heads of every kind with their target: the same drafts at the cost of a larger shape.

The row of a larger target is the small one with zeros behind it. What is added to a matrix reads through random weights
and writes zeros, so that it costs what it would cost, and adds nothing. Layers of EAGLE heads, multi-token-prediction
layers and block drafters are inflated as the target's layers are; what reads two or three rows side by side part by
part. Norms of a block drafter's queries and keys divide by a smaller root mean square where a head is wider; and since
they undo any factor on a query, what scores lose in a wider head is given to its norm. Medusa's and Hydra's heads are
residual blocks on the last row, h + SiLU(W h + b): rows of zeros in W and b add SiLU(0) = 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from forerun.api.llm import LLM
from forerun.build.engine import make_engine
from forerun.build.fingerprint import find_head
from forerun.core.errors import InvalidInput, UnsupportedModel
from forerun.core.params import EngineConfig, SpeculativeConfig
from forerun.drafters.heads.base import HeadShape
from forerun.drafters.heads.block_config import BlockConfig
from forerun.drafters.heads.block_head import read_block, write_block
from forerun.drafters.heads.eagle import read_mtp, write_mtp
from forerun.drafters.heads.eagle_head import EagleConfig, read_head, write_head
from forerun.drafters.heads.medusa import Family, HeadsConfig, read_heads, write_heads
from forerun.models.config import DecoderConfig
from forerun.models.cuda.target import CudaDecoder
from forerun.models.cuda.weights import WeightKind
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.verify.greedy import device_walk
from forerun.verify.sampled import SampledTokens
from lab.inflate.model import InflatedWeights, Shape, find_shape


def inflate_folder(head: Path, kind: str, shape: Shape, folder: Path, device: torch.device | str = "cpu") -> Path:
    """Write the folder of a head of this kind anew, for its target at a larger shape."""
    if kind in ("eagle", "eagle3"):
        write_head(folder, *inflate_head(*read_head(head), shape, device=device))
        return folder
    if kind in ("dflash", "dspark"):
        write_block(folder, *inflate_block(*read_block(head), shape, device=device))
        return folder
    if kind == "mtp":
        write_mtp(folder, *inflate_head(*read_mtp(head), shape, device=device))
        return folder
    if kind in ("medusa", "hydra"):
        family: Family = "medusa" if kind == "medusa" else "hydra"
        write_heads(folder, *inflate_heads(*read_heads(head, family), shape, device=device))
        return folder
    raise UnsupportedModel(f"heads of the kind {kind!r} cannot be inflated")


def inflate_heads(
    config: HeadsConfig,
    weights: Mapping[str, Tensor],
    shape: Shape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> tuple[HeadsConfig, dict[str, Tensor]]:
    """Medusa's or Hydra's heads of a target inflated to `shape`."""
    rows = RowInflater(config.width, shape, dtype, device)

    def inflated(name: str, weight: Tensor) -> Tensor:
        if name in ("d2t", "t2d"):
            return weight
        if name.endswith("linear.weight"):
            return rows.side_by_side(weight)
        return rows.vector(weight) if weight.dim() == 1 else rows.table(weight)

    larger = replace(config, width=shape.width)
    return larger, {name: inflated(name, weight) for name, weight in weights.items()}


class RowInflater:
    """From rows of `width` to those of a larger shape."""

    def __init__(self, width: int, shape: Shape, dtype: torch.dtype, device: torch.device | str) -> None:
        self.width, self.shape, self.dtype, self.device = width, shape, dtype, torch.device(device)

    def side_by_side(self, weight: Tensor) -> Tensor:
        """[d, k d] -> [D, k D]: columns that are added read zeros, rows that are added write zeros."""
        width, wide = self.width, self.shape.width
        parts = torch.split(weight, width, 1)
        new = torch.empty(wide, len(parts) * wide, dtype=self.dtype, device=self.device)
        new.normal_(0.0, 0.02, generator=torch.Generator(self.device).manual_seed(len(parts)))
        for i, part in enumerate(parts):
            new[:, i * wide : i * wide + width] = 0
            new[:width, i * wide : i * wide + width] = part.to(new)
        return new

    def table(self, weight: Tensor) -> Tensor:
        """[V, d] -> [V, D], an embedding or an LM head."""
        new = torch.zeros(len(weight), self.shape.width, dtype=self.dtype, device=self.device)
        new[:, : self.width] = weight.to(new)
        return new

    def norm(self, weight: Tensor) -> Tensor:
        """One or several side by side: they divide by a smaller root mean square."""
        return self._vector(weight, 1.0, math.sqrt(self.width / self.shape.width))

    def vector(self, weight: Tensor) -> Tensor:
        return self._vector(weight, 0.0, 1.0)

    def _vector(self, weight: Tensor, filling: float, scale: float) -> Tensor:
        parts = torch.split(weight, self.width)
        new = torch.full((len(parts), self.shape.width), filling, dtype=self.dtype, device=self.device)
        for i, part in enumerate(parts):
            new[i, : self.width] = (part.float() * scale).to(new)
        return new.flatten()


_LAYER, _INNER = re.compile(r"midlayer\.|layers\.\d+\."), "model.layers.0."
H = TypeVar("H", bound=HeadShape)
_WIDE = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")


class HeadInflater(RowInflater):
    def __init__(self, config: HeadShape, shape: Shape, dtype: torch.dtype, device: torch.device | str) -> None:
        if config.target_width != config.width:
            raise UnsupportedModel(
                f"a head {config.width} wide on a target {config.target_width} wide cannot be inflated: "
                "only heads as wide as their target can"
            )
        super().__init__(config.width, shape, dtype, device)
        self.small = config

    def inflate(self, name: str, weight: Tensor) -> Tensor:
        inner = _LAYER.sub("", name, count=1)
        if name in ("d2t", "t2d"):
            return weight
        if name == "fc.weight":
            return self.side_by_side(weight)
        if name in ("lm_head.weight", "embed_tokens.weight"):
            return self.table(weight)
        if inner.endswith(("q_norm.weight", "k_norm.weight")):
            raise UnsupportedModel("a head of this kind with norms of queries and keys cannot be inflated")
        if weight.dim() == 1:
            return self.vector(weight) if name == "fc.bias" else self.norm(weight)
        if inner in _WIDE:
            return torch.cat([self._inner(inner, part) for part in torch.split(weight, self.small.width, 1)], 1)
        return self._inner(inner, weight)

    def _inner(self, name: str, weight: Tensor) -> Tensor:
        values = {
            "model_type": "llama", "hidden_size": self.small.width, "intermediate_size": self.small.inner,
            "num_hidden_layers": 1, "num_attention_heads": self.small.heads, "head_dim": self.small.head_dim,
            "num_key_value_heads": self.small.kv_heads, "vocab_size": self.small.vocab_size,
        }  # fmt: skip
        whole = InflatedWeights(values, {_INNER + name: weight}, self.shape, dtype=self.dtype, device=self.device)
        return whole[_INNER + name]


def inflated_shape(config: H, shape: Shape) -> H:
    """The head of a target inflated to `shape`; the layers it reads stay, since others are added behind them."""
    return replace(
        config, width=shape.width, inner=shape.inner, heads=shape.heads, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, target_width=shape.width, norm_eps=config.norm_eps * config.width / shape.width,
    )  # fmt: skip


def inflate_head(
    config: EagleConfig,
    weights: Mapping[str, Tensor],
    shape: Shape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> tuple[EagleConfig, dict[str, Tensor]]:
    inflater = HeadInflater(config, shape, dtype, device)
    return inflated_shape(config, shape), {name: inflater.inflate(name, weight) for name, weight in weights.items()}


class BlockInflater(HeadInflater):
    """Makes the weights of a larger drafter one by one."""

    def inflate(self, name: str, weight: Tensor) -> Tensor:
        inner = name.split(".", 2)[2] if name.startswith("layers.") else ""
        width, wide = self.small.width, self.shape.width
        if inner.endswith(("q_norm.weight", "k_norm.weight")):
            return self._head_norm(weight, scored="q_norm" in inner)
        if inner == "self_attn.q_proj.weight":
            return self._queries(inner, weight)
        if inner:
            return self.norm(weight) if weight.dim() == 1 else self._inner(inner, weight)
        if name == "markov_head.up.weight":
            return torch.nn.functional.pad(self._placed(weight), (0, 0, 0, wide - width))
        if name == "markov_head.down.weight":
            return torch.nn.functional.pad(self._placed(weight), (0, wide - width))
        if name == "confidence_head.proj.weight":
            placed = self._placed(weight)
            rows, markov = placed[:, :width], placed[:, width:]
            return torch.cat((torch.nn.functional.pad(rows, (0, wide - width)), markov), 1)
        if name == "mask_embedding":
            return torch.nn.functional.pad(self._placed(weight), (0, wide - width))
        if name.startswith(("markov_head.", "confidence_head.")):
            return self._placed(weight)
        return super().inflate(name, weight)

    def _placed(self, weight: Tensor) -> Tensor:
        return weight.to(self.device, self.dtype)

    def _places(self) -> Tensor:
        """[Dh] where each dimension of a small head goes: pair i is dimensions i and i + Dh/2."""
        old, new = self.small.head_dim, self.shape.head_dim
        first = torch.arange(old // 2, device=self.device) * (new // old)
        return torch.cat((first, first + new // 2))

    def _head_norm(self, weight: Tensor, *, scored: bool) -> Tensor:
        new = torch.ones(self.shape.head_dim, dtype=self.dtype, device=self.device)
        shrink = 1.0 if scored else math.sqrt(self.small.head_dim / self.shape.head_dim)
        new[self._places()] = (weight.float().to(self.device) * shrink).to(new)
        return new

    def _queries(self, name: str, weight: Tensor) -> Tensor:
        """Heads that are kept are zero between their dimensions: their norm counts all of a head."""
        group, wide = self.small.heads // self.small.kv_heads, self.shape.heads // self.shape.kv_heads
        new = torch.unflatten(self._inner(name, weight), 0, (self.shape.heads, self.shape.head_dim))
        kept = [(head // group) * wide + head % group for head in range(self.small.heads)]
        between = torch.ones(self.shape.head_dim, dtype=torch.bool, device=self.device)
        between[self._places()] = False
        new[torch.tensor(kept, device=self.device)[:, None], between.nonzero()[:, 0]] = 0
        return new.flatten(0, 1)


def inflate_block(
    config: BlockConfig,
    weights: Mapping[str, Tensor],
    shape: Shape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> tuple[BlockConfig, dict[str, Tensor]]:
    inflater = BlockInflater(config, shape, dtype, device)
    return inflated_shape(config, shape), {name: inflater.inflate(name, weight) for name, weight in weights.items()}


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
