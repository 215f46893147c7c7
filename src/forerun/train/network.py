"""A causal transformer for training: the frozen target, a student draft model, or the writer of training data.

The same weights and arithmetic as forerun.models.decoder, in another shape: rectangles of tokens [B, T] in one
pass, gradients where wanted, and for writing a static cache that can be captured as a graph. It runs the plain
families (Llama, Mistral without a window, Qwen 2 and 3, SmolLM 2); the others are run by transformers. `LoraNet` learns
low-rank changes of every layer's matrices while the base is frozen.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from forerun.core.errors import InvalidInput, UnsupportedModel
from forerun.models.adapters import Adapter
from forerun.models.blocks import Block, Checkpoint
from forerun.models.config import DecoderConfig
from forerun.models.layers import Mlp, unpair
from forerun.models.rope import frequencies

MATRICES = ("qkv", "o", "gate_up", "down")  # of a layer


def is_plain(config: DecoderConfig) -> bool:
    """Can this network run the model?"""
    return not config.features


class Layer(nn.Module):
    """One block; query and key rows are ordered for rotations of neighbours, as in our decoder."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    def __init__(self, config: DecoderConfig, block: Block) -> None:
        super().__init__()
        assert isinstance(block.mlp, Mlp)
        self.config = config
        mlp = {name: getattr(block.mlp, name) for name in ("gate_up", "gate_up_bias", "down", "down_bias")}
        own = ("attention_norm", "qkv", "qkv_bias", "qk_norm", "o", "o_bias", "mlp_norm")
        for name, weight in ({name: getattr(block, name) for name in own} | mlp).items():
            parameter = None if weight is None else nn.Parameter(weight, requires_grad=False)
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor, rotations: Tensor, cache: Tensor | None, positions: Tensor | None) -> Tensor:
        config, eps = self.config, self.config.norm_eps
        batch, length = x.shape[:2]
        qkv = F.linear(F.rms_norm(x, x.shape[-1:], self.attention_norm, eps), self.qkv, self.qkv_bias)
        qkv = qkv.view(batch, length, -1, config.head_dim)
        q, k, v = torch.split(qkv, [config.heads, config.kv_heads, config.kv_heads], 2)
        if self.qk_norm is not None:
            qk = F.rms_norm(torch.cat((q, k), 2), (config.head_dim,), None, eps) * self.qk_norm
            q, k = torch.split(qk, [config.heads, config.kv_heads], 2)
        q, k = turn(q, rotations), turn(k, rotations)
        if cache is None or positions is None:
            found = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=True,
                scale=config.attention_scale,
                enable_gqa=config.heads != config.kv_heads,
            ).transpose(1, 2)
        else:
            found = attend_cached(q, k, v, cache, positions, config)
        x = x + F.linear(found.reshape(batch, length, -1), self.o, self.o_bias)
        gate, up = F.linear(F.rms_norm(x, x.shape[-1:], self.mlp_norm, eps), self.gate_up, self.gate_up_bias).chunk(
            2, -1
        )
        return x + F.linear(F.silu(gate) * up, self.down, self.down_bias)


class CausalNet(nn.Module):
    """Tokens [B, T] to hidden rows. Rows may be padded on the right: what follows cannot be seen."""

    rates: Tensor
    untied_head: Tensor | None

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        which: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if not is_plain(config):
            raise UnsupportedModel(f"{config.family} is not one of the plain families; transformers runs it")
        self.config = config
        with torch.no_grad():
            source = Checkpoint(weights, config, dtype, torch.device(device))
            embedding = source.embedding()
            self.embedding = nn.Parameter(embedding, requires_grad=False)
            layers = range(config.layers) if which is None else which
            self.layers = nn.ModuleList([Layer(config, source.block(i)) for i in layers])
            self.norm = nn.Parameter(source.final_norm(), requires_grad=False)
            head = None if config.tied else nn.Parameter(source.head(embedding), requires_grad=False)
            self.register_parameter("untied_head", head)
        rates, self._magnitude = frequencies(config.ropes[0], 0)
        self.register_buffer("rates", rates.to(device), persistent=False)

    @property
    def head(self) -> Tensor:
        return self.embedding if self.untied_head is None else self.untied_head

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def forward(self, tokens: Tensor, keep: Sequence[int] = ()) -> tuple[dict[int, Tensor], Tensor]:
        """The inputs of the layers named, and the last hidden rows after the norm: [B, T, D] each."""
        rotations = self.rotations(torch.arange(tokens.shape[1], device=tokens.device))
        return self._through(F.embedding(tokens, self.embedding), rotations, keep)

    def step(self, tokens: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        """One more token [B] each at positions [B] -> [B, D]; keys and values go into cache [L, 2, B, Hkv, S, Dh]."""
        rotations = self.rotations(positions)[:, None]
        x = F.embedding(tokens, self.embedding)[:, None]
        for layer, slots in zip(self.layers, cache, strict=True):
            x = layer(x, rotations, slots, positions)
        return F.rms_norm(x[:, 0], x.shape[-1:], self.norm, self.config.norm_eps)

    def _through(self, x: Tensor, rotations: Tensor, keep: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        kept: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            if i in keep:
                kept[i] = x
            x = layer(x, rotations, None, None)
        if len(self.layers) in keep:
            kept[len(self.layers)] = x
        last = F.rms_norm(x, x.shape[-1:], self.norm, self.config.norm_eps)
        if -1 in keep:
            kept[-1] = last
        return kept, last

    def rotations(self, positions: Tensor) -> Tensor:
        """[..., R, 2] cosine and sine of every pair's angle."""
        angles = positions[..., None].float() * self.rates
        return torch.stack((angles.cos(), angles.sin()), -1) * self._magnitude


def turn(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate neighbours of x [B, T, H, Dh] by rotations [(B,) T, R, 2], in fp32 as our decoder does."""
    count = 2 * rotations.shape[-2]
    a, b = torch.unflatten(x[..., :count].float(), -1, (-1, 2)).unbind(-1)
    cos, sin = rotations.unsqueeze(-3).unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)
    return turned if count == x.shape[-1] else torch.cat((turned, x[..., count:]), -1)


def attend_cached(q: Tensor, k: Tensor, v: Tensor, cache: Tensor, positions: Tensor, config: DecoderConfig) -> Tensor:
    """One query each over a static cache [2, B, Hkv, S, Dh]; a kv head's queries go as rows of one call."""
    batch = len(positions)
    rows = torch.arange(batch, device=positions.device)
    cache[0][rows, :, positions] = k[:, 0]
    cache[1][rows, :, positions] = v[:, 0]
    grouped = q.view(batch, config.kv_heads, -1, config.head_dim)
    if q.is_cuda:
        from forerun.train.attend_rows import attend_rows  # Triton is there with CUDA only

        return attend_rows(grouped, cache, positions, config.attention_scale).view(q.shape)
    seen = torch.arange(cache.shape[3], device=positions.device) <= positions[:, None]
    mask = seen[:, None, None].expand(-1, 1, grouped.shape[2], -1)
    found = F.scaled_dot_product_attention(grouped, cache[0], cache[1], attn_mask=mask, scale=config.attention_scale)
    return found.reshape(batch, 1, -1, config.head_dim)


def split_rows(config: DecoderConfig, name: str, rows: Tensor) -> dict[str, Tensor]:
    """The rows of one of a layer's MATRICES, or as many rows, under the names and in the order of checkpoints."""
    if name == "qkv":
        sizes = [config.heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2]
        q, k, v = torch.split(rows, sizes)
        q, k = (unpair(part, config.head_dim, config.ropes[0].dims) for part in (q, k))
        return {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v}
    if name == "gate_up":
        gate, up = rows.chunk(2)
        return {"mlp.gate_proj": gate, "mlp.up_proj": up}
    return {"self_attn.o_proj" if name == "o" else "mlp.down_proj": rows}


def split_layer(layer: Layer) -> dict[str, Tensor]:
    """One layer's weights under the names and in the order of checkpoints."""
    config, dims = layer.config, layer.config.ropes[0].dims
    named: dict[str, Tensor] = {
        "input_layernorm.weight": layer.attention_norm,
        "post_attention_layernorm.weight": layer.mlp_norm,
    }
    for name in MATRICES:
        parts = split_rows(config, name, layer.get_parameter(name))
        named |= {f"{part}.weight": weight for part, weight in parts.items()}
    if layer.qkv_bias is not None:
        biases = split_rows(config, "qkv", layer.qkv_bias)
        named |= {f"{part}.bias": bias for part, bias in biases.items()}
    if layer.qk_norm is not None:
        heads = {"q_norm": layer.qk_norm[0], "k_norm": layer.qk_norm[-1]}
        named |= {f"self_attn.{name}.weight": unpair(row, config.head_dim, dims) for name, row in heads.items()}
    return {name: weight.detach().contiguous() for name, weight in named.items()}


def require_separate_matrices(names: Container[str]) -> None:
    """Raise where a checkpoint fuses what an adapter names one by one, as Phi 3 does."""
    if "model.layers.0.self_attn.q_proj.weight" not in names:
        raise InvalidInput("a LoRA needs a target whose files name q_proj, k_proj and v_proj; train without --joint")


class LoraNet(nn.Module):
    """A network whose layers' matrices are the base's plus `up @ down`; it begins as the base."""

    def __init__(self, base: CausalNet, rank: int) -> None:
        super().__init__()
        self.rank, self.base = rank, base.requires_grad_(False)
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for key, weight in self._matrices().items():
            outputs, inputs = weight.shape
            down = torch.randn(rank, inputs) * inputs**-0.5
            self.down[key] = nn.Parameter(down.to(weight.device))
            self.up[key] = nn.Parameter(torch.zeros(outputs, rank, device=weight.device))

    def forward(self, tokens: Tensor, keep: Sequence[int] = ()) -> tuple[dict[int, Tensor], Tensor]:
        changed = {
            key.replace("-", "."): weight.float() + self.up[key] @ self.down[key]
            for key, weight in self._matrices().items()
        }
        if not torch.is_autocast_enabled(tokens.device.type):
            changed = {name: weight.to(self.base.embedding.dtype) for name, weight in changed.items()}
        found: tuple[dict[int, Tensor], Tensor] = functional_call(self.base, changed, (tokens, tuple(keep)))
        return found

    def write(self, folder: Path, base: str) -> None:
        """An adapter in PEFT's form, of the base with this name."""
        changes: dict[str, tuple[Tensor, Tensor]] = {}
        for i in range(len(self.base.layers)):
            for name in MATRICES:
                key = f"layers-{i}-{name}"
                for part, up in split_rows(self.base.config, name, self.up[key].detach()).items():
                    down = self.down[key].detach().clone()  # parts of one matrix share it; files do not
                    changes[f"model.layers.{i}.{part}.weight"] = down, up
        Adapter(base, self.rank, 1.0, changes).write(folder)

    def _matrices(self) -> dict[str, Tensor]:
        """By a key that a parameter may have."""
        return {
            f"layers-{i}-{name}": layer.get_parameter(name)
            for i, layer in enumerate(self.base.layers)
            for name in MATRICES
        }
