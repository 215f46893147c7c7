"""Tiny quantised checkpoints as folders, and the weights that they stand for, computed apart from the loader.

compressed-tensors' files are written and read back by that library. AWQ, GPTQ and block FP8 are written by their public
definition, number by number. Widths are no multiples of 128, so that the last blocks and groups are smaller.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

with suppress(ImportError):  # machines with a GPU need not have it: what needs it is not called there
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

from tests.models.tiny_checkpoints import _BASE
from tests.models.tiny_folder import LETTERS, add_tokenizer

Parts = dict[str, Tensor]
Quantise = Callable[[Tensor], tuple[Parts, Tensor]]  # a weight -> the tensors that replace it, and what they stand for
WIDTH, INNER = 160, 224
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs lies in each place of a word


@dataclass(frozen=True)
class Format:
    """One kind of quantised checkpoint."""

    config: dict[str, Any]
    quantise: Quantise
    said: str  # what loading says about it
    plain: tuple[str, ...] = ("lm_head", "embed_tokens")  # modules that stay as they are
    family: str = "llama"
    extra: Parts = field(default_factory=dict)
    sizes: tuple[int, int] = (WIDTH, INNER)


def make_model(family: str, width: int = WIDTH, inner: int = INNER) -> Any:
    settings = {**_BASE, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 2, "vocab_size": 64}
    torch.manual_seed(len(family))
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **settings, tie_word_embeddings=False), attn_implementation="eager"
    )
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.normal_(0.0, 0.15)
            if "norm" in key:
                weight.add_(1.0)
    return model.float().eval()


def write(folder: Path, made: Format) -> Any:
    """Write a folder; the answer is transformers' model in float32 with the weights that the files stand for."""
    model = make_model(made.family, *made.sizes)
    tensors, meant = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if weight.dim() != 2 or stem.rpartition(".")[2] in made.plain:
            tensors[name], meant[name] = weight, weight
            continue
        parts, meant[name] = made.quantise(weight.detach())
        tensors |= {f"{stem}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    model.load_state_dict(meant)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**tensors, **made.extra}, folder / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict() | {"max_position_embeddings": 256, "quantization_config": made.config}
    add_tokenizer(folder, config, LETTERS[1])
    return model


def write_plain(folder: Path, model: Any) -> None:
    """The same weights in float32."""
    folder.mkdir(parents=True)
    save_file({name: weight.contiguous() for name, weight in model.state_dict().items()}, folder / "model.safetensors")
    add_tokenizer(folder, model.config.to_dict() | {"max_position_embeddings": 256}, LETTERS[1])


def change(folder: Path, settings: dict[str, Any] | None = None, **tensors: Tensor | None) -> None:
    """Other settings of the quantisation, and other tensors (None: without it)."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= settings or {}
    path.write_text(json.dumps(config))
    held = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({k: v for k, v in held.items() if v is not None}, folder / "model.safetensors", {"format": "pt"})


def to_words(numbers: np.ndarray[Any, Any], bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[R, C] -> [R, C bits / 32]: each word is the sum of its numbers, shifted."""
    per = 32 // bits
    places = order or tuple(range(per))
    words = np.zeros((numbers.shape[0], numbers.shape[1] // per), dtype=np.uint64)
    for place, column in enumerate(places):
        words += numbers[:, column::per].astype(np.uint64) << np.uint64(place * bits)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def _with_zeros(weight: Tensor, bits: int, group_of: np.ndarray[Any, Any]) -> tuple[Any, Any, Any]:
    """Numbers [N, K], scales and zero points [N, G], by the range of every group; no zero point is 0."""
    values, groups = weight.numpy(), int(group_of.max()) + 1
    scales, zeros = np.zeros((len(values), groups), np.float16), np.zeros((len(values), groups), np.int64)
    for group in range(groups):
        own = values[:, group_of == group]
        low, high = own.min(1), own.max(1)
        scales[:, group] = (high - low) / ((1 << bits) - 1)
        zeros[:, group] = np.clip(np.round(-low / scales[:, group].astype(np.float32)), 1, (1 << bits) - 1)
    wide = scales.astype(np.float32)[:, group_of]
    numbers = np.clip(np.round(values / wide) + zeros[:, group_of], 0, (1 << bits) - 1).astype(np.int64)
    return numbers, scales, zeros


def _meant(numbers: Any, scales: Any, zeros: Any, group_of: Any) -> Tensor:
    wide = scales.astype(np.float32)[:, group_of]
    return torch.from_numpy((numbers - zeros[:, group_of]).astype(np.float32) * wide)


def awq(group: int, order: tuple[int, ...] = AWQ_ORDER) -> Quantise:
    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        group_of = np.arange(weight.shape[1]) // (group if group > 0 else weight.shape[1])
        numbers, scales, zeros = _with_zeros(weight, 4, group_of)
        parts = {
            "qweight": to_words(numbers.T, 4, order),
            "qzeros": to_words(zeros.T, 4, order),
            "scales": torch.from_numpy(scales.T.copy()),
        }
        return parts, _meant(numbers, scales, zeros, group_of)

    return quantise


def gptq(bits: int, group: int, less: int, act_order: bool = False, with_bias: bool = False) -> Quantise:
    """`less`: what is subtracted from zero points before they are stored."""

    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        columns = weight.shape[1]
        group_of = np.arange(columns) // (group if group > 0 else columns)
        if act_order:
            group_of = np.random.default_rng(columns).permutation(group_of)
        numbers, scales, zeros = _with_zeros(weight, bits, group_of)
        parts = {
            "qweight": to_words(numbers, bits).T,  # words of eight inputs
            "qzeros": to_words(zeros.T - less, bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }
        if with_bias:
            parts["bias"] = torch.zeros(len(weight), dtype=torch.float16)
        return parts, _meant(numbers, scales, zeros, group_of)

    return quantise


def block_fp8(weight: Tensor) -> tuple[Parts, Tensor]:
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales, stored, meant = torch.zeros(rows, columns), torch.zeros_like(weight), torch.zeros_like(weight)
    for i in range(rows):
        for j in range(columns):
            own = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[own].abs().max() / 448.0
            stored[own] = (weight[own] / scales[i, j]).to(torch.float8_e4m3fn).float()
            meant[own] = stored[own] * scales[i, j]
    return {"weight": stored.to(torch.float8_e4m3fn), "weight_scale_inv": scales}, meant


def tensor_fp8(weight: Tensor) -> tuple[Parts, Tensor]:
    scale = weight.abs().max() / 448.0
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, stored.float() * scale


def compressed(name: str, static: bool = False, **arguments: Any) -> dict[str, Any]:
    """A config of compressed-tensors, written by its own library."""
    kind, strategy = arguments.get("type", "int"), "tensor" if static else "token"
    rows = QuantizationArgs(num_bits=8, type=kind, dynamic=not static, strategy=strategy)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**arguments),
        input_activations=None if name == "pack-quantized" else rows, format=name,
    )  # fmt: skip
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=name, ignore=["lm_head"], quantization_status="compressed"
    )
    found: dict[str, Any] = json.loads(config.model_dump_json())
    return found


def by_library(config: dict[str, Any]) -> Quantise:
    """compressed-tensors' own compressor and decompressor."""
    group = QuantizationConfig.model_validate(config).config_groups["group_0"]
    assert isinstance(group, QuantizationScheme)
    compressor: Any = BaseCompressor.get_value_from_registry(str(config["format"]))

    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        scale, zero = _scales(weight, group.weights)
        parts = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, group)
        meant: Tensor = compressor.decompress(parts, group)["weight"].float()
        return {key: tensor for key, tensor in parts.items() if tensor is not None}, meant

    return quantise


def reordered(config: dict[str, Any]) -> Quantise:
    """The same with act-order: columns in the model's order, each with the number of its group."""
    inner = by_library({**config, "config_groups": {"group_0": config["config_groups"]["group_0"]}})

    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        order = torch.from_numpy(np.random.default_rng(1).permutation(weight.shape[1]))
        parts, meant = inner(weight[:, order])
        back = order.argsort()
        numbers = unpack_from_int32(parts["weight_packed"], 4, torch.Size(weight.shape))[:, back]
        parts["weight_packed"] = pack_to_int32(numbers, 4)
        parts["weight_g_idx"] = (torch.arange(weight.shape[1]) // 32)[back].to(torch.int32)
        return parts, meant[:, back]

    return quantise


def _scales(weight: Tensor, arguments: Any) -> tuple[Tensor, Tensor]:
    """By range: [1], [N, 1], [N, G] or blocks."""
    largest = 448.0 if arguments.type == "float" else float((1 << arguments.num_bits) // 2 - 1)
    if arguments.strategy == "tensor":
        return (weight.abs().max() / largest).reshape(1), torch.zeros(1, dtype=torch.int8)
    size = arguments.group_size if arguments.strategy == "group" else weight.shape[1]
    parts = weight.reshape(len(weight), -1, size)
    if arguments.symmetric:
        return parts.abs().amax(2) / largest, torch.zeros(parts.shape[:2], dtype=torch.int8)
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scale = (high - low) / ((1 << arguments.num_bits) - 1)
    zero = torch.round(-(largest + 1) - low / scale)
    return scale, zero.clamp(-largest - 1, largest).to(torch.int8)
