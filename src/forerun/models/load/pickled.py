"""PickledWeights: the `.bin` file of an encoder-decoder's folder, read as tensors alone.

The files of the Marian models are older than safetensors. torch reads them with its restricted unpickler, which builds
tensors and containers and calls nothing else; a file that wants more is refused. Decoders have other files, so theirs
are not read this way.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from forerun.core.errors import DamagedFile, brief
from forerun.models.load.weights import Weights

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

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]


def _load(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # the format before torch 1.6 cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True)
