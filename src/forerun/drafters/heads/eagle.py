"""EagleDrafter: EAGLE-1 (a chain, or a tree of one shape), EAGLE-2 (a tree that follows confidence), EAGLE-3; MTP.

Each sequence has a KV cache of its own for the head, one slot per row. Before a draft, the rows of tokens committed
since the last one are run with the target's *true* features and kept; the rows of the draft itself are written behind
them, seen by their own descendants only, and dropped. So a draft never depends on earlier drafts.

A multi-token-prediction layer made of its checkpoint's own parts (`FamilyLayer`) is read as a layer of the target is:
GLM-4.5's has half-rotated heads and experts, DeepSeek-V3's latent attention, Qwen3-Next's gated attention.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from forerun.core.clock import WALL, Clock
from forerun.core.errors import DamagedFile, InvalidInput, UnsupportedModel
from forerun.core.types import Budget, Needs, Offer, Seq, TreeBatch, lone_roots
from forerun.drafters.base import Drafter, Parts
from forerun.drafters.heads.base import UNMEASURED, Meter, Sizes, head_dtype, is_ready, wants_sampling
from forerun.drafters.heads.drafter import PROMPT, RowsDrafter
from forerun.drafters.heads.eagle_head import (
    Attend,
    EagleConfig,
    EagleHead,
    HeadLayer,
    Kind,
    TorchRunner,
    TorchSteps,
    read_head,
    with_layers,
)
from forerun.drafters.heads.eagle_native import NativeHead, NativeRunner, NativeSteps
from forerun.drafters.heads.formats import (
    check_weight,
    read_config,
    read_tensors,
    settings_in,
    write_config,
    write_shards,
)
from forerun.drafters.heads.growth import Drawn, Tree, sample_trees
from forerun.models.base import Target
from forerun.models.config import DecoderConfig
from forerun.models.hybrid.attention import LatentAttention
from forerun.models.hybrid.rows import threads_for_rows
from forerun.models.hybrid.weights import GatedAttention, HybridCheckpoint
from forerun.models.layers import gate, mix, norm_heads_, rms_norm, rotate_
from forerun.models.load import shapes as family_shapes

_HERE, _THERE = "midlayer.", "model.layers.0."


def family_layer(values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> DecoderConfig | None:
    """The shape of the layer, as a model of one; None where config.json names no family with parts beyond Llama's."""
    try:
        config = DecoderConfig.from_hf(values)
    except UnsupportedModel:
        return None
    partly = config.ropes[0].dims < config.head_dim
    if config.moe is None and config.latent is None and not config.gated_attention and not partly:
        return None
    sparse = f"{_HERE}mlp.gate.weight" in weights
    return replace(config, layers=1, recurrent=None, windows=(None,), layer_ropes=(0,), sparse=(sparse,))


def check_layer(folder: Path, config: DecoderConfig, weights: Mapping[str, Tensor]) -> None:
    """Every weight of the layer is there, of its shape, and there is none that is not read."""
    named = _named(weights)
    shapes = {n: s for n, s in family_shapes.expected_shapes(config, cast(Any, named)) if n.startswith(_THERE)}
    for name, shape in shapes.items():
        check_weight(folder, named, name, shape)
    if surplus := next((name for name in named if name not in shapes), None):
        raise UnsupportedModel(
            f"the multi-token-prediction layer of {folder} has {surplus.removeprefix(_THERE)!r}, which a layer of "
            f"{config.family} has not; train one with `forerun train mtp`"
        )


def _named(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_THERE + n.removeprefix(_HERE): w for n, w in weights.items() if n.startswith(_HERE)}


class FamilyLayer:
    """Weights in one precision on one device, and a pass over any rows."""

    def __init__(
        self, config: DecoderConfig, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._block = HybridCheckpoint(_named(weights), config, dtype, device).hybrid_block(0)

    def behind(self, x: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        """Rows x [N, D] through the layer."""
        block, config = self._block, self._config
        assert block.norm is not None and block.mlp_norm is not None  # noqa: PT018
        norm = partial(rms_norm, eps=config.norm_eps)
        with threads_for_rows(x.device):
            rows, turns = norm(x, weight=block.norm), torch.view_as_real(rotations)
            if isinstance(block.mixer, LatentAttention):
                x = x + self._latent(rows, block.mixer, turns, attend)
            else:
                assert isinstance(block.mixer, GatedAttention)
                x = x + self._ordinary(rows, block.mixer, rotations, attend)
            rows = norm(x, weight=block.mlp_norm)
            if block.experts is not None:
                assert config.moe is not None
                return x + mix(rows, block.experts, config.moe, config.activation)
            assert block.mlp is not None
            return x + block.mlp.down(gate(block.mlp.gate_up(rows), config.activation))

    def _latent(self, rows: Tensor, mixer: LatentAttention, turns: Tensor, attend: Attend) -> Tensor:
        """Queries, which the caller divides by the root of their width, are scaled as the family scales them."""
        queries, latents = mixer.projected(rows, turns)
        queries = queries * (self._config.attention_scale * queries.shape[-1] ** 0.5)
        found = attend(queries, latents[:, None], latents[:, None], 0).view_as(queries)
        return mixer.expanded(found[..., : mixer.config.rank])

    def _ordinary(self, rows: Tensor, mixer: GatedAttention, rotations: Tensor, attend: Attend) -> Tensor:
        config, wide = self._config, mixer.inputs(rows)
        heads, dim, both = config.heads, config.head_dim, config.heads + config.kv_heads
        rotary = wide[:, : both * dim].reshape(len(rows), both, dim)
        values = wide[:, both * dim : (both + config.kv_heads) * dim].view(len(rows), -1, dim)
        if mixer.qk_norm is not None:
            norm_heads_(rotary, mixer.qk_norm, heads, config.qk_norm == "all", config.norm_eps)
        rotate_(rotary[..., : config.ropes[0].dims].view(len(rows), both, -1, 2), rotations)
        found = attend(rotary[:, :heads], rotary[:, heads:], values, 0)
        if config.gated_attention:
            found = found * wide[:, -heads * dim :].sigmoid()
        return mixer.output(found)


# How often EAGLE-1's first ranks are right, by level: what a head without measured rates is drafted with.
_RATES = ((0.6, 0.15, 0.07, 0.04, 0.03), *[(0.5, 0.13, 0.06, 0.035, 0.025)] * 7)


class EagleDrafter(RowsDrafter):
    """EAGLE heads; `dynamic` trees follow the head's confidence, static ones the measured rates of its ranks."""

    kind: Kind = "eagle"
    dynamic = False
    row_share = 0.15

    def __init__(self, head: EagleHead | NativeHead, *, sampled: bool = False, clock: Clock = WALL) -> None:
        self.head, self.sampled, config = head, sampled, head.config
        super().__init__(config.layers, config.depends_on, Meter(clock))
        self.needs = Needs(tuple(sorted(set(config.layers))), match_length=0, may_run=True)
        self._runner = NativeRunner(head) if isinstance(head, NativeHead) else TorchRunner(head)
        self._further = Meter(clock)  # of levels behind the first, which reads new rows too, and costs more
        self._rates = None if self.dynamic else config.rates or _RATES
        self._offer = Offer()  # the last one, which often holds for the next round too

    @classmethod
    def read(cls, folder: Path) -> tuple[EagleConfig, dict[str, Tensor]]:
        return read_mtp(folder) if cls.kind == "mtp" else read_head(folder, kind=cls.kind)

    @classmethod
    def build(cls, parts: Parts) -> Drafter:
        """On a GPU drafting stays on the device, in trees that follow the head's confidence, where that can be."""
        folder = parts.head_folder(cls.kind, in_formats=parts.target.can.captures)
        sampled = wants_sampling(parts.speculative, parts.target.can)

        def plain() -> Drafter:
            return cls(load_head(folder, parts.target, cls.kind), sampled=sampled, clock=parts.target.can.clock)

        if not parts.target.can.captures:
            return plain()
        from forerun.drafters.device.eagle import on_device

        return on_device(
            folder, parts.target, plain, read=cls.read, sampled=sampled,
            max_batch=parts.max_batch, max_length=parts.max_length, dtype=parts.speculative.draft_dtype,
        ) or plain()  # fmt: skip

    def offer(self, seq: Seq) -> Offer:
        """A level, and the rows of a prompt that it has not read; a dynamic tree stops where confidence is low."""
        first = self._first.seconds or UNMEASURED
        levels, start = (first, self._further.seconds or first), self._start_of(seq, first)
        chosen, expected, last = not self._draws(seq), self._expected.get(seq.id), self._offer
        if (levels, start, chosen, expected) != (last.seconds, last.start, last.chosen, last.expected):
            stops = self.dynamic and chosen
            last = Offer(levels, start, chosen=chosen, stops=stops, expected=expected, key=id(self))
            self._offer = last
        return last

    def propose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> TreeBatch:
        if len(seqs) == 1 and self._rates is None:
            if not budgets[0].nodes:
                return lone_roots(seqs)
            tree = self._draft_alone(seqs[0], budgets[0])
            if tree is not None:
                return TreeBatch.trees([tree])
        return super().propose(seqs, budgets)

    def _choose(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> list[Tree]:
        steps, calibration = self._begin(seqs, budgets), self.head.config.calibration
        ranks, between = steps.ranks(seqs), self._after_first_level
        trees = self._grow_ranked(ranks, seqs, budgets, calibration, self._rates, between)
        self._further.stop(steps.levels - 1)
        return trees

    def _draw(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> Drawn:
        steps = self._begin(seqs, budgets)
        drawn = sample_trees(steps, seqs, budgets, self.head.vocabulary)
        self._first.stop(steps.levels)
        return drawn

    def _draft_alone(self, seq: Seq, budget: Budget) -> Tree | None:
        """One sequence's tree of chosen nodes in one go, as in most rounds on a CPU; None where that cannot be."""
        observed = self._sequences.get(seq.id)
        if not is_ready(observed, seq, budget):
            return [seq.tokens[-1]], [-1]
        assert observed is not None
        if self._draws(seq) or len(observed.tokens) > PROMPT:
            return None
        self._first.start()
        if (
            not isinstance(self._runner, NativeRunner)
            or (found := self._runner.draft(seq, observed, budget, self.head.config.calibration)) is None
        ):
            return None
        spent = self._first.elapsed()
        self._first.note(spent * found.first, 1)
        self._further.note(spent * (1.0 - found.first), found.levels - 1)
        self._expected[seq.id] = found.expected
        return found.tree

    def _begin(self, seqs: Sequence[Seq], budgets: Sequence[Budget]) -> NativeSteps | TorchSteps:
        """Read the new rows of these sequences."""
        sequences = [self._sequences[seq.id] for seq in seqs]
        unread = sum(len(observed.tokens) for observed in sequences)
        self._first.start()
        steps = self._runner.begin(seqs, sequences, budgets)
        self._note_reading(unread, len(sequences))
        return steps

    def forget(self, seq: Seq) -> None:
        super().forget(seq)
        self._runner.forget(seq.id)

    def _after_first_level(self) -> None:
        self._first.stop(1)
        self._further.start()


def load_head(folder: Path, target: Target, kind: Kind | None = None) -> EagleHead | NativeHead:
    """A head from its folder, for this target; layers that the file does not name are the usual ones."""
    config, weights = read_mtp(folder) if kind == "mtp" else read_head(folder, kind=kind)
    shared = target.shared()
    config = with_layers(config, folder, shared)
    if kind == "mtp":
        return MtpHead(config, weights, shared, dtype=head_dtype(target, shared), device=target.device)
    normed = any(name.endswith("q_norm.weight") for name in weights)  # queries and keys, which no kernel of ours does
    if NativeHead.supports(config, target.device) and not normed:
        return NativeHead(config, weights, shared)
    return EagleHead(config, weights, shared, dtype=head_dtype(target, shared), device=target.device)


class Eagle2Drafter(EagleDrafter):
    """Any EAGLE-1 or HASS head."""

    dynamic = True


class Eagle3Drafter(EagleDrafter):
    """EAGLE-3 and 3.1 heads; a width of 1 makes a chain, more a dynamic tree."""

    kind: Kind = "eagle3"
    dynamic = True


_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(enorm|hnorm|eh_proj)\.weight")
_BEHIND = {"shared_head.norm.": "norm.", "shared_head.head.": "lm_head.", "eh_proj.": "fc."}
_QWEN = {
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "layers.0.": "midlayer.",
    "shared_head.": "lm_head.",
}
_BESIDE = ("enorm.", "hnorm.", "fc.", "norm.", "lm_head.", "embed_tokens.", "d2t", "t2d")  # the layer itself
_OTHER_KINDS = ("kv_a_proj", "q_a_proj", "mlp.experts", "mlp.gate.weight", "mlp.shared_expert")


class MtpHead(EagleHead):
    """A multi-token-prediction layer, as DeepSeek-V3 and Qwen3-Next checkpoints bring one; run as an EAGLE head is.

    The layer reads the target's last hidden row of token t and the embedding of token t + 1, each behind a norm of
    its own, side by side through one projection; behind it is an ordinary layer, a norm, and the target's LM head.
    It is run again on its own output to draft further, so all else is as in EAGLE-1. Of several such layers the
    first is used.

    Names are read in two styles. DeepSeek-V3 puts the layer behind the target's last (`model.layers.L.enorm`,
    `hnorm`, `eh_proj`, `shared_head.norm`, `shared_head.head`), and a step reads the output of the one before it as
    it is. Qwen3-Next has `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden`, `mtp.fc`, `mtp.layers.0`,
    `mtp.norm`, and a step reads the normed output. A layer with parts beyond Llama's (latent or gated attention,
    half-rotated heads, experts) is read as a layer of the checkpoint's family; where that has none, it is refused.
    """

    def _read_layers(self, weights: Mapping[str, Tensor]) -> list[HeadLayer]:
        self._family_layer: FamilyLayer | None = None
        if self.config.family is None:
            return super()._read_layers(weights)
        self._family_layer = FamilyLayer(self.config.family, weights, self.dtype, self.device)
        return []

    def run(self, tokens: Tensor, carried: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        eps = self.config.norm_eps
        assert self._enorm is not None and self._hnorm is not None  # noqa: PT018
        embedded = rms_norm(self._embed(tokens), self._enorm, eps)
        before = rms_norm(carried.to(self.dtype), self._hnorm, eps)
        x = self._through_fc(torch.cat((embedded, before), -1))
        return (self._family_layer or self._layers[0]).behind(x, self._rotations_at(positions), attend)


class MtpDrafter(EagleDrafter):
    """EAGLE-2's drafting, a tree that follows confidence, with a checkpoint's own layer."""

    kind: Kind = "mtp"
    dynamic = True


def read_mtp(folder: Path) -> tuple[EagleConfig, dict[str, Tensor]]:
    """Shape and weights under our names: fc, enorm, hnorm, midlayer.*, norm; embedding and LM head where stored."""
    values = read_config(folder)
    weights, qwen = _read_layer(folder)
    config, family = EagleConfig.from_json(values, "mtp"), family_layer(values, weights)
    if family is None:
        _must_be_plain(folder, values, weights)
    else:
        config = replace(config, heads=family.heads, kv_heads=family.kv_heads, head_dim=family.head_dim, family=family)
        check_layer(folder, family, weights)
    if qwen and str(values.get("model_type", "")).startswith(
        ("qwen3_next", "qwen3_5")
    ):  # there a norm stores weight - 1
        ours = {n for n in weights if n.endswith("norm.weight") and (family is None or not n.startswith("midlayer."))}
        weights = {n: w + 1.0 if n in ours else w for n, w in weights.items()}
    rows = len(weights["lm_head.weight"]) if "lm_head.weight" in weights else config.draft_vocab_size
    config = replace(config, norm_output=qwen, draft_vocab_size=rows)
    for name, shape in expected_shapes(config).items():
        if (name in weights or "_norm.weight" not in name) and (family is None or not name.startswith("midlayer.")):
            check_weight(folder, weights, name, shape)
    return config, weights


def write_mtp(folder: Path, config: EagleConfig, weights: Mapping[str, Tensor]) -> None:
    """A trained layer in DeepSeek-V3's names, behind a target of as many layers as its config says."""
    at = "model.layers.0."
    places = {ours: theirs for theirs, ours in _BEHIND.items()}
    named = dict[str, Tensor]()
    for name, weight in weights.items():
        start = next((ours for ours in places if name.startswith(ours)), "")
        inside = name.removeprefix("midlayer.") if not start else places[start] + name.removeprefix(start)
        named[name if name in ("d2t", "t2d") else at + inside] = weight
    values = config.to_json()
    ours = {**values["forerun"], "format": "mtp"}
    write_config(folder, {**values, "architectures": ["MtpModel"], "num_nextn_predict_layers": 1, "forerun": ours})
    write_shards(folder, named)


def expected_shapes(config: EagleConfig) -> Sizes:
    """What must be there, or may be: norms of heads, embedding, LM head and a reduced vocabulary."""
    width, dim = config.width, config.head_dim
    layer = config.layer_weights(width) | {"input_layernorm.weight": (width,)}
    layer |= {f"self_attn.{name}_norm.weight": (dim,) for name in "qk"}
    shapes: Sizes = {"fc.weight": (width, 2 * width)}
    shapes |= dict.fromkeys(("enorm.weight", "hnorm.weight", "norm.weight"), (width,))
    return shapes | {f"midlayer.{name}": size for name, size in layer.items()}


def _read_layer(folder: Path) -> tuple[dict[str, Tensor], bool]:
    """Weights of the first such layer under our names, and whether they had Qwen3-Next's; no others are read."""
    found = read_tensors(folder, wanted=lambda name: "mtp." in name)
    if found:
        bare = {name.rpartition("mtp.")[2]: weight for name, weight in found.items()}
        return {_our_name(name, _QWEN): weight for name, weight in bare.items()}, True
    marks = read_tensors(folder, wanted=lambda name: _LAYER.fullmatch(name) is not None)
    numbers = [int(match[1]) for name in marks if (match := _LAYER.fullmatch(name))]
    if not numbers:
        raise InvalidInput(
            f"{folder} carries no multi-token-prediction layer (no eh_proj, no mtp.fc); name another folder"
        )
    at, weights = f"layers.{min(numbers)}.", dict[str, Tensor]()
    named = read_tensors(folder, wanted=lambda n: n in ("d2t", "t2d") or n.removeprefix("model.").startswith(at))
    for name, weight in named.items():
        ours = _our_name(name.removeprefix("model.").removeprefix(at), _BEHIND)
        weights[ours if ours.startswith(_BESIDE) else f"midlayer.{ours}"] = weight
    return weights, False


def _our_name(name: str, places: Mapping[str, str]) -> str:
    start = next((theirs for theirs in places if name.startswith(theirs)), None)
    return name if start is None else places[start] + name.removeprefix(start)


def _must_be_plain(folder: Path, values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Refuse layers that compute something else than is known here."""
    other = next((name for name in weights if any(kind in name for kind in _OTHER_KINDS)), None)
    biased = next((name for name in weights if name.endswith("_proj.bias")), None)
    if other or biased:
        raise UnsupportedModel(
            f"the multi-token-prediction layer of {folder} has {other or biased!r}: only plain attention and a dense "
            "MLP are run here; train one with `forerun train mtp`"
        )
    try:
        dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
        heads, rope = values["num_attention_heads"] * dim, settings_in(values, "rope_parameters")
        partial = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    except (KeyError, TypeError, ValueError, ArithmeticError):
        raise DamagedFile(f"config.json of {folder} does not say how wide its heads are") from None
    queries = weights.get("midlayer.self_attn.q_proj.weight")
    if partial != 1.0 or (queries is not None and queries.dim() == 2 and len(queries) == 2 * heads):
        raise UnsupportedModel(
            f"the multi-token-prediction layer of {folder} has gated attention or rotates a part of each head, "
            "which is not run here; train one with `forerun train mtp`"
        )
