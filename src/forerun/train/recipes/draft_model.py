"""Recipe for a small draft model, distilled from the target: starts from some of its layers, learns its laws."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.drafters.heads.formats import DraftVocabulary, write_config, write_shards
from forerun.models.config import DecoderConfig
from forerun.models.load.checkpoint import Checkpoint
from forerun.train.data.corpus import Batch
from forerun.train.network import CausalNet, Layer, split_layer
from forerun.train.options import TrainOptions
from forerun.train.recipes.base import LawLoss, Measured, Output, Reading
from forerun.train.teacher import Teacher


def spread_layers(layers: int, keep: int) -> list[int]:
    """Which layers to keep: the first, the last, and others evenly between."""
    keep = min(keep, layers)
    if keep == 1:
        return [0]
    return sorted({round(i * (layers - 1) / (keep - 1)) for i in range(keep)})


class DraftModelRecipe:
    """A student with a few of the target's layers, over the whole vocabulary."""

    feature_weight = 0.0
    law_weight = 1.0

    def __init__(self, options: TrainOptions, teacher: Teacher, checkpoint: Checkpoint) -> None:
        self.options, self.teacher, self.checkpoint = options, teacher, checkpoint
        config = DecoderConfig.from_hf(checkpoint.config)
        which = spread_layers(config.layers, options.own_layers)
        device = teacher.head.device
        student = CausalNet(config, checkpoint.weights, device=device, which=which)
        # a copy: tensors read from a file may share its memory with those of the teacher
        self.student = copy.deepcopy(student).requires_grad_(True)
        self.vocabulary = DraftVocabulary.whole(len(teacher.head), device)
        self.law_loss = LawLoss(options.loss)

    def module(self) -> nn.Module:
        return self.student

    def rates(self) -> dict[str, float]:
        return {}

    def lm_head(self) -> Tensor:
        return self.student.head

    def truth_head(self) -> Tensor:
        return self.teacher.head

    def read(self, batch: Batch) -> Reading:
        kept, last = self.teacher.features(batch.tokens, ())
        return Reading(kept, last, None)

    def outputs(self, batch: Batch, reading: Reading, noise: torch.Generator | None) -> Iterator[Output]:
        """One level: what a chain comes to is this level's rate to the power of its length."""
        yield Output(self.student(batch.tokens)[1], 0)

    def export(self, folder: Path, measured: Measured) -> None:
        """A Hugging Face folder that loads as any model does, with the target's own tokenizer."""
        write_model(folder, self.student, self.checkpoint.config)
        save_tokenizer(folder, self.checkpoint)


def write_model(folder: Path, net: CausalNet, config: Mapping[str, Any]) -> None:
    values = {**config, "num_hidden_layers": len(net.layers), "dtype": "bfloat16"}
    if "layer_types" in values:  # plain families have one type
        values["layer_types"] = ["full_attention"] * len(net.layers)
    write_config(folder, values)
    named: dict[str, Tensor] = {"model.embed_tokens.weight": net.embedding, "model.norm.weight": net.norm}
    if net.untied_head is not None:
        named["lm_head.weight"] = net.untied_head
    layers: Sequence[Any] = list(net.layers)
    for i, layer in enumerate(layers):
        assert isinstance(layer, Layer)
        named |= {f"model.layers.{i}.{name}": weight for name, weight in split_layer(layer).items()}
    half = {name: weight.detach().to(torch.bfloat16).cpu().contiguous() for name, weight in named.items()}
    write_shards(folder, half)


def save_tokenizer(folder: Path, checkpoint: Checkpoint) -> None:
    """The target's tokenizer beside a model made from it."""
    if checkpoint.path.is_dir() and not checkpoint.adapted_from:
        names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
        for name in names:
            if (checkpoint.path / name).is_file():
                (folder / name).write_bytes((checkpoint.path / name).read_bytes())
        return
    checkpoint.tokenizer().save(folder)
