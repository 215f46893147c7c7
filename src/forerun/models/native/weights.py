"""A checkpoint as the native kernels want it: structs that point to packed weights, and the tensors that keep them.

Queries, keys and values stay separate weights that share their input, so each keeps the type that the file gives
it; rows are in the order of Hugging Face's files, which is the one that the kernels rotate.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor

from forerun.errors import DamagedFile, InvalidInput
from forerun.models.blocks import Checkpoint
from forerun.models.config import DecoderConfig
from forerun.models.layer_subset import LayerSubset
from forerun.models.load.quants import Blocks
from forerun.models.load.weights import GgufWeights, Weights
from forerun.models.native import library as native
from forerun.models.native.library import Layer, Model
from forerun.models.native.library import Weights as Parts
from forerun.models.native.packing import PackedWeight, pack_blocks, pack_floats, side_by_side

Mode = Literal["gguf", "q8", "float32", "bfloat16"]


class NativeReader:
    """Named weights of one model as the kernels want them. `kept` holds every tensor that a struct points to."""

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Tensor], mode: Mode) -> None:
        self.config, self.weights, self.mode = config, weights, mode
        self.names = Checkpoint(weights, config, torch.float32, torch.device("cpu"))
        self.kept: list[Tensor | ctypes.Array[Layer]] = []
        with ThreadPoolExecutor(
            min(8, torch.get_num_threads())
        ) as pool:  # packing is C and needs no interpreter
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
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            rotary=config.ropes[0].dims,
            inner=config.inner,
            vocab=config.vocab_size,
            eps=config.norm_eps,
            attention_scale=config.attention_scale,
            layer=self.layers,
            final_norm=self._keep(self.names.final_norm().contiguous()),
            head=side_by_side([self.head]),
        )

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
        config, at = self.config, f"{self.names.prefix}layers.{index}."
        window, rope = config.windows[index], config.layer_ropes[index]
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        sizes = {"q": queries, "k": keys, "v": keys}
        gates = {"gate": config.inner, "up": config.inner}
        return Layer(
            attention_norm=self._vector(at + "input_layernorm.weight", config.width),
            mlp_norm=self._vector(at + "post_attention_layernorm.weight", config.width),
            q_norm=self._vector(at + "self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=self._vector(at + "self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
            qkv=self._projection(at + "self_attn.", "qkv", sizes, config.width),
            output=self._projection(at + "self_attn.", "o", {"o": config.width}, queries),
            gate_up=self._projection(at + "mlp.", "gate_up", gates, config.width),
            down=self._projection(at + "mlp.", "down", {"down": config.width}, config.inner),
            window=window or 0,
            rotate=rope is not None,
        )

    def _projection(self, at: str, fused: str, sizes: dict[str, int], inputs: int) -> Parts:
        """Weights that share their input; Phi-3 stores them as one."""
        if f"{at}{fused}_proj.weight" in self.weights:
            sizes = {fused: sum(sizes.values())}
        parts = [self._linear(f"{at}{name}_proj.weight", size, inputs) for name, size in sizes.items()]
        return side_by_side(parts)

    def _linear(self, name: str, outputs: int, inputs: int) -> PackedWeight:
        self._check(name, (outputs, inputs))
        bias_name = name.removesuffix("weight") + "bias"
        bias = None
        if bias_name in self.weights:
            self._check(bias_name, (outputs,))
            bias = self.weights[bias_name].detach()
        if self.mode == "gguf":
            assert isinstance(self.weights, GgufWeights)
            packed = pack_blocks(self.weights.blocks(name), bias)
        else:
            packed = pack_floats(self.weights[name].detach(), self.mode, bias)
        self.kept.extend(tensor for tensor in (packed.data, packed.bias) if tensor is not None)
        return packed

    def _vector(self, name: str, size: int) -> int:
        self._check(name, (size,))
        return self._keep(self.weights[name].detach().to(torch.float32).contiguous())

    def _keep(self, tensor: Tensor) -> int:
        self.kept.append(tensor)
        return tensor.data_ptr()

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.weights:
            raise DamagedFile(
                f"the checkpoint has no weight {name!r}: is a shard missing, or the config another's?"
            )
        weights = self.weights
        given = weights.shape(name) if isinstance(weights, Weights) else tuple(weights[name].shape)
        if given != shape:
            raise DamagedFile(
                f"weight {name!r} is {given} but the config says {shape}: are they of one model?"
            )


def some_layers(model: Model, layers: LayerSubset) -> Model:
    """The same model with some of its layers only, over the same weights."""
    if layers.skips and not native.skips_sublayers():
        raise InvalidInput(
            "the native kernels here were built before layers could be skipped: build forerun again"
        )
    made = (Layer * (layers.end - layers.first))(*[model.layer[i] for i in range(layers.first, layers.end)])
    for index in layers.without_attention:
        made[index - layers.first].attention_norm = None
    for index in layers.without_mlp:
        made[index - layers.first].mlp_norm = None
    part = Model.from_buffer_copy(model)
    part.layers, part.layer = len(made), made  # the struct keeps the array
    return part
