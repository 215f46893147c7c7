"""Loads a checkpoint's weights into the layout that our decoder computes with: one Block per layer.

Names are those of the files on disk or of transformers' modules, under any of the usual prefixes. Queries,
keys and values become one weight, gate and up another; query and key rows are reordered for `rotate_`.
Weights are read one at a time and copied into place, so that a lazy mapping holds one at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.errors import UnsupportedModel
from forerun.models.config import DecoderConfig
from forerun.models.layers import Experts, Mlp, pair_up
from forerun.models.load.quantized.unstacked import unstack
from forerun.models.load.shapes import expert_names
from forerun.models.load.weights import Weights, missing_weight, wrong_shape
from forerun.models.moe import MoeConfig

_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")


@dataclass(frozen=True, slots=True)
class Block:
    attention_norm: Tensor | None  # [D]; None = rows enter as they are
    qkv: Tensor  # [(H + 2 Hkv) Dh, D]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [H + Hkv, Dh]: by head, or over all heads of queries and over all of keys
    o: Tensor  # [D, H Dh]
    o_bias: Tensor | None
    mlp_norm: Tensor | None
    mlp: Mlp | Experts
    after_attention_norm: Tensor | None  # [D]; where the layer norms what attention returns
    after_mlp_norm: Tensor | None
    sinks: Tensor | None = None  # [H]


class Checkpoint:
    def __init__(
        self, weights: Mapping[str, Tensor], config: DecoderConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        weights = unstack(config.family, weights)
        if isinstance(weights, Weights):
            weights = weights.on(device)
        if config.names:
            weights = _Renamed(weights, config)
        self.weights, self.config, self.dtype, self.device = weights, config, dtype, device
        self.prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in weights), "model.")

    def embedding(self) -> Tensor:
        return self._read(self.prefix + "embed_tokens.weight", (self.config.vocab_size, self.config.width))

    def head(self, embedding: Tensor) -> Tensor:
        if self.config.tied:
            return embedding
        name = next((n for n in ("lm_head.weight", "language_model.lm_head.weight") if n in self.weights), None)
        return self._read(name or "lm_head.weight", (self.config.vocab_size, self.config.width))

    def final_norm(self) -> Tensor:
        return self.norm(self.prefix + "norm.weight")

    def block(self, index: int) -> Block:
        config, at = self.config, f"{self.prefix}layers.{index}."
        rope = None if config.rope_pairs == "neighbours" else config.layer_ropes[index]
        rotary_dims = 0 if rope is None else config.ropes[rope].dims
        before, after, mlp_before, mlp_after = self.norms(at)
        return Block(
            attention_norm=before,
            qkv=self._qkv(at + "self_attn.", "weight", rotary_dims),
            qkv_bias=self._qkv(at + "self_attn.", "bias", rotary_dims) if self._has_bias(at) else None,
            qk_norm=self._qk_norm(at + "self_attn.", rotary_dims) if config.qk_norm else None,
            o=self._read(at + "self_attn.o_proj.weight", (config.width, config.heads * config.head_dim)),
            o_bias=self._maybe(at + "self_attn.o_proj.bias"),
            mlp_norm=mlp_before,
            mlp=self._experts(at) if config.sparse[index] else self._mlp(at + "mlp.", config.inner),
            after_attention_norm=after,
            after_mlp_norm=mlp_after,
            sinks=self._read(at + "self_attn.sinks", (config.heads,)) if config.sinks else None,
        )

    def norms(self, at: str) -> list[Tensor | None]:
        """Of a layer, in the order of `Norms`."""
        return [None if name is None else self.norm(f"{at}{name}.weight") for name in self.config.norms]

    def norms_apart(self, at: str) -> tuple[Tensor, ...]:
        """Before a layer's experts, behind them, and behind the dense layer beside them; none where they have none."""
        apart = self.config.moe is not None and self.config.moe.normed_apart
        return tuple(self.norm(f"{at}mlp.norms.{place}.weight") for place in ("before", "after", "dense") if apart)

    def _has_bias(self, at: str) -> bool:
        return any(f"{at}self_attn.{name}_proj.bias" in self.weights for name in ("q", "qkv"))

    def _qkv(self, at: str, kind: str, rotary_dims: int) -> Tensor:
        """Queries, keys and values as one weight or bias; Phi-3 stores them so already."""
        config = self.config
        sizes = [config.heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2]
        columns = (config.width,) if kind == "weight" else ()
        fused = torch.empty(sum(sizes), *columns, dtype=self.dtype, device=self.device)
        if f"{at}qkv_proj.{kind}" in self.weights:
            parts = iter(torch.split(self._get(f"{at}qkv_proj.{kind}", tuple(fused.shape)), sizes))
        else:
            names = zip(("q", "k", "v"), sizes, strict=True)
            parts = (self._get(f"{at}{name}_proj.{kind}", (size, *columns)) for name, size in names)
        for name, into, part in zip("qkv", torch.split(fused, sizes), parts, strict=True):
            into.copy_(part if name == "v" or not rotary_dims else pair_up(part, config.head_dim, rotary_dims))
        return fused

    def _qk_norm(self, at: str, rotary_dims: int) -> Tensor:
        """[H + Hkv, Dh] one norm weight per head, so that queries and keys are normed in one go."""
        config = self.config
        rows = []
        for name, heads in (("q_norm", config.heads), ("k_norm", config.kv_heads)):
            weight = self.norm(f"{at}{name}.weight", config.head_dim * (heads if config.qk_norm == "all" else 1))
            rows.append(pair_up(weight, config.head_dim, rotary_dims).view(-1, config.head_dim).expand(heads, -1))
        return torch.cat(rows)

    def _mlp(self, at: str, inner: int) -> Mlp:
        width = self.config.width
        if not self.config.gated:
            up = self._read(at + "up_proj.weight", (inner, width))
            return Mlp(up, self._read(at + "down_proj.weight", (width, inner)), None, None)
        gate_up = torch.empty(2 * inner, width, dtype=self.dtype, device=self.device)
        if at + "gate_up_proj.weight" in self.weights:
            gate_up.copy_(self._get(at + "gate_up_proj.weight", (2 * inner, width)))
        else:
            self._fill(gate_up, [at + "gate_proj.weight", at + "up_proj.weight"])
        biases = [self._maybe(f"{at}{name}_proj.bias") for name in ("gate", "up")]
        both = [bias for bias in biases if bias is not None]
        down = self._read(at + "down_proj.weight", (width, inner))
        return Mlp(gate_up, down, torch.cat(both) if both else None, self._maybe(at + "down_proj.bias"))

    def _experts(self, at: str) -> Experts:
        """Experts one by one, as on disk, or stacked, as transformers holds them."""
        moe, width = self.config.moe, self.config.width
        assert moe is not None
        old_mixtral = f"{at}block_sparse_moe.gate.weight" in self.weights
        at += "block_sparse_moe." if old_mixtral else "mlp."
        into = 2 * moe.inner if self.config.gated else moe.inner
        stacked = (moe.experts, into, width), (moe.experts, width, moe.inner)
        if at + "experts.gate_up_proj" in self.weights:
            gate_up = self._read(at + "experts.gate_up_proj", stacked[0])
            down = self._read(at + "experts.down_proj", stacked[1])
        else:
            gate_up = torch.empty(stacked[0], dtype=self.dtype, device=self.device)
            down = torch.empty(stacked[1], dtype=self.dtype, device=self.device)
            for i in range(moe.experts):
                *ups, last = expert_names(self.config, f"{at}experts.0.w1.weight" in self.weights)
                self._fill(gate_up[i], [f"{at}experts.{i}.{name}.weight" for name in ups])
                self._fill(down[i], [f"{at}experts.{i}.{last}.weight"])
        shared = moe.shared_inner
        biases = self._expert_biases(at, moe) if moe.biases else {}
        router, wide, scales = self._get(at + "gate.weight", (moe.experts, width)), torch.float32, None
        if moe.normed_apart:
            router = self.router_behind(at)
            scales = self._get(at + "gate.per_expert_scale", (moe.experts,)).to(self.device, wide)
        return Experts(
            router=router.to(self.device, wide if moe.wide_router else self.dtype).contiguous(),
            gate_up=gate_up,
            down=down,
            shared=self._mlp(at + "shared_expert.", shared) if shared else None,
            shared_gate=self._read(at + "shared_expert_gate.weight", (1, width))
            if shared and moe.shared_gate
            else None,
            correction=self.correction(at).to(self.device) if moe.corrected else None,
            scales=scales,
            **biases,
        )

    def correction(self, at: str) -> Tensor:
        """[E] fp32 what is added to experts' scores for the choice; ERNIE's files have one row of it."""
        moe, name = self.config.moe, at + "gate.e_score_correction_bias"
        assert moe is not None
        rows = name in self.weights and self.weights[name].dim() == 2
        return self._get(name, (1, moe.experts) if rows else (moe.experts,)).flatten().float()

    def router_behind(self, at: str) -> Tensor:
        """Of rows that the experts' norm has multiplied: it reads the same rows behind a norm of its own."""
        width, moe = self.config.width, self.config.moe
        assert moe is not None
        own, theirs = (self._get(at + name, (width,)).float() for name in ("gate.scale", "norms.before.weight"))
        if not bool(theirs.all()):
            raise UnsupportedModel("a norm before experts has a weight of 0, behind which the router sees nothing")
        router: Tensor = self._get(at + "gate.weight", (moe.experts, width)).float() * (own * width**-0.5 / theirs)
        return router

    def _expert_biases(self, at: str, moe: MoeConfig) -> dict[str, Tensor]:
        width = self.config.width
        gate_up = torch.empty(moe.experts, 2 * moe.inner, dtype=self.dtype, device=self.device)
        down = torch.empty(moe.experts, width, dtype=self.dtype, device=self.device)
        for i in range(moe.experts):
            self._fill(gate_up[i], [f"{at}experts.{i}.{name}_proj.bias" for name in ("gate", "up")])
            self._fill(down[i], [f"{at}experts.{i}.down_proj.bias"])
        router = self._read(at + "gate.bias", (moe.experts,))
        return {"router_bias": router, "gate_up_bias": gate_up, "down_bias": down}

    def norm(self, name: str, size: int | None = None) -> Tensor:
        """A norm's weight; where the norm multiplies by 1 + weight, the sum is kept in fp32, which bf16 would round."""
        weight = self._get(name, (size or self.config.width,))
        dtype = torch.float32 if self.config.norm_offset else self.dtype
        weight = weight.to(self.device, dtype)
        return weight + 1 if self.config.norm_offset else weight

    def _fill(self, into: Tensor, names: Sequence[str]) -> None:
        for part, name in zip(into.chunk(len(names)), names, strict=True):
            part.copy_(self._get(name, tuple(part.shape)))

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._get(name, shape).to(self.device, self.dtype).contiguous()

    def _maybe(self, name: str) -> Tensor | None:
        return self.weights[name].to(self.device, self.dtype) if name in self.weights else None

    def _get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.weights:
            raise missing_weight(self.weights, self.config.file_name(name))
        weight = self.weights[name]
        if tuple(weight.shape) != shape:
            raise wrong_shape(self.weights, self.config.file_name(name), tuple(weight.shape), shape)
        return weight.detach()


class _Renamed(Mapping[str, Tensor]):
    """Weights under our names, where a family has its own."""

    def __init__(self, weights: Mapping[str, Tensor], config: DecoderConfig) -> None:
        self._weights, self._config = weights, config

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._config.file_name(name)]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._config.file_name(name) in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
