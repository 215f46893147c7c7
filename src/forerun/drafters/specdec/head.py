"""SpecDecHead: the weights of a SpecDec drafter and its one pass over blocks; the trainer runs the same code.

A block has a row for each token to be drafted. All rows start from the target's last hidden row and the root's
embedding, joined, and a vector of their place in the block; in every layer they see each other in both directions
and attend to the encoder's rows, whose keys and values are made once per source. The LM head has the target's rows of a
part of its vocabulary; the same rows embed the root, and a root outside has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters.head_formats import check_weight, read_config, read_tensors, write_config, write_shards
from forerun.drafters.specdec.config import KIND, SpecDecConfig
from forerun.drafters.vocab import DraftVocabulary
from forerun.errors import InvalidInput
from forerun.heads import kind_of
from forerun.models.encoder_decoder.layers import Attention, FeedForward, Layer, Norm
from forerun.models.encoder_decoder.linear import Linear, TorchLinear, make_linear
from forerun.models.native import library as native

Make = Callable[[Tensor, Tensor | None], Linear]
# layer, queries [B, K, D] -> what they find in their sources [B, K, D]
Look = Callable[[int, Tensor], Tensor]


class SpecDecHead:
    """A drafter's weights as functions. `make` makes linear layers; those of torch can be trained."""

    def __init__(
        self, config: SpecDecConfig, weights: Mapping[str, Tensor], vocabulary: DraftVocabulary, make: Make
    ) -> None:
        self.config, self.vocabulary = config, vocabulary

        def linear(name: str) -> Linear:
            return make(weights[f"{name}.weight"], weights[f"{name}.bias"])

        def norm(name: str) -> Norm:
            return Norm(weights[f"{name}.norm.weight"], weights[f"{name}.norm.bias"], config.norm_eps)

        self.layers = [
            Layer(
                Attention(norm(f"{at}self_attn"), linear(f"{at}self_attn.in"), linear(f"{at}self_attn.out")),
                Attention(
                    norm(f"{at}cross_attn"), linear(f"{at}cross_attn.in"), linear(f"{at}cross_attn.out")
                ),
                FeedForward(norm(f"{at}mlp"), linear(f"{at}mlp.up"), linear(f"{at}mlp.down")),
            )
            for at in (f"layers.{i}." for i in range(config.depth))
        ]
        self._join, self._source, self._head = linear("fc"), linear("source"), linear("lm_head")
        self._places, table = weights["places"], weights["lm_head.weight"]
        self._embedding = F.pad(table, (0, 0, 0, 1))  # the last row is of all tokens that cannot be drafted
        self._row_of = torch.full((config.vocab_size,), len(vocabulary), device=table.device)
        self._row_of[vocabulary.ids] = torch.arange(len(vocabulary), device=table.device)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def read(self, encoded: Tensor) -> Tensor:
        """[N, S, D] what encoders made of sources -> [L, 2, N, H, S, Dh] keys and values of every layer."""
        count, length, width = encoded.shape
        made = self._source(encoded.reshape(-1, width))
        heads = self.config.heads
        shape = (count, length, self.config.depth, 2, heads, width // heads)
        return made.view(shape).permute(2, 3, 0, 4, 1, 5)

    def start(self, hidden: Tensor, roots: Tensor) -> Tensor:
        """[B, D] the rows before the roots [B] -> [B, K, D] a block for each."""
        embedded = F.embedding(self._row_of[roots], self._embedding) * self.config.embedding_scale
        return self._join(torch.cat((hidden, embedded), -1))[:, None] + self._places

    def run(self, x: Tensor, look: Look) -> Tensor:
        """Blocks [B, K, D] -> rows for the LM head [B, K, D]."""
        count, size, width = x.shape
        heads, rows = self.config.heads, x.reshape(-1, width)
        for i, layer in enumerate(self.layers):
            part, cross, mlp = layer.attention, layer.cross, layer.feed_forward
            assert cross is not None
            qkv = part.inputs(rows).view(count, size, 3, heads, -1).permute(2, 0, 3, 1, 4)
            seen = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])  # [B, H, K, Dh]
            rows = part.norm(rows + part.output(seen.transpose(1, 2).reshape(-1, width)))
            found = look(i, cross.inputs(rows).view(count, size, width)).reshape(-1, width)
            rows = cross.norm(rows + cross.output(found))
            rows = mlp.norm(rows + mlp.down(F.silu(mlp.up(rows))))
        return rows.view(count, size, width)

    def logits(self, rows: Tensor) -> Tensor:
        """[.., D] -> [.., Vd]."""
        return torch.unflatten(self._head(rows.reshape(-1, rows.shape[-1])).float(), 0, rows.shape[:-1])


def attend_to_source(queries: Tensor, source: Tensor, mask: Tensor | None = None) -> Tensor:
    """[N, Q, D] to the keys and values [2, N, H, S, Dh] of their own sources -> [N, Q, D]."""
    count, many, width = queries.shape
    split = queries.view(count, many, source.shape[2], -1).transpose(1, 2)
    found = F.scaled_dot_product_attention(split, source[0], source[1], attn_mask=mask)
    return found.transpose(1, 2).reshape(count, many, width)


def look_one_by_one(sources: Sequence[Tensor]) -> Look:
    """Block b looks into sources[b] [L, 2, 1, H, S, Dh]: they differ in length."""

    def look(layer: int, queries: Tensor) -> Tensor:
        return torch.cat([attend_to_source(queries[b : b + 1], one[layer]) for b, one in enumerate(sources)])

    return look


def read_specdec(folder: Path) -> tuple[SpecDecConfig, dict[str, Tensor], DraftVocabulary]:
    """A drafter's files, checked."""
    values, weights = read_config(folder), read_tensors(folder)
    if kind_of(values, lambda: weights) != KIND:
        raise InvalidInput(f"{folder} holds no SpecDec drafter; try `forerun drafters check`")
    config = SpecDecConfig.from_json(values)
    for name, shape in config.shapes().items():
        check_weight(folder, weights, name, shape)
    vocabulary = DraftVocabulary.from_file(weights, config.draft_vocab_size, config.vocab_size)
    return config, weights, vocabulary


def write_specdec(
    folder: Path, config: SpecDecConfig, weights: Mapping[str, Tensor], vocabulary: DraftVocabulary
) -> None:
    """config.json and safetensors, in half the bytes of float32."""
    write_config(folder, config.to_json())
    half = {name: weights[name].detach().to(torch.bfloat16).cpu().contiguous() for name in config.shapes()}
    write_shards(folder, half if vocabulary.is_whole else half | vocabulary.tensors())


def load_specdec(folder: Path, device: torch.device) -> SpecDecHead:
    """On a CPU in eight bits by the native kernels, where they are: what is drafted need not be exact."""
    config, weights, vocabulary = read_specdec(folder)
    native_cpu = device.type == "cpu" and native.available()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    placed = {name: weights[name].to(device, dtype) for name in config.shapes()}
    make: Make = partial(make_linear, mode="q8") if native_cpu else TorchLinear
    return SpecDecHead(config, placed, vocabulary.to(device), make)
