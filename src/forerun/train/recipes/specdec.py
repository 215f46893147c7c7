"""The recipe for SpecDec, the block drafter of encoder-decoders: blocks at random tokens of a translation, in one pass.

A sequence of the data is a source and what the target wrote for it. Row t of a batch is the decoder's row that predicts
token t + 1, so the source's last place stands for the start token. A block whose root is the token at a starts from the
row at a - 1 and learns the target's laws of the tokens behind a. The LM head is the target's own, with its bias as one
more column, and stays as it is; layers start as the target's last ones where the family is Marian's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.drafters.heads.formats import DraftVocabulary
from forerun.drafters.heads.specdec import SpecDecConfig, SpecDecHead, attend_to_source, write_specdec
from forerun.models.encoder_decoder.layers import TorchLinear
from forerun.train.data.corpus import Batch, Corpus
from forerun.train.options import TrainOptions
from forerun.train.recipes.base import Measured, Output, Reading, Recipe, shifted
from forerun.train.recipes.block import choose_anchors
from forerun.train.teacher import SourceTeacher

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
