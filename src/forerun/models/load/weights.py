"""The weights of a checkpoint under their Hugging Face names, loaded one at a time when asked for.

GGUF and safetensors files, and the `.bin` files of encoder-decoders: the Marian models are older than safetensors.
torch reads these with its restricted unpickler, which builds tensors and containers and calls nothing else.

Shapes are checked against the config before anything is allocated: a damaged config or GGUF header may name millions of
heads, layers or experts, and what the files really hold costs no memory to look at.
"""

from __future__ import annotations

import json
import pickle
import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.core.errors import DamagedFile, UnsupportedModel, brief
from forerun.models.config import DecoderConfig, LatentConfig, MoeConfig, RecurrentConfig, VariedConfig
from forerun.models.load.gguf import GgufFile
from forerun.models.load.gguf_families import Origin, tensor_of
from forerun.models.load.quantized.scheme import Quantization
from forerun.models.load.quants import Blocks, dequantize

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class LazyTensors(Mapping[str, Tensor]):
    """Names to tensors that are made each time they are asked for."""

    names: Collection[str]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names


class Weights(LazyTensors):
    """Weights of a checkpoint: `weights[name]` loads (and dequantises) that one tensor."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, without loading it."""

    quantization: Quantization | None = None  # what its config says of quantised weights

    def on(self, device: torch.device | str) -> Weights:
        """The same, dequantised on a device when asked for; plain weights are loaded as they are."""
        return self

    def blocks(self, name: str) -> Blocks | None:
        """The weight as the file packs it, where that is in blocks of a GGUF type."""
        return None

    def packed_kinds(self) -> set[int]:
        """The GGUF types of what `blocks` gives; empty where it gives nothing."""
        return set()


def missing_weight(weights: Mapping[str, Tensor], name: str) -> DamagedFile:
    """The error where a checkpoint lacks a weight, in the words of its file."""
    if isinstance(weights, GgufWeights):
        return DamagedFile(f"{weights.file.path} is damaged: it has no tensor {weights.tensor(name)!r}; pull it again")
    return DamagedFile(f"the checkpoint has no weight {name!r}: is a shard missing, or the config another's?")


def wrong_shape(
    weights: Mapping[str, Tensor], name: str, given: tuple[int, ...], shape: tuple[int, ...]
) -> DamagedFile:
    """The error where a weight has another shape than the model's settings say."""
    if isinstance(weights, GgufWeights):
        tensor = weights.tensor(name)
        return DamagedFile(
            f"{weights.file.path} is damaged: tensor {tensor!r} is {given} but its metadata say {shape}; pull it again"
        )
    return DamagedFile(f"weight {name!r} is {given} but the config says {shape}: are they of one model?")


def surplus_weights(weights: Mapping[str, Tensor], names: Sequence[str]) -> DamagedFile:
    """The error where a checkpoint holds weights that a model of its settings does not read."""
    if isinstance(weights, GgufWeights):
        return DamagedFile(
            f"{weights.file.path} is damaged: {len(names)} of its tensors, such as {weights.tensor(names[0])!r}, are "
            "more than its metadata say; pull it again"
        )
    return DamagedFile(
        f"{len(names)} weights of the checkpoint, such as {names[0][:80]!r}, are more than its config says: are they "
        "of one model?"
    )


class GgufWeights(Weights):
    """From a GGUF file. `blocks` gives a weight still quantised, its rows in Hugging Face's order."""

    def __init__(self, file: GgufFile, origins: dict[str, Origin], device: torch.device | str = "cpu") -> None:
        self.file, self.origins, self.device = file, origins, device
        self.names = origins

    def tensor(self, name: str) -> str:
        """What the file calls a weight, or would call it."""
        return self.origins[name].tensor if name in self.origins else tensor_of(self.file, name)

    def on(self, device: torch.device | str) -> GgufWeights:
        return GgufWeights(self.file, self.origins, device)

    def shape(self, name: str) -> tuple[int, ...]:
        origin = self.origins[name]
        shape = self.file.tensors[origin.tensor].shape
        if origin.as_row and len(shape) == 1:
            return (1, *shape)
        return shape if origin.expert is None else shape[1:]

    def blocks(self, name: str) -> Blocks:
        """The weight as the file packs it; taking an expert or reordering moves whole rows of blocks."""
        origin, shape = self.origins[name], self.shape(name)
        packed = self.file.blocks(origin.tensor)
        data = packed.data
        if origin.expert is not None:
            data = data.view(packed.shape[0], -1)[origin.expert]
        if origin.heads:
            if shape[0] % (2 * origin.heads) or data.numel() % shape[0]:
                raise DamagedFile(
                    f"{self.file.path} is damaged: {origin.tensor} has {shape[0]} rows for "
                    f"{origin.heads} heads; pull it again"
                )
            pairs = shape[0] // origin.heads // 2
            data = data.view(origin.heads, pairs, 2, -1).transpose(1, 2).reshape(-1)
        return Blocks(packed.kind, shape, data)

    def packed_kinds(self) -> set[int]:
        return {self.file.tensors[origin.tensor].kind for origin in self.origins.values()}

    def __getitem__(self, name: str) -> Tensor:
        weight = dequantize(self.blocks(name), self.device)
        return weight - 1 if self.origins[name].plus_one else weight


class SafetensorsWeights(Weights):
    """From the safetensors files of a folder; the files are mapped, so opening costs nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self.names = self._file_of = self._find()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open(self._file_of[name]).get_slice(name).get_shape())

    def kind(self, name: str) -> str:
        """The type of a tensor's numbers, in the words of the format."""
        return str(self._open(self._file_of[name]).get_slice(name).get_dtype())

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._open(self._file_of[name]).get_tensor(name)
        return tensor

    def _find(self) -> dict[str, str]:
        """Which file holds each weight, by the index or, without one, by the files' own headers."""
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            return self._read_index(index)
        files = sorted(self.folder.glob("model*.safetensors")) or sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise UnsupportedModel(_without_weights(self.folder))
        return {name: file.name for file in files for name in self._open(file.name).keys()}  # noqa: SIM118

    def _read_index(self, index: Path) -> dict[str, str]:
        try:
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            file_of = {str(name): str(file) for name, file in listed.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DamagedFile(f"{index} is not an index of weights; fetch it again") from None
        held: dict[str, set[str]] = {}
        for file in set(file_of.values()):
            if Path(file).name != file:
                raise DamagedFile(f"{index} points outside its folder ({file[:80]!r}); fetch it again")
            held[file] = set(self._open(file).keys())
        for name, file in file_of.items():
            if name not in held[file]:
                raise DamagedFile(f"{self.folder / file} lacks {name[:80]!r}, which its index lists; fetch it again")
        return file_of

    def _open(self, name: str) -> Any:
        if name not in self._files:
            try:
                self._files[name] = safe_open(self.folder / name, framework="pt")
            except FileNotFoundError:
                raise DamagedFile(f"{self.folder} lacks {name}, which its index lists; fetch it again") from None
            except (SafetensorError, OSError) as error:
                raise DamagedFile(f"{self.folder / name} is damaged ({error}); fetch it again") from None
        return self._files[name]


def _without_weights(folder: Path) -> str:
    pickled = next((file.name for file in sorted(folder.iterdir()) if file.suffix in _PICKLES), None)
    if pickled is not None:
        return (
            f"{folder} holds only pickled weights ({pickled}), which can run code when opened; "
            "convert them to safetensors first"
        )
    return f"{folder} holds no *.safetensors file; fetch the model's weights into it"


FILE = "pytorch_model.bin"


class PickledWeights(Weights):
    """Names to tensors, mapped from the file where its format allows that."""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        try:
            found = _load(path)
        except pickle.UnpicklingError as error:
            raise DamagedFile(
                f"{path} holds more than tensors, or is damaged ({brief(error)}); it was not opened"
            ) from None
        except Exception as error:  # torch raises RuntimeError, EOFError, KeyError and more for damaged files
            raise DamagedFile(f"{path} is damaged ({brief(error)}); fetch it again") from None
        if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
            raise DamagedFile(f"{path} is not a mapping of names to tensors; fetch it again")
        self._tensors: dict[str, Tensor] = {str(name): value for name, value in found.items()}
        self.names = self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]


def _load(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # the format before torch 1.6 cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True)


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """The file gets the mode that `open` would give it."""
    file.touch()
    mode = file.stat().st_mode & 0o777
    save_file(dict(tensors), file, None if metadata is None else dict(metadata))
    file.chmod(mode)


Shape = tuple[int, ...]
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


# what a decoder need not read: tables that are computed, a tied head, towers for pictures, and drafting layers
UNREAD = re.compile(
    r"rotary_emb\.inv_freq$|(^|\.)lm_head\.weight$|(^|\.)mtp\.|"
    r"^(model\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|embed_vision|embed_audio)\."
)


def check_shapes(config: DecoderConfig, weights: Weights) -> None:
    """Raise DamagedFile at the first weight that is missing, or of another shape than the config says, or surplus."""
    read = set[str]()
    for name, shape in expected_shapes(config, weights):
        if name not in weights:
            raise missing_weight(weights, name)
        if weights.shape(name) != shape:
            raise wrong_shape(weights, name, weights.shape(name), shape)
        read.add(name)
    surplus = [name for name in weights if name not in read and not UNREAD.search(name)]
    drafting = tuple(name.removesuffix("eh_proj.weight") for name in surplus if name.endswith("eh_proj.weight"))
    surplus = [name for name in surplus if not (drafting and name.startswith(drafting))]
    if surplus:
        raise surplus_weights(weights, surplus)


def expected_shapes(config: DecoderConfig, weights: Weights) -> Iterator[tuple[str, Shape]]:
    """Every weight that a decoder of this config reads, under the names that this checkpoint uses, and its shape."""
    for name, shape in _shapes(config, weights):
        yield config.file_name(name), shape


def _shapes(config: DecoderConfig, weights: Weights) -> Iterator[tuple[str, Shape]]:
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in weights), "model.")
    yield prefix + "embed_tokens.weight", (config.vocab_size, config.width)
    yield prefix + "norm.weight", (config.width,)
    if not config.tied:
        head = next((name for name in _HEADS if name in weights), _HEADS[0])
        yield head, (config.vocab_size, config.width)
    if config.varied is not None and (inputs := config.layers * config.varied.input_width):
        yield prefix + "embed_tokens_per_layer.weight", (config.vocab_size, inputs)
        yield prefix + "per_layer_model_projection.weight", (inputs, config.width)
        yield prefix + "per_layer_projection_norm.weight", (config.varied.input_width,)
    norms = [name for name in config.norms if name is not None]
    for i in range(config.layers):
        at = f"{prefix}layers.{i}."
        yield from ((f"{at}{norm}.weight", (config.width,)) for norm in norms)
        alone = () if config.recurrent is None else config.recurrent.mlp_alone
        if config.recurrent is not None and config.recurrent.layers[i]:
            yield from _recurrent(config, config.recurrent, weights, at)
        elif config.latent is not None:
            yield from _latent(config, config.latent, weights, at + "self_attn.")
        elif config.varied is not None:
            yield from _sized(config, config.varied, i, weights, at)
        elif not (alone and alone[i]):
            yield from _attention(config, weights, at + "self_attn.")
        if alone and not alone[i]:
            continue
        if config.sparse[i]:
            assert config.moe is not None
            yield from _experts(config, config.moe, weights, at)
        if not config.sparse[i] or (config.moe is not None and config.moe.beside_mlp):
            yield from _mlp(config, config.inner_of(i), weights, at + "mlp.")


def _attention(config: DecoderConfig, weights: Weights, at: str) -> Iterator[tuple[str, Shape]]:
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    sizes = {"q": queries * (2 if config.gated_attention else 1), "k": keys, "v": keys}
    if f"{at}qkv_proj.weight" in weights:
        sizes = {"qkv": queries + 2 * keys}
    for name, size in sizes.items():
        yield from _with_bias(weights, f"{at}{name}_proj", size, config.width)
    yield from _with_bias(weights, f"{at}o_proj", config.width, queries)
    if config.qk_norm is not None:
        whole = config.qk_norm == "all"
        for name, size in (("q", queries), ("k", keys)):
            yield f"{at}{name}_norm.weight", (size if whole else config.head_dim,)
    if config.sinks:
        yield f"{at}sinks", (config.heads,)


def _latent(config: DecoderConfig, latent: LatentConfig, weights: Weights, at: str) -> Iterator[tuple[str, Shape]]:
    width, queries = config.width, config.heads * (latent.key_dim + latent.rope_dim)
    if latent.query_rank is None:
        yield at + "q_proj.weight", (queries, width)
    else:
        yield from _with_bias(weights, at + "q_a_proj", latent.query_rank, width)
        yield at + "q_a_layernorm.weight", (latent.query_rank,)
        yield at + "q_b_proj.weight", (queries, latent.query_rank)
    yield from _with_bias(weights, at + "kv_a_proj_with_mqa", latent.row, width)
    yield at + "kv_a_layernorm.weight", (latent.rank,)
    yield at + "kv_b_proj.weight", (config.heads * (latent.key_dim + latent.value_dim), latent.rank)
    yield from _with_bias(weights, at + "o_proj", width, config.heads * latent.value_dim)


def _sized(
    config: DecoderConfig, varied: VariedConfig, index: int, weights: Weights, layer: str
) -> Iterator[tuple[str, Shape]]:
    at, width, (kv_heads, dim) = layer + "self_attn.", config.width, varied.sizes[index]
    queries, keys = config.heads * dim, kv_heads * dim
    yield from _with_bias(weights, at + "q_proj", queries, width)
    yield from _with_bias(weights, at + "o_proj", width, queries)
    yield at + "q_norm.weight", (dim,)
    own: dict[str, Shape] = {"k_proj": (keys, width), "v_proj": (keys, width), "k_norm": (dim,)}
    if varied.keys_are_values[index]:
        del own["v_proj"]
    for name, shape in own.items():  # layers that read those of another may have their own in the file, unread
        if varied.owns[index] or f"{at}{name}.weight" in weights:
            yield f"{at}{name}.weight", shape
        if f"{at}{name}.bias" in weights:
            yield f"{at}{name}.bias", shape[:1]
    yield layer + "layer_scalar", (1,)
    if inputs := varied.input_width:
        yield layer + "per_layer_input_gate.weight", (inputs, width)
        yield layer + "per_layer_projection.weight", (width, inputs)
        yield layer + "post_per_layer_input_norm.weight", (width,)


def _recurrent(whole: DecoderConfig, config: RecurrentConfig, weights: Weights, at: str) -> Iterator[tuple[str, Shape]]:
    width = whole.width
    if config.kind == "short_conv":
        yield from _with_bias(weights, at + "conv.in_proj", 3 * width, width)
        yield from _with_bias(weights, at + "conv.out_proj", width, width)
        yield at + "conv.conv.weight", (width, 1, config.kernel)
        if f"{at}conv.conv.bias" in weights:
            yield at + "conv.conv.bias", (width,)
        return
    keys, values = config.key_heads * config.key_dim, config.value_heads * config.value_dim
    if config.kind == "mamba2":
        at += "mamba."
        yield from _with_bias(weights, at + "in_proj", 2 * values + 2 * keys + config.value_heads, width)
        yield from _with_bias(weights, at + "out_proj", width, values)
        if whole.file_name(f"{at}conv1d.bias") in weights:
            yield at + "conv1d.bias", (2 * keys + values,)
        yield at + "D", (config.value_heads,)
        yield at + "norm.weight", (values,)
    else:
        at += "linear_attn."
        yield from _delta_net(config, width, weights, at)
    yield at + "conv1d.weight", (2 * keys + values, 1, config.kernel)
    yield at + "A_log", (config.value_heads,)
    yield at + "dt_bias", (config.value_heads,)


def _delta_net(config: RecurrentConfig, width: int, weights: Weights, at: str) -> Iterator[tuple[str, Shape]]:
    keys, values = config.key_heads * config.key_dim, config.value_heads * config.value_dim
    sizes = {"qkv": 2 * keys + values, "z": values, "b": config.value_heads, "a": config.value_heads}
    if f"{at}in_proj_qkvz.weight" in weights:
        sizes = {"qkvz": 2 * keys + 2 * values, "ba": 2 * config.value_heads}
    yield from ((f"{at}in_proj_{name}.weight", (size, width)) for name, size in sizes.items())
    yield at + "norm.weight", (config.value_dim,)
    yield at + "out_proj.weight", (width, values)


def _mlp(config: DecoderConfig, inner: int, weights: Weights, at: str) -> Iterator[tuple[str, Shape]]:
    sizes, width = {"gate": inner, "up": inner} if config.gated else {"up": inner}, config.width
    if config.file_name(f"{at}gate_up_proj.weight") in weights:
        sizes = {"gate_up": 2 * inner}
    for name, size in sizes.items():
        yield from _with_bias(weights, f"{at}{name}_proj", size, width)
    yield from _with_bias(weights, f"{at}down_proj", width, inner)


def _with_bias(weights: Weights, name: str, outputs: int, inputs: int) -> Iterator[tuple[str, Shape]]:
    """A matrix, and its bias where there is one."""
    yield f"{name}.weight", (outputs, inputs)
    if f"{name}.bias" in weights:
        yield f"{name}.bias", (outputs,)


def _experts(config: DecoderConfig, moe: MoeConfig, weights: Weights, at: str) -> Iterator[tuple[str, Shape]]:
    width = config.width
    old = f"{at}block_sparse_moe.gate.weight" in weights
    at += "block_sparse_moe." if old else "mlp."
    yield at + "gate.weight", (moe.experts, width)
    if config.file_name(at + "experts.gate_up_proj") in weights:
        yield at + "experts.gate_up_proj", (moe.experts, 2 * moe.inner, width)
        yield at + "experts.down_proj", (moe.experts, width, moe.inner)
    else:
        old_names = f"{at}experts.0.w1.weight" in weights
        into, out = (("w1", "w3"), "w2") if old_names else (("gate_proj", "up_proj"), "down_proj")
        for i in range(moe.experts):
            for name in into:
                yield f"{at}experts.{i}.{name}.weight", (moe.inner, width)
            yield f"{at}experts.{i}.{out}.weight", (width, moe.inner)
    if moe.biases:
        yield at + "gate.bias", (moe.experts,)
        for i in range(moe.experts):
            sizes = {"gate_proj": moe.inner, "up_proj": moe.inner, "down_proj": width}
            yield from ((f"{at}experts.{i}.{name}.bias", (size,)) for name, size in sizes.items())
    if moe.shared_inner is not None:
        yield from _mlp(config, moe.shared_inner, weights, at + "shared_expert.")
        if moe.shared_gate:
            yield at + "shared_expert_gate.weight", (1, width)
    if moe.sigmoid:
        yield at + "gate.e_score_correction_bias", (moe.experts,)
