"""Recipes for block drafters: blocks that start at random tokens of an answer, all learnt at once.

A block at anchor a is the token there and mask tokens behind it. Its rows see the target's features of the tokens
before a, and each other, or only those before them (`--causal`, JetSpec); `--window` limits all layers but the last.
Row j learns the target's law of the token at a + j + 1. Positions are weighed by how far their draft gets (`Survival`),
or by a fixed decay. P-EAGLE's features are rows of their own that pass through the layers: the features of token t with
token t + 1, as in EAGLE-3; the row of the anchor is part of its block, and masks carry one feature that is learnt.

DFlash 2 has convolutions around attention and MLP, and a selector, which is a Markov head that a projection of the row
multiplies. DSpark's Markov head adds to the logits what the token before says: a product of two small matrices between
the target's embedding and its LM head, which is the same as adding it to the rows in front of the LM head. The
confidence head learns whether the likeliest token is the target's likeliest; nothing of its gradient reaches the rest.

The recipe for SpecDec, the block drafter of encoder-decoders: blocks at random tokens of a translation, in one pass.

A sequence of the data is a source and what the target wrote for it. Row t of a batch is the decoder's row that predicts
token t + 1, so the source's last place stands for the start token. A block whose root is the token at a starts from the
row at a - 1 and learns the target's laws of the tokens behind a. The LM head is the target's own, with its bias as one
more column, and stays as it is; layers start as the target's last ones where the family is Marian's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import ceil, gcd
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forerun.drafters.heads.base import shape_in
from forerun.drafters.heads.block_config import BlockConfig, BlockKind, Markov, spread_features
from forerun.drafters.heads.block_head import SELECTOR, tables_of, write_block
from forerun.drafters.heads.eagle_head import default_layers
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.drafters.heads.specdec import SpecDecConfig, SpecDecHead, attend_to_source, write_specdec
from forerun.models.encoder_decoder.layers import TorchLinear
from forerun.train.data.corpus import Batch, Corpus
from forerun.train.options import TrainOptions
from forerun.train.recipes.base import Measured, Output, Reading, Recipe, fused, shifted
from forerun.train.recipes.eagle import HeadLayer, Norm, rates_of, softmax_over_both, turn
from forerun.train.recipes.scaling import BEGINNING, QUICK, ScaledLinear, ScaledNorm, Sizes
from forerun.train.teacher import SourceTeacher, Teacher

JUDGED = 1024  # rows per level from which the confidence head learns
TAPS, GROUP = 2, 16  # of DFlash 2's convolutions, as its authors have them
_ROUND = 8  # numbers of blocks per sequence are multiples of this, so that few shapes occur


class BlockRecipe(Recipe):
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
        super().__init__(options, teacher, vocabulary)
        self.config, self.layers = config, config.layers
        self._module = BlockModule(config, sizes, features).to(teacher.head.device)
        if options.compile:
            for layer in self._module.layers:
                layer.compile(dynamic=True)

    def outputs(self, batch: Batch, reading: Reading, noise: torch.Generator | None) -> Iterator[Output]:
        device, length = batch.tokens.device, batch.tokens.shape[1]
        share, seed = (1.0, 0) if noise is None else (self.options.anchors, noise.initial_seed())
        anchors = choose_anchors(batch.learnt, share, seed)  # a simulation drafts from every token
        places = anchors.to(device, non_blocking=True)
        features = torch.cat([reading.features[layer] for layer in self.config.layers], -1)
        embedded = F.embedding(batch.tokens, self.teacher.embedding).float()
        if not torch.is_autocast_enabled(device.type):
            features = features.float()
        mask = self.teacher.embedding[self.config.mask_token].float()
        rows = self._module(embedded, mask, features, places)
        first = torch.arange(len(anchors))[:, None] * length + anchors  # [B, A] which row of [B T]
        for level in range(self.config.levels):
            # P-EAGLE's root row carries the feature of the token before it
            some = shifted(batch.learnt, level + 1).gather(1, anchors) & (anchors >= self.config.reads_rows)
            learnt = some.flatten().nonzero()[:, 0]
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
        known: Tensor = self._module.get_submodule(tables_of(self.config)[0] + ".down")(embedded)
        return known

    def corrected(self, rows: Tensor, known: Tensor | None) -> Tensor:
        """Rows [N, D] for the LM head, with what is known of the tokens before them."""
        if known is None:
            return rows
        owner = self._module.get_submodule(tables_of(self.config)[0])
        if self.config.markov == "selector":
            known = known * owner["hidden_projection"](rows)  # type: ignore[index]
        added: Tensor = owner["up"](known)  # type: ignore[index]
        return rows + added.to(rows.dtype)

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
    kind, depth = kind_for(options.method), options.own_layers
    markov: Markov = "selector" if options.method == "dflash2" else "vanilla" if kind == "dspark" else "none"
    causal = options.causal or kind == "peagle"
    first, usual = int(kind == "dflash"), default_layers(layers) if kind == "peagle" else spread_features(layers)
    return BlockConfig(
        **{**shape, "inner": options.inner or shape["inner"], "rope_scaling": {}, "trained": options.max_length},
        kind=kind,
        depth=depth,
        layers=options.features or usual,
        rows=options.depth + first,
        mask_token=int((counts == counts.min()).nonzero()[-1]),
        first=first,
        window=options.window,
        windowed=tuple(i < max(1, depth - 1) for i in range(depth)) if options.window else (),
        causal="all" if causal else "windowed" if options.window else "none",
        taps=TAPS if options.method == "dflash2" else 0,
        group=gcd(shape["width"], GROUP) if options.method == "dflash2" else 1,
        markov=markov,
        markov_rank=0 if markov == "none" else options.own_rank,
        confidence=kind == "dspark",
        norm_before_residual=kind == "peagle",
    )


def kind_for(method: str) -> BlockKind:
    return "peagle" if method == "peagle" else "dspark" if method == "dspark" else "dflash"


class BlockConv(nn.Module):
    """A convolution over a block's rows, before and behind a sublayer; it begins as none."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config, width = config, config.width
        base = torch.zeros(2, config.taps, width)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(width, 2 * config.taps * (width // config.group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def factors(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of a sublayer's input [.., R, D]: [.., R, taps, D] each."""
        added = torch.unflatten(self.kernel_projection(rows), -1, (2, self.config.taps, -1))
        before, behind = (added.repeat_interleave(self.config.group, -1) + self.base_kernel).unbind(-3)
        return before, behind

    @staticmethod
    def apply_to(rows: Tensor, factors: Tensor) -> Tensor:
        parts = [F.pad(rows, (0, 0, tap, 0))[..., : rows.shape[-2], :] for tap in range(factors.shape[-2])]
        return (torch.stack(parts, -2) * factors).sum(-2)


class BlockLayer(HeadLayer):
    def __init__(self, config: BlockConfig, index: int) -> None:
        wide = 2 if config.reads_rows and not index else 1
        super().__init__(config, wide * config.width, partial(nn.Linear, bias=False))
        self.config, self.index = config, index
        if not config.reads_rows:
            self.self_attn.update({name: Norm(config.head_dim, config.norm_eps) for name in ("q_norm", "k_norm")})
        self.input_layernorm = Norm(config.width, config.norm_eps)
        if wide == 2:
            self.hidden_norm = Norm(config.width, config.norm_eps)
        if config.taps:
            self.attention_conv, self.mlp_conv = BlockConv(config), BlockConv(config)

    def forward(
        self, x: Tensor, into: Tensor, context: Tensor, anchors: Tensor, far: tuple[Tensor, Tensor],
        near: tuple[Tensor, Tensor],
    ) -> Tensor:  # fmt: skip
        """Blocks x [B, A, R, D] behind context [B, T, D]; rotations of the context's rows and of the blocks'.

        `into` is what the blocks' attention reads, `context` what its keys and values are made of.
        """
        before, behind = self.attention_conv.factors(into) if self.config.taps else (None, None)
        rows = (into if before is None else BlockConv.apply_to(into, before)).flatten(1, 2)
        q, k, v = (self._heads(rows, name) for name in "qkv")
        past, kept = self._heads(context, "k"), self._heads(context, "v")
        q, k, past = turn(q, near), turn(k, near), turn(past, far)
        found = attend_blocks(q, k, v, past, kept, anchors, *self.config.span(self.index))
        found = torch.unflatten(found, 1, x.shape[1:3])
        if behind is None:
            return self.after_attention(x, found)
        x = x + BlockConv.apply_to(self.self_attn["o_proj"](found), behind)
        rows = self.post_attention_layernorm(x)
        before, behind = self.mlp_conv.factors(rows)
        rows = BlockConv.apply_to(rows, before)
        inner = F.silu(self.mlp["gate_proj"](rows)) * self.mlp["up_proj"](rows)
        return x + BlockConv.apply_to(self.mlp["down_proj"](inner), behind)

    def go_on(self, context: Tensor, into: Tensor, far: tuple[Tensor, Tensor]) -> Tensor:
        """P-EAGLE: the context's own rows [B, T, D] behind this layer, each of which sees those before it."""
        q, k, v = (self._heads(into, name) for name in "qkv")
        place, window = torch.arange(context.shape[1], device=context.device), self.config.span(self.index)[0]
        back = place[:, None] - place
        seen = (back >= 0) & (back < window) if window else back >= 0
        q, k = (turn(part, far).to(v.dtype) for part in (q, k))
        found = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=self.config.heads != self.config.kv_heads)
        return self.after_attention(context, found.transpose(1, 2).flatten(2))

    def _heads(self, rows: Tensor, name: str) -> Tensor:
        """[B, N, D] -> [B, heads, N, Dh], queries and keys normed."""
        heads = self.self_attn[f"{name}_proj"](rows).unflatten(-1, (-1, self.config.head_dim))
        if name != "v" and not self.config.reads_rows:
            heads = self.self_attn[f"{name}_norm"](heads)
        turned: Tensor = heads.transpose(1, 2)
        return turned


SCORES = 1 << 25  # of a head that are there at once


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, past: Tensor, kept: Tensor, anchors: Tensor, window: int = 0, causal: bool = False
) -> Tensor:
    """Queries [B, H, A R, Dh] over the context before each block's anchor and over their own block [B, A R, H Dh].

    q, k, v are the blocks' own; past and kept [B, Hkv, T, Dh] the context's keys and values; anchors [B, A]. Of long
    texts some blocks at a time, whose scores are not kept for the gradients.
    """
    count = q.shape[2] // anchors.shape[1]
    most = max(1, SCORES // (count * past.shape[2]))
    if anchors.shape[1] <= most:
        return _attend_some(q, k, v, past, kept, anchors, window, causal)
    parts = [
        checkpoint(
            _attend_some, *(part[:, :, low * count : (low + most) * count] for part in (q, k, v)), past, kept,
            anchors[:, low : low + most], window, causal, use_reentrant=False,
        )
        for low in range(0, anchors.shape[1], most)
    ]  # fmt: skip
    return torch.cat(parts, 1)


def _attend_some(
    q: Tensor, k: Tensor, v: Tensor, past: Tensor, kept: Tensor, anchors: Tensor, window: int, causal: bool
) -> Tensor:
    dtype = torch.get_autocast_dtype(q.device.type) if torch.is_autocast_enabled(q.device.type) else q.dtype
    batch, heads, rows, dim = q.shape
    blocks, group = anchors.shape[1], heads // k.shape[1]
    q, k, v = (torch.unflatten(part.to(dtype), 2, (blocks, -1)) for part in (q, k, v))  # [B, H, A, R, Dh]
    q = torch.unflatten(q, 1, (-1, group))  # [B, Hkv, G, A, R, Dh]
    flat = q.flatten(2, 4)
    scores = (flat @ past.to(dtype).transpose(-1, -2)).view(*q.shape[:-1], -1)  # [B, Hkv, G, A, R, T]
    own = q @ k.transpose(-1, -2)[:, :, None]  # [B, Hkv, G, A, R, R]
    weights, shares = fused(weigh_blocks, q.device.type)(scores, own, anchors, dim**-0.5, window, causal)
    found: Tensor = (weights.flatten(2, 4) @ kept.to(dtype)).view(q.shape) + shares @ v[:, :, None]
    return found.flatten(1, 2).reshape(batch, heads, rows, dim).transpose(1, 2).flatten(2)


def weigh_blocks(
    scores: Tensor, own: Tensor, anchors: Tensor, scale: float, window: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """One softmax over the context before the anchor [B, Hkv, G, A, R, T] and the block itself [.., R]."""
    places, rows = (torch.arange(part.shape[-1], device=scores.device) for part in (scores, own))
    starts = anchors[:, None, None, :, None, None]
    hidden = places >= starts
    ahead = rows - rows[:, None]  # [R, R]
    unseen = ahead > 0 if causal else torch.zeros_like(ahead, dtype=torch.bool)
    if window:
        hidden = hidden | (starts + rows[:, None] - places >= window)
        unseen = unseen | (ahead.abs() >= window)
    seen = (scores.float() * scale).masked_fill(hidden, -torch.inf)
    return softmax_over_both(seen, (own.float() * scale).masked_fill(unseen, -torch.inf), scores.dtype)


class BlockModule(nn.Module):
    """All trained parameters; its state_dict, folded, is the head's file."""

    rates: Tensor

    def __init__(self, config: BlockConfig, sizes: Sizes, features: Tensor) -> None:
        """Sizes of what it reads, so that everything is learnt at one rate: features [F] are very unequal."""
        super().__init__()
        self.config, width, rank = config, config.width, config.markov_rank
        self.fc = ScaledLinear(config.feature_width, width)
        self.fc.scale(reads=features)
        if config.reads_rows:
            self.mask_hidden = nn.Parameter(torch.zeros(config.feature_width))
        else:
            self.hidden_norm = Norm(width, config.norm_eps)
        self.layers = nn.ModuleList([BlockLayer(config, i) for i in range(config.depth)])
        self.norm = ScaledNorm(width, config.norm_eps)
        self.norm.scale(QUICK * sizes.feature, BEGINNING / QUICK)
        if rank:
            down, up = ScaledLinear(width, rank), nn.Linear(rank, width, bias=False)
            down.scale(reads=sizes.token)
            nn.init.zeros_(up.weight)
            owner = {"down": down, "up": up}
            if config.markov == "selector":
                owner["hidden_projection"] = opens = ScaledLinear(width, rank)
                opens.scale(reads=sizes.feature)
            self.add_module(SELECTOR if config.markov == "selector" else "markov_head", nn.ModuleDict(owner))
        if config.confidence:
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width + rank, 1)})
        self.register_buffer("rates", rates_of(config), persistent=False)

    def forward(self, embedded: Tensor, mask: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Blocks at anchors [B, A] of tokens [B, T, D], and masks [D], behind features [B, T, F].

        -> predicting rows [B, A, levels, D]
        """
        count, fused, layers = self.config.rows, self.fc(features), [cast(BlockLayer, one) for one in self.layers]
        first = layers[0]
        if self.config.reads_rows:
            anchors = (anchors - 1).clamp(min=0)  # rows of tokens at t and t + 1
            embedded = F.pad(embedded[:, 1:], (0, 0, 0, 1))
        roots = embedded.gather(1, anchors[:, :, None].expand(-1, -1, embedded.shape[-1]))
        x = torch.cat((roots[:, :, None], mask.expand(*roots.shape[:2], count - 1, -1)), 2).float()
        places = anchors[:, :, None] + torch.arange(count, device=anchors.device)  # [B, A, R]
        near = self._rotations(places.flatten(1)[:, None])
        far = self._rotations(torch.arange(features.shape[1], device=anchors.device))
        if not self.config.reads_rows:
            context = self.hidden_norm(fused)
            for layer in layers:
                x = layer(x, layer.input_layernorm(x), context, anchors, far, near)
        else:
            carried = fused.gather(1, anchors[:, :, None].expand(-1, -1, fused.shape[-1]))[:, :, None]
            shared = self.fc(self.mask_hidden).expand(*roots.shape[:2], count - 1, -1)
            spoken, heard = (first.input_layernorm(rows) for rows in (x, embedded.float()))
            x, context = (first.hidden_norm(rows) for rows in (torch.cat((carried, shared), 2), fused))
            into, reads = torch.cat((spoken, x), -1), torch.cat((heard, context), -1)
            for i, layer in enumerate(layers):
                if i:
                    into, reads = layer.input_layernorm(x), layer.input_layernorm(context)
                x = layer(x, into, reads, anchors, far, near)
                context = layer.go_on(context, reads, far)
        rows: Tensor = self.norm(x[:, :, self.config.first :])
        return rows

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.rates
        return angles.cos(), angles.sin()


_FROZEN = ("lm_head.weight", "lm_head.bias")
_SPREAD = 0.02  # of weights that have nothing to start from


class SpecDecRecipe(Recipe):
    def __init__(self, options: TrainOptions, teacher: SourceTeacher, corpus: Corpus) -> None:
        vocab, width = teacher.head.shape
        counts = corpus.count_tokens(vocab)
        size = options.vocab if 0 < options.vocab < vocab else vocab
        vocabulary = DraftVocabulary.most_frequent(counts, size, always=(teacher.start,))
        super().__init__(options, teacher, vocabulary)
        self.config = SpecDecConfig(
            width=width,
            inner=options.inner or teacher.config.decoder.inner,
            heads=teacher.config.decoder.heads,
            depth=options.own_layers,
            levels=options.depth,
            vocab_size=vocab,
            draft_vocab_size=len(self.vocabulary),
            embedding_scale=teacher.config.embedding_scale,
            target=options.target,
        )
        ids = self.vocabulary.ids
        weights = {"lm_head.weight": teacher.head[ids], "lm_head.bias": teacher.bias[ids]}
        beginning = first_weights(self.config, teacher.weights)
        self._learnt = {name: nn.Parameter(weight.to(ids.device)) for name, weight in beginning.items()}
        # names of parameters hold no dots
        self._module = nn.ParameterDict({name.replace(".", "/"): p for name, p in self._learnt.items()})
        self._weights: dict[str, Tensor] = weights | self._learnt
        self._head = SpecDecHead(self.config, self._weights, self.vocabulary, TorchLinear)
        self._truth_head = torch.cat((weights["lm_head.weight"], weights["lm_head.bias"][:, None]), 1)
        self._drafted = torch.zeros(vocab, dtype=torch.bool, device=ids.device)
        self._drafted[ids] = True

    def read(self, batch: Batch) -> Reading:
        """Encoder rows as layer 0, at the places of the source; decoder rows as layer -1, and ready for the head."""
        encoded, rows = self.teacher.read(batch)
        last = _with_one(rows * self.teacher.config.head_scale)
        inside = self._drafted[shifted(batch.tokens, 1)]  # the target's own text: its next token
        return Reading({0: encoded, -1: rows}, last, None if self.vocabulary.is_whole else inside)

    def outputs(self, batch: Batch, reading: Reading, noise: torch.Generator | None) -> Iterator[Output]:
        device, (count, length) = batch.tokens.device, batch.tokens.shape
        seed = 0 if noise is None else noise.initial_seed()
        anchors = choose_anchors(batch.learnt, self.options.anchors, seed)
        places = anchors.to(device)
        sources = source_lengths(batch.learnt).to(device)
        roots = batch.tokens.gather(1, places)
        roots = torch.where(places < sources[:, None], self.teacher.start, roots)
        before = F.pad(reading.features[-1], (0, 0, 1, 0))  # row a is that of a - 1
        hidden = before.gather(1, places[:, :, None].expand(-1, -1, before.shape[-1]))
        rows = self._run(reading.features[0], sources, hidden, roots)  # [B, A, K, D]
        first = torch.arange(count)[:, None] * length + anchors
        # an output starts where its source ends: no block has a root before that
        begun = shifted(batch.learnt, 1)
        for level in range(self.config.levels):
            told = begun & shifted(batch.learnt, level + 1)
            learnt = told.gather(1, anchors).flatten().nonzero()[:, 0]
            here = rows[:, :, level].flatten(0, 1)[learnt.to(device)]
            at = first.flatten()[learnt].to(device)
            yield Output(_with_one(here), level, self.options.decay**level, at=at)

    def _run(self, encoded: Tensor, sources: Tensor, hidden: Tensor, roots: Tensor) -> Tensor:
        """Blocks [B, A] of every source in one pass."""
        count, anchors = roots.shape
        longest = int(sources.max())
        kv = self._head.read(encoded[:, :longest])
        mask = (torch.arange(longest, device=sources.device) < sources[:, None])[:, None, None]

        def look(layer: int, queries: Tensor) -> Tensor:
            together = queries.reshape(count, -1, queries.shape[-1])
            return attend_to_source(together, kv[layer], mask).view_as(queries)

        rows = self._head.run(self._head.start(hidden.flatten(0, 1), roots.flatten()), look)
        return torch.unflatten(rows, 0, (count, anchors))

    def export(self, folder: Path, measured: Measured) -> None:
        config = replace(self.config, calibration=measured.calibration, rates=measured.rates)
        write_specdec(folder, config, self._weights, self.vocabulary)


def source_lengths(learnt: Tensor) -> Tensor:
    """[B] tokens of each source: all before the first to be learnt; of a row of padding, one."""
    return torch.where(learnt.any(1), learnt.int().argmax(1), 1)


def first_weights(config: SpecDecConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Where training starts: the last decoder layers of a Marian model, or small random numbers."""
    found = dict[str, Tensor]()
    for name, shape in config.shapes().items():
        if name in _FROZEN:
            continue
        if name.endswith("norm.weight"):
            found[name] = torch.ones(shape)
        elif name.endswith("bias"):
            found[name] = torch.zeros(shape)
        else:
            found[name] = torch.randn(shape) * _SPREAD
    found["fc.weight"][:, : config.width] += torch.eye(config.width)
    copied = _marian_layers(config, theirs)
    return found | {name: weight for name, weight in copied.items() if weight.shape == found[name].shape}


def _marian_layers(config: SpecDecConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    at, found = "model.decoder.layers.", dict[str, Tensor]()
    layers = sorted({int(name.removeprefix(at).split(".")[0]) for name in theirs if name.startswith(at)})
    if len(layers) < config.depth:
        return {}
    kept = layers[-config.depth :]

    def joined(i: int, kind: str, *names: str) -> Tensor:
        return torch.cat([theirs[f"{at}{i}.{name}.{kind}"] for name in names])

    for kind in ("weight", "bias"):
        for to, i in enumerate(kept):
            mine, a, b = f"layers.{to}.", "self_attn.", "encoder_attn."
            found[f"{mine}self_attn.in.{kind}"] = joined(i, kind, a + "q_proj", a + "k_proj", a + "v_proj")
            found[f"{mine}self_attn.out.{kind}"] = joined(i, kind, a + "out_proj")
            found[f"{mine}self_attn.norm.{kind}"] = joined(i, kind, "self_attn_layer_norm")
            found[f"{mine}cross_attn.in.{kind}"] = joined(i, kind, b + "q_proj")
            found[f"{mine}cross_attn.out.{kind}"] = joined(i, kind, b + "out_proj")
            found[f"{mine}cross_attn.norm.{kind}"] = joined(i, kind, "encoder_attn_layer_norm")
            found[f"{mine}mlp.up.{kind}"] = joined(i, kind, "fc1")
            found[f"{mine}mlp.down.{kind}"] = joined(i, kind, "fc2")
            found[f"{mine}mlp.norm.{kind}"] = joined(i, kind, "final_layer_norm")
        found[f"source.{kind}"] = torch.cat(
            [joined(i, kind, f"encoder_attn.{name}_proj") for i in kept for name in "kv"]
        )
    return {name: weight.clone() for name, weight in found.items()}


def _with_one(rows: Tensor) -> Tensor:
    """[.., D] -> [.., D + 1]: the LM head's last column is its bias."""
    return F.pad(rows, (0, 1), value=1.0)
