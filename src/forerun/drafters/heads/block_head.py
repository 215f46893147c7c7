"""BlockHead: the weights of a block drafter (DFlash, DSpark), its config.json, its files, and the pass over a block.

The features of every committed token are fused to one row and projected to keys and values of each draft layer, once,
when they arrive. A block is the root and mask tokens; its rows see all these and each other, in both directions.
DFlash's first row carries the root and predicts nothing, the mask rows behind it predict their own token; DSpark's root
row predicts too, each row the token after it.

Files have the authors' names of weights, in bfloat16 or in int8 with a scale per row; embedding and LM head may be
absent. They count hidden layers by their outputs (`target_layer_ids`: 0 = what the first layer returns); here i is the
input of layer i. DSpark's Markov head is stored as the authors have it, two tables of a row per token (`markov_w1`,
`markov_w2`), or as what this package trains: two small matrices (`down`, `up`) which make the same tables out of the
target's embedding and LM head, at a hundredth of the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.errors import DamagedFile, InvalidInput
from forerun.drafters.heads.base import HeadShape, Sizes, checked_shared, shape_in, vocabulary_of
from forerun.drafters.heads.formats import (
    Matrix,
    config_of,
    read_config,
    read_tensors,
    readers,
    settings_in,
    size_in,
    write_config,
    write_shards,
)
from forerun.heads import kind_of
from forerun.models.base import SharedWeights
from forerun.models.layers import Rotations, gate, pair_up, rms_norm, rotate_
from forerun.models.rope import RopeConfig

BlockKind = Literal["dflash", "dspark"]
NAMES: Mapping[str, str] = {"dflash": "DFlash", "dspark": "DSpark"}
_MODELS = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}
_BLOCKS = {"dflash": 16, "dspark": 8}  # rows of a block where a file does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(HeadShape):
    """A few layers that read the target's features as keys and values."""

    kind: BlockKind
    depth: int  # layers of the drafter
    rows: int  # of a block: the root and the masks
    mask_token: int
    markov_rank: int = 0  # 0 = no Markov head
    confidence: bool = False  # has it a confidence head?

    @property
    def levels(self) -> int:
        """Tokens that one pass drafts."""
        return self.rows - self.first

    @property
    def first(self) -> int:
        """The first row that predicts: the root's own (DSpark), or the first mask's (DFlash)."""
        return 1 if self.kind == "dflash" else 0

    @classmethod
    def from_json(cls, values: Mapping[str, Any], kind: BlockKind) -> BlockConfig:
        """From a config.json in the authors' form, or in that of speculators."""
        with config_of(f"{NAMES[kind]}'s"):
            own = {**values, **settings_in(values, "dflash_config")}
            _refuse_unknown(own)
            shape = shape_in(values)
            return cls(
                **shape,
                kind=kind,
                depth=size_in({**values, **settings_in(values, "transformer_layer_config")}, "num_hidden_layers"),
                layers=_layers_in(own),
                rows=size_in(own, "block_size", _BLOCKS[kind]),
                mask_token=_mask_in(own, shape["vocab_size"]),
                markov_rank=size_in(own, "markov_rank", 1) if own.get("markov_rank") else 0,
                confidence=bool(own.get("enable_confidence_head")),
            )

    def to_json(self) -> dict[str, Any]:
        """config.json in the authors' form, with what only we measure under a key of our own."""
        outputs = [layer - 1 for layer in self.layers]
        values: dict[str, Any] = {
            "architectures": [_MODELS[self.kind]],
            **self.layer_json("qwen3", self.depth, attention_bias=False),
            "block_size": self.rows,
            **self.target_json(),
            "forerun": {"format": self.kind, **self.measured_json()},
        }
        if self.kind == "dflash":
            return values | {"dflash_config": {"mask_token_id": self.mask_token, "target_layer_ids": outputs}}
        return values | {
            "mask_token_id": self.mask_token,
            "target_layer_ids": outputs,
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": self.confidence,
            "confidence_head_with_markov": self.confidence,
        }


def spread_features(layers: int, count: int = 5) -> tuple[int, ...]:
    """Which hidden layers to read: from the second layer's input to that of the last but one, evenly."""
    low, high = min(2, layers), max(min(2, layers), layers - 1)
    return tuple(sorted({round(low + i * (high - low) / max(1, count - 1)) for i in range(count)}))


def _layers_in(own: Mapping[str, Any]) -> tuple[int, ...]:
    """Outputs of layers in the authors' files; speculators counts inputs, as we do."""
    if ids := own.get("target_layer_ids"):
        found = tuple(int(layer) + 1 for layer in ids)
    else:
        found = tuple(int(layer) for layer in own["aux_hidden_state_layer_ids"])
    if not found or min(found) < 0 or len(set(found)) != len(found):
        raise ValueError(f"target_layer_ids = {found!r:.60}")
    return found


def _mask_in(own: Mapping[str, Any], vocab_size: int) -> int:
    mask = own["mask_token_id"]
    if type(mask) is not int or not 0 <= mask < vocab_size:
        raise ValueError(f"mask_token_id = {mask!r:.60}")
    return mask


def _refuse_unknown(own: Mapping[str, Any]) -> None:
    """Variants whose layers compute something else: they would load, and draft what is never accepted."""
    windows = own.get("use_swa") or "sliding_attention" in (own.get("layer_types") or ())
    causal = own.get("causal") or own.get("is_causal")
    kind = own.get("markov_head_type")
    for unknown, what in (
        (windows, "sliding windows"),
        (causal, "causal attention inside the block"),
        (own.get("fc_layernorm"), "norms on every feature"),
        (own.get("attention_bias"), "biases in its attention"),
        (kind not in (None, "vanilla"), f"a Markov head of the type {kind!r:.40}"),
    ):
        if unknown:
            raise ValueError(f"what is known here: it has {what}")


_EMBEDDED = 8192  # tokens whose rows of the Markov head are made at a time
# layer, q [N, H, Dh], k, v [N, Hkv, Dh] -> [N, H Dh]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class BlockLayer:
    """One layer's weights in the order that our kernels read."""

    def __init__(self, config: BlockConfig, weight: Callable[[str], Tensor]) -> None:
        dims = config.head_dim
        q, k, v = (weight(f"self_attn.{name}_proj.weight") for name in "qkv")
        k = pair_up(k, dims, dims)
        self.key_value = torch.cat((k, v))  # [2 Hkv Dh, D] for the features
        self.qkv = Matrix(torch.cat((pair_up(q, dims, dims), k, v)))
        norms = [pair_up(weight(f"self_attn.{name}_norm.weight"), dims, dims) for name in "qk"]
        self.k_norm = norms[1]
        heads = [norms[0].expand(config.heads, -1), norms[1].expand(config.kv_heads, -1)]
        self.qk_norm = torch.cat(heads).contiguous()  # [H + Hkv, Dh]
        self.o = Matrix(weight("self_attn.o_proj.weight"))
        self.gate_up = Matrix(torch.cat([weight(f"mlp.{name}_proj.weight") for name in ("gate", "up")]))
        self.down = Matrix(weight("mlp.down_proj.weight"))
        self.attention_norm = weight("input_layernorm.weight")
        self.mlp_norm = weight("post_attention_layernorm.weight")


class BlockHead:
    """All weights, and what is computed with them."""

    def __init__(
        self,
        config: BlockConfig,
        weights: Mapping[str, Tensor],
        shared: SharedWeights | None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)

        get, maybe = readers(weights, dtype, self.device)
        self.vocabulary = vocabulary_of(config, weights).to(self.device)
        self._shared = _checked(config, weights, shared)
        with torch.no_grad(), torch.inference_mode(False):
            self.layers = [
                BlockLayer(config, lambda name, i=i: get(f"layers.{i}.{name}"))  # type: ignore[misc]
                for i in range(config.depth)
            ]
            # not packed: rounding in blocks would drown the small features between the large ones
            self._fc = Matrix(get("fc.weight"), packed=False)
            self._key_value = Matrix(torch.cat([layer.key_value for layer in self.layers]))
            self._k_norms = torch.stack([layer.k_norm for layer in self.layers])[:, None]  # [L, 1, Dh]
            self._feature_norm, self._norm = get("hidden_norm.weight"), get("norm.weight")
            self._embedding, self._mask = maybe("embed_tokens.weight"), maybe("mask_embedding")
            head = maybe("lm_head.weight")
            if head is None:
                assert self._shared is not None
                head = self._shared.head_rows(self.vocabulary.ids).to(self.device, dtype).contiguous()
            self._lm_head = Matrix(head)
            self._read_markov(maybe, head)
        rope = RopeConfig("default", config.rope_theta, config.head_dim, config.max_length)
        self._rotations = Rotations(rope, self.device)

    def _read_markov(self, maybe: Callable[[str], Tensor | None], head: Tensor) -> None:
        """The table of previous tokens, or what makes it of the embedding; and its columns for the vocabulary."""
        self._markov_rows, down = maybe("markov_head.markov_w1.weight"), maybe("markov_head.down.weight")
        if down is not None:
            ids = torch.arange(self.config.vocab_size, device=self.device)
            parts = [F.linear(self._embed(some), down) for some in ids.split(_EMBEDDED)]  # type: ignore[no-untyped-call]
            self._markov_rows = torch.cat(parts)
        table, up = maybe("markov_head.markov_w2.weight"), maybe("markov_head.up.weight")
        if up is not None:
            table = head @ up
        self._markov_columns = table if self.config.markov_rank else None  # [Vd, rank]
        self._markov_table = None if self._markov_columns is None else Matrix(self._markov_columns)
        weight = maybe("confidence_head.proj.weight") if self.config.confidence else None
        self._confidence = None if weight is None else weight.float()[0]
        self._confidence_bias = maybe("confidence_head.proj.bias")

    def context(self, features: Tensor, positions: Tensor) -> Tensor:
        """[N, F] of the target at these positions -> keys and values [2, L, N, Hkv, Dh] of every draft layer."""
        config, depth = self.config, self.config.depth
        fused = rms_norm(self._fc.times(features.to(self.dtype)), self._feature_norm, config.norm_eps)
        both = self._key_value.times(fused).view(len(fused), depth, 2, config.kv_heads, config.head_dim)
        keys, values = both.permute(2, 1, 0, 3, 4)  # [L, N, Hkv, Dh] each
        normed = F.rms_norm(keys, keys.shape[-1:], None, config.norm_eps) * self._k_norms[:, None]
        pairs = torch.unflatten(normed.contiguous(), -1, (-1, 2))
        rotations = self._rotations.at(positions, 0)
        for layer in pairs:
            rotate_(layer, rotations)
        return torch.stack((pairs.flatten(-2), values))

    def run(self, roots: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Blocks that start with these roots [B] at these positions [B] -> predicting rows [B, levels, D], normed."""
        config, eps, count = self.config, self.config.norm_eps, len(roots)
        masks = roots.new_full((count, config.rows - 1), config.mask_token)
        x = self._embed(torch.cat((roots[:, None], masks), 1).flatten()).clone()  # [B R, D]
        if self._mask is not None:
            torch.unflatten(x, 0, (count, config.rows))[:, 1:] = self._mask
        places = (positions[:, None] + torch.arange(config.rows, device=self.device)).flatten()
        rotations = self._rotations.at(places, 0)
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv.times(rms_norm(x, layer.attention_norm, eps))
            qkv = qkv.view(len(x), -1, config.head_dim)
            both = config.heads + config.kv_heads
            turned = F.rms_norm(qkv[:, :both], qkv.shape[-1:], None, eps) * layer.qk_norm
            rotate_(torch.unflatten(turned, -1, (-1, 2)), rotations)
            found = attend(i, turned[:, : config.heads], turned[:, config.heads :], qkv[:, both:])
            x = layer.o.add_to(x, found)
            x = layer.down.add_to(x, gate(layer.gate_up.times(rms_norm(x, layer.mlp_norm, eps)), "silu"))
        rows = torch.unflatten(rms_norm(x, self._norm, eps), 0, (count, config.rows))
        return rows[:, config.first :]

    def logits(self, rows: Tensor) -> Tensor:
        """[N, Vd] fp32: the law of each position by itself."""
        return self._lm_head.times(rows.contiguous()).float()

    @property
    def has_markov(self) -> bool:
        return self._markov_table is not None

    def markov(self, tokens: Tensor) -> Tensor:
        """[N, rank] what the Markov head knows of a previous token."""
        assert self._markov_rows is not None
        return F.embedding(tokens, self._markov_rows)

    def bias(self, previous: Tensor) -> Tensor:
        """[N, Vd] what is added to the logits behind previous tokens."""
        assert self._markov_table is not None
        return self._markov_table.times(previous).float()

    def markov_columns(self, places: Tensor) -> Tensor:
        """[.., rank] of rows of the draft vocabulary: `markov` times these is the bias of each."""
        assert self._markov_columns is not None
        return self._markov_columns[places]

    def confidence(self, rows: Tensor, previous: Tensor) -> Tensor | None:
        """How likely the likeliest token is accepted, if those before it are; None without a confidence head.

        Of rows [.., D] and what is known of the tokens before them [.., rank], which may be more to a row.
        """
        if self._confidence is None:
            return None
        width = self.config.width
        score = rows.float() @ self._confidence[:width] + previous.float() @ self._confidence[width:]
        return torch.sigmoid(score if self._confidence_bias is None else score + self._confidence_bias.float())

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._embedding is not None:
            return F.embedding(tokens, self._embedding)
        assert self._shared is not None
        return self._shared.embed(tokens).to(self.dtype)


def _checked(config: BlockConfig, weights: Mapping[str, Tensor], shared: SharedWeights | None) -> SharedWeights | None:
    """What the target shares, if it fits; a drafter of another width stores its own embedding."""
    if config.width != config.target_width and "embed_tokens.weight" not in weights:
        raise InvalidInput(
            f"a block drafter of width {config.width} cannot share the embedding of a target of width "
            f"{config.target_width}; use a head that stores its own"
        )
    return checked_shared(config, weights, shared)


Stored = Literal["bfloat16", "int8"]
_SCALE = "_scale"
_SMALLEST = 1 << 14  # numbers in a matrix that is worth storing as int8


def read_block(
    folder: Path, *, kind: BlockKind | None = None, pickle: bool = False
) -> tuple[BlockConfig, dict[str, Tensor]]:
    """Config and weights under the authors' names; `kind` is what the caller wants to use it as."""
    values, weights = read_config(folder), read_tensors(folder, pickle=pickle)
    weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    found = kind_of(values, lambda: weights)
    if found != "dflash" and found != "dspark":
        raise InvalidInput(f"{folder} holds no block drafter; try `forerun drafters check`")
    if kind is not None and found != kind:
        raise InvalidInput(f"{folder} holds a {NAMES[found]} head, not {NAMES[kind]}; use drafter={found!r}")
    config = BlockConfig.from_json(values, "dflash" if found == "dflash" else "dspark")
    weights = _from_int8(weights)
    check_shapes(config, weights, folder)
    return config, weights


def write_block(folder: Path, config: BlockConfig, weights: Mapping[str, Tensor], stored: Stored = "bfloat16") -> None:
    """config.json and safetensors; a head of more than 15 MiB is cut into several files with an index."""
    write_config(folder, config.to_json())
    write_shards(folder, _to_int8(weights) if stored == "int8" else weights)


def check_shapes(config: BlockConfig, weights: Mapping[str, Tensor], folder: Path) -> None:
    if config.rows <= config.first:
        raise DamagedFile(f"config.json of {folder} says blocks of {config.rows}; fetch it again")
    tables = "markov_head.markov_w1.weight" in weights
    needed = expected_shapes(config, tables=tables)
    config.check(folder, weights, needed, {"mask_embedding": (config.width,)})


def expected_shapes(config: BlockConfig, *, tables: bool = False) -> Sizes:
    """What must be there; `tables` = with DSpark's Markov head as its authors store it."""
    width, dim, rank = config.width, config.head_dim, config.markov_rank
    shapes: Sizes = {
        "fc.weight": (width, config.feature_width), "hidden_norm.weight": (width,), "norm.weight": (width,),
    }  # fmt: skip
    layer = config.layer_weights(width) | {
        "self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,), "input_layernorm.weight": (width,),
    }  # fmt: skip
    shapes |= {f"layers.{i}.{name}": size for i in range(config.depth) for name, size in layer.items()}
    if rank and tables:
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
    elif rank:
        shapes |= {"markov_head.down.weight": (rank, width), "markov_head.up.weight": (width, rank)}
    if config.confidence:
        shapes |= {"confidence_head.proj.weight": (1, width + rank), "confidence_head.proj.bias": (1,)}
    return shapes


def _to_int8(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as int8 with a scale per row. Not `fc`: its columns are as unequal as the features that they read."""
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() == 2 and weight.numel() >= _SMALLEST and name.startswith("layers."):
            scale = weight.float().abs().amax(1).clamp(min=1e-12) / 127.0
            stored[name] = (weight.float() / scale[:, None]).round_().to(torch.int8)
            stored[name + _SCALE] = scale
        else:
            stored[name] = weight
    return stored


def _from_int8(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for name, weight in stored.items():
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) in stored:
            continue
        scale = stored.get(name + _SCALE)
        if scale is not None and (weight.dim() != 2 or scale.shape != weight.shape[:1]):
            raise DamagedFile(f"{name + _SCALE!r} does not fit {name!r}; fetch the head again")
        weights[name] = weight if scale is None else weight.float() * scale.float()[:, None]
    return weights
