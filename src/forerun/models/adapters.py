"""LoRA adapters: files of PEFT's form, and adapters beside a base, many in one batch.

`adapter_config.json` names the base, `adapter_model.safetensors` holds two small matrices per changed weight, whose
product is added when that weight is loaded: then the folder is a model of its own. Variants that compute something else
are refused. Beside a base, changes are added to the rows of single sequences. A sequence holds the adapter that it was
submitted with: one that is unloaded or evicted while it writes serves it to its end.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from os.path import expanduser
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from forerun.core.errors import DamagedFile, InvalidInput, ModelNotFound, UnknownName, UnsupportedModel, brief
from forerun.core.types import LoadedAdapter
from forerun.models.base import Target
from forerun.models.config import DecoderConfig
from forerun.models.load.tokenizer import read_json
from forerun.models.load.weights import Weights, write_tensors

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_BEFORE, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_OTHER = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out", "layer_replication",
          "alora_invocation_tokens", "use_qalora")  # fmt: skip
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # how changes began: the base was changed as well


def is_adapter(folder: Path) -> bool:
    """Does the folder hold an adapter, and no model?"""
    return (folder / SETTINGS).is_file() and not (folder / "config.json").is_file()


@dataclass(frozen=True, slots=True)
class Adapter:
    base: str  # the base's name, path or hub id
    rank: int
    scale: float
    changes: dict[str, tuple[Tensor, Tensor]]  # weight -> down [r, in], up [out, r]

    @classmethod
    def read(cls, folder: Path) -> Adapter:
        if not (folder / SETTINGS).is_file():
            raise ModelNotFound(f"{folder} holds no adapter: there is no {SETTINGS} of PEFT's in it")
        values = read_json(folder / SETTINGS)
        unknown = [name for name in _OTHER if values.get(name)]
        if str(values.get("init_lora_weights")).startswith(_OTHER_BASE):
            unknown.append("init_lora_weights")
        if values.get("peft_type") != "LORA" or unknown or values.get("bias", "none") != "none":
            what = ", ".join(unknown) or f"type {values.get('peft_type')!r:.40}, bias {values.get('bias')!r:.40}"
            raise UnsupportedModel(f"{folder} is an adapter of a kind that is not known here ({what})")
        try:
            base, rank = str(values["base_model_name_or_path"]), int(values["r"])
            alpha = float(values["lora_alpha"])
            scale = alpha / (math.sqrt(rank) if values.get("use_rslora") else rank)
            tensors = load_file(folder / TENSORS)
        except (KeyError, TypeError, ValueError, ArithmeticError, OSError, SafetensorError) as error:
            raise DamagedFile(f"the adapter in {folder} is damaged ({brief(error)}); fetch it again") from None
        if not abs(scale) < 3e38 or not all(_is_finite(one) for one in tensors.values()):
            raise DamagedFile(f"the adapter in {folder} is damaged (numbers that are not finite); fetch it again")
        return cls(base, rank, scale, _pairs(folder, tensors, rank))

    def write(self, folder: Path) -> None:
        modules = sorted({name.removesuffix(".weight").rsplit(".", 1)[-1] for name in self.changes})
        values = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": self.base, "r": self.rank,
            "lora_alpha": self.scale * self.rank, "target_modules": modules, "bias": "none", "inference_mode": True,
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SETTINGS).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        tensors: dict[str, Tensor] = {}
        for name, pair in self.changes.items():
            for end, matrix in zip((_DOWN, _UP), pair, strict=True):
                tensors[_BEFORE + name.removesuffix(".weight") + end] = matrix.detach().cpu().contiguous()
        write_tensors(folder / TENSORS, tensors)


class AdaptedWeights(Weights):
    def __init__(self, base: Weights, adapter: Adapter) -> None:
        self.base, self.adapter, self.names = base, adapter, base
        for name, (down, up) in adapter.changes.items():
            shape = (len(up), down.shape[1])
            if name not in base or base.shape(name) != shape:
                raise DamagedFile(
                    f"the adapter changes {name[:80]!r} of {shape}, which {adapter.base} does not have: it is another "
                    "model's"
                )

    def shape(self, name: str) -> tuple[int, ...]:
        return self.base.shape(name)

    def __getitem__(self, name: str) -> Tensor:
        weight = self.base[name]
        if name not in self.adapter.changes:
            return weight
        down, up = self.adapter.changes[name]
        return (weight.float() + self.adapter.scale * (up.float() @ down.float())).to(weight.dtype)


def _is_finite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.float().isfinite().all())


def _pairs(folder: Path, tensors: Mapping[str, Tensor], rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The two matrices of every changed weight."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, down in tensors.items():
        stem = name.removesuffix(_DOWN)
        up = tensors.get(stem + _UP)
        if stem == name:
            if not name.endswith(_UP) or name.removesuffix(_UP) + _DOWN not in tensors:
                raise DamagedFile(f"{folder / TENSORS} holds {name[:80]!r}, which is no part of a LoRA; fetch it again")
            continue
        if up is None or down.dim() != 2 or up.dim() != 2 or len(down) != rank or up.shape[1] != rank:
            raise DamagedFile(f"{folder / TENSORS}: {stem[:80]!r} has no two matrices of rank {rank}; fetch it again")
        weight = stem.removeprefix(_BEFORE) + ".weight"
        if weight in found:
            raise DamagedFile(f"{folder / TENSORS} changes {weight[:80]!r} twice; fetch it again")
        found[weight] = down, up
    if not found:
        raise DamagedFile(f"{folder / TENSORS} changes nothing; fetch it again")
    return found


log = logging.getLogger(__name__)
MOST_RANK = 256
_WEIGHT = re.compile(r"(?:.*\.)?layers\.(0|[1-9]\d{0,3})\.(?:self_attn|mlp)\.(\w+)_proj\.weight")
_SIZED = re.compile(r".*?(?<![a-z0-9])\d+(?:\.\d+)?[bm](?![a-z0-9])")  # a model's name, up to its size
_KEYS = count(1)  # of adapters as they are loaded: one that is loaded again shares no cached prompts with the first


def own_head(given: str) -> tuple[str, str | None]:
    """The folders of an adapter and of a head of its own, from FOLDER or FOLDER,head=FOLDER."""
    folder, mark, head = given.partition(",head=")
    return folder, head if mark else None


def is_another_model(one: str, other: str) -> bool:
    """Do two paths or hub ids name models of which one cannot be the other? Only names that say a size tell that."""
    found = [_name_in(path) for path in (one, other)]
    if None in found:
        return False
    first, second = (re.sub(r"[^a-z0-9]", "", name or "") for name in found)
    return first not in second and second not in first


def _name_in(path: str) -> str | None:
    """Up to the size, of the last part that has one: what comes behind it is how a model was trained or packed."""
    parts = re.split(r"[/\\]|--", path.lower())
    return next((found[0] for part in reversed(parts) if (found := _SIZED.match(part)) is not None), None)


class Part(NamedTuple):
    """The change of one projection in one layer."""

    layer: int
    name: str  # q, k, v, o, gate, up or down
    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank]


@runtime_checkable
class TakesAdapters(Protocol):
    """A target that adds adapters' changes to rows of its passes."""

    def load_adapter(self, name: str, key: int, adapter: Adapter) -> LoadedAdapter:
        """An adapter ready for passes; sequences whose `adapter` it is are computed with it."""


def parts_of(adapter: Adapter, config: DecoderConfig) -> Iterator[Part]:
    """The changes of an adapter by layer and projection; weights that are one on disk are taken apart."""
    if adapter.rank > MOST_RANK:
        raise UnsupportedModel(f"an adapter of rank {adapter.rank} is too large: {MOST_RANK} is the most")
    if config.special is not None:
        raise UnsupportedModel(f"{config.family} takes no adapters beside a base; load the adapter's folder as a model")
    shapes, seen = _shapes(config), set[tuple[int, str]]()
    for name, (down, up) in adapter.changes.items():
        found = _WEIGHT.fullmatch(name)
        layer, which = (int(found[1]), found[2]) if found is not None else (-1, "")
        in_experts = 0 <= layer < config.layers and config.sparse[layer] and which in ("gate", "up", "down", "gate_up")
        if which not in shapes or in_experts:
            raise UnsupportedModel(
                f"the adapter changes {name[:80]!r}: beside a base only projections of attention and of MLPs without "
                "experts are changed; load the adapter's folder as a model instead"
            )
        outputs, inputs = shapes[which]
        if seen & (parts := {(layer, part) for part in outputs}):
            raise DamagedFile(f"the adapter changes what {name[:80]!r} is twice; fetch it again")
        seen |= parts
        if layer >= config.layers or (len(up), down.shape[1]) != (sum(outputs.values()), inputs):
            raise DamagedFile(
                f"the adapter changes {name[:80]!r} of {(len(up), down.shape[1])}, which the base does not have: it is "
                "another model's"
            )
        rows = torch.split(up.float(), list(outputs.values()))
        for part, own in zip(outputs, rows, strict=True):
            yield Part(layer, part, down.float(), own)


def _shapes(config: DecoderConfig) -> dict[str, tuple[dict[str, int], int]]:
    """Of the projections that may be changed: the outputs of each part, and the inputs."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention, mlp = {"q": queries, "k": keys, "v": keys}, {"gate": config.inner, "up": config.inner}
    single = {name: ({name: size}, config.width) for name, size in (attention | mlp).items()}
    fused = {"qkv": (attention, config.width), "gate_up": (mlp, config.width)}
    return {**single, **fused, "o": ({"o": config.width}, queries), "down": ({"down": config.width}, config.inner)}


class AdapterPool:
    """Adapters by name, read from their folders; those used last stay in memory, up to a limit."""

    def __init__(self, target: Target, limit: int | None = None, base: str = "") -> None:
        """`limit`: bytes of adapters in memory, beside those that sequences hold; None = no limit.

        `base`: what the target was loaded from, where that is known.
        """
        self._target, self._limit, self._base = target, limit, base
        self._folders: dict[str, Path] = {}
        self._loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()  # the one used last is last
        # those that sequences hold, evicted or not
        self._held: WeakValueDictionary[str, LoadedAdapter] = WeakValueDictionary()
        self._lock = Lock()  # names are asked for by other threads

    @property
    def names(self) -> list[str]:
        return [*self._folders]

    def __contains__(self, name: str) -> bool:
        return name in self._folders

    @property
    def loaded(self) -> list[str]:
        return [*self._loaded]

    def add(self, name: str, folder: str) -> None:
        """Serve the adapter in this folder under a name; it is read now, so that damage is reported now."""
        where = Path(expanduser(own_head(folder)[0]))
        self._refuse_taken(name)  # before it is read, and again: another thread may have been faster
        loaded = self._read(name, where, is_new=True)
        with self._lock:
            self._refuse_taken(name)
            self._folders[name] = where
            self._keep(name, loaded)

    def remove(self, name: str) -> None:
        """Serve it no longer; sequences that have it keep it to their end."""
        with self._lock:
            if self._folders.pop(name, None) is None:
                raise self._unknown(name)
            self._loaded.pop(name, None)

    def get(self, name: str) -> LoadedAdapter:
        """The adapter of this name, read again where it was evicted and nobody holds it.

        Nobody waits for the reading but the caller: an engine's thread should find the adapter held by whoever asked
        for it before.
        """
        with self._lock:
            folder, found = self._folders.get(name), self._known(name)
        if folder is None:
            raise self._unknown(name)
        found = found or self._read(name, folder)
        with self._lock:
            if self._folders.get(name) is not folder:  # removed meanwhile, and perhaps another one has its name
                raise self._unknown(name)
            found = self._known(name) or found  # two that read it at once share one
            self._keep(name, found)
            return found

    def _known(self, name: str) -> LoadedAdapter | None:
        return self._loaded.get(name) or self._held.get(name)

    def _keep(self, name: str, adapter: LoadedAdapter) -> None:
        """As the one used last; others go, the longest unused first, until all fit the limit."""
        self._loaded[name] = self._held[name] = adapter
        self._loaded.move_to_end(name)
        while self._limit is not None and len(self._loaded) > 1:
            if sum(one.nbytes for one in self._loaded.values()) <= self._limit:
                break
            self._loaded.popitem(last=False)

    def _read(self, name: str, folder: Path, is_new: bool = False) -> LoadedAdapter:
        if not isinstance(self._target, TakesAdapters):
            raise UnsupportedModel(
                "adapters beside a base need our own CPU or GPU decoder; load the adapter's folder as a model"
            )
        adapter = Adapter.read(folder)
        loaded = self._target.load_adapter(name, next(_KEYS), adapter)
        if is_new and is_another_model(adapter.base, self._base):  # of the same shapes, or it would have been refused
            log.warning(
                "the adapter %r was made for the base %.200r, but this model is %r: its texts may be meaningless",
                name, adapter.base, self._base
            )  # fmt: skip
        return loaded

    def _refuse_taken(self, name: str) -> None:
        if name in self._folders:
            raise InvalidInput(f"an adapter named {name!r} is served already; unload it first, or choose another name")

    def _unknown(self, name: str) -> UnknownName:
        known = ", ".join(self._folders) or "none"
        return UnknownName(f"unknown adapter {name!r}; served: {known}")
