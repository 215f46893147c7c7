"""Recipes for block drafters, DFlash and DSpark: blocks that start at random tokens of an answer, all learnt at once.

A block at anchor a is the token there and mask tokens behind it. Its rows see the target's features of the tokens
before a, and each other. Row j learns the target's law of the token at a + j + 1 (recipes.block_network runs them).

Positions are weighed by how far their draft gets (recipes.survival), or by a fixed decay.

DSpark's Markov head adds to the logits what the token before says: a product of two small matrices between the target's
embedding and its LM head, which is the same as adding it to the rows in front of the LM head. The confidence head
learns whether the likeliest token is the target's likeliest; nothing of its gradient reaches the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.drafters.heads.base import shape_in
from forerun.drafters.heads.block_head import BlockConfig, spread_features, write_block
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.train.data.corpus import Batch
from forerun.train.options import TrainOptions
from forerun.train.recipes.base import Measured, Output, Reading, WithTargetHead, read_teacher, shifted
from forerun.train.recipes.block_network import BlockModule
from forerun.train.recipes.losses import LawLoss
from forerun.train.recipes.scaling import Sizes, fold
from forerun.train.teacher import Teacher

JUDGED = 1024  # rows per level from which the confidence head learns
_ROUND = 8  # numbers of blocks per sequence are multiples of this, so that few shapes occur


class BlockRecipe(WithTargetHead):
    """A block drafter learning from a frozen target."""

    feature_weight = 0.0
    law_weight = 1.0

    def __init__(
        self,
        options: TrainOptions,
        teacher: Teacher,
        config: BlockConfig,
        vocabulary: DraftVocabulary,
        sizes: Sizes,
        features: Tensor,
    ) -> None:
        self.options, self.teacher, self.config = options, teacher, config
        self.vocabulary = vocabulary.to(teacher.head.device)
        self._module = BlockModule(config, sizes, features).to(teacher.head.device)
        if options.compile:
            for layer in self._module.layers:
                layer.compile(dynamic=True)
        self._truth_head = self.vocabulary.rows_of(teacher.head)
        self.law_loss = LawLoss(options.loss)

    def module(self) -> nn.Module:
        return self._module

    def read(self, batch: Batch) -> Reading:
        kept = self.teacher.features(batch.tokens, self.config.layers)
        with torch.no_grad():
            return read_teacher(kept, self.teacher.head, self.vocabulary, batch)

    def outputs(self, batch: Batch, reading: Reading, noise: torch.Generator | None) -> Iterator[Output]:
        device, length = batch.tokens.device, batch.tokens.shape[1]
        share, seed = (1.0, 0) if noise is None else (self.options.anchors, noise.initial_seed())
        anchors = choose_anchors(batch.learnt, share, seed)  # a simulation drafts from every token
        places = anchors.to(device, non_blocking=True)
        features = torch.cat([reading.features[layer] for layer in self.config.layers], -1)
        embedded = F.embedding(batch.tokens, self.teacher.embedding).float()
        if not torch.is_autocast_enabled(device.type):
            features = features.float()
        roots = embedded.gather(1, places[:, :, None].expand(-1, -1, embedded.shape[-1]))
        mask = self.teacher.embedding[self.config.mask_token].float()
        rows = self._module(roots, mask, features, places)
        first = torch.arange(len(anchors))[:, None] * length + anchors  # [B, A] which row of [B T]
        for level in range(self.config.levels):
            learnt = shifted(batch.learnt, level + 1).gather(1, anchors).flatten().nonzero()[:, 0]
            at = first.flatten()[learnt].to(device, non_blocking=True)
            here = rows[:, :, level].flatten(0, 1)[learnt.to(device, non_blocking=True)]
            spoken, aside, survives = at + level, None, self.options.positions == "survival"
            known = self.known_of(embedded.flatten(0, 1)[spoken])
            law = self.corrected(here, known)
            if noise is not None and self.config.confidence:
                aside = self._judge(here, known, law, spoken, reading)
            yield Output(law, level, self.options.decay**level, at=at, aside=aside, survives=survives)

    def known_of(self, embedded: Tensor) -> Tensor | None:
        """[N, rank] what the Markov head knows of previous tokens, from their embeddings [N, D]."""
        if not self.config.markov_rank:
            return None
        known: Tensor = self._module.markov_head["down"](embedded)
        return known

    def corrected(self, rows: Tensor, known: Tensor | None) -> Tensor:
        """Rows [N, D] for the LM head, with what is known of the tokens before them."""
        return rows if known is None else rows + self._module.markov_head["up"](known).to(rows.dtype)

    def _judge(
        self, rows: Tensor, known: Tensor | None, law: Tensor, spoken: Tensor, reading: Reading
    ) -> Tensor:
        """The loss of the confidence head: is the likeliest token of these rows the target's likeliest?"""
        step = max(1, ceil(len(rows) / JUDGED))
        parts = [rows] if known is None else [rows, known.to(rows.dtype)]
        some, spoken = torch.cat([part[::step].detach() for part in parts], -1), spoken[::step]
        with torch.no_grad():
            guessed = (law[::step].to(self._truth_head.dtype) @ self._truth_head.t()).argmax(-1)
            truth = reading.last.flatten(0, 1)[spoken] @ self._truth_head.t()
            right = guessed == truth.argmax(-1)
            if reading.inside is not None:
                right = right & reading.inside.flatten()[spoken]
        score = self._module.confidence_head["proj"](some).float()[:, 0]
        return F.binary_cross_entropy_with_logits(score, right.float(), reduction="sum") / max(1, len(some))

    def export(self, folder: Path, measured: Measured) -> None:
        config = replace(self.config, calibration=measured.calibration, rates=measured.rates)
        weights = {name: weight.to(torch.bfloat16) for name, weight in fold(self._module).items()}
        if not self.vocabulary.is_whole:
            weights |= self.vocabulary.tensors()
        write_block(folder, config, weights, self.options.stored)


def choose_anchors(learnt: Tensor, share: float, seed: int) -> Tensor:
    """[B, A] tokens at which blocks start, ascending: a share of those before a token to be learnt, by the seed.

    A sequence that has fewer than others gets some that predict nothing to be learnt. On the host, where `learnt` is.
    """
    useful = shifted(learnt, 1)
    most = max(1, ceil(share * int(useful.sum(1).max())))
    count = min(learnt.shape[1], -(-most // _ROUND) * _ROUND)
    dice = torch.rand(learnt.shape, generator=torch.Generator().manual_seed(seed % (1 << 63)))
    order = (dice + 2.0 * (~useful).float()).argsort(1)
    return order[:, :count].sort(1).values


def block_config(
    options: TrainOptions,
    checkpoint_config: dict[str, object],
    layers: int,
    counts: Tensor,
    vocab: int,
) -> BlockConfig:
    """A drafter whose layers are shaped like the target's; masks are the rarest token of the texts [V]."""
    shape = {**shape_in({**checkpoint_config, "draft_vocab_size": vocab}), "target": options.target}
    dspark = options.method == "dspark"
    return BlockConfig(
        **{**shape, "inner": options.inner or shape["inner"]},
        kind="dspark" if dspark else "dflash",
        depth=options.own_layers,
        layers=options.features or spread_features(layers),
        rows=options.depth + (0 if dspark else 1),
        mask_token=int((counts == counts.min()).nonzero()[-1]),
        markov_rank=options.own_rank if dspark else 0,
        confidence=dspark,
    )
