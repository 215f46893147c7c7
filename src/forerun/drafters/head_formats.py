"""The files of a trained head: a config.json and safetensors in one folder.

Nothing is unpickled unless the caller says so, and then as weights only. A folder is read whole: heads are small.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import DamagedFile, InvalidInput, ModelNotFound, brief
from forerun.models.load.tensor_file import write_tensors

_SHARD_BYTES = 15 << 20  # small enough for strict hosts; one file where everything fits


def write_config(folder: Path, values: Mapping[str, Any]) -> None:
    """Make the folder, with its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a head's folder."""
    if not folder.is_dir():
        raise ModelNotFound(f"there is no folder {str(folder)!r}; give the folder of a trained head")
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFound(
            f"{folder} has no config.json; give the folder that holds the head's files"
        ) from None
    except (ValueError, OSError, RecursionError) as error:
        raise DamagedFile(f"{folder / 'config.json'} is not JSON ({brief(error)}); fetch it again") from None
    if not isinstance(values, dict):
        raise DamagedFile(f"{folder / 'config.json'} does not hold an object; fetch it again")
    return values


def read_tensors(
    folder: Path, *, pickle: bool = False, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """The tensors of a folder's safetensors files that are wanted; of its pickles only where that was asked for."""
    tensors: dict[str, Tensor] = {}
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys() if wanted(name)}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise DamagedFile(f"{file} cannot be read ({brief(error)}); fetch it again") from None
    pickles = [] if files else sorted([*folder.glob("*.bin"), *folder.glob("*.pt")])
    if pickles and not pickle:
        raise InvalidInput(
            f"{pickles[0]} is a pickle, which is not read by default; convert it with "
            "`forerun drafters import DIR OUT --pickle`"
        )
    for file in pickles:
        tensors |= torch.load(file, map_location="cpu", weights_only=True)
    if not files and not pickles:
        raise ModelNotFound(f"{folder} holds no safetensors file; give the folder of a trained head")
    return tensors


def settings_in(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The settings under a key of a config; none where the key is absent, ValueError where it holds something else."""
    found = values.get(key) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{key} = {found!r:.60}")
    return found


def size_in(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A count or width in a config: a whole number from 1; ValueError where it cannot be one."""
    value = values[key] if default is None else values.get(key) or default
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ValueError(f"{key} = {value!r:.60}")
    return value


def rates_in(ours: Mapping[str, Any]) -> tuple[tuple[float, ...], ...]:
    """[levels][ranks] how often each rank was right, as our trainer measured it."""
    rates = tuple(tuple(map(float, row)) for row in ours.get("rates", ()))
    if not all(0.0 <= rate <= 1.0 for row in rates for rate in row):
        raise ValueError("rates outside 0 to 1")
    return rates


def check_weight(folder: Path, weights: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> None:
    """Raise where a weight that must have this shape is missing or has another."""
    if name not in weights:
        raise DamagedFile(f"{folder} has no weight {name!r}; is a file missing?")
    if tuple(weights[name].shape) != shape:
        given = tuple(weights[name].shape)
        raise DamagedFile(f"weight {name!r} of {folder} is {given} but its config says {shape}")


def write_shards(folder: Path, tensors: Mapping[str, Tensor], stem: str = "model") -> None:
    """One safetensors file, or several of at most 15 MiB (a larger tensor has one to itself) and an index."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if used and used + size > _SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += size
    for stale in folder.glob(f"{stem}*.safetensors"):
        stale.unlink()
    if len(shards) == 1:
        write_tensors(folder / f"{stem}.safetensors", shards[0])
        return
    places: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        name = f"{stem}-{i:05}-of-{len(shards):05}.safetensors"
        write_tensors(folder / name, shard)
        places |= dict.fromkeys(shard, name)
    index = {"metadata": {}, "weight_map": places}
    (folder / f"{stem}.safetensors.index.json").write_text(
        json.dumps(index, indent=1) + "\n", encoding="utf-8"
    )
