"""Recipes for block drafters, DFlash and DSpark: blocks that start at random tokens of an answer, all learnt at once.

A block at anchor a is the token there and mask tokens behind it. Its rows see the target's features of the tokens
before a, and each other. Row j learns the target's law of the token at a + j + 1. Positions
are weighed by how far their draft gets (`Survival`), or by a fixed decay.

DSpark's Markov head adds to the logits what the token before says: a product of two small matrices between the target's
embedding and its LM head, which is the same as adding it to the rows in front of the LM head. The confidence head
learns whether the likeliest token is the target's likeliest; nothing of its gradient reaches the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
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
from forerun.train.recipes.eagle import HeadLayer, Norm, rates_of, softmax_over_both, turn
from forerun.train.recipes.scaling import BEGINNING, QUICK, ScaledLinear, ScaledNorm, Sizes
from forerun.train.teacher import Teacher

JUDGED = 1024  # rows per level from which the confidence head learns
_ROUND = 8  # numbers of blocks per sequence are multiples of this, so that few shapes occur


class BlockRecipe(WithTargetHead):
    _module: BlockModule

    def __init__(
        self,
        options: TrainOptions,
        teacher: Teacher,
        config: BlockConfig,
        vocabulary: DraftVocabulary,
        sizes: Sizes,
        features: Tensor,
    ) -> None:
        super().__init__(options, teacher.head, vocabulary)
        self.teacher, self.config = teacher, config
        self._module = BlockModule(config, sizes, features).to(teacher.head.device)
        if options.compile:
            for layer in self._module.layers:
                layer.compile(dynamic=True)

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

    def _judge(self, rows: Tensor, known: Tensor | None, law: Tensor, spoken: Tensor, reading: Reading) -> Tensor:
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
        write_block(folder, config, self.tensors(self._module), self.options.stored)


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
    options: TrainOptions, checkpoint_config: dict[str, object], layers: int, counts: Tensor, vocab: int
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


class BlockLayer(HeadLayer):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config, config.width, partial(nn.Linear, bias=False))
        self.config = config
        norms = {name: Norm(config.head_dim, config.norm_eps) for name in ("q_norm", "k_norm")}
        self.self_attn.update(norms)
        self.input_layernorm = Norm(config.width, config.norm_eps)

    def forward(
        self, x: Tensor, context: Tensor, anchors: Tensor, far: tuple[Tensor, Tensor], near: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Blocks x [B, A, R, D] behind context [B, T, D]; rotations of the context's rows and of the blocks'."""
        rows = self.input_layernorm(x).flatten(1, 2)
        q, k, v = (self._heads(rows, name) for name in "qkv")
        past, kept = self._heads(context, "k"), self._heads(context, "v")
        q, k, past = turn(q, near), turn(k, near), turn(past, far)
        found = torch.unflatten(attend_blocks(q, k, v, past, kept, anchors), 1, x.shape[1:3])
        return self.after_attention(x, found)

    def _heads(self, rows: Tensor, name: str) -> Tensor:
        """[B, N, D] -> [B, heads, N, Dh], queries and keys normed."""
        heads = self.self_attn[f"{name}_proj"](rows).unflatten(-1, (-1, self.config.head_dim))
        if name != "v":
            heads = self.self_attn[f"{name}_norm"](heads)
        turned: Tensor = heads.transpose(1, 2)
        return turned


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, past: Tensor, kept: Tensor, anchors: Tensor) -> Tensor:
    """Queries [B, H, A R, Dh] over the context before each block's anchor and over their own block [B, A R, H Dh].

    q, k, v are the blocks' own; past and kept [B, Hkv, T, Dh] the context's keys and values; anchors [B, A].
    """
    dtype = torch.get_autocast_dtype(q.device.type) if torch.is_autocast_enabled(q.device.type) else q.dtype
    batch, heads, rows, dim = q.shape
    blocks, group = anchors.shape[1], heads // k.shape[1]
    q, k, v = (torch.unflatten(part.to(dtype), 2, (blocks, -1)) for part in (q, k, v))  # [B, H, A, R, Dh]
    q = torch.unflatten(q, 1, (-1, group))  # [B, Hkv, G, A, R, Dh]
    flat = q.flatten(2, 4)
    scores = (flat @ past.to(dtype).transpose(-1, -2)).view(*q.shape[:-1], -1)  # [B, Hkv, G, A, R, T]
    own = q @ k.transpose(-1, -2)[:, :, None]  # [B, Hkv, G, A, R, R]
    weights, shares = _weigh_for(q.device.type)(scores, own, anchors, dim**-0.5)
    found = (weights.flatten(2, 4) @ kept.to(dtype)).view(q.shape) + shares @ v[:, :, None]
    return found.flatten(1, 2).reshape(batch, heads, rows, dim).transpose(1, 2).flatten(2)


def weigh_blocks(scores: Tensor, own: Tensor, anchors: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One softmax over the context before the anchor [B, Hkv, G, A, R, T] and the block itself [.., R]."""
    places = torch.arange(scores.shape[-1], device=scores.device)
    hidden = places >= anchors[:, None, None, :, None, None]
    seen = (scores.float() * scale).masked_fill(hidden, -torch.inf)
    return softmax_over_both(seen, own.float() * scale, scores.dtype)


@cache
def _weigh_for(device: str) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """Fused on a GPU: written out, the passes over [B, H, A R, T] would cost more than the products."""
    return torch.compile(weigh_blocks, dynamic=True) if device == "cuda" else weigh_blocks


class BlockModule(nn.Module):
    """All trained parameters; its state_dict, folded, is the head's file."""

    rates: Tensor

    def __init__(self, config: BlockConfig, sizes: Sizes, features: Tensor) -> None:
        """Sizes of what it reads, so that everything is learnt at one rate: features [F] are very unequal."""
        super().__init__()
        self.config, width, rank = config, config.width, config.markov_rank
        self.fc = ScaledLinear(config.feature_width, width)
        self.fc.scale(reads=features)
        self.hidden_norm = Norm(width, config.norm_eps)
        self.layers = nn.ModuleList([BlockLayer(config) for _ in range(config.depth)])
        self.norm = ScaledNorm(width, config.norm_eps)
        self.norm.scale(QUICK * sizes.feature, BEGINNING / QUICK)
        if rank:
            down, up = ScaledLinear(width, rank), nn.Linear(rank, width, bias=False)
            down.scale(reads=sizes.token)
            nn.init.zeros_(up.weight)
            self.markov_head = nn.ModuleDict({"down": down, "up": up})
        if config.confidence:
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width + rank, 1)})
        self.register_buffer("rates", rates_of(config), persistent=False)

    def forward(self, roots: Tensor, mask: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Blocks of roots [B, A, D] and masks [D] behind features [B, T, F] -> predicting rows [B, A, levels, D]."""
        count = self.config.rows
        context = self.hidden_norm(self.fc(features))
        masks = mask.expand(*roots.shape[:2], count - 1, -1)
        x = torch.cat((roots[:, :, None], masks), 2).float()
        places = anchors[:, :, None] + torch.arange(count, device=anchors.device)  # [B, A, R]
        near = self._rotations(places.flatten(1)[:, None])
        far = self._rotations(torch.arange(features.shape[1], device=anchors.device))
        for layer in self.layers:
            x = layer(x, context, anchors, far, near)
        rows: Tensor = self.norm(x[:, :, self.config.first :])
        return rows

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.rates
        return angles.cos(), angles.sin()
