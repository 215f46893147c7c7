"""Recipe for a multi-token-prediction layer: DeepSeek-V3's, learnt on a frozen target by drafting ahead.

Training goes as EAGLE-3's does (recipes.eagle): each step reads the output of the one before it, gradients flow through
the steps, and the loss is between laws alone. What differs is the layer: a norm on the token and one on the hidden row,
a projection of both, an ordinary layer behind it. The LM head is the target's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from forerun.drafters.heads.eagle_head import EagleConfig
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.drafters.heads.mtp import write_mtp
from forerun.train.options import TrainOptions
from forerun.train.recipes.base import Measured, WithTargetHead, shifted
from forerun.train.recipes.eagle import EagleLayer, EagleRecipe, Norm
from forerun.train.recipes.scaling import BEGINNING, QUICK, ScaledLinear, ScaledNorm, Sizes
from forerun.train.teacher import Teacher


class MtpModule(nn.Module):
    """All trained parameters; its state_dict, folded, is the layer under our names."""

    def __init__(self, config: EagleConfig, sizes: Sizes) -> None:
        super().__init__()
        self.config, width = config, config.width
        self.enorm, self.hnorm = Norm(width, config.norm_eps), Norm(width, config.norm_eps)
        self.fc = ScaledLinear(2 * width, width)
        self.midlayer = EagleLayer(config, Sizes.ones(width))
        self.midlayer.input_layernorm = Norm(width, config.norm_eps)
        self.norm = ScaledNorm(width, config.norm_eps)
        self.norm.scale(QUICK * sizes.feature, BEGINNING / QUICK)
        with torch.no_grad():  # dimensions of the target's rows are very unequal: made equal when read
            self.hnorm.weight.copy_(sizes.row / sizes.feature)

    def forward(self, embedded: Tensor, features: Tensor, steps: int, detach: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows for the LM head, raw outputs) of every step; embeddings [B, T, D] of token t at t."""
        carried, past = features, list[tuple[Tensor, Tensor]]()
        for step in range(steps):
            token = self.enorm(shifted(embedded, step + 1))
            x = self.fc(torch.cat((token, self.hnorm(carried)), -1))
            out: Tensor = self.midlayer(x, self.midlayer.input_layernorm(x), step, past)
            yield self.norm(out), out
            carried = out.detach() if detach else out


class MtpRecipe(EagleRecipe):
    """A multi-token-prediction layer learning from a frozen target."""

    def __init__(
        self, options: TrainOptions, teacher: Teacher, config: EagleConfig, vocabulary: DraftVocabulary, sizes: Sizes
    ) -> None:
        WithTargetHead.__init__(self, options, teacher.head, vocabulary)
        self.teacher, self.config = teacher, config
        self._module = MtpModule(config, sizes).to(teacher.head.device)  # type: ignore[assignment]
        self._unit = None

    def lm_head(self) -> Tensor:
        return self._truth_head

    def export(self, folder: Path, measured: Measured) -> None:
        config = replace(self.config, calibration=measured.calibration, rates=measured.rates)
        write_mtp(folder, config, self.tensors(self._module))
