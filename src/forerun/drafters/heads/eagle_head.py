"""EagleHead: an EAGLE head's shape, files, weights, and a pass over any rows in torch.

Row t of the head is made of the target's feature of token t and the embedding of token t + 1, and predicts token t + 2.
Steps beyond the committed sequence use the head's own output as the feature. The caller decides what a row attends to.

EAGLE-1 (`eagle`) reads the target's last hidden row and predicts the next one, so that the target's own LM head turns
it into a law. EAGLE-3 (`eagle3`) reads the inputs of three layers, has its own LM head, over a reduced vocabulary, and
predicts no feature. EAGLE-2 is EAGLE-1's head with a dynamic tree. A multi-token-prediction layer (`mtp`,
forerun.drafters.heads.eagle) reads what EAGLE-1 does, behind norms.

In memory the names are those of the authors' EAGLE-3 files (`fc`, `midlayer.*`, `norm`, `lm_head`, `d2t`, `t2d`),
whatever the folder holds; speculators' layout is read too. Layers behind the first are `layers.1.*` and so on.
Embedding and LM head may be absent: the target shares its own.

TorchRunner: drafts with an EAGLE head in torch, on any device; the reference for the native one.

Rows that are new since a sequence's last draft are run with the target's true features; then one frontier per level is
written behind them, each node seen by its own descendants only. A row sees no further back than its layer reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.errors import DamagedFile, InvalidInput, UnsupportedModel
from forerun.core.types import Budget, Seq
from forerun.drafters.heads.base import HeadShape, LayerWeights, ObservedRows, Sizes, Tables, shape_in, windows_in
from forerun.drafters.heads.formats import (
    Matrix,
    config_of,
    in_bytes,
    read_config,
    read_tensors,
    readers,
    settings_in,
    size_in,
    widened,
    write_config,
    write_shards,
)
from forerun.drafters.heads.growth import LogitRanks
from forerun.heads import kind_of
from forerun.models.base import SharedWeights
from forerun.models.config import DecoderConfig
from forerun.models.layers import Rotations, gate, rms_norm, rotate_

# q [N, H, Dh], k and v [N, Hkv, Dh] of a layer, and which layer it is -> [N, H Dh]
Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class HeadLayer:
    """Weights under `prefix`, in one precision on one device, and a pass over any rows."""

    def __init__(
        self,
        config: HeadShape,
        weights: Mapping[str, Tensor],
        prefix: str,
        index: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config, self._index = config, index
        own = LayerWeights.read(config, *readers(weights, dtype, device, prefix))
        # exact: packed heads run natively
        matrices = own.qkv, own.o, own.gate_up, own.down
        self._qkv, self._o, self._gate_up, self._down = (Matrix(weight, packed=False) for weight in matrices)
        self._mlp_norm, self.input_norm, self.feature_norm = own.mlp_norm, own.input_norm, own.feature_norm
        self._qk_norm = own.qk_norm

    def run(self, x: Tensor, into: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        """Rows x [N, D], whose attention reads `into`, through the layer; x may be overwritten."""
        config, eps = self._config, self._config.norm_eps
        qkv = self._qkv.times(into).view(len(into), -1, config.head_dim)
        both = config.heads + config.kv_heads
        turned, v = qkv[:, :both], qkv[:, both:]
        if self._qk_norm is not None:
            turned = rms_norm(turned, self._qk_norm, eps)
        rotate_(torch.unflatten(turned, -1, (-1, 2)), rotations)
        x = self._o.add_to(x, attend(turned[:, : config.heads], turned[:, config.heads :], v, self._index))
        inner = gate(self._gate_up.times(rms_norm(x, self._mlp_norm, eps)), "silu")
        return self._down.add_to(x, inner)

    def behind(self, x: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        """As an ordinary layer, which reads the rows themselves behind its norm."""
        assert self.input_norm is not None
        return self.run(x, rms_norm(x, self.input_norm, self._config.norm_eps), rotations, attend)


Kind = Literal["eagle", "eagle3", "mtp"]
Shape = TypeVar("Shape", bound=HeadShape)
MOST_LAYERS = 64  # that a file may say it has
NAMES: Mapping[str, str] = {"eagle": "EAGLE-1", "eagle3": "EAGLE-3", "mtp": "MTP"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(HeadShape):
    """Layers on the target's features: one, or several in an EAGLE-3 head."""

    kind: Kind
    depth: int = 1  # layers of its own
    fc_norm: bool = False  # EAGLE-3.1: a norm on each feature before they are fused
    norm_output: bool = False  # EAGLE-3.1: the normed output is the next step's feature
    norm_before_fc: bool = False  # one norm over all features, side by side
    norm_before_residual: bool = False
    family: DecoderConfig | None = None  # MTP: the layer is one of this family (forerun.drafters.heads.eagle)

    @property
    def depends_on(self) -> int:
        """Rows, the last one included, that a draft behind the last row depends on."""
        return 1 + sum(self.reach(i) - 1 for i in range(self.depth))

    @property
    def prefixes(self) -> list[str]:
        """Of the weights of each layer."""
        return ["midlayer.", *(f"layers.{i}." for i in range(1, self.depth))]

    @classmethod
    def from_json(cls, values: Mapping[str, Any], kind: Kind) -> EagleConfig:
        """From a config.json in the authors' form, or in that of speculators; layers stay empty if not named."""
        with config_of("an EAGLE head's config"):
            ids = values.get("eagle_aux_hidden_state_layer_ids") or _nested_ids(values) or ()
            depth = _depth_in(values) if kind == "eagle3" else 1
            return cls(
                **shape_in(values),
                **_windows_in(values, kind, depth),
                kind=kind,
                depth=depth,
                layers=tuple(int(layer) for layer in ids) if kind == "eagle3" else (-1,),
                fc_norm=bool(values.get("fc_norm")),
                norm_output=bool(values.get("norm_output")),
                norm_before_fc=bool(values.get("norm_before_fc")),
                norm_before_residual=bool(values.get("norm_before_residual")),
            )

    def to_json(self) -> dict[str, Any]:
        """config.json in the authors' form, with what only we measure under a key of our own."""
        name = "LlamaForCausalLMEagle3" if self.kind == "eagle3" else "LlamaForCausalLMEagle"
        values = {
            "architectures": [name],
            **self.layer_json("llama", self.depth),
            **self.target_json(),
            "forerun": self.measured_json(),
        }
        return {**values, **self._eagle3_settings()}

    def to_speculators_json(self, speculative_tokens: int = 5) -> dict[str, Any]:
        """config.json in the form of speculators, which vLLM loads."""
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.7.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": speculative_tokens}],
                "verifier": {"name_or_path": self.target, "architectures": ["LlamaForCausalLM"]},
            },
            "transformer_layer_config": self.layer_json("llama", self.depth),
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_width,
            "embed_requires_grad": False,
            "forerun": self.measured_json(),
            **self._eagle3_settings(),
        }

    def _eagle3_settings(self) -> dict[str, Any]:
        if self.kind != "eagle3":
            return {}
        return {
            "eagle_aux_hidden_state_layer_ids": list(self.layers),
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "norm_before_fc": self.norm_before_fc,
            "norm_before_residual": self.norm_before_residual,
        }


def default_layers(layers: int) -> tuple[int, int, int]:
    """The inputs of layers 2, L/2 and L - 3: what EAGLE-3 heads read where their files do not say."""
    return (min(2, layers), layers // 2, max(0, layers - 3))


def with_layers(config: Shape, folder: Path, shared: SharedWeights | None) -> Shape:
    """The config of a head; layers that its file does not name are the usual ones of this target."""
    if config.layers:
        return config
    if shared is None or not shared.layers:
        raise InvalidInput(f"{folder} does not say which hidden layers its head reads; add them to config.json")
    return replace(config, layers=default_layers(len(shared.layers)))


def _depth_in(values: Mapping[str, Any]) -> int:
    depth = size_in({**values, **settings_in(values, "transformer_layer_config")}, "num_hidden_layers", 1)
    if depth > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers = {depth}")
    return depth


def _windows_in(values: Mapping[str, Any], kind: Kind, depth: int) -> dict[str, Any]:
    own = {**values, **settings_in(values, "transformer_layer_config")}
    if kind == "mtp" and len(own.get("layer_types") or ()) != depth:
        return {}  # those of the layers of the target, whose config this is
    return windows_in(own, depth)


def _nested_ids(values: Mapping[str, Any]) -> Any:
    return settings_in(values, "eagle_config").get("eagle_aux_hidden_state_layer_ids")


class EagleHead:
    def __init__(
        self,
        config: EagleConfig,
        weights: Mapping[str, Tensor],
        shared: SharedWeights | None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)

        get, maybe = readers(weights, dtype, self.device)

        def matrix(weight: Tensor) -> Matrix:  # exact: packed heads run natively
            return Matrix(weight, packed=False)

        with torch.no_grad(), torch.inference_mode(False):
            self._fc, self._fc_bias = matrix(get("fc.weight")), maybe("fc.bias")
            self._layers = self._read_layers(weights)
            self._norm = maybe("norm.weight")
            # of a multi-token-prediction layer
            self._enorm, self._hnorm = maybe("enorm.weight"), maybe("hnorm.weight")
            self._fc_norms = [get(f"fc_norm.{i}.weight") for i in range(len(config.layers)) if config.fc_norm]
            self._input_norm = get("input_norm.weight") if config.norm_before_fc else None
            tables = Tables(config, weights, shared, dtype, self.device)
            self.vocabulary, self._embed, self._lm_head = tables.vocabulary, tables.embed, matrix(tables.head)
        self._rotations = Rotations(config.rope if config.family is None else config.family.ropes[0], self.device)
        self._rotation_table = self._rotations.at(torch.arange(256, device=self.device), 0)  # [P, 1, R]

    def _read_layers(self, weights: Mapping[str, Tensor]) -> list[HeadLayer]:
        made = enumerate(self.config.prefixes)
        return [HeadLayer(self.config, weights, at, i, self.dtype, self.device) for i, at in made]

    def fuse(self, features: Tensor) -> Tensor:
        """[N, F] of the target -> [N, D], what a row carries of them."""
        if self.config.kind != "eagle3":
            return features
        features = features.to(self.dtype)
        if self._input_norm is not None:
            features = rms_norm(features, self._input_norm, self.config.norm_eps)
        if self._fc_norms:
            parts = zip(features.chunk(len(self._fc_norms), -1), self._fc_norms, strict=True)
            features = torch.cat([rms_norm(part, norm, self.config.norm_eps) for part, norm in parts], -1)
        return self._through_fc(features)

    def run(self, tokens: Tensor, carried: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass over N rows -> their output [N, D], before any norm."""
        config, eps, first = self.config, self.config.norm_eps, self._layers[0]
        embedded, rotations = self._embed(tokens), self._rotations_at(positions)
        if config.kind == "eagle":
            into = self._through_fc(torch.cat((embedded, carried.to(self.dtype)), -1))
            x = into.clone()
        else:
            assert first.input_norm is not None and first.feature_norm is not None  # noqa: PT018
            normed = rms_norm(carried, first.feature_norm, eps)
            into = torch.cat((rms_norm(embedded, first.input_norm, eps), normed), -1)
            x = normed.clone() if config.norm_before_residual else carried.clone()
        x = first.run(x, into, rotations, attend)
        for layer in self._layers[1:]:
            x = layer.behind(x, rotations, attend)
        return x

    def logits(self, out: Tensor) -> Tensor:
        """[N, Vd] fp32 of what follows the rows with these outputs."""
        return self._lm_head.times(self._normed(out)).float()

    def carry(self, out: Tensor) -> Tensor:
        """What the next row carries after a row with this output."""
        return self._normed(out) if self.config.norm_output else out

    def _normed(self, out: Tensor) -> Tensor:
        return out if self._norm is None else rms_norm(out, self._norm, self.config.norm_eps)

    def _rotations_at(self, positions: Tensor) -> Tensor:
        last = int(positions.max()) if self.device.type == "cpu" else len(self._rotation_table)
        if self.device.type != "cpu":
            return self._rotations.at(positions, 0)
        if last >= len(self._rotation_table):
            self._rotation_table = self._rotations.at(torch.arange(2 * (last + 1)), 0)
        return self._rotation_table[positions]

    def _through_fc(self, rows: Tensor) -> Tensor:
        out = self._fc.times(rows)
        return out if self._fc_bias is None else out.add_(self._fc_bias)


Layout = Literal["eagle", "speculators"]


def read_head(folder: Path, *, kind: Kind | None = None, pickle: bool = False) -> tuple[EagleConfig, dict[str, Tensor]]:
    """A head's config and weights, under our names; `kind` is what the caller wants to use it as."""
    values, weights = read_config(folder), read_tensors(folder, pickle=pickle)
    weights = {_our_name(name): weight for name, weight in weights.items()}
    weights = widened(weights)
    kind_found = kind_of(values, lambda: weights)
    if kind_found not in ("eagle", "eagle3"):
        raise InvalidInput(f"{folder} holds no EAGLE head (no fc and layer in it); try `forerun drafters check`")
    found: Kind = "eagle3" if kind_found == "eagle3" else "eagle"
    if kind is not None and found != kind:
        raise InvalidInput(f"{folder} holds an {NAMES[found]} head, not an {NAMES[kind]} one; use drafter={found!r}")
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
    named = {name.replace("midlayer.", prefix): weight for name, weight in weights.items()}
    write_shards(folder, in_bytes(named) if one_byte else named)


def check_shapes(config: EagleConfig, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Every weight against the config, so that a wrong file is named here and not deep in a matrix product."""
    optional: Sizes = {
        "embed_proj.weight": (config.width, config.target_width),
        "fc.bias": (config.width,),
        "norm.weight": (config.width,),
    } | {f"{at}self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk" for at in config.prefixes}
    if biased := next((name for name in weights if name.endswith("_proj.bias")), None):
        raise UnsupportedModel(f"the layers of {folder} have biases ({biased!r}), which no EAGLE head of ours has")
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


class HeadCache:
    """Keys and values of each layer of many sequences, a row of slots each, of which the first `length` are valid."""

    def __init__(self, config: EagleConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = config.kv_heads, config.head_dim
        empty = (config.depth, 2, 0, self._shape[0], 0, self._shape[1])  # [L, 2, rows, Hkv, slots, Dh]
        self.data = torch.zeros(empty, dtype=dtype, device=device)
        self.rows: dict[int, int] = {}
        self.lengths: dict[int, int] = {}

    def admit(self, seq_id: int, slots: int) -> None:
        """A row for a sequence, with room for `slots` slots."""
        if seq_id not in self.rows:
            free = set(range(len(self.rows) + 1)) - set(self.rows.values())
            self.rows[seq_id], self.lengths[seq_id] = min(free), 0
        depth, _, rows, _, have, _ = self.data.shape
        need = self.rows[seq_id] + 1
        if need > rows or slots > have:
            slots = max(slots + slots // 2, have)
            data = self.data.new_zeros(depth, 2, max(need, rows), self._shape[0], slots, self._shape[1])
            data[:, :, :rows, :, :have] = self.data
            self.data = data

    def release(self, seq_id: int) -> None:
        self.rows.pop(seq_id, None)
        self.lengths.pop(seq_id, None)

    def base(self, seq_id: int) -> int:
        """Where a sequence's slots start, counted in slots of its first key head."""
        return self.rows[seq_id] * self._shape[0] * self.data.shape[4]

    def write(self, ids: Sequence[int], first: Tensor, keys: Tensor, values: Tensor, layer: int) -> None:
        """Keys and values [B, R, Hkv, Dh] of a layer into the slots from `first` [B] on."""
        slots = first[:, None] + torch.arange(keys.shape[1], device=first.device)  # [B, R]
        rows = torch.tensor([self.rows[i] for i in ids], device=first.device)[:, None].expand_as(slots)
        self.data[layer, 0][rows, :, slots] = keys
        self.data[layer, 1][rows, :, slots] = values

    def view(self, ids: Sequence[int], slots: int) -> Tensor:
        """[L, 2, B, Hkv, slots, Dh]: the sequence's own slots where it is alone, else a copy."""
        rows = [self.rows[i] for i in ids]
        if len(rows) == 1:
            return self.data[:, :, rows[0] : rows[0] + 1, :, :slots]
        return self.data[:, :, rows, :, :slots]


CHUNK = 512  # rows per sequence and pass while a prompt is read


class TorchRunner:
    """Keeps the head's KV cache of each sequence, and starts drafts."""

    def __init__(self, head: EagleHead) -> None:
        self.head = head
        self.cache = HeadCache(head.config, head.dtype, head.device)
        self._last: dict[int, Tensor] = {}  # [D] the output of each sequence's last row

    @torch.no_grad()
    def begin(self, seqs: Sequence[Seq], sequences: Sequence[ObservedRows], budgets: Sequence[Budget]) -> TorchSteps:
        """Run the observed rows of these sequences; the result drafts for them."""
        nodes = sum(frontier_sizes(budgets))
        out = self._catch_up(seqs, sequences, nodes)
        return TorchSteps(self.head, self.cache, [seq.id for seq in seqs], out, nodes)

    def forget(self, seq_id: int) -> None:
        self._last.pop(seq_id, None)
        self.cache.release(seq_id)

    def _catch_up(self, seqs: Sequence[Seq], sequences: Sequence[ObservedRows], extra: int) -> Tensor:
        """Run the rows that are new since each sequence's last draft; the output of the last one [B, D]."""
        device, cache = self.head.device, self.cache
        for seq, observed in zip(seqs, sequences, strict=True):
            cache.admit(seq.id, observed.seen + extra + CHUNK)
            cache.lengths[seq.id] = observed.seen - len(observed.tokens)  # some before these may never be read
        features = [torch.cat(observed.features) if observed.features else None for observed in sequences]
        longest = max(len(observed.tokens) for observed in sequences)
        for low in range(0, longest, CHUNK):
            some = [b for b, observed in enumerate(sequences) if len(observed.tokens) > low]
            counts = [min(CHUNK, len(sequences[b].tokens) - low) for b in some]
            wide = max(counts)
            rows, carried = list[list[int]](), list[Tensor]()
            for b, n in zip(some, counts, strict=True):
                fresh = features[b]
                assert fresh is not None
                rows.append(_padded(sequences[b].tokens[low : low + n], wide))
                carried.append(F.pad(fresh[low : low + n], (0, 0, 0, wide - n)))
            ids = [seqs[b].id for b in some]
            out = self._run_rows(ids, torch.tensor(rows, device=device), torch.stack(carried))
            for i, (seq_id, n) in enumerate(zip(ids, counts, strict=True)):
                cache.lengths[seq_id] += n
                self._last[seq_id] = out[i, n - 1]
        for observed in sequences:
            observed.features, observed.tokens = [], []
        return torch.stack([self._last[seq.id] for seq in seqs])

    def _run_rows(self, ids: Sequence[int], tokens: Tensor, features: Tensor) -> Tensor:
        """True rows [B, R] behind what each sequence has; pads write slots that nothing will read."""
        head, cache = self.head, self.cache
        lengths = torch.tensor([cache.lengths[i] for i in ids], device=head.device)
        count, wide = tokens.shape
        positions = lengths[:, None] + torch.arange(wide, device=head.device)  # [B, R]
        total = max(cache.lengths[i] for i in ids) + wide

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            keys, values = (torch.unflatten(part, 0, (count, wide)) for part in (k, v))
            cache.write(ids, lengths, keys, values, layer)
            mask, reach = None, head.config.reach(layer)
            if wide > 1 or count > 1 or total > reach:
                back = positions[:, :, None] - torch.arange(total, device=head.device)
                mask = ((back >= 0) & (back < reach))[:, None]
            return attend_to(torch.unflatten(q, 0, (count, wide)), cache.view(ids, total)[layer], mask)

        carried = head.fuse(features.flatten(0, 1))
        out = head.run(tokens.flatten(), carried, positions.flatten(), attend)
        return torch.unflatten(out, 0, (count, wide))


class TorchSteps:
    """The draft of one batch: rows written behind the true ones, each seen by its descendants only."""

    def __init__(self, head: EagleHead, cache: HeadCache, ids: Sequence[int], out: Tensor, nodes: int) -> None:
        self.head, self.levels = head, 1
        lengths = [cache.lengths[i] for i in ids]
        self._base = max(lengths)  # drafted slots start here, for all sequences
        self._kv = cache.view(ids, self._base + nodes)
        self._positions = torch.tensor(lengths, device=head.device)[:, None]  # [B, 1] of the next level
        self._out = out[:, None]  # [B, W, D] of the last frontier
        self._used, self._level_of = 0, list[int]()  # drafted slots, and which level wrote each
        # [B, W, drafted slots]
        self._seen = torch.zeros(len(ids), 1, 0, dtype=torch.bool, device=head.device)
        committed = torch.arange(self._base, device=head.device) < self._positions  # [B, base]
        self._committed = committed[:, None, None]

    def ranks(self, seqs: Sequence[Seq]) -> LogitRanks:
        return LogitRanks(self, seqs, self.head.vocabulary)

    @torch.no_grad()
    def first(self) -> Tensor:
        return self.head.logits(self._out[:, 0])

    @torch.no_grad()
    def after(self, parents: Tensor, tokens: Tensor) -> Tensor:
        count, wide = tokens.shape
        head, start = self.head, self._base + self._used
        at = parents[:, :, None]
        out = self._out.gather(1, at.expand(-1, -1, self._out.shape[-1]))
        own = torch.eye(wide, dtype=torch.bool, device=head.device).expand(count, -1, -1)
        self._seen = torch.cat((self._seen.gather(1, at.expand(-1, -1, self._used)), own), -1)
        self._level_of += [self.levels] * wide
        end = start + wide

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            kv = self._kv[layer]
            kv[0, :, :, start:end] = torch.unflatten(k, 0, (count, wide)).transpose(1, 2)
            kv[1, :, :, start:end] = torch.unflatten(v, 0, (count, wide)).transpose(1, 2)
            mask, reach = None, head.config.reach(layer)
            if wide > 1 or count > 1 or self._used >= self.levels or self._base + self.levels > reach:
                mask = self._mask(wide, reach)
            return attend_to(torch.unflatten(q, 0, (count, wide)), kv[:, :, :, :end], mask)

        positions = self._positions.expand(-1, wide)
        flat = head.run(tokens.flatten(), head.carry(out.flatten(0, 1)), positions.flatten(), attend)
        self._out = torch.unflatten(flat, 0, (count, wide))
        self._positions = self._positions + 1
        self._used += wide
        self.levels += 1
        return torch.unflatten(head.logits(flat), 0, (count, wide))

    def _mask(self, wide: int, reach: int) -> Tensor:
        """[B, 1, W, S] what the nodes of this level see."""
        known, drafted = self._committed, self._seen
        if self._base + self.levels > reach:
            places, device = self._positions[:, :, None, None], known.device
            known = known & (places - torch.arange(self._base, device=device) < reach)
            drafted = drafted & (torch.tensor(self._level_of, device=device) > self.levels - reach)
        return torch.cat((known.expand(-1, 1, wide, -1), drafted[:, None]), -1)


def attend_to(queries: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    """Queries [B, R, H, Dh] over keys and values [2, B, Hkv, S, Dh] -> [B R, H Dh]."""
    found = F.scaled_dot_product_attention(
        queries.transpose(1, 2), kv[0], kv[1], attn_mask=mask, enable_gqa=queries.shape[2] != kv.shape[2]
    )
    return found.transpose(1, 2).reshape(queries.shape[0] * queries.shape[1], -1)


def frontier_sizes(budgets: Sequence[Budget]) -> list[int]:
    """Nodes that each level of a draft may put through the head, for any of these sequences."""
    width = max(min(budget.width, budget.nodes) for budget in budgets)
    return [width] * max(budget.depth for budget in budgets)


def _padded(row: list[int], size: int) -> list[int]:
    return row + [0] * (size - len(row))
