"""The weights of a checkpoint under their Hugging Face names, loaded one at a time when asked for.

GGUF and safetensors files, and the `.bin` files of encoder-decoders: the Marian models are older than safetensors.
torch reads these with its restricted unpickler, which builds tensors and containers and calls nothing else.
"""

from __future__ import annotations

import json
import pickle
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.core.errors import DamagedFile, UnsupportedModel, brief
from forerun.models.families import Family
from forerun.models.load.gguf import GgufFile
from forerun.models.load.gguf_names import Origin, tensor_of
from forerun.models.load.quantized.scheme import Quantization
from forerun.models.load.quants import F32, Blocks, dequantize

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
        return weights.damaged(f"it has no tensor {weights.tensor(name)!r}")
    return DamagedFile(f"the checkpoint has no weight {name!r}: is a shard missing, or the config another's?")


def wrong_shape(
    weights: Mapping[str, Tensor], name: str, given: tuple[int, ...], shape: tuple[int, ...]
) -> DamagedFile:
    """The error where a weight has another shape than the model's settings say."""
    if isinstance(weights, GgufWeights):
        return weights.damaged(f"tensor {weights.tensor(name)!r} is {given} but its metadata say {shape}")
    return DamagedFile(f"weight {name!r} is {given} but the config says {shape}: are they of one model?")


def surplus_weights(weights: Mapping[str, Tensor], names: Sequence[str]) -> DamagedFile:
    """The error where a checkpoint holds weights that a model of its settings does not read."""
    if isinstance(weights, GgufWeights):
        such = f"{len(names)} of its tensors, such as {weights.tensor(names[0])!r}"
        return weights.damaged(f"{such}, are more than its metadata say")
    return DamagedFile(
        f"{len(names)} weights of the checkpoint, such as {names[0][:80]!r}, are more than its config says: are they "
        "of one model?"
    )


class GgufWeights(Weights):
    """From a GGUF file. `blocks` gives a weight still quantised, its rows in Hugging Face's order."""

    def __init__(
        self, file: GgufFile, origins: dict[str, Origin], family: Family, device: torch.device | str = "cpu"
    ) -> None:
        self.file, self.origins, self.family, self.device = file, origins, family, device
        self.names = origins

    def tensor(self, name: str) -> str:
        """What the file calls a weight, or would call it."""
        return self.origins[name].tensor if name in self.origins else tensor_of(self.file, name, self.family)

    def on(self, device: torch.device | str) -> GgufWeights:
        return GgufWeights(self.file, self.origins, self.family, device)

    def shape(self, name: str) -> tuple[int, ...]:
        origin = self.origins[name]
        shape = self.file.tensors[origin.tensor].shape
        shape = origin.shape or (shape if origin.expert is None else shape[1:])
        return shape if origin.half is None else (shape[0] // 2, *shape[1:])

    def kind(self, name: str) -> int:
        """The GGUF type of what `blocks` gives."""
        origin = self.origins[name]
        return F32 if origin.computed else self.file.tensors[origin.tensor].kind

    def blocks(self, name: str) -> Blocks:
        """The weight as the file packs it, or in float32 where its numbers are not those of the file."""
        if not self.origins[name].computed:
            return self._packed(name)
        return Blocks(F32, self.shape(name), self.on("cpu")[name].contiguous().view(-1).view(torch.uint8))

    def packed_kinds(self) -> set[int]:
        return {self.kind(name) for name in self.origins}

    def _packed(self, name: str) -> Blocks:
        """Taking an expert or reordering moves whole rows of blocks."""
        origin, shape = self.origins[name], self.shape(name)
        packed = self.file.blocks(origin.tensor)
        data = packed.data
        if origin.expert is not None:
            data = data.view(packed.shape[0], -1)[origin.expert]
        if origin.half is not None:
            data = data.view(2, -1)[origin.half]
        if origin.heads:
            if shape[0] % (2 * origin.heads) or data.numel() % shape[0]:
                raise self._no_heads(origin, shape[0], origin.heads)
            pairs = shape[0] // origin.heads // 2
            data = data.view(origin.heads, pairs, 2, -1).transpose(1, 2).reshape(-1)
        return Blocks(packed.kind, shape, data)

    def _no_heads(self, origin: Origin, rows: int, heads: int) -> DamagedFile:
        return self.damaged(f"{origin.tensor} has {rows} rows for {heads} heads")

    def damaged(self, what: str) -> DamagedFile:
        return DamagedFile(f"{self.file.path} is damaged: {what}; pull it again")

    def __getitem__(self, name: str) -> Tensor:
        origin = self.origins[name]
        if origin.values:
            keys, values = (dequantize(self.file.blocks(one), self.device) for one in (origin.tensor, origin.values))
            if keys.shape[0] != values.shape[0] or keys.shape[1] != values.shape[2]:
                raise self._no_heads(origin, values.shape[0], keys.shape[0])
            return torch.cat((keys.transpose(1, 2), values), 1).view(origin.shape)
        weight = dequantize(self._packed(name), self.device)
        if origin.negative_exp:
            return (-weight).log()
        return weight - 1 if origin.plus_one else weight


_FLOATS = ("BF16", "F16", "F32", "F64")


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

    def check_kinds(self) -> None:
        """Raise DamagedFile where a weight is quantised: no config says what its numbers stand for."""
        for name in self.names:
            if name.endswith(".weight") and (kind := self.kind(name)) not in _FLOATS:
                raise DamagedFile(
                    f"{self.folder} is damaged: {name[-80:]!r} is {kind}, and config.json has no quantization_config; "
                    "fetch it again"
                )

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
