"""MtpDrafter: drafts with a multi-token-prediction layer, as DeepSeek-V3 and Qwen3-Next checkpoints bring one.

The layer reads the target's last hidden row of token t and the embedding of token t + 1, each behind a norm of its
own, side by side through one projection; behind it is an ordinary layer, a norm, and the target's LM head. It is run
again on its own output to draft further, so all else is as in EAGLE-1. Of several such layers the first is used.

Names are read in two styles. DeepSeek-V3 puts the layer behind the target's last (`model.layers.L.enorm`, `hnorm`,
`eh_proj`, `shared_head.norm`, `shared_head.head`), and a step reads the output of the one before it as it is.
Qwen3-Next has `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden`, `mtp.fc`, `mtp.layers.0`, `mtp.norm`, and a
step reads the normed output. Layers of another kind (compressed or gated attention, experts) are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.core.errors import DamagedFile, InvalidInput, UnsupportedModel
from forerun.drafters.heads.base import Sizes, head_dtype
from forerun.drafters.heads.eagle import EagleDrafter
from forerun.drafters.heads.eagle_head import Attend, EagleConfig, EagleHead, Kind
from forerun.drafters.heads.formats import (
    check_weight,
    read_config,
    read_tensors,
    settings_in,
    write_config,
    write_shards,
)
from forerun.models.base import Target
from forerun.models.layers import rms_norm

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(enorm|hnorm|eh_proj)\.weight")
_BEHIND = {"shared_head.norm.": "norm.", "shared_head.head.": "lm_head.", "eh_proj.": "fc."}
_QWEN = {
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "layers.0.": "midlayer.",
    "shared_head.": "lm_head.",
}
_BESIDE = ("enorm.", "hnorm.", "fc.", "norm.", "lm_head.", "embed_tokens.", "d2t", "t2d")  # the layer itself
_OTHER_KINDS = ("kv_a_proj", "q_a_proj", "mlp.experts", "mlp.gate.weight", "mlp.shared_expert")


class MtpHead(EagleHead):
    """A multi-token-prediction layer, run as an EAGLE head is."""

    def run(self, tokens: Tensor, carried: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        eps = self.config.norm_eps
        assert self._enorm is not None and self._hnorm is not None  # noqa: PT018
        embedded = rms_norm(self._embed(tokens), self._enorm, eps)
        before = rms_norm(carried.to(self.dtype), self._hnorm, eps)
        x = self._through_fc(torch.cat((embedded, before), -1))
        return self._layers[0].behind(x, self._rotations_at(positions), attend)


class MtpDrafter(EagleDrafter):
    """EAGLE-2's drafting, a tree that follows confidence, with a checkpoint's own layer."""

    kind: Kind = "mtp"
    dynamic = True

    @classmethod
    def read(cls, folder: Path) -> tuple[EagleConfig, dict[str, Tensor]]:
        return read_mtp(folder)

    @classmethod
    def load(cls, folder: Path, target: Target) -> MtpHead:
        return load_mtp(folder, target)


def load_mtp(folder: Path, target: Target) -> MtpHead:
    """The layer in a folder, which may be the target's own checkpoint, for this target."""
    config, weights = read_mtp(folder)
    shared = target.shared()
    return MtpHead(config, weights, shared, dtype=head_dtype(target, shared), device=target.device)


def read_mtp(folder: Path) -> tuple[EagleConfig, dict[str, Tensor]]:
    """Shape and weights under our names: fc, enorm, hnorm, midlayer.*, norm; embedding and LM head where stored."""
    values = read_config(folder)
    weights, qwen = _read_layer(folder)
    _must_be_plain(folder, values, weights)
    if qwen and str(values.get("model_type", "")).startswith("qwen3_next"):  # there a norm stores weight - 1
        weights = {n: w + 1.0 if n.endswith("norm.weight") else w for n, w in weights.items()}
    config = EagleConfig.from_json(values, "mtp")
    rows = len(weights["lm_head.weight"]) if "lm_head.weight" in weights else config.draft_vocab_size
    config = replace(config, norm_output=qwen, draft_vocab_size=rows)
    for name, shape in expected_shapes(config).items():
        if name in weights or "_norm.weight" not in name:
            check_weight(folder, weights, name, shape)
    return config, weights


def write_mtp(folder: Path, config: EagleConfig, weights: Mapping[str, Tensor]) -> None:
    """A trained layer in DeepSeek-V3's names, behind a target of as many layers as its config says."""
    at = "model.layers.0."
    places = {ours: theirs for theirs, ours in _BEHIND.items()}
    named = dict[str, Tensor]()
    for name, weight in weights.items():
        start = next((ours for ours in places if name.startswith(ours)), "")
        inside = name.removeprefix("midlayer.") if not start else places[start] + name.removeprefix(start)
        named[name if name in ("d2t", "t2d") else at + inside] = weight
    values = config.to_json()
    ours = {**values["forerun"], "format": "mtp"}
    write_config(folder, {**values, "architectures": ["MtpModel"], "num_nextn_predict_layers": 1, "forerun": ours})
    write_shards(folder, named)


def expected_shapes(config: EagleConfig) -> Sizes:
    """What must be there, or may be: norms of heads, embedding, LM head and a reduced vocabulary."""
    width, dim = config.width, config.head_dim
    layer = config.layer_weights(width) | {"input_layernorm.weight": (width,)}
    layer |= {f"self_attn.{name}_norm.weight": (dim,) for name in "qk"}
    shapes: Sizes = {"fc.weight": (width, 2 * width)}
    shapes |= dict.fromkeys(("enorm.weight", "hnorm.weight", "norm.weight"), (width,))
    return shapes | {f"midlayer.{name}": size for name, size in layer.items()}


def _read_layer(folder: Path) -> tuple[dict[str, Tensor], bool]:
    """Weights of the first such layer under our names, and whether they had Qwen3-Next's; no others are read."""
    found = read_tensors(folder, wanted=lambda name: "mtp." in name)
    if found:
        bare = {name.rpartition("mtp.")[2]: weight for name, weight in found.items()}
        return {_our_name(name, _QWEN): weight for name, weight in bare.items()}, True
    marks = read_tensors(folder, wanted=lambda name: _LAYER.fullmatch(name) is not None)
    numbers = [int(match[1]) for name in marks if (match := _LAYER.fullmatch(name))]
    if not numbers:
        raise InvalidInput(
            f"{folder} carries no multi-token-prediction layer (no eh_proj, no mtp.fc); name another folder"
        )
    at, weights = f"layers.{min(numbers)}.", dict[str, Tensor]()
    named = read_tensors(folder, wanted=lambda n: n in ("d2t", "t2d") or n.removeprefix("model.").startswith(at))
    for name, weight in named.items():
        ours = _our_name(name.removeprefix("model.").removeprefix(at), _BEHIND)
        weights[ours if ours.startswith(_BESIDE) else f"midlayer.{ours}"] = weight
    return weights, False


def _our_name(name: str, places: Mapping[str, str]) -> str:
    start = next((theirs for theirs in places if name.startswith(theirs)), None)
    return name if start is None else places[start] + name.removeprefix(start)


def _must_be_plain(folder: Path, values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Refuse layers that compute something else than is known here."""
    other = next((name for name in weights if any(kind in name for kind in _OTHER_KINDS)), None)
    biased = next((name for name in weights if name.endswith("_proj.bias")), None)
    if other or biased:
        raise UnsupportedModel(
            f"the multi-token-prediction layer of {folder} has {other or biased!r}: only plain attention and a dense "
            "MLP are run here; train one with `forerun train mtp`"
        )
    try:
        dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
        heads, rope = values["num_attention_heads"] * dim, settings_in(values, "rope_parameters")
        partial = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    except (KeyError, TypeError, ValueError, ArithmeticError):
        raise DamagedFile(f"config.json of {folder} does not say how wide its heads are") from None
    queries = weights.get("midlayer.self_attn.q_proj.weight")
    if partial != 1.0 or (queries is not None and queries.dim() == 2 and len(queries) == 2 * heads):
        raise UnsupportedModel(
            f"the multi-token-prediction layer of {folder} has gated attention or rotates a part of each head, "
            "which is not run here; train one with `forerun train mtp`"
        )
