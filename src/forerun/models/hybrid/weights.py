"""A hybrid's checkpoint as the decoder computes with it: one HybridBlock per layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.models.blocks import Checkpoint
from forerun.models.config import RecurrentConfig
from forerun.models.hybrid.mixers import Convolution, DeltaNet, Mamba2, Memory, Mixer, ShortConv
from forerun.models.hybrid.rows import RowLinear
from forerun.models.layers import Experts


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """Queries, keys, values and, where there is one, the gate of what is found, in one linear layer."""

    inputs: RowLinear
    qk_norm: Tensor | None  # [H + Hkv, Dh]
    output: RowLinear


@dataclass(frozen=True, slots=True)
class RowMlp:
    """A gated feed-forward layer: gate and up in one."""

    gate_up: RowLinear
    down: RowLinear


@dataclass(frozen=True, slots=True)
class HybridBlock:
    """One layer."""

    norm: Tensor | None  # [D]
    mixer: GatedAttention | Mixer | None  # None = a feed-forward layer alone
    mlp_norm: Tensor | None
    mlp: RowMlp | None
    experts: Experts | None  # what both give is added up


class HybridCheckpoint(Checkpoint):
    """Named weights of one hybrid, read one by one."""

    def hybrid_block(self, index: int) -> HybridBlock:
        recurrent, at = self.config.recurrent, f"{self.prefix}layers.{index}."
        assert recurrent is not None
        norm, _, mlp_norm, _ = self.norms(at)
        if recurrent.mlp_alone and recurrent.mlp_alone[index]:
            up, down = (self._linear(f"{at}mlp.{name}_proj.", *sizes) for name, sizes in self._plain_mlp().items())
            return HybridBlock(None, None, norm, RowMlp(up, down), None)
        if recurrent.mlp_alone:
            if recurrent.layers[index]:
                return HybridBlock(norm, self._memory(at, recurrent), None, None, None)
            return HybridBlock(norm, self._attention(at + "self_attn.", index), None, None, None)
        experts, mlp = self._experts(at) if self.config.sparse[index] else None, None
        if experts is None or (self.config.moe is not None and self.config.moe.beside_mlp):
            plain = self._mlp(at + "mlp.", self.config.inner)
            mlp = RowMlp(RowLinear(plain.gate_up, plain.gate_up_bias), RowLinear(plain.down, plain.down_bias))
        if not recurrent.layers[index]:
            return HybridBlock(norm, self._attention(at + "self_attn.", index), mlp_norm, mlp, experts)
        make = self._short_conv if recurrent.kind == "short_conv" else self._memory
        return HybridBlock(norm, make(at, recurrent), mlp_norm, mlp, experts)

    def _plain_mlp(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of a feed-forward layer without a gate."""
        return {"up": (self.config.inner, self.config.width), "down": (self.config.width, self.config.inner)}

    def _linear(self, at: str, outputs: int, inputs: int) -> RowLinear:
        return RowLinear(self._read(at + "weight", (outputs, inputs)), self._maybe(at + "bias"))

    def _attention(self, at: str, index: int) -> GatedAttention:
        config, rope = self.config, self.config.layer_ropes[index]
        dims, queries = 0 if rope is None else config.ropes[rope].dims, config.heads * config.head_dim
        weight, bias = self._qkv(at, "weight", dims), None
        if self._has_bias(at.removesuffix("self_attn.")):
            bias = self._qkv(at, "bias", dims)
        if config.gated_attention:  # behind the queries of each head
            weight = torch.cat((weight, self._gates(at + "q_proj.weight", (config.width,))))
            bias = None if bias is None else torch.cat((bias, self._gates(at + "q_proj.bias", ())))
        return GatedAttention(
            RowLinear(weight, bias),
            self._qk_norm(at, dims) if config.qk_norm else None,
            RowLinear(self._read(at + "o_proj.weight", (config.width, queries)), self._maybe(at + "o_proj.bias")),
        )

    def _gates(self, name: str, columns: tuple[int, ...]) -> Tensor:
        """The second half of every head's rows."""
        heads, dim = self.config.heads, self.config.head_dim
        whole = super()._get(name, (2 * heads * dim, *columns)).view(heads, 2, dim, *columns)
        return whole[:, 1].reshape(heads * dim, *columns).to(self.device, self.dtype)

    def _get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if not (self.config.gated_attention and ".q_proj." in name):
            return super()._get(name, shape)
        heads, dim = self.config.heads, self.config.head_dim
        whole = super()._get(name, (2 * shape[0], *shape[1:])).view(heads, 2, dim, *shape[1:])
        return whole[:, 0].reshape(shape)

    def _short_conv(self, at: str, recurrent: RecurrentConfig) -> ShortConv:
        width = self.config.width
        parts = [(f"{at}conv.{name}_proj.", outputs) for name, outputs in (("in", 3 * width), ("out", width))]
        inputs, output = (
            RowLinear(self._read(name + "weight", (outputs, width)), self._maybe(name + "bias"))
            for name, outputs in parts
        )
        return ShortConv(inputs, self._convolution(at + "conv.conv.", width, recurrent.kernel), output)

    def _memory(self, at: str, recurrent: RecurrentConfig) -> Memory:
        width, heads, is_mamba = self.config.width, recurrent.value_heads, recurrent.kind == "mamba2"
        keys, values = recurrent.key_heads * recurrent.key_dim, heads * recurrent.value_dim
        at += "mamba." if is_mamba else "linear_attn."
        made = (Mamba2 if is_mamba else DeltaNet)(
            recurrent,
            self._mamba_inputs(at, recurrent) if is_mamba else RowLinear(self._delta_net_inputs(at, recurrent)),
            self._convolution(at + "conv1d.", 2 * keys + values, recurrent.kernel),
            rates=-self._wide(at + "A_log", heads).exp(),
            step_bias=self._wide(at + "dt_bias", heads),
            norm=self._read(at + "norm.weight", (values if is_mamba else recurrent.value_dim,)),
            output=RowLinear(self._read(at + "out_proj.weight", (width, values)), self._maybe(at + "out_proj.bias")),
            eps=self.config.norm_eps,
            steps=heads if is_mamba else 2 * heads,
        )
        if isinstance(made, Mamba2):
            made.skip = self._wide(at + "D", heads)
        return made

    def _mamba_inputs(self, at: str, recurrent: RecurrentConfig) -> RowLinear:
        """Gates come first in the file, and second here."""
        heads, values = recurrent.value_heads, recurrent.value_heads * recurrent.value_dim
        convolved = values + 2 * recurrent.key_heads * recurrent.key_dim
        order = [slice(values, values + convolved), slice(0, values), slice(values + convolved, None)]
        weight = self._read(at + "in_proj.weight", (values + convolved + heads, self.config.width))
        bias = self._maybe(at + "in_proj.bias")
        moved = None if bias is None else torch.cat([bias[one] for one in order])
        return RowLinear(torch.cat([weight[one] for one in order]), moved)

    def _delta_net_inputs(self, at: str, recurrent: RecurrentConfig) -> Tensor:
        width, heads = self.config.width, recurrent.value_heads
        keys, values = recurrent.key_heads * recurrent.key_dim, heads * recurrent.value_dim
        if f"{at}in_proj_qkvz.weight" in self.weights:  # Qwen3-Next: key head by key head
            share = heads // recurrent.key_heads
            sizes = [recurrent.key_dim] * 2 + [share * recurrent.value_dim] * 2
            first = self._by_heads(f"{at}in_proj_qkvz.weight", 2 * keys + 2 * values, sizes)
            return torch.cat((first, self._by_heads(f"{at}in_proj_ba.weight", 2 * heads, [share, share])))
        outputs = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
        return torch.cat([self._read(f"{at}in_proj_{n}.weight", (size, width)) for n, size in outputs.items()])

    def _by_heads(self, name: str, outputs: int, sizes: list[int]) -> Tensor:
        """Rows that lie head by head, part after part."""
        width = self.config.width
        parts = torch.split(self._read(name, (outputs, width)).view(-1, sum(sizes), width), sizes, 1)
        return torch.cat([part.reshape(-1, width) for part in parts])

    def _convolution(self, at: str, channels: int, kernel: int) -> Convolution:
        return Convolution(self._read(at + "weight", (channels, 1, kernel)), self._maybe(at + "bias"))

    def _wide(self, name: str, size: int) -> Tensor:
        return self._get(name, (size,)).to(self.device, torch.float32)
