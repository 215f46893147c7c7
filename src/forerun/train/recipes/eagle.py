"""Recipes for EAGLE heads: EAGLE-1, HASS and EAGLE-3, which differ in the head, the steps and the loss.

A head that drafts ahead reads its own outputs, so it must be trained on them. Step 0 is a causal pass over the
target's true features. Step j continues, from every row t at once, the draft that started there: it reads the
output of step j - 1 at t and the token at t + 1 + j, sits at position t + j, and attends to the true rows up to
t and to its own earlier steps, which are the diagonals of the steps before. Everything else is masked with -inf.
That is EAGLE-3's training-time test, and HASS's context alignment as well, counted from the draft's start instead
of from its end; HASS stops gradients between the steps.

    eagle   one step; smooth-L1 on features + 0.1 law loss; noise on features
    hass    three steps, detached; the same, + the top-K loss
    eagle3  seven steps, gradients through them; law loss only, 0.8 per step
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.drafters.heads.eagle_head import EagleConfig, write_head
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.train.data.corpus import Batch
from forerun.train.options import WIDTHS, TrainOptions
from forerun.train.recipes.base import Measured, Output, Reading, WithTargetHead, read_teacher
from forerun.train.recipes.eagle_network import EagleModule
from forerun.train.recipes.losses import LawLoss
from forerun.train.recipes.scaling import Sizes, fold, main_directions
from forerun.train.teacher import Teacher

HEAD_DIM = 64  # of a head that is narrower than its target, where its width allows it
SIMULATED = 6  # levels of a simulation, however many steps were learnt


class EagleRecipe(WithTargetHead):
    """An EAGLE head learning from a frozen target."""

    def __init__(
        self,
        options: TrainOptions,
        teacher: Teacher,
        config: EagleConfig,
        vocabulary: DraftVocabulary,
        sizes: Sizes | None = None,
    ) -> None:
        """Sizes, of EAGLE-1's features, are for training alone: the head that is written is the same."""
        self.options, self.teacher, self.config = options, teacher, config
        self.vocabulary = vocabulary.to(teacher.head.device)
        own_head = config.kind == "eagle3" and options.train_head
        self._module = EagleModule(config, own_head=own_head, sizes=sizes).to(teacher.head.device)
        self._unit = None if sizes is None else sizes.feature.to(teacher.head.device)
        self._truth_head = self.vocabulary.rows_of(teacher.head)
        self.law_loss = LawLoss(options.loss, top_weight=10.0 if options.method == "hass" else 0.0)
        self.feature_weight = 0.0 if config.kind == "eagle3" else 1.0
        self.law_weight = 1.0 if config.kind == "eagle3" else 0.1  # HASS's top-K loss counts 1.0: ten tenths
        self._start()

    def module(self) -> nn.Module:
        return self._module

    def lm_head(self) -> Tensor:
        return self._module.lm_head.weight if hasattr(self._module, "lm_head") else self._truth_head

    def read(self, batch: Batch) -> Reading:
        kept = self.teacher.features(batch.tokens, self.config.layers)
        with torch.no_grad():
            return read_teacher(kept, self.teacher.head, self.vocabulary, batch)

    def outputs(self, batch: Batch, reading: Reading, noise: torch.Generator | None) -> Iterator[Output]:
        features = torch.cat([reading.features[layer] for layer in self.config.layers], -1)
        embedded = F.embedding(batch.tokens, self.teacher.embedding)
        if not torch.is_autocast_enabled(features.device.type):
            features, embedded = features.float(), embedded.float()
        if noise is not None and self.config.kind == "eagle":
            spread = torch.rand(features.shape, generator=noise, device=features.device) - 0.5
            features = features + (spread * (0.2 * 512 / max(512, features.shape[1]))).to(features.dtype)
        steps, detach = self.options.depth, self.options.method == "hass"
        # a simulation goes as deep for a head that learnt one step as for one that learnt six
        if noise is None:
            steps = max(steps, SIMULATED)
        rolled = self._module(embedded, features, steps, detach)
        for step, (rows, out) in enumerate(rolled):
            predicted = out if self.config.kind == "eagle" else None
            weight = 1.0 if self.config.kind == "eagle" else self.options.decay**step
            yield Output(rows, step + 1, weight, predicted, self._unit)

    def export(self, folder: Path, measured: Measured) -> None:
        config = replace(self.config, calibration=measured.calibration, rates=measured.rates)
        weights = {name: weight.to(torch.bfloat16) for name, weight in fold(self._module).items()}
        if not self.vocabulary.is_whole:
            weights |= self.vocabulary.tensors()
        write_head(folder, config, weights, one_byte=bool(self.options.one_byte))

    @torch.no_grad()
    def _start(self) -> None:
        """Begin with the target's own rows in the LM head, where the head has one.

        Nothing of the target's layers: they are made for a residual stream of another size (in a SmolLM2 a
        hundred times that of a head's), and a head that began with one learnt more slowly than from noise.
        """
        head, rows = self.config.width, self._truth_head.float()
        if head != self.config.target_width:
            basis = main_directions(rows, head)  # [D, width]
            self._module.lm_head.weight.copy_(rows @ basis)
            self._module.embed_proj.weight.copy_(basis.t())
        elif hasattr(self._module, "lm_head"):
            self._module.lm_head.weight.copy_(rows)


def eagle_config(
    options: TrainOptions, checkpoint_config: dict[str, object], layers: tuple[int, ...], vocab: int
) -> EagleConfig:
    """A head whose layers are shaped like those of its target."""
    kind = options.method if options.method in ("eagle3", "mtp") else "eagle"
    ours = {"draft_vocab_size": vocab, "num_hidden_layers": options.own_layers if kind == "eagle3" else 1}
    read = EagleConfig.from_json({**checkpoint_config, **ours}, "eagle3")
    if options.width:  # half as many heads of keys as of queries
        dims = HEAD_DIM if options.width % (2 * HEAD_DIM) == 0 else WIDTHS
        heads = options.width // dims
        sizes = {"width": options.width, "heads": heads, "kv_heads": max(1, heads // 2), "head_dim": dims}
        read = replace(read, inner=3 * options.width, **sizes)  # type: ignore[arg-type]
    return replace(
        read,
        kind=kind,
        inner=options.inner or read.inner,
        layers=layers if kind == "eagle3" else (-1,),
        fc_norm=options.fc_norm,
        norm_output=options.norm_output and kind == "eagle3",
        target=options.target,
    )
