"""Recipes for Medusa and Hydra heads: each head learns the target's law one position further ahead.

Medusa-1 leaves the target as it is. Medusa-2 (`joint`) trains a LoRA on the target too, kept close to the original by
the same law loss, and writes it beside the heads (`target`, an adapter that loads as a model): another target, whose
text is not the first one's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.core.errors import InvalidInput
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.drafters.heads.medusa import HeadsConfig, write_heads
from forerun.train.data.corpus import Batch
from forerun.train.network import LoraNet
from forerun.train.options import TrainOptions
from forerun.train.recipes.base import Measured, Output, Reading, Recipe, shifted
from forerun.train.recipes.scaling import ScaledLinear, Sizes
from forerun.train.teacher import NetTeacher, Teacher

ADAPTED = "target"  # the folder of Medusa-2's adapter, beside the heads
HEADS_WEIGHT = 0.2  # Medusa-2: what the heads' losses count beside the target's own


class HeadsModule(nn.Module):
    """Blocks of all heads; `{head}.{block}.linear` as files name them."""

    def __init__(self, config: HeadsConfig, sizes: Sizes | None = None) -> None:
        super().__init__()
        self.config = config
        for i in range(config.count):
            blocks = nn.ModuleDict()
            for j in range(config.blocks):
                into = config.width * (2 + i) if config.family == "hydra" and j == 0 else config.width
                linear = ScaledLinear(into, config.width, bias=True)
                if sizes is not None:
                    tokens = into // config.width - 1
                    linear.scale(torch.cat((sizes.feature, *([sizes.token] * tokens))))
                nn.init.zeros_(linear.bias)
                if config.family == "medusa":  # every head starts as the target's own next-token prediction
                    nn.init.zeros_(linear.weight)
                blocks[str(j)] = nn.ModuleDict({"linear": linear})
            self.add_module(str(i), blocks)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Iterator[Tensor]:
        """Rows for the LM head of every head; hidden and embeddings [B, T, D] of token t at t."""
        read = hidden
        for i in range(self.config.count):
            blocks = self.get_submodule(str(i))
            row = hidden
            for j in range(self.config.blocks):
                into = row
                if self.config.family == "hydra" and j == 0:
                    read = into = torch.cat((read, shifted(embedded, i + 1)), -1)
                row = row + F.silu(blocks.get_submodule(f"{j}.linear")(into))
            yield row


class HeadsRecipe(Recipe):
    """Medusa or Hydra heads trained on a frozen target, or together with it."""

    def __init__(
        self,
        options: TrainOptions,
        teacher: Teacher,
        config: HeadsConfig,
        vocabulary: DraftVocabulary,
        sizes: Sizes | None = None,
    ) -> None:
        """Sizes of what heads read are for training alone: the heads that are written are the same."""
        super().__init__(options, teacher, vocabulary)
        self.config = config
        self.heads = HeadsModule(config, sizes).to(teacher.head.device)
        self.student: LoraNet | None = None
        self._module = self.heads
        if options.joint:
            if not isinstance(teacher, NetTeacher) or not self.vocabulary.is_whole:
                raise InvalidInput("joint=True needs a target of a plain family and the whole vocabulary")
            self.student = LoraNet(copy.deepcopy(teacher.net), options.own_rank)
            self._module = nn.ModuleDict({"heads": self.heads, "target": self.student})

    def rates(self) -> dict[str, float]:
        """Learning rates of parts that do not have the full one: the target's is a quarter of the heads'."""
        return {"target.": 0.25} if self.student is not None else {}

    def outputs(self, batch: Batch, reading: Reading, noise: torch.Generator | None) -> Iterator[Output]:
        hidden, scale = reading.last, 1.0
        if self.student is not None:
            hidden, scale = self.student(batch.tokens)[1], HEADS_WEIGHT
        embedded = F.embedding(batch.tokens, self.teacher.embedding)
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden, embedded = hidden.float(), embedded.float()
        for i, rows in enumerate(self.heads(hidden, embedded)):
            yield Output(rows, i + 1, scale * self.options.decay ** (i + 1))
        if self.student is not None and noise is not None:
            yield Output(hidden, 0)  # while it learns; a simulation counts heads only

    def export(self, folder: Path, measured: Measured) -> None:
        config = replace(self.config, rates=measured.rates)
        if self.student is not None:  # heads of the adapted target, not of the one that it was made from
            config = replace(config, target=f"{folder.name}/{ADAPTED}")
        write_heads(folder, config, self.tensors(self.heads))
        if self.student is not None:
            self.student.write(folder / ADAPTED, self.options.target)
