"""BlockHead: the weights of a block drafter, its files, and the pass over a block.

One implementation; a file's config.json says which of these parts a head has:

    DFlash    mask rows behind the root, each of which predicts its own token
    DFlash 2  the same with short convolutions around attention and MLP, and a path selector
    DSpark    a root row that predicts too, a Markov head and a confidence head
    JetSpec   DFlash whose rows see only the rows before them in the block (`causal`)
    P-EAGLE   EAGLE-3's layers; mask rows carry one learnt feature, and committed tokens pass through the layers

Any of them may limit layers to a window of positions. In all but P-EAGLE the features of every committed token are
fused to one row and projected to keys and values of each draft layer, once, when they arrive.

What the token before says of the next is one mechanism: a row of one table for the token before times a column of
another for the next. A Markov head adds it as it is, or gated by the row (`gated`); the selector of DFlash 2 multiplies
it by a projection of the row (`selector`).

Files have the authors' names of weights, in bfloat16 or in int8 with a scale per row; embedding and LM head may be
absent. They count hidden layers by their outputs (`target_layer_ids`: 0 = what the first layer returns); here i is the
input of layer i. The two tables are stored as the authors have them, a row per token, or as what this package trains:
two small matrices (`down`, `up`) which make the same tables out of the target's embedding and LM head, at a hundredth
of the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.errors import DamagedFile, InvalidInput
from forerun.drafters.heads.base import LayerWeights, Sizes, Tables
from forerun.drafters.heads.block_config import KINDS, NAMES, BlockConfig, BlockKind
from forerun.drafters.heads.formats import Matrix, read_config, read_tensors, readers, write_config, write_shards
from forerun.heads import kind_of
from forerun.models.base import SharedWeights
from forerun.models.layers import Rotations, gate, rms_norm, rotate_

_EMBEDDED = 8192  # tokens whose rows of the Markov head are made at a time
# layer, q [N, H, Dh], k, v [N, Hkv, Dh] -> [N, H Dh]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def masks_of(config: BlockConfig, places: Tensor, keys: Tensor, valid: Tensor) -> list[Tensor]:
    """Of each layer, what rows at positions [B, R] see of keys at positions [B, S] that hold something [B, S].

    [B, 1, R, S] each; layers that see alike share a mask.
    """
    ahead = keys[:, None, None] - places[:, None, :, None]  # [B, 1, R, S]
    made: dict[tuple[int, bool], Tensor] = {}
    for i in range(config.depth):
        causal, reach = (span := config.span(i))[1], config.reach(i)
        if span not in made:
            seen = valid[:, None, None].expand_as(ahead) if not causal else valid[:, None, None] & (ahead <= 0)
            made[span] = seen & (ahead.abs() < reach) if keys.shape[1] > reach else seen
    return [made[config.span(i)] for i in range(config.depth)]


class BlockConv:
    """A convolution over the rows of a block, around a sublayer: DFlash 2's.

    Each column of a row is a sum over the row and those before it in the block; the factors are learnt per column, plus
    what a projection of the sublayer's input adds for a group of columns. One projection serves both sides.
    """

    def __init__(self, config: BlockConfig, weight: Callable[[str], Tensor]) -> None:
        self._taps, self._group = config.taps, config.group
        self._base, self._project = weight("base_kernel"), Matrix(weight("kernel_projection.weight"))

    def factors(self, rows: Tensor) -> Tensor:
        """Of a sublayer's input [N, D]: [2, N, taps, D] before and behind it."""
        added = torch.unflatten(self._project.times(rows), -1, (2, self._taps, -1)).transpose(0, 1)
        return added.repeat_interleave(self._group, -1) + self._base[:, None]

    def apply(self, rows: Tensor, factors: Tensor, size: int) -> Tensor:
        """Rows [N, D], `size` a block, by factors [N, taps, D]."""
        blocks = torch.unflatten(rows, 0, (-1, size))
        parts = [F.pad(blocks, (0, 0, tap, 0))[:, :size].flatten(0, 1) * factors[:, tap] for tap in range(self._taps)]
        return torch.stack(parts).sum(0)


class BlockLayer:
    """One layer's weights in the order that our kernels read."""

    def __init__(
        self, config: BlockConfig, get: Callable[[str], Tensor], maybe: Callable[[str], Tensor | None]
    ) -> None:
        own = LayerWeights.read(config, get, maybe)
        self.qkv, self.o, self.gate_up, self.down = map(Matrix, (own.qkv, own.o, own.gate_up, own.down))
        self.key_value = own.qkv[config.heads * config.head_dim :]  # [2 Hkv Dh, D] for the features
        self.qk_norm = None if config.reads_rows else own.qk_norm
        assert own.input_norm is not None
        self.attention_norm, self.mlp_norm, self.feature_norm = own.input_norm, own.mlp_norm, own.feature_norm
        self.convs: list[BlockConv] = []
        if config.taps:
            names = ("attention_conv", "mlp_conv")
            self.convs = [BlockConv(config, lambda part, name=name: get(f"{name}.{part}")) for name in names]  # type: ignore[misc]
        self._config = config

    def run(self, x: Tensor, into: Tensor, size: int, rotations: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """The residual stream x [N, D] behind this layer; `into` is what its attention reads, `size` rows a block."""
        config, eps = self._config, self._config.norm_eps
        before, behind = self.convs[0].factors(into) if self.convs else (None, None)
        if before is not None:
            into = self.convs[0].apply(into, before, size)
        qkv = self.qkv.times(into).view(len(x), -1, config.head_dim)
        both = config.heads + config.kv_heads
        turned = qkv[:, :both].clone()
        if self.qk_norm is not None:
            turned = F.rms_norm(turned, qkv.shape[-1:], None, eps) * self.qk_norm
        rotate_(torch.unflatten(turned, -1, (-1, 2)), rotations)
        found = attend(turned[:, : config.heads], turned[:, config.heads :], qkv[:, both:])
        if behind is None:
            x = self.o.add_to(x, found)
            return self.down.add_to(x, gate(self.gate_up.times(rms_norm(x, self.mlp_norm, eps)), "silu"))
        x = x + self.convs[0].apply(self.o.times(found), behind, size)
        into = rms_norm(x, self.mlp_norm, eps)
        before, behind = self.convs[1].factors(into)
        out = self.down.times(gate(self.gate_up.times(self.convs[1].apply(into, before, size)), "silu"))
        return x + self.convs[1].apply(out, behind, size)


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
        _must_share_embedding(config, weights)
        with torch.no_grad(), torch.inference_mode(False):
            self.layers = [
                BlockLayer(config, *readers(weights, dtype, self.device, f"layers.{i}.")) for i in range(config.depth)
            ]
            # not packed: rounding in blocks would drown the small features between the large ones
            self._fc = Matrix(get("fc.weight"), packed=False)
            self._norm = get("norm.weight")
            tables, self._mask = Tables(config, weights, shared, dtype, self.device), maybe("mask_embedding")
            self.vocabulary, self._embed, self._lm_head = tables.vocabulary, tables.embed, Matrix(tables.head)
            if config.reads_rows:
                self._mask_feature = self._fc.times(get("mask_hidden").view(1, -1))  # [1, D]
            else:
                self._key_value = Matrix(torch.cat([layer.key_value for layer in self.layers]))
                k_norms = [cast(Tensor, layer.qk_norm)[-1] for layer in self.layers]
                self._k_norms = torch.stack(k_norms)[:, None]  # [L, 1, Dh]
                self._feature_norm = get("hidden_norm.weight")
            self._read_markov(maybe, tables.head)
        rope = config.rope
        self._rotations = Rotations(rope, self.device)

    def _read_markov(self, maybe: Callable[[str], Tensor | None], head: Tensor) -> None:
        """The table of previous tokens, or what makes it of the embedding; and its columns for the vocabulary."""
        owner, before, after = tables_of(self.config)
        self._markov_rows, down = maybe(before), maybe(f"{owner}.down.weight")
        if down is not None:
            ids = torch.arange(self.config.vocab_size, device=self.device)
            parts = [F.linear(self._embed(some), down) for some in ids.split(_EMBEDDED)]  # type: ignore[no-untyped-call]
            self._markov_rows = torch.cat(parts)
        table, up = maybe(after), maybe(f"{owner}.up.weight")
        if up is not None:
            table = head @ up
        self._markov_columns = table if self.config.markov_rank else None  # [Vd, rank]
        self._markov_table = None if self._markov_columns is None else Matrix(self._markov_columns)
        self._gate = maybe(f"{owner}.hidden_projection.weight" if owner == SELECTOR else f"{owner}.gate_proj.weight")
        self._gate_bias = maybe(f"{owner}.gate_proj.bias")
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

    def run(self, roots: Tensor, positions: Tensor, attend: Attend, features: Tensor | None = None) -> Tensor:
        """Blocks that start with these roots [B] at these positions [B] -> predicting rows [B, levels, D], normed.

        P-EAGLE's root rows carry features [B, F] of the target.
        """
        config, count = self.config, len(roots)
        masks = roots.new_full((count, config.rows - 1), config.mask_token)
        tokens = torch.cat((roots[:, None], masks), 1)
        places = positions[:, None] + torch.arange(config.rows, device=self.device)
        fused: Tensor | None = None
        if features is not None:
            carried = self._fused(features)[:, None]
            fused = torch.cat((carried, self._mask_feature.expand(count, config.rows - 1, -1)), 1)
        return self._through(tokens, places, attend, fused)[:, config.first :]

    def read_rows(self, tokens: Tensor, features: Tensor, places: Tensor, attend: Attend) -> None:
        """P-EAGLE: committed tokens [B, W] with the features before them [B, W, F] pass through the layers."""
        self._through(tokens, places, attend, torch.unflatten(self._fused(features), 0, tokens.shape))

    def _fused(self, features: Tensor) -> Tensor:
        return self._fc.times(features.flatten(0, -2).to(self.dtype))

    def _through(self, tokens: Tensor, places: Tensor, attend: Attend, fused: Tensor | None) -> Tensor:
        """Rows of tokens at places [B, R], of P-EAGLE with fused features [B, R, D] -> [B, R, D], normed."""
        config, eps, shape = self.config, self.config.norm_eps, tokens.shape
        embedded = self._embed(tokens.flatten()).clone()  # [B R, D]
        if self._mask is not None:
            torch.unflatten(embedded, 0, shape)[:, 1:] = self._mask
        rotations, first = self._rotations.at(places.flatten(), 0), self.layers[0]
        x, into = embedded, rms_norm(embedded, first.attention_norm, eps)
        if fused is not None:
            assert first.feature_norm is not None
            x = fused.flatten(0, 1).contiguous()
            normed = rms_norm(x, first.feature_norm, eps)
            into = torch.cat((into, normed), -1)
            x = normed if config.norm_before_residual else x.clone()
        for i, layer in enumerate(self.layers):
            if i:
                into = rms_norm(x, layer.attention_norm, eps)
            x = layer.run(x, into, shape[1], rotations, lambda q, k, v, i=i: attend(i, q, k, v))
        return torch.unflatten(rms_norm(x, self._norm, eps), 0, shape)

    def logits(self, rows: Tensor) -> Tensor:
        """[N, Vd] fp32: the law of each position by itself."""
        return self._lm_head.times(rows.contiguous()).float()

    @property
    def has_markov(self) -> bool:
        return self._markov_table is not None

    def markov(self, tokens: Tensor) -> Tensor:
        """[N, rank] what the Markov head or the selector knows of a previous token."""
        assert self._markov_rows is not None
        return F.embedding(tokens, self._markov_rows)

    def gated(self, previous: Tensor, rows: Tensor) -> Tensor:
        """What is known of previous tokens [.., rank], as rows [.., D], which may be fewer, let it through."""
        if self._gate is None:
            return previous
        if self.config.markov == "selector":
            return previous * F.linear(rows, self._gate)
        width = self.config.width
        open_by = F.linear(rows, self._gate[:, :width], self._gate_bias) + F.linear(previous, self._gate[:, width:])
        return previous * torch.sigmoid(open_by)

    def bias(self, known: Tensor) -> Tensor:
        """[N, Vd] what is added to the logits, given what is known of the tokens before."""
        assert self._markov_table is not None
        return self._markov_table.times(known.contiguous()).float()

    def markov_columns(self, places: Tensor) -> Tensor:
        """[.., rank] of rows of the draft vocabulary: what is known times these is the bias of each."""
        assert self._markov_columns is not None
        return self._markov_columns[places]

    def confidence(self, rows: Tensor, previous: Tensor) -> Tensor | None:
        """How likely the likeliest token is accepted, if those before it are; None without a confidence head.

        Of rows [.., D] and what is known of the tokens before them [.., rank], which may be more to a row.
        """
        if self._confidence is None:
            return None
        width = self.config.width
        score = rows.float() @ self._confidence[:width]
        if self.config.confidence_with_markov:
            score = score + previous.float() @ self._confidence[width:]
        else:
            score = score.expand(previous.shape[:-1])
        return torch.sigmoid(score if self._confidence_bias is None else score + self._confidence_bias.float())


def _must_share_embedding(config: BlockConfig, weights: Mapping[str, Tensor]) -> None:
    """A drafter of another width than its target's stores its own embedding."""
    if config.width != config.target_width and "embed_tokens.weight" not in weights:
        raise InvalidInput(
            f"a block drafter of width {config.width} cannot share the embedding of a target of width "
            f"{config.target_width}; use a head that stores its own"
        )


Stored = Literal["bfloat16", "int8"]
_SCALE = "_scale"
_SMALLEST = 1 << 14  # numbers in a matrix that is worth storing as int8


def read_block(
    folder: Path, *, kind: BlockKind | None = None, pickle: bool = False
) -> tuple[BlockConfig, dict[str, Tensor]]:
    """Config and weights under the authors' names; `kind` is what the caller wants to use it as."""
    values, weights = read_config(folder), read_tensors(folder, pickle=pickle)
    weights = {_our_name(name): weight for name, weight in weights.items()}
    named = kind_of(values, lambda: weights)
    found = next((one for one in KINDS if one == named), None)
    if found is None:
        raise InvalidInput(f"{folder} holds no block drafter; try `forerun drafters check`")
    if kind is not None and found != kind:
        raise InvalidInput(f"{folder} holds a {NAMES[found]} head, not {NAMES[kind]}; use drafter={found!r}")
    config = BlockConfig.from_json(values, found)
    weights = _from_int8(weights)
    if "mask_hidden" in weights:
        weights["mask_hidden"] = weights["mask_hidden"].flatten()
    check_shapes(config, weights, folder)
    return config, weights


def _our_name(name: str) -> str:
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def write_block(folder: Path, config: BlockConfig, weights: Mapping[str, Tensor], stored: Stored = "bfloat16") -> None:
    """config.json and safetensors; a head of more than 15 MiB is cut into several files with an index."""
    write_config(folder, config.to_json())
    write_shards(folder, _to_int8(weights) if stored == "int8" else weights)


def check_shapes(config: BlockConfig, weights: Mapping[str, Tensor], folder: Path) -> None:
    if config.rows <= config.first:
        raise DamagedFile(f"config.json of {folder} says blocks of {config.rows}; fetch it again")
    if config.taps and config.width % config.group:
        raise DamagedFile(f"config.json of {folder} groups {config.width} columns by {config.group}; fetch it again")
    needed = expected_shapes(config, tables=tables_of(config)[1] in weights)
    config.check(folder, weights, needed, {"mask_embedding": (config.width,)})


SELECTOR = "candidate_selector"


def tables_of(config: BlockConfig) -> tuple[str, str, str]:
    """What the weights of its Markov head or selector are called, and its tables of previous and next tokens."""
    if config.markov == "selector":
        return SELECTOR, f"{SELECTOR}.predecessor_codebook", f"{SELECTOR}.successor_codebook"
    return "markov_head", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


def expected_shapes(config: BlockConfig, *, tables: bool = False) -> Sizes:
    """What must be there; `tables` = with a Markov head or selector as the authors store it."""
    width, dim, rank = config.width, config.head_dim, config.markov_rank
    shapes: Sizes = {"fc.weight": (width, config.feature_width)}
    layer: Sizes = {}
    if config.reads_rows:
        shapes |= {"mask_hidden": (config.feature_width,), "layers.0.hidden_norm.weight": (width,)}
    else:
        shapes["hidden_norm.weight"] = (width,)
        layer = {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    shapes["norm.weight"] = layer["input_layernorm.weight"] = (width,)
    if config.taps:
        added = 2 * config.taps * (width // config.group)
        for name in ("attention_conv", "mlp_conv"):
            layer |= {f"{name}.base_kernel": (2, config.taps, width)}
            layer |= {f"{name}.kernel_projection.weight": (added, width)}
    for i in range(config.depth):
        own = config.layer_weights(2 * width if config.reads_rows and not i else width) | layer
        shapes |= {f"layers.{i}.{name}": size for name, size in own.items()}
    owner, before, after = tables_of(config)
    if rank and tables:
        shapes |= {before: (config.vocab_size, rank), after: (config.draft_vocab_size, rank)}
    elif rank:
        shapes |= {f"{owner}.down.weight": (rank, width), f"{owner}.up.weight": (width, rank)}
    if config.markov == "selector":
        shapes[f"{owner}.hidden_projection.weight"] = (rank, width)
    if config.markov == "gated":
        shapes |= {f"{owner}.gate_proj.weight": (rank, width + rank), f"{owner}.gate_proj.bias": (rank,)}
    if config.confidence:
        reads = width + (rank if config.confidence_with_markov else 0)
        shapes |= {"confidence_head.proj.weight": (1, reads), "confidence_head.proj.bias": (1,)}
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
