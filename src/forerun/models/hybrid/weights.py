"""A hybrid's checkpoint as the decoder computes with it: one HybridBlock per layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.models.blocks import Checkpoint
from forerun.models.config import LatentConfig, RecurrentConfig, VariedConfig
from forerun.models.hybrid.attention import LatentAttention, LayerEnd, LayerInputs, SizedAttention
from forerun.models.hybrid.mixers import Convolution, DeltaNet, Mamba2, Memory, Mixer, ShortConv
from forerun.models.hybrid.rows import RowLinear
from forerun.models.layers import Experts, pair_up


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
    mixer: GatedAttention | LatentAttention | SizedAttention | Mixer | None  # None = a feed-forward layer alone
    mlp_norm: Tensor | None
    mlp: RowMlp | None
    experts: Experts | None  # what both give is added up
    after_mixer: Tensor | None = None  # [D]; where what attention gives is normed
    after_mlp: Tensor | None = None
    end: LayerEnd | None = None
    apart: tuple[Tensor, ...] = ()  # [D] norms before experts, behind them, and behind the dense layer beside them


class HybridCheckpoint(Checkpoint):
    """Named weights of one hybrid, read one by one."""

    def hybrid_block(self, index: int) -> HybridBlock:
        recurrent, at = self.config.recurrent, f"{self.prefix}layers.{index}."
        norm, after, mlp_norm, mlp_after = self.norms(at)
        alone = recurrent.mlp_alone if recurrent is not None else ()
        if alone and self.config.sparse[index]:
            return HybridBlock(None, None, norm, None, self._experts(at))
        if alone and alone[index]:
            up, down = (self._linear(f"{at}mlp.{name}_proj.", *sizes) for name, sizes in self._plain_mlp().items())
            return HybridBlock(None, None, norm, RowMlp(up, down), None)
        if alone:
            return HybridBlock(norm, self._mixer(at, index), None, None, None)
        experts, mlp, varied = self._experts(at) if self.config.sparse[index] else None, None, self.config.varied
        if experts is None or (self.config.moe is not None and self.config.moe.beside_mlp):
            plain = self._mlp(at + "mlp.", self.config.inner_of(index))
            mlp = RowMlp(RowLinear(plain.gate_up, plain.gate_up_bias), RowLinear(plain.down, plain.down_bias))
        end = None if varied is None else self._end(at, varied)
        apart = self.norms_apart(at) if experts is not None else ()
        return HybridBlock(norm, self._mixer(at, index), mlp_norm, mlp, experts, after, mlp_after, end, apart)

    def _mixer(self, at: str, index: int) -> GatedAttention | LatentAttention | SizedAttention | Mixer:
        config, recurrent = self.config, self.config.recurrent
        if config.latent is not None:
            return self._latent(at + "self_attn.", index, config.latent)
        if config.varied is not None:
            return self._sized(at + "self_attn.", index, config.varied)
        if recurrent is None or not recurrent.layers[index]:
            return self._attention(at + "self_attn.", index)
        return self._short_conv(at, recurrent) if recurrent.kind == "short_conv" else self._memory(at, recurrent)

    def layer_inputs(self) -> LayerInputs | None:
        config, varied, at = self.config, self.config.varied, self.prefix + "per_layer_"
        if varied is None or not varied.input_width:
            return None
        outputs = config.layers * varied.input_width
        return LayerInputs(
            self._read(self.prefix + "embed_tokens_per_layer.weight", (config.vocab_size, outputs)),
            RowLinear(self._read(at + "model_projection.weight", (outputs, config.width))),
            self.norm(at + "projection_norm.weight", varied.input_width),
            config.norm_eps,
        )

    def _end(self, at: str, varied: VariedConfig) -> LayerEnd:
        width, inputs, scale = self.config.width, varied.input_width, self._read(at + "layer_scalar", (1,))
        if not inputs:
            return LayerEnd(None, None, None, scale)
        return LayerEnd(
            RowLinear(self._read(at + "per_layer_input_gate.weight", (inputs, width))),
            RowLinear(self._read(at + "per_layer_projection.weight", (width, inputs))),
            self.norm(at + "post_per_layer_input_norm.weight"),
            scale,
        )

    def _sized(self, at: str, index: int, varied: VariedConfig) -> SizedAttention:
        config, (kv_heads, dim) = self.config, varied.sizes[index]
        owns, sizes = varied.owns[index], {"q": config.heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}

        def linear(name: str) -> RowLinear:
            weight, bias = self._read(f"{at}{name}_proj.weight", (sizes[name], config.width)), f"{at}{name}_proj.bias"
            biases = self._maybe(bias)
            if name == "v":
                return RowLinear(weight, biases)
            return RowLinear(pair_up(weight, dim, dim), None if biases is None else pair_up(biases, dim, dim))

        # values that are made of what keys are made of lie in the keys' order, which the output must undo
        outputs, equal = self._read(at + "o_proj.weight", (config.width, config.heads * dim)), varied.keys_are_values
        if equal[varied.sources[index]]:
            outputs = pair_up(outputs.t(), dim, dim).t().contiguous()
        return SizedAttention(
            kv_heads,
            dim,
            config.windows[index],
            varied.sources[index],
            config.norm_eps,
            linear("q"),
            pair_up(self.norm(at + "q_norm.weight", dim), dim, dim),
            linear("k") if owns else None,
            pair_up(self.norm(at + "k_norm.weight", dim), dim, dim) if owns else None,
            linear("v") if owns and not equal[index] else None,
            RowLinear(outputs, self._maybe(at + "o_proj.bias")),
        )

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

    def _latent(self, at: str, index: int, latent: LatentConfig) -> LatentAttention:
        config, width, rank = self.config, self.config.width, latent.rank
        both, queries = latent.key_dim + latent.value_dim, latent.key_dim + latent.rope_dim
        name, inputs = ("q_proj", width) if latent.query_rank is None else ("q_b_proj", latent.query_rank)
        expand = self._read(at + "kv_b_proj.weight", (config.heads * both, rank)).view(config.heads, both, rank)
        short, norm = None, None
        if latent.query_rank is not None:
            weight = self._read(at + "q_a_proj.weight", (latent.query_rank, width))
            short = RowLinear(weight, self._maybe(at + "q_a_proj.bias"))
            norm = self.norm(at + "q_a_layernorm.weight", latent.query_rank)
        cached, bias = at + "kv_a_proj_with_mqa.", self._maybe(at + "kv_a_proj_with_mqa.bias")
        made = self._paired(self._read(cached + "weight", (latent.row, width)), 1)
        return LatentAttention(
            latent,
            index,
            short,
            norm,
            RowLinear(self._paired(self._read(f"{at}{name}.weight", (config.heads * queries, inputs)), config.heads)),
            RowLinear(made, None if bias is None else self._paired(bias, 1)),
            self.norm(at + "kv_a_layernorm.weight", rank),
            keys=expand[:, : latent.key_dim].contiguous(),
            values=expand[:, latent.key_dim :].transpose(1, 2).contiguous(),
            output=RowLinear(
                self._read(at + "o_proj.weight", (width, config.heads * latent.value_dim)),
                self._maybe(at + "o_proj.bias"),
            ),
        )

    def _paired(self, weight: Tensor, heads: int) -> Tensor:
        """The rotated part, which ends the rows of every head, in the order that `rotate_` takes."""
        rope = self.config.ropes[0].dims
        if self.config.rope_pairs == "neighbours":
            return weight
        assert self.config.latent is not None
        dims = self.config.latent.rope_dim
        parts = weight.view(heads, -1, *weight.shape[1:]).clone()
        parts[:, -dims:] = pair_up(parts[:, -dims:].reshape(heads * dims, *weight.shape[1:]), dims, rope).view_as(
            parts[:, -dims:]
        )
        return parts.view_as(weight)

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
        share, outputs, parts = heads // recurrent.key_heads, {"qkv": 2 * keys + values, "z": values}, list[Tensor]()
        if f"{at}in_proj_qkvz.weight" in self.weights:  # Qwen3-Next: key head by key head
            sizes = [recurrent.key_dim] * 2 + [share * recurrent.value_dim] * 2
            parts.append(self._by_heads(f"{at}in_proj_qkvz.weight", 2 * keys + 2 * values, sizes))
            outputs = {}
        if f"{at}in_proj_ba.weight" not in self.weights:
            outputs |= {"b": heads, "a": heads}
        parts += [self._read(f"{at}in_proj_{n}.weight", (size, width)) for n, size in outputs.items()]
        if f"{at}in_proj_ba.weight" in self.weights:
            parts.append(self._by_heads(f"{at}in_proj_ba.weight", 2 * heads, [share, share]))
        return torch.cat(parts)

    def _by_heads(self, name: str, outputs: int, sizes: list[int]) -> Tensor:
        """Rows that lie head by head, part after part."""
        width = self.config.width
        parts = torch.split(self._read(name, (outputs, width)).view(-1, sum(sizes), width), sizes, 1)
        return torch.cat([part.reshape(-1, width) for part in parts])

    def _convolution(self, at: str, channels: int, kernel: int) -> Convolution:
        return Convolution(self._read(at + "weight", (channels, 1, kernel)), self._maybe(at + "bias"))

    def _wide(self, name: str, size: int) -> Tensor:
        return self._get(name, (size,)).to(self.device, torch.float32)
