"""Test parts of the GPU benchmark: random weights of a given shape, and a drafter that knows the answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from forerun.core.types import Budget, Seq, TreeBatch
from forerun.drafters.base import BaseDrafter
from lab.inflate.model import Shape


class RandomWeights(Mapping[str, Tensor]):
    """Weights of a Llama of some shape, made on the device: enough to time a pass."""

    def __init__(self, shape: Shape, vocab_size: int, tied: bool, device: str) -> None:
        self.config = {
            "model_type": "llama", "vocab_size": vocab_size, "hidden_size": shape.width,
            "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "rms_norm_eps": 1e-5,
            "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "intermediate_size": shape.inner,
            "max_position_embeddings": 32768, "tie_word_embeddings": tied,
        }  # fmt: skip
        width, self.device = shape.width, device
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = {"q": (queries, width), "k": (keys, width), "v": (keys, width), "o": (width, queries)}
        parts = {f"self_attn.{name}_proj": size for name, size in sizes.items()}
        parts |= {"mlp.gate_proj": (shape.inner, width), "mlp.up_proj": (shape.inner, width)}
        parts |= {"mlp.down_proj": (width, shape.inner)}
        self.shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, width)}
        self.shapes |= {"lm_head.weight": (vocab_size, width), "model.norm.weight": (width,)}
        for i in range(shape.layers):
            norms = ("input_layernorm", "post_attention_layernorm")
            self.shapes |= {f"model.layers.{i}.{name}.weight": (width,) for name in norms}
            self.shapes |= {f"model.layers.{i}.{name}.weight": size for name, size in parts.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, name: str) -> Tensor:
        size = self.shapes[name]
        new = torch.ones(size, dtype=torch.bfloat16, device=self.device)
        return new.normal_(0.0, 0.7 / size[-1] ** 0.5) if len(size) > 1 else new


class AnswerTrees(BaseDrafter):
    """Trees that branch at random and hold some of the known answer somewhere: a drafter to test equality with."""

    def __init__(self) -> None:
        self.answers: dict[tuple[int, ...], list[int]] = {}

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        return TreeBatch.trees([self._tree(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)])

    def _tree(self, seq: Seq, budget: Budget) -> tuple[list[int], list[int]]:
        rng = random.Random(f"{seq.id} {len(seq.tokens)}")
        written = len(seq.tokens) - seq.prompt_length
        coming = self.answers[tuple(seq.tokens[: seq.prompt_length])][written : written + rng.randint(0, 4)]
        tokens, parents, depths, right = seq.tokens[-1:], [-1], [0], 0
        for _ in range(budget.nodes):
            parent = right if coming and rng.random() < 0.4 else rng.randrange(len(tokens))
            grows = parent == right and bool(coming)
            token = coming[0] if grows else rng.choice(seq.tokens)
            if depths[parent] >= budget.depth or (parent, token) in zip(parents, tokens, strict=True):
                continue
            if grows:
                coming, right = coming[1:], len(tokens)
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return tokens, parents
