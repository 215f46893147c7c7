"""EAGLE heads as modules in training: their layers, and the steps of a draft for all rows of a text at once.

Parameters are named as files name them, so a folded state_dict is a head's file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.drafters.heads.eagle_head import EagleConfig
from forerun.train.recipes.base import shifted
from forerun.train.recipes.scaling import ScaledLinear, Sizes

Past = list[tuple[Tensor, Tensor]]  # keys and values of each step so far, of one layer


class Norm(nn.RMSNorm):
    """In the weight's own precision: a fused kernel wants both alike."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class EagleLayer(nn.Module):
    """One layer of a head: the first, or an ordinary one behind it."""

    rates: Tensor

    def __init__(self, config: EagleConfig, sizes: Sizes, *, is_first: bool = True) -> None:
        super().__init__()
        width, fused = config.width, config.kind == "eagle3"
        into = width * (2 if fused and is_first else 1)
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.config = config
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": ScaledLinear(into, q),
                "k_proj": ScaledLinear(into, kv),
                "v_proj": ScaledLinear(into, kv),
                "o_proj": ScaledLinear(q, width),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": ScaledLinear(width, config.inner),
                "up_proj": ScaledLinear(width, config.inner),
                "down_proj": ScaledLinear(config.inner, width),
            }
        )
        self.post_attention_layernorm = Norm(width, config.norm_eps)
        if fused:
            self.input_layernorm = Norm(width, config.norm_eps)
            if is_first:
                self.hidden_norm = Norm(width, config.norm_eps)
        else:
            self._scale(sizes)
        dims = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        self.register_buffer("rates", config.rope_theta**-dims, persistent=False)

    def _scale(self, sizes: Sizes) -> None:
        """An EAGLE-1 head's residual stream has the size of the features it predicts, dimension by dimension."""
        for name, layer in [*self.self_attn.items(), *self.mlp.items()]:
            assert isinstance(layer, ScaledLinear)
            if name in ("o_proj", "down_proj"):
                layer.scale(writes=sizes.feature)
            else:  # the MLP reads behind a norm over all dimensions
                layer.scale(reads=sizes.feature / (sizes.row if name in ("gate_proj", "up_proj") else 1.0))

    def forward(self, x: Tensor, into: Tensor, first: int, past: Past) -> Tensor:
        """Residual x and input [B, T, .] of step `len(past)`, rows at positions first + t; grows `past`."""
        heads, dim = self.config.heads, self.config.head_dim
        q, k, v = (
            self.self_attn[f"{name}_proj"](into).unflatten(-1, (-1, dim)).transpose(1, 2) for name in "qkv"
        )
        q, k = self._turn(q, first), self._turn(k, first)
        repeat = heads // self.config.kv_heads
        past.append((k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)))
        found = attend_rollout(q, past).transpose(1, 2).flatten(2)
        x = x + self.self_attn["o_proj"](found)
        rows = self.post_attention_layernorm(x)
        inner = F.silu(self.mlp["gate_proj"](rows)) * self.mlp["up_proj"](rows)
        out: Tensor = x + self.mlp["down_proj"](inner)
        return out

    def _turn(self, x: Tensor, first: int) -> Tensor:
        """Rotate halves of x [B, H, T, Dh], as checkpoints order them."""
        positions = torch.arange(first, first + x.shape[2], device=x.device).float()
        angles = positions[:, None] * self.rates  # [T, Dh / 2]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attend_rollout(q: Tensor, past: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Queries [B, H, T, Dh] of the last step: causal over the first step's rows, own row only of the later ones."""
    keys, values = past[0]
    if len(past) == 1:
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True)
    own = torch.stack([(q * k).sum(-1) for k, _ in past[1:]], -1)  # [B, H, T, steps]
    weigh = _weigh_for(q.device.type)
    weights, shares = weigh(q @ keys.transpose(-1, -2), own, q.shape[-1] ** -0.5)
    found: Tensor = weights @ values
    for i, (_, v) in enumerate(past[1:]):
        found = found + shares[..., i, None] * v
    return found


def weigh_rollout(scores: Tensor, own: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One softmax over true rows up to the query's [B, H, T, T] and the draft's own earlier steps [B, H, T, n]."""
    places = torch.arange(scores.shape[-1], device=scores.device)
    seen = (scores.float() * scale).masked_fill(places > places[:, None], -torch.inf)
    near = own.float() * scale
    top = torch.maximum(seen.amax(-1, keepdim=True), near.amax(-1, keepdim=True)).detach()
    far, near = (seen - top).exp(), (near - top).exp()
    total = far.sum(-1, keepdim=True) + near.sum(-1, keepdim=True)
    return (far / total).to(scores.dtype), (near / total).to(scores.dtype)


@cache
def _weigh_for(device: str) -> Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """Fused on a GPU: written out, the passes over [B, H, T, T] were a third of a step."""
    return torch.compile(weigh_rollout, dynamic=True) if device == "cuda" else weigh_rollout


class EagleModule(nn.Module):
    """All trained parameters of a head; its state_dict, folded, is the head's file."""

    def __init__(self, config: EagleConfig, *, own_head: bool, sizes: Sizes | None = None) -> None:
        super().__init__()
        self.config, sizes = config, sizes or Sizes.ones(config.width)
        fused = 2 * config.width if config.kind == "eagle" else config.feature_width
        self.fc = ScaledLinear(fused, config.width)
        if config.kind == "eagle":
            self.fc.scale(torch.cat((sizes.token, sizes.feature)), sizes.feature)
        self.midlayer = EagleLayer(config, sizes)
        if config.depth > 1:
            later = {str(i): EagleLayer(config, sizes, is_first=False) for i in range(1, config.depth)}
            self.layers = nn.ModuleDict(later)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList([Norm(config.target_width, config.norm_eps) for _ in config.layers])
        if config.kind == "eagle3":
            self.norm = Norm(config.width, config.norm_eps)
        if own_head:
            self.lm_head = nn.Linear(config.width, config.draft_vocab_size, bias=False)
        if config.width != config.target_width:
            self.embed_proj = nn.Linear(config.target_width, config.width, bias=False)

    def forward(
        self, embedded: Tensor, features: Tensor, steps: int, detach: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows for the LM head, raw outputs) of every step; embeddings [B, T, D] of token t at t."""
        carried, pasts = self.fuse(features), [Past() for _ in range(self.config.depth)]
        if self.config.width != self.config.target_width:
            embedded = self.embed_proj(embedded)
        for step in range(steps):
            token = shifted(embedded, step + 1)
            if self.config.kind == "eagle":
                x = into = self.fc(torch.cat((token, carried), -1))
            else:
                layer = self.midlayer
                x, into = carried, torch.cat((layer.input_layernorm(token), layer.hidden_norm(carried)), -1)
            out = self._through_layers(x, into, step, pasts)
            normed = self.norm(out) if self.config.kind == "eagle3" else out
            yield normed, out
            carried = normed if self.config.norm_output else out
            if detach:
                carried = carried.detach()
                for past in pasts:
                    past[1:] = [(k.detach(), v.detach()) for k, v in past[1:]]

    def _through_layers(self, x: Tensor, into: Tensor, step: int, pasts: Sequence[Past]) -> Tensor:
        """The first layer on its two inputs, each later one on the output before it, behind a norm."""
        out: Tensor = self.midlayer(x, into, step, pasts[0])
        for i, past in enumerate(pasts[1:], start=1):
            layer = self.layers[str(i)]
            assert isinstance(layer, EagleLayer)
            out = layer(out, layer.input_layernorm(out), step, past)
        return out

    def fuse(self, features: Tensor) -> Tensor:
        if self.config.kind == "eagle":
            return features
        if self.config.fc_norm:
            parts = zip(features.chunk(len(self.fc_norm), -1), self.fc_norm, strict=True)
            features = torch.cat([norm(part) for part, norm in parts], -1)
        fused: Tensor = self.fc(features)
        return fused
