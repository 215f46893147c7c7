"""A checkpoint as the native kernels want it: structs that point to packed weights, and the tensors that keep them.

Queries, keys and values stay separate weights that share their input, so each keeps the type that the file gives
it; rows are in the order of Hugging Face's files, which is the one that the kernels rotate.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch
from torch import Tensor

from forerun.models.base import LayerSubset
from forerun.models.blocks import Checkpoint
from forerun.models.config import Activation, DecoderConfig, LatentConfig
from forerun.models.layers import unpair
from forerun.models.load.quants import Blocks, dequantize
from forerun.models.load.shapes import expert_names
from forerun.models.load.weights import GgufWeights, Weights, missing_weight, wrong_shape
from forerun.models.moe import MoeConfig
from forerun.models.native.library import Experts, Latent, Layer, Mixer, Model
from forerun.models.native.library import Weights as Parts
from forerun.models.native.packing import (
    FloatMode,
    PackedWeight,
    pack_blocks,
    pack_floats,
    side_by_side,
    table_of,
    take_rows,
)  # fmt: skip

Mode = Literal["gguf", "q8", "float32", "bfloat16"]
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "relu2": 2}  # as forerun.h has them


class NativeReader:
    """Named weights of one model as the kernels want them. `kept` holds every tensor that a struct points to."""

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Tensor], mode: Mode) -> None:
        self.config, self.mode = config, mode
        self.names = Checkpoint(weights, config, torch.float32, torch.device("cpu"))
        self.weights = self.names.weights
        self.kept: list[Tensor | ctypes.Array[Layer] | ctypes.Array[Parts] | Experts | Latent | Mixer] = []
        self.input_rows: Tensor | Blocks | None = None  # what the model's table of layer inputs points to
        self.inactive_bytes = list[int]()  # by layer: bytes of the experts that a pass over one node does not read
        with ThreadPoolExecutor(min(8, torch.get_num_threads())) as pool:  # packing is C and needs no interpreter
            head = pool.submit(self._linear, self._head_name(), config.vocab_size, config.width)
            self.layers = (Layer * config.layers)(*pool.map(self._layer_once, range(config.layers)))
            self.head = head.result()
        self.kept.append(self.layers)

    def model(self) -> Model:
        config = self.config
        return Model(
            layers=config.layers,
            width=config.width,
            heads=config.heads,
            vocab=config.vocab_size,
            inner=max(*map(config.inner_of, range(config.layers)), config.varied.input_width if config.varied else 0),
            rotary=max(rope.dims for rope in config.ropes),
            keyed=config.layers if config.varied is None else config.kv_layers,
            eps=config.norm_eps,
            attention_scale=config.attention_scale,
            activation=_ACTIVATIONS[config.activation],
            whole_norms=config.qk_norm == "all",
            embedding_scale=config.embedding_scale if config.embedding_scale != 1.0 else 0.0,
            residual_scale=config.residual_scale,
            logit_scale=config.logit_scale if config.logit_scale != 1.0 else 0.0,
            attention_cap=config.attention_softcap or 0.0,
            logit_cap=config.logit_softcap or 0.0,
            layer=self.layers,
            final_norm=self._keep(self.names.final_norm().contiguous()),
            head=side_by_side([self.head]),
            **self._inputs(),
        )

    def _inputs(self) -> dict[str, Any]:
        """What tokens give every layer beside the residual stream; the sum of both parts is over the root of two."""
        config, varied, at = self.config, self.config.varied, self.names.prefix
        if varied is None or not varied.input_width:
            return {}
        width, outputs, name = varied.input_width, config.layers * varied.input_width, "embed_tokens_per_layer.weight"
        self._check(at + name, (config.vocab_size, outputs))
        rows = self._table(at + name)
        if not table_of(rows).rows:
            rows = dequantize(rows) if isinstance(rows, Blocks) else rows.float().contiguous()
        self.input_rows = rows
        projection = self._linear(at + "per_layer_model_projection.weight", outputs, config.width)
        return {
            "input_width": width,
            "inputs": table_of(rows),
            "input_projection": side_by_side([projection]),
            "input_norm": self._keep(self.names.norm(at + "per_layer_projection_norm.weight", width) * 0.5**0.5),
            "input_scale": (width / 2) ** 0.5,
        }

    def _end(self, at: str) -> dict[str, Any]:
        """What ends a layer: its input, and a number that multiplies all."""
        varied, width = self.config.varied, self.config.width
        if varied is None:
            return {}
        self._check(at + "layer_scalar", (1,))
        found: dict[str, Any] = {"scale": float(self.weights[at + "layer_scalar"])}
        if inputs := varied.input_width:
            found["input_gate"] = side_by_side([self._linear(at + "per_layer_input_gate.weight", inputs, width)])
            found["input_output"] = side_by_side([self._linear(at + "per_layer_projection.weight", width, inputs)])
            found["after_input"] = self._keep(self.names.norm(at + "post_per_layer_input_norm.weight").contiguous())
        return found

    def embedding(self) -> Tensor | Blocks:
        """What tokens are looked up in."""
        name = self.names.prefix + "embed_tokens.weight"
        self._check(name, (self.config.vocab_size, self.config.width))
        return self.head_table() if self.config.tied else self._table(name)

    def head_table(self) -> Tensor | Blocks:
        """The head by rows; in float modes it is the one that the kernels read."""
        plain = not isinstance(self.weights, GgufWeights) and self.mode != "q8"
        return self.head.data if plain else self._table(self._head_name())

    def _table(self, name: str) -> Tensor | Blocks:
        """The file's own blocks, of which only the rows asked for are ever read, or a float tensor."""
        if isinstance(self.weights, GgufWeights):
            return self.weights.blocks(name)
        return self.weights[name].detach()

    def _head_name(self) -> str:
        if self.config.tied:
            return self.names.prefix + "embed_tokens.weight"
        names = ("lm_head.weight", "language_model.lm_head.weight")
        return next((name for name in names if name in self.weights), names[0])

    def _layer_once(self, index: int) -> Layer:
        """Pack a layer, and let go of the file's pages: else file and copy would be in memory side by side."""
        layer = self._layer(index)
        if isinstance(self.weights, GgufWeights):
            self.weights.file.drop_pages()
        return layer

    def _layer(self, index: int) -> Layer:
        at = f"{self.names.prefix}layers.{index}."
        before, after, mlp_before, mlp_after = (
            None if norm is None else self._keep(norm.contiguous()) for norm in self.names.norms(at)
        )
        norms, apart = self.names.norms_apart(at), dict[str, Any]()
        if norms:
            names = ("experts_norm", "after_experts", "after_dense")
            apart = {name: self._keep(norm.contiguous()) for name, norm in zip(names, norms, strict=True)}
        return Layer(
            attention_norm=before,
            mlp_norm=mlp_before,
            after_attention=after,
            after_mlp=mlp_after,
            **self._attention(at + "self_attn.", index),
            **(self._experts(at) if self.config.sparse[index] else {}),
            **({} if self.config.sparse[index] and not apart else self._mlp(at + "mlp.", self.config.inner_of(index))),
            **apart,
            **self._end(at),
        )

    def _attention(self, at: str, index: int) -> dict[str, Any]:
        config = self.config
        window, rope = config.windows[index], config.layer_ropes[index]
        kv_heads, dim = config.kv_sizes(index)
        queries, keys, norms = config.heads * dim, kv_heads * dim, dict[str, int]()
        borrows = config.varied is not None and not config.varied.owns[index]
        if config.qk_norm is not None:
            lengths = {"q": queries, "k": keys} if config.qk_norm == "all" else {"q": dim, "k": dim}
            norms = {
                f"{one}_norm": self._keep(self.names.norm(f"{at}{one}_norm.weight", size).contiguous())
                for one, size in lengths.items()
                if one == "q" or not borrows
            }
        if config.varied is not None:
            norms["v_norm"] = self._keep(torch.ones(dim))
        latent = config.latent
        return {
            "kv_heads": kv_heads,
            "head_dim": dim,
            "rotary": 0 if rope is None else config.ropes[rope].dims,
            "cache": config.kv_source(index),
            "borrows": borrows,
            **norms,
            **(self._queries_keys_values(at, index) if latent is None else self._latent(at, latent)),
            "output": self._projection(
                at, "o", {"o": config.width}, queries if latent is None else config.heads * latent.value_dim
            ),
            "window": window or 0,
            "rotate": 0 if rope is None else 1 + rope,
            "sinks": self._floats(at + "sinks", config.heads) if config.sinks else None,
        }

    def _queries_keys_values(self, at: str, index: int) -> dict[str, Any]:
        """With gates, the second half of every head's rows of the queries' weight, where the family has them."""
        config, varied, (kv_heads, dim) = self.config, self.config.varied, self.config.kv_sizes(index)
        queries, keys = config.heads * dim, kv_heads * dim
        if not config.gated_attention:
            sizes = {"q": queries, "k": keys, "v": keys}
            if varied is not None and not varied.owns[index]:
                sizes = {"q": queries}
            elif varied is not None and varied.keys_are_values[index]:
                del sizes["v"]
            made = self._projection(at, "qkv", sizes, config.width)
            if [*sizes] == ["q", "k"]:
                made.count, made.part[2] = 3, made.part[1]
            return {"qkv": made}
        halves = torch.arange(2 * queries).view(config.heads, 2, config.head_dim)
        query, gate = (
            self._linear(at + "q_proj.weight", 2 * queries, config.width, rows=halves[:, i].flatten()) for i in (0, 1)
        )
        others = [self._linear(f"{at}{name}_proj.weight", keys, config.width) for name in "kv"]
        return {"qkv": side_by_side([query, *others]), "gate": side_by_side([gate])}

    def _latent(self, at: str, latent: LatentConfig) -> dict[str, Any]:
        """The expanding weight is split by head, and by what becomes of it."""
        config, width, rank = self.config, self.config.width, latent.rank
        both, queries = latent.key_dim + latent.value_dim, latent.key_dim + latent.rope_dim
        self._check(at + "kv_b_proj.weight", (config.heads * both, rank))
        expand = self.weights[at + "kv_b_proj.weight"].detach().view(config.heads, both, rank)
        split = [(one[: latent.key_dim].t().contiguous(), one[latent.key_dim :]) for one in expand]
        arrays = [
            (Parts * config.heads)(*(side_by_side([self._pack(weight, None)]) for weight in parts))
            for parts in zip(*split, strict=True)
        ]
        found, name, inputs = Latent(latent.query_rank or 0, rank, latent.key_dim, latent.rope_dim), "q_proj", width
        found.value_dim, (found.absorb, found.expand) = latent.value_dim, arrays
        if latent.query_rank is not None:
            name, inputs = "q_b_proj", latent.query_rank
            found.short_queries = side_by_side([self._linear(at + "q_a_proj.weight", inputs, width)])
            found.query_norm = self._keep(self.names.norm(at + "q_a_layernorm.weight", inputs).contiguous())
        rows = self._rotated_last(config.heads, queries)
        found.queries = side_by_side([self._linear(f"{at}{name}.weight", config.heads * queries, inputs, rows=rows)])
        rows = self._rotated_last(1, latent.row)
        found.latents = side_by_side([self._linear(at + "kv_a_proj_with_mqa.weight", latent.row, width, rows=rows)])
        found.latent_norm = self._keep(self.names.norm(at + "kv_a_layernorm.weight", rank).contiguous())
        self.kept.extend((*arrays, found))
        return {"latent": ctypes.pointer(found)}

    def _rotated_last(self, heads: int, size: int) -> Tensor:
        """Rows of heads whose ends rotate, in the order that the kernels rotate."""
        rows = torch.arange(heads * size).view(heads, size)
        if self.config.rope_pairs == "neighbours":
            assert self.config.latent is not None
            dims = self.config.latent.rope_dim
            rows[:, -dims:] = unpair(rows[:, -dims:].flatten(), dims, self.config.ropes[0].dims).view(heads, dims)
        return rows.flatten()

    def _floats(self, name: str, count: int) -> int:
        self._check(name, (count,))
        return self._keep(self.weights[name].detach().float().contiguous())

    def _mlp(self, at: str, inner: int) -> dict[str, Any]:
        gates, width = {"gate": inner, "up": inner} if self.config.gated else {"up": inner}, self.config.width
        return {
            "gate_up": self._projection(at, "gate_up", gates, width),
            "down": self._projection(at, "down", {"down": width}, inner),
        }

    def _experts(self, at: str) -> dict[str, Any]:
        """Experts one by one, as on disk, or stacked, as transformers holds them."""
        moe = self.config.moe
        assert moe is not None
        at += "block_sparse_moe." if f"{at}block_sparse_moe.gate.weight" in self.weights else "mlp."
        packed = [self._expert(at, i, moe) for i in range(moe.experts)]
        arrays = [(Parts * moe.experts)(*map(side_by_side, parts)) for parts in zip(*packed, strict=True)]
        found = Experts(moe.experts, moe.per_token, moe.inner, moe.renormalise, moe.sigmoid, *moe.groups)
        found.shared_inner, found.scale = moe.shared_inner or 0, moe.scale
        found.correction = self._keep(self.names.correction(at)) if moe.corrected else None
        found.activation = _ACTIVATIONS[self.config.activation]
        found.limit, found.alpha = moe.clamp or (0.0, 0.0)
        found.router = self._router(at + "gate", moe.experts, moe.biases)
        if moe.normed_apart:
            found.router = side_by_side([self._kept(pack_floats(self.names.router_behind(at), "float32"))])
            found.scales = self._floats(at + "gate.per_expert_scale", moe.experts)
        found.gate_up, found.down = arrays
        if moe.beside_mlp and not moe.normed_apart:  # which is an expert that every row goes through, without a gate
            shared, found.shared_inner = self._mlp(at, self.config.inner), self.config.inner
            found.shared_gate_up, found.shared_down = shared["gate_up"], shared["down"]
        if moe.shared_inner is not None:
            shared = self._mlp(at + "shared_expert.", moe.shared_inner)
            found.shared_gate_up, found.shared_down = shared["gate_up"], shared["down"]
            if moe.shared_gate:
                found.shared_gate = self._router(at + "shared_expert_gate", 1)
        size = sum(part.data.nbytes for parts in packed for some in parts for part in some)
        self.inactive_bytes.append(size * (moe.experts - moe.per_token) // moe.experts)
        self.kept.extend((*arrays, found))
        return {"experts": ctypes.pointer(found)}

    def _router(self, name: str, outputs: int, biased: bool = False) -> Parts:
        """In float32 whatever the mode: it is small, and a rounded one would pick other experts."""
        self._check(name + ".weight", (outputs, self.config.width))
        bias = self._bias(name + ".bias", outputs) if biased else None
        return side_by_side([self._kept(pack_floats(self.weights[name + ".weight"].detach(), "float32", bias))])

    def _bias(self, name: str, outputs: int) -> Tensor:
        self._check(name, (outputs,))
        return self.weights[name].detach()

    def _expert(self, at: str, index: int, moe: MoeConfig) -> tuple[list[PackedWeight], list[PackedWeight]]:
        width, inner = self.config.width, moe.inner
        if (stacked := at + "experts.gate_up_proj") in self.weights:
            self._check(stacked, (moe.experts, 2 * inner, width))
            self._check(at + "experts.down_proj", (moe.experts, width, inner))
            both = self._pack(self.weights[stacked][index], None)
            return [both], [self._pack(self.weights[at + "experts.down_proj"][index], None)]
        names = expert_names(self.config, f"{at}experts.0.w1.weight" in self.weights)
        *ups, down = (f"{at}experts.{index}.{name}.weight" for name in names)
        into = [self._linear(name, inner, width, moe.biases) for name in ups]
        return into, [self._linear(down, width, inner, moe.biases)]

    def _projection(self, at: str, fused: str, sizes: dict[str, int], inputs: int) -> Parts:
        """Weights that share their input; Phi-3 stores them as one."""
        if f"{at}{fused}_proj.weight" in self.weights:
            sizes = {fused: sum(sizes.values())}
        parts = [self._linear(f"{at}{name}_proj.weight", size, inputs) for name, size in sizes.items()]
        return side_by_side(parts)

    def _linear(
        self, name: str, outputs: int, inputs: int, biased: bool = False, rows: Tensor | None = None
    ) -> PackedWeight:
        """A matrix, or these rows of it, and its bias where there is one; `biased`: there must be."""
        self._check(name, (outputs, inputs))
        bias_name, weights = name.removesuffix("weight") + "bias", self.weights
        bias = self._bias(bias_name, outputs) if bias_name in weights or biased else None
        blocks = weights.blocks(name) if self.mode == "gguf" and isinstance(weights, Weights) else None
        weight = weights[name] if blocks is None else blocks
        if (
            rows is None
            and self.config.rope_pairs == "neighbours"
            and name.endswith(("q_proj.weight", "k_proj.weight"))
        ):
            rows = unpair(torch.arange(outputs), self.config.head_dim, self.config.ropes[0].dims)
        if rows is not None:
            weight = take_rows(weight, rows) if isinstance(weight, Blocks) else weight[rows]
            bias = None if bias is None else bias[rows]
        return self._pack(weight, bias)

    def _pack(self, weight: Tensor | Blocks, bias: Tensor | None) -> PackedWeight:
        if isinstance(weight, Blocks):
            return self._kept(pack_blocks(weight, bias))
        own: FloatMode = "bfloat16" if weight.dtype == torch.bfloat16 else "float32"
        return self._kept(pack_floats(weight.detach(), own if self.mode == "gguf" else self.mode, bias))

    def _kept(self, packed: PackedWeight) -> PackedWeight:
        self.kept.extend(tensor for tensor in (packed.data, packed.bias) if tensor is not None)
        return packed

    def _keep(self, tensor: Tensor) -> int:
        self.kept.append(tensor)
        return tensor.data_ptr()

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.weights:
            raise missing_weight(self.weights, name)
        weights = self.weights
        given = weights.shape(name) if isinstance(weights, Weights) else tuple(weights[name].shape)
        if given != shape:
            raise wrong_shape(weights, name, given, shape)


def some_layers(model: Model, layers: LayerSubset) -> Model:
    """The same model with some of its layers only, over the same weights."""
    made = (Layer * (layers.end - layers.first))(*[model.layer[i] for i in range(layers.first, layers.end)])
    for index in layers.without_attention:
        made[index - layers.first].qkv.count = 0
    for index in layers.without_mlp:
        made[index - layers.first].gate_up.count = 0
        made[index - layers.first].experts = None
    part = Model.from_buffer_copy(model)
    part.layers, part.keyed, part.layer = len(made), len(made), made  # the struct keeps the array
    return part
