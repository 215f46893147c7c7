"""LoRA adapters: a folder in PEFT's form is a model of its own, its base's weights with low-rank changes added.

`adapter_config.json` names the base, `adapter_model.safetensors` holds two small matrices per changed weight, whose
product is added when that weight is loaded. The result is another target: nothing that was trained for the base is
looked up for it. Variants that compute something else are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from forerun.core.errors import DamagedFile, ModelNotFound, UnsupportedModel, brief
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
