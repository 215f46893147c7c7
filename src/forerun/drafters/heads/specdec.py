"""SpecDecDrafter: drafts a block for an encoder-decoder in one pass over the encoder's rows (Xia et al. 2022).

A block has a row for each token to be drafted. All rows start from the target's last hidden row and the root's
embedding, joined, and a vector of their place in the block; in every layer they see each other in both directions
and attend to the encoder's rows, whose keys and values are made once per source. The LM head has the target's rows of a
part of its vocabulary; the same rows embed the root, and a root outside has none. The paper accepts what lies among the
target's likeliest few; here the target's own verifier decides, so texts are the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.clock import WALL, Clock
from forerun.core.errors import InvalidInput
from forerun.core.types import Budget, Needs, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.base import Parts
from forerun.drafters.heads.base import Calibration, ObservedRows
from forerun.drafters.heads.block import BlockCandidates
from forerun.drafters.heads.block_config import CANDIDATES
from forerun.drafters.heads.drafter import LastRowDrafter
from forerun.drafters.heads.formats import (
    DraftVocabulary,
    check_weight,
    config_of,
    rates_in,
    read_config,
    read_tensors,
    settings_in,
    size_in,
    write_config,
    write_shards,
)
from forerun.drafters.heads.growth import Tree, grow_ranked
from forerun.drafters.model.draft_law import DraftLaw, likeliest
from forerun.heads import kind_of
from forerun.models.encoder_decoder.layers import Attention, FeedForward, Layer, Linear, Norm, TorchLinear, make_linear
from forerun.models.native import library as native

KIND = "specdec"
_SIZES = {  # fields of the config, and what files call them
    "width": "hidden_size", "inner": "intermediate_size", "heads": "num_attention_heads", "depth": "num_hidden_layers",
    "levels": "block_size", "vocab_size": "vocab_size", "draft_vocab_size": "draft_vocab_size",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SpecDecConfig:
    """A few decoder layers as wide as the target's, for blocks of `levels` tokens."""

    width: int
    inner: int
    heads: int
    depth: int  # layers
    levels: int  # tokens that one pass drafts
    vocab_size: int  # the target's
    draft_vocab_size: int
    embedding_scale: float = 1.0
    norm_eps: float = 1e-5
    target: str = ""  # what it was trained for
    calibration: Calibration = field(default_factory=Calibration)
    rates: tuple[tuple[float, ...], ...] = ()  # [levels][ranks] how often right, given that the path was

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SpecDecConfig:
        with config_of("SpecDec's"):
            ours = settings_in(values, "forerun")
            config = cls(
                **{name: size_in(values, key) for name, key in _SIZES.items()},
                embedding_scale=float(values["embedding_scale"]),
                norm_eps=float(values["layer_norm_eps"]),
                target=str(values.get("target_model") or ""),
                calibration=Calibration(**settings_in(ours, "calibration")),
                rates=rates_in(ours),
            )
            if config.width % config.heads:
                raise ValueError(f"num_attention_heads = {config.heads} of a width of {config.width}")
        return config

    def to_json(self) -> dict[str, Any]:
        return {
            "architectures": ["SpecDecDraftModel"],
            **{key: getattr(self, name) for name, key in _SIZES.items()},
            "embedding_scale": self.embedding_scale,
            "layer_norm_eps": self.norm_eps,
            "target_model": self.target,
            "forerun": {"format": KIND, "calibration": asdict(self.calibration), "rates": self.rates},
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        width, inner = self.width, self.inner
        found: dict[str, tuple[int, ...]] = {
            "places": (self.levels, width),
            "fc.weight": (width, 2 * width),
            "fc.bias": (width,),
            "source.weight": (2 * width * self.depth, width),
            "source.bias": (2 * width * self.depth,),
            "lm_head.weight": (self.draft_vocab_size, width),
            "lm_head.bias": (self.draft_vocab_size,),
        }
        matrices = {
            "self_attn.in": (3 * width, width), "self_attn.out": (width, width), "cross_attn.in": (width, width),
            "cross_attn.out": (width, width), "mlp.up": (inner, width), "mlp.down": (width, inner),
        }  # fmt: skip
        for i in range(self.depth):
            for name, shape in matrices.items():
                found[f"layers.{i}.{name}.weight"] = shape
                found[f"layers.{i}.{name}.bias"] = shape[:1]
            for part in ("self_attn", "cross_attn", "mlp"):
                found[f"layers.{i}.{part}.norm.weight"] = found[f"layers.{i}.{part}.norm.bias"] = (width,)
        return found


Make = Callable[[Tensor, Tensor | None], Linear]
# layer, queries [B, K, D] -> what they find in their sources [B, K, D]
Look = Callable[[int, Tensor], Tensor]


class SpecDecHead:
    """A drafter's weights as functions. `make` makes linear layers; those of torch can be trained."""

    def __init__(
        self, config: SpecDecConfig, weights: Mapping[str, Tensor], vocabulary: DraftVocabulary, make: Make
    ) -> None:
        self.config, self.vocabulary = config, vocabulary

        def linear(name: str) -> Linear:
            return make(weights[f"{name}.weight"], weights[f"{name}.bias"])

        def norm(name: str) -> Norm:
            return Norm(weights[f"{name}.norm.weight"], weights[f"{name}.norm.bias"], config.norm_eps)

        self.layers = [
            Layer(
                Attention(norm(f"{at}self_attn"), linear(f"{at}self_attn.in"), linear(f"{at}self_attn.out")),
                Attention(norm(f"{at}cross_attn"), linear(f"{at}cross_attn.in"), linear(f"{at}cross_attn.out")),
                FeedForward(norm(f"{at}mlp"), linear(f"{at}mlp.up"), linear(f"{at}mlp.down")),
            )
            for at in (f"layers.{i}." for i in range(config.depth))
        ]
        self._join, self._source, self._head = linear("fc"), linear("source"), linear("lm_head")
        self._places, table = weights["places"], weights["lm_head.weight"]
        self._embedding = F.pad(table, (0, 0, 0, 1))  # the last row is of all tokens that cannot be drafted
        self._row_of = torch.full((config.vocab_size,), len(vocabulary), device=table.device)
        self._row_of[vocabulary.ids] = torch.arange(len(vocabulary), device=table.device)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def read(self, encoded: Tensor) -> Tensor:
        """[N, S, D] what encoders made of sources -> [L, 2, N, H, S, Dh] keys and values of every layer."""
        count, length, width = encoded.shape
        made = self._source(encoded.reshape(-1, width))
        heads = self.config.heads
        shape = (count, length, self.config.depth, 2, heads, width // heads)
        return made.view(shape).permute(2, 3, 0, 4, 1, 5)

    def start(self, hidden: Tensor, roots: Tensor) -> Tensor:
        """[B, D] the rows before the roots [B] -> [B, K, D] a block for each."""
        embedded = F.embedding(self._row_of[roots], self._embedding) * self.config.embedding_scale
        return self._join(torch.cat((hidden, embedded), -1))[:, None] + self._places

    def run(self, x: Tensor, look: Look) -> Tensor:
        """Blocks [B, K, D] -> rows for the LM head [B, K, D]."""
        count, size, width = x.shape
        heads, rows = self.config.heads, x.reshape(-1, width)
        for i, layer in enumerate(self.layers):
            part, cross, mlp = layer.attention, layer.cross, layer.feed_forward
            assert cross is not None
            qkv = part.inputs(rows).view(count, size, 3, heads, -1).permute(2, 0, 3, 1, 4)
            seen = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])  # [B, H, K, Dh]
            rows = part.norm(rows + part.output(seen.transpose(1, 2).reshape(-1, width)))
            found = look(i, cross.inputs(rows).view(count, size, width)).reshape(-1, width)
            rows = cross.norm(rows + cross.output(found))
            rows = mlp.norm(rows + mlp.down(F.silu(mlp.up(rows))))
        return rows.view(count, size, width)

    def logits(self, rows: Tensor) -> Tensor:
        """[.., D] -> [.., Vd]."""
        return torch.unflatten(self._head(rows.reshape(-1, rows.shape[-1])).float(), 0, rows.shape[:-1])


def attend_to_source(queries: Tensor, source: Tensor, mask: Tensor | None = None) -> Tensor:
    """[N, Q, D] to the keys and values [2, N, H, S, Dh] of their own sources -> [N, Q, D]."""
    count, many, width = queries.shape
    split = queries.view(count, many, source.shape[2], -1).transpose(1, 2)
    found = F.scaled_dot_product_attention(split, source[0], source[1], attn_mask=mask)
    return found.transpose(1, 2).reshape(count, many, width)


def look_one_by_one(sources: Sequence[Tensor]) -> Look:
    """Block b looks into sources[b] [L, 2, 1, H, S, Dh]: they differ in length."""

    def look(layer: int, queries: Tensor) -> Tensor:
        return torch.cat([attend_to_source(queries[b : b + 1], one[layer]) for b, one in enumerate(sources)])

    return look


def read_specdec(folder: Path) -> tuple[SpecDecConfig, dict[str, Tensor], DraftVocabulary]:
    values, weights = read_config(folder), read_tensors(folder)
    if kind_of(values, lambda: weights) != KIND:
        raise InvalidInput(f"{folder} holds no SpecDec drafter; try `forerun drafters check`")
    config = SpecDecConfig.from_json(values)
    for name, shape in config.shapes().items():
        check_weight(folder, weights, name, shape)
    vocabulary = DraftVocabulary.from_file(weights, config.draft_vocab_size, config.vocab_size)
    return config, weights, vocabulary


def write_specdec(
    folder: Path, config: SpecDecConfig, weights: Mapping[str, Tensor], vocabulary: DraftVocabulary
) -> None:
    """config.json and safetensors, in half the bytes of float32."""
    write_config(folder, config.to_json())
    half = {name: weights[name].to(torch.bfloat16) for name in config.shapes()}
    write_shards(folder, half if vocabulary.is_whole else half | vocabulary.tensors())


def load_specdec(folder: Path, device: torch.device) -> SpecDecHead:
    """On a CPU in eight bits by the native kernels, where they are: what is drafted need not be exact."""
    config, weights, vocabulary = read_specdec(folder)
    native_cpu = device.type == "cpu" and native.available()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    placed = {name: weights[name].to(device, dtype) for name in config.shapes()}
    make: Make = partial(make_linear, mode="q8") if native_cpu else TorchLinear
    return SpecDecHead(config, placed, vocabulary.to(device), make)


class SpecDecDrafter(LastRowDrafter):
    needs = Needs((-1,), encoded=True)
    one_pass = True

    def __init__(self, head: SpecDecHead, clock: Clock = WALL) -> None:
        super().__init__(clock)
        self.head, self.levels = head, head.config.levels
        self._sources: dict[int, Tensor] = {}  # [L, 2, 1, H, S, Dh]

    @classmethod
    def build(cls, parts: Parts) -> SpecDecDrafter:
        if parts.target.source_rules is None:
            raise InvalidInput(f"the drafter {KIND!r} reads an encoder's rows, and this target has no encoder")
        head = load_specdec(parts.head_folder(KIND), parts.target.device)
        if head.config.vocab_size != parts.target.vocab_size:
            raise InvalidInput(
                f"this head was trained for {head.config.target!r} with {head.config.vocab_size} tokens, and the "
                f"target has {parts.target.vocab_size}; use a head of this target"
            )
        return cls(head, parts.target.can.clock)

    @torch.inference_mode()
    def _choose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> list[Tree]:
        self._meter.start()
        candidates = self._candidates(seqs, max(budget.depth for budget in budgets))
        grown, _ = grow_ranked(candidates, seqs, budgets, self.head.config.calibration)
        self._meter.stop(1)
        return grown

    @torch.inference_mode()
    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        super().observe(seqs, trees, scores, verdict)
        if scores.encoded is None:
            return
        self._match_threads()
        for seq, encoded in zip(seqs, scores.encoded, strict=True):
            self._sources[seq.id] = self.head.read(encoded[None])

    def forget(self, seq: Seq) -> None:
        super().forget(seq)
        self._sources.pop(seq.id, None)

    def _ready(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> list[int]:
        """Those whose sources were read, and of which every row was seen; before the first token there is none."""
        return [
            b
            for b, seq in enumerate(seqs)
            if budgets[b].runs and seq.id in self._sources and self._sequences[seq.id].seen == len(seq.tokens) - 1
        ]

    def _candidates(self, seqs: Sequence[Seq], levels: int) -> BlockCandidates:
        self._match_threads()
        head, device = self.head, self.head.device
        roots = torch.tensor([seq.tokens[-1] for seq in seqs], device=device)
        hidden = torch.cat([self._last_row(self._sequences[seq.id]) for seq in seqs])
        rows = head.run(head.start(hidden, roots), look_one_by_one([self._sources[seq.id] for seq in seqs]))
        logits = head.logits(rows[:, :levels].contiguous())  # [B, L, Vd]
        law = DraftLaw(seqs, head.vocabulary, device)
        if law.changes:
            logits = torch.cat([law.applied(logits[:, i, None], i) for i in range(levels)], 1)
        values, places = likeliest(logits, min(CANDIDATES, logits.shape[-1]))
        return BlockCandidates(values[:, :, None], head.vocabulary.ids[places])

    def _last_row(self, observed: ObservedRows) -> Tensor:
        """[1, D]; zeros before the first token."""
        if observed.features:
            return observed.features[0].to(self.head.dtype)
        return torch.zeros(1, self.head.config.width, device=self.head.device, dtype=self.head.dtype)

    def _match_threads(self) -> None:
        if self.head.device.type == "cpu" and native.available():
            native.match_threads(torch.get_num_threads())
