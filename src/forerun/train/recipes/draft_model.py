"""Recipes for drafters made of the target's own layers: a small draft model, and an adapter at an early exit.

The draft model starts from some of the target's layers and learns its laws. The exit adapter stands behind one of the
layers of the frozen target: a drafted token has there exactly the row that it would have in the target's pass, so one
level is all there is to learn, and its rate is the rate of every level.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.core.errors import InvalidInput
from forerun.drafters.heads.formats import DraftVocabulary, write_config, write_shards
from forerun.drafters.model.layer_skip import PLAN, ExitAdapter, LayerPlan, default_plan, write_plan
from forerun.models.base import LayerSubset
from forerun.models.blocks import Checkpoint as Named
from forerun.models.config import DecoderConfig, supports
from forerun.models.load.checkpoint import Checkpoint
from forerun.train.data.corpus import Batch
from forerun.train.network import CausalNet, Layer, split_layer
from forerun.train.options import TrainOptions
from forerun.train.recipes.base import Measured, Output, Reading, Recipe, read_teacher
from forerun.train.teacher import Teacher


def spread_layers(layers: int, keep: int) -> list[int]:
    """Which layers to keep: the first, the last, and others evenly between."""
    keep = min(keep, layers)
    if keep == 1:
        return [0]
    return sorted({round(i * (layers - 1) / (keep - 1)) for i in range(keep)})


class DraftModelRecipe(Recipe):
    """A student with a few of the target's layers and an LM head of its own, over the whole vocabulary."""

    def __init__(self, options: TrainOptions, teacher: Teacher, checkpoint: Checkpoint) -> None:
        super().__init__(options, teacher, DraftVocabulary.whole(len(teacher.head)))
        self.checkpoint = checkpoint
        config = DecoderConfig.from_hf(checkpoint.config)
        which = spread_layers(config.layers, options.own_layers)
        device = teacher.head.device
        student = CausalNet(config, checkpoint.weights, device=device, which=which)
        # a copy: tensors read from a file may share its memory with those of the teacher
        self._module = self.student = copy.deepcopy(student).requires_grad_(True)

    def lm_head(self) -> Tensor:
        return self.student.head

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


KEPT_BYTES = 4 << 30  # of features: on a CPU a pass of the target costs more than everything behind it


class AdapterModule(nn.Module):
    """An ExitAdapter in training; it starts as the target's own early exit."""

    def __init__(self, final_norm: Tensor, rank: int, eps: float) -> None:
        super().__init__()
        width = len(final_norm)
        self.norm = nn.Parameter(torch.ones(width))
        self.down = nn.Parameter(torch.randn(rank, width) * width**-0.5)
        self.up = nn.Parameter(torch.zeros(width, rank))
        self.final_norm = nn.Parameter(final_norm.clone())
        self.eps = eps

    def adapter(self) -> ExitAdapter:
        return ExitAdapter(self.norm, self.down, self.up, self.final_norm, self.eps)

    def forward(self, rows: Tensor) -> Tensor:
        return self.adapter()(rows)


class EarlyExitRecipe(Recipe):
    """A norm and a gated low-rank correction behind one of the frozen target's layers."""

    def __init__(
        self, options: TrainOptions, teacher: Teacher, checkpoint: Checkpoint, vocabulary: DraftVocabulary
    ) -> None:
        """A vocabulary smaller than the target's makes steps cheaper; the adapter drafts all tokens in any case."""
        if not supports(checkpoint.config):
            raise InvalidInput("early-exit needs a target of one of our own families: layer_skip runs no other")
        config = DecoderConfig.from_hf(checkpoint.config)
        self.exit = options.exit or default_plan(config.layers).layers.end
        if not 1 <= self.exit < config.layers:
            raise InvalidInput(f"exit={self.exit} is out of range: 1 to {config.layers - 1} of {config.layers} layers")
        super().__init__(options, teacher, vocabulary)
        self.depth, self.layers = config.layers, (self.exit,)
        norm = Named(checkpoint.weights, config, torch.float32, torch.device("cpu")).final_norm()
        self.adapter = AdapterModule(norm.float(), options.own_rank, config.norm_eps).to(teacher.head.device)
        self._module = self.adapter
        self._kept: dict[bytes, Reading] = {}
        self._bytes = 0

    def read(self, batch: Batch) -> Reading:
        if batch.tokens.device.type != "cpu":
            return self._read_whole(batch.tokens)
        rows = batch.tokens
        texts = [row[: int(row.nonzero().max()) + 1] if row.any() else row[:1] for row in rows]  # no padding
        found = [self._read_once(text) for text in texts]
        exits, last = (
            torch.stack([_padded(one, rows.shape[1]) for one in some])
            for some in ([one.features[self.exit][0] for one in found], [one.last[0] for one in found])
        )
        inside = [one.inside[0, :, None] for one in found if one.inside is not None]
        known = torch.stack([_padded(one, rows.shape[1])[:, 0] for one in inside]) if inside else None
        return Reading({self.exit: exits}, last, known)

    @torch.no_grad()
    def _read_whole(self, tokens: Tensor) -> Reading:
        kept = self.teacher.features(tokens, (self.exit,))
        return read_teacher(kept, self.teacher.head, self.vocabulary)

    def _read_once(self, text: Tensor) -> Reading:
        """Of one text, without padding: on a CPU it is kept while there is room."""
        key = text.numpy().tobytes()
        if key in self._kept:
            return self._kept[key]
        reading = self._read_whole(text[None])
        self._bytes += 2 * reading.last.nbytes
        if self._bytes <= KEPT_BYTES:
            self._kept[key] = reading
        return reading

    def outputs(self, batch: Batch, reading: Reading, noise: torch.Generator | None) -> Iterator[Output]:
        """One level: what a chain comes to is this level's rate to the power of its length."""
        rows = reading.features[self.exit]
        yield Output(self.adapter(rows if torch.is_autocast_enabled(rows.device.type) else rows.float()), 0)

    def export(self, folder: Path, measured: Measured) -> None:
        """A plan of layers that `forerun generate --drafter layer_skip --draft-layers FOLDER` reads."""
        notes = {
            "target": self.options.target,
            "acceptance": round(measured.rates[0][0], 4),
            "measured": "greedy agreement per token on held-back text, teacher-forced",
        }
        adapter = self.adapter.adapter().to(torch.float32, torch.device("cpu"))
        write_plan(folder / PLAN, LayerPlan(LayerSubset(self.exit), adapter, notes), self.depth)


def _padded(rows: Tensor, length: int) -> Tensor:
    """Rows of zeros behind some rows: [T, D] -> [length, D]."""
    return torch.nn.functional.pad(rows, (0, 0, 0, length - len(rows)))
