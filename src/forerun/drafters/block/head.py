"""BlockHead: the weights of a block drafter, keys and values of the target's features, and the pass over a block.

The features of every committed token are fused to one row and projected to keys and values of each draft layer, once,
when they arrive. A block is the root and mask tokens; its rows see all these and each other, in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters.block.config import BlockConfig
from forerun.drafters.head_shape import checked_shared, vocabulary_of
from forerun.drafters.matrix import Matrix
from forerun.errors import InvalidInput
from forerun.models.layers import Rotations, gate, pair_up, rms_norm, rotate_
from forerun.models.rope import RopeConfig
from forerun.models.shared import SharedWeights

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

        def get(name: str) -> Tensor:
            return weights[name].detach().to(self.device, dtype).contiguous()

        def maybe(name: str) -> Tensor | None:
            return get(name) if name in weights else None

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
        return torch.sigmoid(
            score if self._confidence_bias is None else score + self._confidence_bias.float()
        )

    def _embed(self, tokens: Tensor) -> Tensor:
        """[N, D]"""
        if self._embedding is not None:
            return F.embedding(tokens, self._embedding)
        assert self._shared is not None
        return self._shared.embed(tokens).to(self.dtype)


def _checked(
    config: BlockConfig, weights: Mapping[str, Tensor], shared: SharedWeights | None
) -> SharedWeights | None:
    """What the target shares, if it fits; a drafter of another width stores its own embedding."""
    if config.width != config.target_width and "embed_tokens.weight" not in weights:
        raise InvalidInput(
            f"a block drafter of width {config.width} cannot share the embedding of a target of width "
            f"{config.target_width}; use a head that stores its own"
        )
    return checked_shared(config, weights, shared)
