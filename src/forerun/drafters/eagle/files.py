"""EAGLE heads on disk: the authors' layouts of EAGLE-1 and EAGLE-3, and that of speculators.

In memory the names are those of the authors' EAGLE-3 files (`fc`, `midlayer.*`, `norm`, `lm_head`, `d2t`, `t2d`),
whatever the folder holds. Layers behind the first are `layers.1.*` and so on, as vLLM and speculators name them; they
are ordinary layers, which read rows of the head's width. Embedding and LM head may be absent: the target shares its
own. A pickle is read only when asked for, and then as weights only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor

from forerun.drafters.eagle.config import NAMES, EagleConfig, Kind
from forerun.drafters.head_formats import read_config, read_tensors, write_config, write_shards
from forerun.drafters.head_shape import Sizes
from forerun.drafters.one_byte import in_bytes, widened
from forerun.errors import DamagedFile, InvalidInput
from forerun.heads import kind_of

Layout = Literal["eagle", "speculators"]


def read_head(
    folder: Path, *, kind: Kind | None = None, pickle: bool = False
) -> tuple[EagleConfig, dict[str, Tensor]]:
    """A head's config and weights, under our names; `kind` is what the caller wants to use it as."""
    values, weights = read_config(folder), read_tensors(folder, pickle=pickle)
    weights = {_our_name(name): weight for name, weight in weights.items()}
    weights = widened(weights)
    kind_found = kind_of(values, lambda: weights)
    if kind_found not in ("eagle", "eagle3"):
        raise InvalidInput(
            f"{folder} holds no EAGLE head (no fc and layer in it); try `forerun drafters check`"
        )
    found: Kind = "eagle3" if kind_found == "eagle3" else "eagle"
    if kind is not None and found != kind:
        raise InvalidInput(
            f"{folder} holds an {NAMES[found]} head, not an {NAMES[kind]} one; use drafter={found!r}"
        )
    config = EagleConfig.from_json(values, found)
    check_shapes(config, weights, folder)
    return config, weights


def write_head(
    folder: Path,
    config: EagleConfig,
    weights: Mapping[str, Tensor],
    layout: Layout = "eagle",
    *,
    one_byte: bool = False,
) -> None:
    """config.json and safetensors; a head of more than 15 MiB is cut into several files with an index.

    `one_byte` writes large matrices as int8 blocks with a scale each: only Forerun reads these.
    """
    if layout == "speculators" and config.kind != "eagle3":
        raise InvalidInput("the speculators layout is for EAGLE-3 heads; write an EAGLE-1 head as 'eagle'")
    write_config(folder, config.to_json() if layout == "eagle" else config.to_speculators_json())
    prefix = "midlayer." if config.kind == "eagle3" and layout == "eagle" else "layers.0."
    named = {name.replace("midlayer.", prefix): weight.contiguous().cpu() for name, weight in weights.items()}
    write_shards(folder, in_bytes(named) if one_byte else named)


def check_shapes(config: EagleConfig, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Every weight against the config, so that a wrong file is named here and not deep in a matrix product."""
    optional: Sizes = {
        "embed_proj.weight": (config.width, config.target_width),
        "fc.bias": (config.width,),
        "norm.weight": (config.width,),
    }
    for name in weights:
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        if layer.isdecimal() and int(layer) >= config.depth:
            raise DamagedFile(
                f"{folder} has a weight {name!r}, but its head has {config.depth} layers (num_hidden_layers)"
            )
    config.check(folder, weights, expected_shapes(config), optional)


def expected_shapes(config: EagleConfig) -> Sizes:
    """What must be there; embedding, LM head and vocabulary may be."""
    width, layers = config.width, max(1, len(config.layers) or 3)
    fused = layers * config.target_width if config.kind == "eagle3" else 2 * width
    layer = config.layer_weights(2 * width if config.kind == "eagle3" else width)
    shapes: Sizes = {"fc.weight": (width, fused)} | {f"midlayer.{name}": size for name, size in layer.items()}
    if config.kind == "eagle3":
        shapes |= {
            "midlayer.hidden_norm.weight": (width,),
            "midlayer.input_layernorm.weight": (width,),
            "norm.weight": (width,),
        }
        later = config.layer_weights(width) | {"input_layernorm.weight": (width,)}
        for i in range(1, config.depth):
            shapes |= {f"layers.{i}.{name}": size for name, size in later.items()}
        if config.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (config.target_width,) for i in range(layers)}
        if config.norm_before_fc:
            shapes["input_norm.weight"] = (fused,)
    return shapes


def _our_name(name: str) -> str:
    """The authors' EAGLE-3 name of a weight, from any of the layouts."""
    name = name.removeprefix("model.").removeprefix("eagle.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name
