"""LayerPlan: which of a target's layers the drafter `layer_skip` runs, and the file that says so.

The file is JSON: the number of the target's layers, how many of the first ones run, whose attention and whose MLP is
left out, and, where one was trained, the name of a safetensors file beside it with an exit adapter. The rest of it
(where the plan came from, what was measured) is for people.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.drafters.exit_adapter import ExitAdapter
from forerun.errors import DamagedFile, InvalidInput
from forerun.models.layer_subset import LayerSubset

FORMAT = "forerun-layers-1"
PLAN = "plan.json"  # its name in a folder of `forerun train early-exit`
KEPT = 2 / 3  # of the layers: where an exit is tried when nobody has searched for one


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Layers to run, and what stands between the last of them and the LM head; None = the target's final norm."""

    layers: LayerSubset
    adapter: ExitAdapter | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


def default_plan(layers: int) -> LayerPlan:
    """The first two thirds of a target's layers."""
    return LayerPlan(LayerSubset(max(1, round(layers * KEPT))))


def read_plan(given: str, layers: int) -> LayerPlan:
    """The plan of a file, or the first so many layers where a number is given; for a target of `layers` layers."""
    if re.fullmatch(r"\d+", given):
        return LayerPlan(_subset(given, layers, {"exit": int(given)}))
    path = Path(given).expanduser()
    path = path / PLAN if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(
            f"draft_layers={given}: there is no such file ({error.strerror}); `forerun layers search` makes one, "
            "and a number stands for that many of the first layers"
        ) from error
    except ValueError as error:
        raise DamagedFile(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise DamagedFile(f"{path} is not a plan of layers: its format is not {FORMAT!r}")
    if values.get("layers") != layers:
        raise InvalidInput(
            f"{path} was made for a model of {values.get('layers')} layers, and the target has {layers}: "
            "search again with `forerun layers search`"
        )
    adapter = values.get("adapter")
    if adapter is not None and (not isinstance(adapter, str) or Path(adapter).name != adapter):
        raise DamagedFile(f"{path}: adapter must be the name of a file beside it, not {adapter!r}")
    read = None if adapter is None else ExitAdapter.read(path.with_name(adapter))
    return LayerPlan(_subset(str(path), layers, values), read, values)


def write_plan(path: Path, plan: LayerPlan, layers: int) -> None:
    """Write a plan for a target of so many layers; its adapter goes beside it."""
    values: dict[str, Any] = {
        **plan.notes,
        "format": FORMAT,
        "layers": layers,
        "exit": plan.layers.end,
        "without_attention": sorted(plan.layers.without_attention),
        "without_mlp": sorted(plan.layers.without_mlp),
        "adapter": None if plan.adapter is None else path.with_suffix(".safetensors").name,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    if plan.adapter is not None:
        plan.adapter.write(path.with_suffix(".safetensors"))
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _subset(name: str, layers: int, values: Mapping[str, Any]) -> LayerSubset:
    end = values.get("exit")
    skipped = [values.get(key, []) for key in ("without_attention", "without_mlp")]
    whole = [
        type(end) is int,
        *(isinstance(some, list) and all(type(i) is int for i in some) for some in skipped),
    ]
    if not all(whole) or not 1 <= (end or 0) <= layers:
        raise InvalidInput(
            f"draft_layers={name}: exit must be 1 to {layers}, and skipped layers whole numbers"
        )
    attentions, mlps = (frozenset(some) for some in skipped)
    return LayerSubset(end or 0, without_attention=attentions, without_mlp=mlps)
