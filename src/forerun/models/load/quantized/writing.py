"""Writes a checkpoint of ours with rounded weights, as a compressed-tensors folder that other engines load too.

The matrices of the layers are rounded to nearest; embeddings, the LM head, norms and biases are copied as they are.
One weight is in memory at a time: the headers of the files are known from the shapes before anything is read. The
folder appears under its name when it is complete, so a run that was interrupted leaves none.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor

from forerun.core.errors import DamagedFile, InvalidInput, UnsupportedModel
from forerun.models.config import DecoderConfig
from forerun.models.load.checkpoint import Checkpoint
from forerun.models.load.quantized.layouts import GROUPS, in_bytes, in_four_bits
from forerun.models.load.quantized.scheme import is_quantised, quantization_of
from forerun.models.load.shapes import check_shapes
from forerun.models.load.weights import SafetensorsWeights

Rounding = Literal["fp8", "int8", "w4"]
SHARD_BYTES = 5_000_000_000
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
_NAMES = {kind: name for name, kind in _TYPES.items()}
_PLAIN_NUMBERS = ("F32", "F16", "BF16")
_COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken")  # tokenizers, chat templates, settings of generation
_PICTURES = ("vision", "visual", "audio", "multi_modal")


@dataclass(frozen=True, slots=True)
class Rounder:
    """Rounds one weight after the other to the same format."""

    kind: Rounding
    group: int = 0  # columns that share a scale; 0 = all

    def __call__(self, weight: Tensor, column_sizes: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors that replace a weight [N, K], by the end of their names; scales are exact in bfloat16."""
        if self.kind == "w4":
            numbers, scales = in_four_bits(weight, self.group, column_sizes)
            return self._packed(numbers[:, ::2] | numbers[:, 1::2] << 4, scales, weight)
        data, by_output = in_bytes(weight, self.kind, torch.bfloat16)
        scales = by_output[:, None].bfloat16()
        if self.kind == "int8":  # with an offset of 128
            return self._packed(data.view(torch.uint8) ^ 128, scales, weight)
        return {"weight": data, "weight_scale": scales}

    def _packed(self, data: Tensor, scales: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """Bytes in words of 32 bits, the lowest first."""
        shape = torch.tensor(weight.shape) if not weight.is_meta else torch.empty(2, dtype=torch.int64, device="meta")
        return {"weight_packed": data.contiguous().view(torch.int32), "weight_scale": scales, "weight_shape": shape}

    def settings(self, ignored: list[str]) -> dict[str, Any]:
        """The `quantization_config` of config.json."""
        floats = self.kind == "fp8"
        name = "float-quantized" if floats else "pack-quantized"
        common = {"num_bits": 4 if self.kind == "w4" else 8, "type": "float" if floats else "int", "symmetric": True}
        strategy = {"strategy": "group" if self.group else "channel", "group_size": self.group or None}
        rows = {**common, "strategy": "token", "group_size": None, "dynamic": True} if floats else None
        group = {
            "targets": ["Linear"], "weights": {**common, **strategy, "dynamic": False},
            "input_activations": rows, "output_activations": None, "format": name,
        }  # fmt: skip
        return {
            "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ignored, "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Shard:
    weights: list[str]
    tensors: dict[str, Tensor]  # on the device "meta"


def write_rounded(
    checkpoint: Checkpoint,
    out: Path,
    kind: Rounding,
    progress: Callable[[int, int], None] = lambda done, total: None,
    input_sizes: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Write the folder `out`; `progress` is told how many weights are done, and of how many.

    `input_sizes`: of columns, by weight; scales of four bits are those with the smallest errors of what is multiplied.
    """
    check_out(out)
    weights = plain_weights(checkpoint)
    rounder = _rounder(weights, kind)
    folder = out.absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    beside = Path(mkdtemp(prefix=f".{out.absolute().name}.", suffix=".part", dir=folder))
    try:
        part = beside / "made"
        part.mkdir()  # with the rights of new folders, which `beside` has not
        _write_weights(weights, rounder, part, progress, input_sizes)
        _copy_others(checkpoint, part)
        settings = rounder.settings(_ignored(weights))
        config = json.dumps({**checkpoint.config, "quantization_config": settings}, indent=2)
        (part / "config.json").write_text(config + "\n", encoding="utf-8")
        part.replace(out.absolute())
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def check_out(out: Path) -> None:
    """Raise where something is there already."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InvalidInput(f"{str(out)!r} exists and is not an empty folder; name a new one")


def plain_weights(checkpoint: Checkpoint) -> SafetensorsWeights:
    """The weights, where they can be rounded; else one line that says why not."""
    name, config = checkpoint.name, checkpoint.config
    if not checkpoint.path.is_dir():
        raise UnsupportedModel(f"{name} is a GGUF file; quantize reads safetensors: name the original's folder")
    if checkpoint.adapted_from:
        raise UnsupportedModel(f"{name} is an adapter of {checkpoint.adapted_from}; merge them into a folder first")
    if is_quantised(config):
        raise UnsupportedModel(f"{name} is quantised already ({quantization_of(config)}); quantize the original")
    ours = DecoderConfig.from_hf(config)
    weights = checkpoint.weights
    assert isinstance(weights, SafetensorsWeights)
    if ours.moe is not None:
        raise UnsupportedModel(f"{name} has experts, which quantize cannot write; use --dtype int8 or fp8 on a GPU")
    if tower := next((each for each in weights if any(part in each for part in _PICTURES)), None):
        raise UnsupportedModel(f"{name} has more than a language model ({tower[:80]!r}); quantize its text model")
    check_shapes(ours, weights)
    for each in filter(_is_rounded, weights):
        if weights.kind(each) not in _PLAIN_NUMBERS:
            raise UnsupportedModel(f"{each[:80]!r} of {name} is {weights.kind(each)}; it must be BF16, F16 or F32")
    return weights


def _rounder(weights: SafetensorsWeights, kind: Rounding) -> Rounder:
    """With the largest group that divides every width."""
    widths = {weights.shape(name)[1]: name for name in weights if _is_rounded(name)}
    group = next((size for size in GROUPS if not any(width % size for width in widths)), 0) if kind == "w4" else 0
    multiple = {"fp8": 1, "int8": 4, "w4": group or GROUPS[-1]}[kind]
    for width, name in widths.items():
        if width % multiple:
            raise UnsupportedModel(
                f"{name[:80]!r} is {width} wide, which is no multiple of {multiple} as {kind} needs; use --to fp8"
            )
    return Rounder(kind, group)


def _is_rounded(name: str) -> bool:
    """The matrices of layers; drafting layers (`mtp.`) stay as they are."""
    return name.endswith("_proj.weight") and ".layers." in f".{name}" and "mtp." not in name and "eh_proj" not in name


def _ignored(weights: SafetensorsWeights) -> list[str]:
    """Modules that are not rounded and may be linear layers elsewhere."""
    others = (name.removesuffix(".weight") for name in weights if name.endswith(".weight") and not _is_rounded(name))
    matrices = [each for each in others if len(weights.shape(f"{each}.weight")) == 2 and "embed_tokens" not in each]
    return list(dict.fromkeys(["lm_head", *matrices]))


def _write_weights(
    weights: SafetensorsWeights,
    rounder: Rounder,
    folder: Path,
    progress: Callable[[int, int], None],
    input_sizes: Mapping[str, Tensor],
) -> None:
    shards = list(_planned(weights, rounder))
    places, done = dict[str, str](), 0
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        places |= dict.fromkeys(shard.tensors, name)
        with (folder / name).open("wb") as file:
            starts = _write_header(file, shard.tensors)
            for weight in shard.weights:
                for key, tensor in _parts(weight, weights[weight], rounder, input_sizes.get(weight)).items():
                    file.seek(starts[key])
                    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                done += 1
                progress(done, len(weights))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _planned(weights: SafetensorsWeights, rounder: Rounder) -> Iterator[_Shard]:
    """What each file will hold; rounding tensors without data tells shapes and types."""
    shard, used = _Shard([], {}), 0
    for name in weights:
        if weights.kind(name) not in _TYPES:
            raise UnsupportedModel(f"{name[:80]!r} is {weights.kind(name)}, which cannot be copied; convert it to BF16")
        empty = torch.empty(weights.shape(name), dtype=_TYPES[weights.kind(name)], device="meta")
        parts = _parts(name, empty, rounder)
        size = sum(tensor.nbytes for tensor in parts.values())
        if used and used + size > SHARD_BYTES:
            yield shard
            shard, used = _Shard([], {}), 0
        shard.weights.append(name)
        shard.tensors.update(parts)
        used += size
    yield shard


def _parts(name: str, weight: Tensor, rounder: Rounder, column_sizes: Tensor | None = None) -> dict[str, Tensor]:
    """The tensors that a weight becomes, by name."""
    if not _is_rounded(name):
        return {name: weight}
    if not weight.is_meta and not bool(weight.isfinite().all()):
        raise DamagedFile(f"{name[:80]!r} has values that are not finite; fetch the model again")
    stem = name.removesuffix("weight")
    return {stem + part: tensor for part, tensor in rounder(weight, column_sizes).items()}


def _write_header(file: BinaryIO, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The header of a safetensors file; returns where each tensor begins. Wide types come first: all are aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        span = [at, at + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        at = span[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + at)
    return {name: 8 + len(text) + header[name]["data_offsets"][0] for name in tensors}


def _copy_others(checkpoint: Checkpoint, folder: Path) -> None:
    """The tokenizer, the chat template, the settings of generation and the licence."""
    for file in sorted(checkpoint.path.iterdir()):
        named = file.suffix in _COPIED or file.name.startswith(("LICENSE", "NOTICE"))
        if file.is_file() and named and file.name != "config.json" and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
