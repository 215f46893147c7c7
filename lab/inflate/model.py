"""Inflates a small model to a large one with the same function: the same tokens and acceptance, the large cost.

Where no large checkpoint is available, speculation can still be measured at its size. The residual stream is padded
with zeros; a norm then divides by a smaller root mean square, so its weight shrinks by sqrt(old / new) and its
epsilon by old / new. Each head's rotary pair i goes to pair i * (new / old) of a wider head, which rotates at the
same rate, and queries grow by sqrt(new / old) because scores are divided by more. Query heads keep their key-value
head. Whatever is added (heads, units, layers) reads through random weights and writes through zeros: it costs what it
would cost, and adds nothing to the output. Every figure from such a model must say that it is one.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.core.errors import InvalidInput, UnknownName, UnsupportedModel
from forerun.models.config import DecoderConfig

if TYPE_CHECKING:
    from forerun.models.load.checkpoint import Checkpoint

SHARD_BYTES = 4 << 30
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
_PARTS = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the model becomes."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int


PRESETS = {
    "1b": Shape(width=1536, layers=32, heads=24, kv_heads=8, head_dim=64, inner=6144),
    "8b": Shape(width=4096, layers=32, heads=32, kv_heads=8, head_dim=128, inner=14336),
    "70b": Shape(width=8192, layers=80, heads=64, kv_heads=8, head_dim=128, inner=28672),
}


def find_shape(name: str) -> Shape:
    if name not in PRESETS:
        raise UnknownName(f"unknown shape {name!r}; use one of {', '.join(PRESETS)}")
    return PRESETS[name]


def inflated_config(config: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """The config.json of the large model; raises where the small one does not fit into it."""
    small = DecoderConfig.from_hf(config)
    _check(config, small, shape)
    return {
        **config,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.inner,
        "rms_norm_eps": small.norm_eps * small.width / shape.width,
        "tie_word_embeddings": False,
    }


def _check(config: Mapping[str, Any], small: DecoderConfig, shape: Shape) -> None:
    rope = small.ropes[0]
    if small.family != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise UnsupportedModel(f"only Llama models without biases can be inflated, not {small.family!r}")
    if rope.kind != "default" or rope.dims != small.head_dim:
        raise UnsupportedModel(f"rope {rope.kind!r} cannot be inflated: only plain rotary positions can")
    pairs = {
        "width": (small.width, shape.width),
        "layers": (small.layers, shape.layers),
        "kv_heads": (small.kv_heads, shape.kv_heads),
        "heads per kv_head": (small.heads // small.kv_heads, shape.heads // shape.kv_heads),
        "inner": (small.inner, shape.inner),
        "head_dim": (small.head_dim, shape.head_dim),
    }
    for name, (old, new) in pairs.items():
        if new < old:
            raise InvalidInput(f"{name}={new} is less than the model's own {old}: models can only be made larger")
    if shape.head_dim % small.head_dim or shape.heads % shape.kv_heads:
        raise InvalidInput(
            f"head_dim={shape.head_dim} must be a multiple of {small.head_dim}, and heads={shape.heads} of kv_heads"
        )


class InflatedWeights(Mapping[str, Tensor]):
    """The large model's weights by their Hugging Face names, each made when it is asked for, on `device`."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        shape: Shape,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = inflated_config(config, shape)
        self.small, self.shape, self.weights = DecoderConfig.from_hf(config), shape, weights
        self.dtype, self.device = dtype, torch.device(device)
        layers = [f"model.layers.{i}.{part}.weight" for i in range(shape.layers) for part in _PARTS]
        self._names = ("model.embed_tokens.weight", *layers, "model.norm.weight", "lm_head.weight")
        self._known, self._kv = frozenset(self._names), torch.arange(self.small.kv_heads)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._known:
            raise KeyError(name)
        if (match := _LAYER.fullmatch(name)) is None:
            return self._outer(name)
        index, part = int(match[1]), match[2]
        old = self._old(name) if index < self.small.layers else None
        make: dict[str, Callable[[str, Tensor | None], Tensor]] = {
            "self_attn.q_proj": self._queries,
            "self_attn.k_proj": self._keys,
            "self_attn.v_proj": self._values,
            "self_attn.o_proj": self._leave_attention,
            "mlp.gate_proj": self._enter_mlp,
            "mlp.up_proj": self._enter_mlp,
            "mlp.down_proj": self._leave_mlp,
        }
        return make[part](name, old) if part in make else self._norm(old)

    def _outer(self, name: str) -> Tensor:
        if name == "model.norm.weight":
            return self._norm(self._old(name))
        source = "model.embed_tokens.weight" if self.small.tied else name
        new = torch.zeros(self.small.vocab_size, self.shape.width, dtype=self.dtype, device=self.device)
        new[:, : self.small.width] = self._old(source)
        return new

    def _norm(self, old: Tensor | None) -> Tensor:
        new = torch.ones(self.shape.width, dtype=self.dtype, device=self.device)
        if old is not None:
            new[: self.small.width] = (old.float() * math.sqrt(self.small.width / self.shape.width)).to(new)
        return new

    def _queries(self, name: str, old: Tensor | None) -> Tensor:
        new = self._random(name, self.shape.heads * self.shape.head_dim, self.shape.width)
        if old is not None:
            growth = math.sqrt(self.shape.head_dim / self.small.head_dim)
            new[self._head_rows(self._rotary_places()), : self.small.width] = (old.float() * growth).to(new)
        return new

    def _keys(self, name: str, old: Tensor | None) -> Tensor:
        """Between the pairs that are used keys are zero, so that what queries hold there does not matter."""
        shape = self.shape
        new = self._random(name, shape.kv_heads * shape.head_dim, shape.width)
        if old is not None:
            new[: self.small.kv_heads * shape.head_dim] = 0
            new[self._rows(self._kv, self._rotary_places()), : self.small.width] = old.to(new)
        return new

    def _values(self, name: str, old: Tensor | None) -> Tensor:
        new = self._random(name, self.shape.kv_heads * self.shape.head_dim, self.shape.width)
        if old is not None:
            new[self._rows(self._kv, torch.arange(self.small.head_dim)), : self.small.width] = old.to(new)
        return new

    def _leave_attention(self, name: str, old: Tensor | None) -> Tensor:
        columns = self.shape.heads * self.shape.head_dim
        new = torch.zeros(self.shape.width, columns, dtype=self.dtype, device=self.device)
        if old is not None:
            new[: self.small.width, self._head_rows(torch.arange(self.small.head_dim))] = old.to(new)
        return new

    def _enter_mlp(self, name: str, old: Tensor | None) -> Tensor:
        new = self._random(name, self.shape.inner, self.shape.width)
        if old is not None:
            new[: self.small.inner, : self.small.width] = old.to(new)
        return new

    def _leave_mlp(self, name: str, old: Tensor | None) -> Tensor:
        new = torch.zeros(self.shape.width, self.shape.inner, dtype=self.dtype, device=self.device)
        if old is not None:
            new[: self.small.width, : self.small.inner] = old.to(new)
        return new

    def _rotary_places(self) -> Tensor:
        """[Dh] where each dimension of a small head goes: pair i is dimensions i and i + Dh/2."""
        pairs, stride = self.small.head_dim // 2, self.shape.head_dim // self.small.head_dim
        first = torch.arange(pairs) * stride
        return torch.cat((first, first + self.shape.head_dim // 2))

    def _head_rows(self, dims: Tensor) -> Tensor:
        """[H Dh] rows of the large model's queries that are the small one's: groups keep their kv head."""
        group, wide = self.small.heads // self.small.kv_heads, self.shape.heads // self.shape.kv_heads
        heads = torch.tensor([(h // group) * wide + h % group for h in range(self.small.heads)])
        return self._rows(heads, dims)

    def _rows(self, heads: Tensor, dims: Tensor) -> Tensor:
        return (heads[:, None] * self.shape.head_dim + dims[None, :]).flatten().to(self.device)

    def _random(self, name: str, rows: int, columns: int) -> Tensor:
        """The same for the same name and device, whichever weights are asked for."""
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        new = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        return new.normal_(0.0, 0.02, generator=generator)

    def _old(self, name: str) -> Tensor:
        return self.weights[name].detach().to(self.device)


def inflate(
    checkpoint: Checkpoint,
    shape: Shape,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a Hugging Face folder with the checkpoint's function at a larger shape; `progress` counts weights."""
    from forerun.models.load.weights import write_tensors

    weights = InflatedWeights(checkpoint.config, checkpoint.weights, shape, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0
    names = list(weights)
    for done, name in enumerate(names, start=1):
        held[name] = weights[name]
        size += held[name].nbytes
        if size >= SHARD_BYTES or done == len(names):
            write_tensors(folder / f"shard-{len(shards)}.safetensors", held, {"format": "pt"})
            shards.append(list(held))
            total, size, held = total + size, 0, {}
        if progress is not None:
            progress(done, len(names))
    _name_shards(folder, shards, total)
    settings = {**weights.config, "torch_dtype": str(dtype).removeprefix("torch."), "inflated_from": checkpoint.name}
    (folder / "config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    _write_tokenizer(checkpoint, folder)
    return folder


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    """The names that every loader expects, which say how many there are."""
    file_of = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{i}.safetensors").replace(folder / file)
        file_of.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """The files of a folder are copied; a tokenizer that comes out of a GGUF file is written anew."""
    if checkpoint.path.is_dir():
        for name in _TOKENIZER_FILES:
            if (checkpoint.path / name).is_file():
                shutil.copy(checkpoint.path / name, folder / name)
        return
    tokenizer = checkpoint.tokenizer()
    tokenizer.save(folder)
    ends = {"eos_token_id": sorted(tokenizer.eos_ids)}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2), encoding="utf-8")
