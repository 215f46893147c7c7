"""The network of a block drafter in training: blocks of many anchors of a sequence in one pass, with gradients.

Each block sees the target's features of the tokens before its anchor, and itself; no other block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.drafters.heads.block_head import BlockConfig
from forerun.train.recipes.eagle_network import Norm
from forerun.train.recipes.scaling import BEGINNING, QUICK, ScaledLinear, ScaledNorm, Sizes


class BlockLayer(nn.Module):
    """One layer; parameters are named as files name them."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config, width, dim = config, config.width, config.head_dim
        q, kv = config.heads * dim, config.kv_heads * dim
        sizes = {"q_proj": (width, q), "k_proj": (width, kv), "v_proj": (width, kv), "o_proj": (q, width)}
        attention: dict[str, nn.Module] = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
        attention |= {"q_norm": Norm(dim, config.norm_eps), "k_norm": Norm(dim, config.norm_eps)}
        self.self_attn = nn.ModuleDict(attention)
        inner = {"gate_proj": (width, config.inner), "up_proj": (width, config.inner)}
        inner["down_proj"] = (config.inner, width)
        self.mlp = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in inner.items()})
        self.input_layernorm = Norm(width, config.norm_eps)
        self.post_attention_layernorm = Norm(width, config.norm_eps)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        anchors: Tensor,
        far: tuple[Tensor, Tensor],
        near: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Blocks x [B, A, R, D] behind context [B, T, D]; rotations of the context's rows and of the blocks'."""
        rows = self.input_layernorm(x).flatten(1, 2)
        q, k, v = (self._heads(rows, name) for name in "qkv")
        past, kept = self._heads(context, "k"), self._heads(context, "v")
        q, k, past = turn(q, near), turn(k, near), turn(past, far)
        found = torch.unflatten(attend_blocks(q, k, v, past, kept, anchors), 1, x.shape[1:3])
        x = x + self.self_attn["o_proj"](found)
        rows = self.post_attention_layernorm(x)
        inner = F.silu(self.mlp["gate_proj"](rows)) * self.mlp["up_proj"](rows)
        out: Tensor = x + self.mlp["down_proj"](inner)
        return out

    def _heads(self, rows: Tensor, name: str) -> Tensor:
        """[B, N, D] -> [B, heads, N, Dh], queries and keys normed."""
        heads = self.self_attn[f"{name}_proj"](rows).unflatten(-1, (-1, self.config.head_dim))
        if name != "v":
            heads = self.self_attn[f"{name}_norm"](heads)
        turned: Tensor = heads.transpose(1, 2)
        return turned


def turn(x: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate halves of x [.., N, Dh], as checkpoints order them, by cosines and sines [.., N, Dh / 2]."""
    cos, sin = rotations
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, past: Tensor, kept: Tensor, anchors: Tensor) -> Tensor:
    """Queries [B, H, A R, Dh] over the context before each block's anchor and over their own block [B, A R, H Dh].

    q, k, v are the blocks' own; past and kept [B, Hkv, T, Dh] the context's keys and values; anchors [B, A].
    """
    dtype = torch.get_autocast_dtype(q.device.type) if torch.is_autocast_enabled(q.device.type) else q.dtype
    batch, heads, rows, dim = q.shape
    blocks, group = anchors.shape[1], heads // k.shape[1]
    q, k, v = (torch.unflatten(part.to(dtype), 2, (blocks, -1)) for part in (q, k, v))  # [B, H, A, R, Dh]
    q = torch.unflatten(q, 1, (-1, group))  # [B, Hkv, G, A, R, Dh]
    flat = q.flatten(2, 4)
    scores = (flat @ past.to(dtype).transpose(-1, -2)).view(*q.shape[:-1], -1)  # [B, Hkv, G, A, R, T]
    own = q @ k.transpose(-1, -2)[:, :, None]  # [B, Hkv, G, A, R, R]
    weights, shares = _weigh_for(q.device.type)(scores, own, anchors, dim**-0.5)
    found = (weights.flatten(2, 4) @ kept.to(dtype)).view(q.shape) + shares @ v[:, :, None]
    return found.flatten(1, 2).reshape(batch, heads, rows, dim).transpose(1, 2).flatten(2)


def weigh_blocks(scores: Tensor, own: Tensor, anchors: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One softmax over the context before the anchor [B, Hkv, G, A, R, T] and the block itself [.., R]."""
    places = torch.arange(scores.shape[-1], device=scores.device)
    hidden = places >= anchors[:, None, None, :, None, None]
    seen, near = (scores.float() * scale).masked_fill(hidden, -torch.inf), own.float() * scale
    top = torch.maximum(seen.amax(-1, keepdim=True), near.amax(-1, keepdim=True)).detach()
    seen, near = (seen - top).exp(), (near - top).exp()
    total = seen.sum(-1, keepdim=True) + near.sum(-1, keepdim=True)
    return (seen / total).to(scores.dtype), (near / total).to(scores.dtype)


@cache
def _weigh_for(device: str) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """Fused on a GPU: written out, the passes over [B, H, A R, T] would cost more than the products."""
    return torch.compile(weigh_blocks, dynamic=True) if device == "cuda" else weigh_blocks


class BlockModule(nn.Module):
    """All trained parameters; its state_dict, folded, is the head's file."""

    rates: Tensor

    def __init__(self, config: BlockConfig, sizes: Sizes, features: Tensor) -> None:
        """Sizes of what it reads, so that everything is learnt at one rate: features [F] are very unequal."""
        super().__init__()
        self.config, width, rank = config, config.width, config.markov_rank
        self.fc = ScaledLinear(config.feature_width, width)
        self.fc.scale(reads=features)
        self.hidden_norm = Norm(width, config.norm_eps)
        self.layers = nn.ModuleList([BlockLayer(config) for _ in range(config.depth)])
        self.norm = ScaledNorm(width, config.norm_eps)
        self.norm.scale(QUICK * sizes.feature, BEGINNING / QUICK)
        if rank:
            down, up = ScaledLinear(width, rank), nn.Linear(rank, width, bias=False)
            down.scale(reads=sizes.token)
            nn.init.zeros_(up.weight)
            self.markov_head = nn.ModuleDict({"down": down, "up": up})
        if config.confidence:
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width + rank, 1)})
        dims = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        self.register_buffer("rates", config.rope_theta**-dims, persistent=False)

    def forward(self, roots: Tensor, mask: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Blocks of roots [B, A, D] and masks [D] behind features [B, T, F] -> predicting rows [B, A, levels, D]."""
        count = self.config.rows
        context = self.hidden_norm(self.fc(features))
        masks = mask.expand(*roots.shape[:2], count - 1, -1)
        x = torch.cat((roots[:, :, None], masks), 2).float()
        places = anchors[:, :, None] + torch.arange(count, device=anchors.device)  # [B, A, R]
        near = self._rotations(places.flatten(1)[:, None])
        far = self._rotations(torch.arange(features.shape[1], device=anchors.device))
        for layer in self.layers:
            x = layer(x, context, anchors, far, near)
        rows: Tensor = self.norm(x[:, :, self.config.first :])
        return rows

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.rates
        return angles.cos(), angles.sin()
