"""A drafting head on the GPU: EAGLE and multi-token-prediction heads, run by the steps of the GPU decoder.

An EAGLE-3 head's first layer is a decoder layer with a wider input: the normed embedding of a token beside a normed row
of features. So everything after the input (rotation, slots, tree attention, gate, residuals, further layers, the LM
head over the draft vocabulary) is shared with the target's passes. Only keys and values outlast a pass: rows of a
prompt need all layers but the last, and of that the first product only. In a head of one layer keys and values depend
on the input alone, and such rows attend to nothing. An EAGLE-1 head has no norms before its layer: one product makes
its input, and the residual stream, of embedding and features. A multi-token-prediction layer has both: two norms, then
a product that starts the residual stream, then an ordinary layer.

Weights of fp8 and four bits are read by the products of targets in these formats (cubin/), where a GPU has them. A head
of int8 weights has rows of whole numbers in two bytes (see weights.py) in all products. Their size must then
be right to within a few powers of two, and is known beforehand: behind a norm from the norm's weight, attention's and
the gate's from the weights that made them. These lifts are powers of two that are folded into norms and scales when the
head is loaded. Only the residual stream is handed on before its norm is known; it is lifted by how large a row's
input features are, and by how large what all layers add to them should be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.types import TreeForm
from forerun.drafters.device.growth import HeadOutput
from forerun.drafters.device.plan import ROOM
from forerun.drafters.heads.base import LayerWeights
from forerun.drafters.heads.eagle_head import EagleConfig
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.models.config import DecoderConfig
from forerun.models.cuda.compile.together import starts_early
from forerun.models.cuda.device_trees import STEPS, LastRound
from forerun.models.cuda.network import HEAD_DIMS, Buffers, Layer, Model, Run, Steps
from forerun.models.cuda.plan import LONGEST, MAX_ROWS
from forerun.models.cuda.pool import has_compiled
from forerun.models.cuda.steps.plain import PlainSteps, times
from forerun.models.cuda.target import CudaDecoder
from forerun.models.cuda.weights import Packed, Role, Weight, WeightKind, interleaved, whole
from forerun.models.pages import PAGE, TREE_MARGIN, PagePool, pages_for

LIFTED_TO = 128.0  # root mean square of rows of whole numbers: 256 times as much is still held
ResidualStart = Literal["features", "normed", "nothing"]  # "normed": the features behind their norm
BYTES_STEP = 32  # depth of one product of bytes on tensor cores


@dataclass(frozen=True, slots=True)
class HeadWeights:
    embedding: Tensor  # [V, D] the target's, or its own
    token_norm: Tensor  # [D]
    feature_norm: Tensor  # [D]
    layers: Sequence[LayerWeights]
    norm: Tensor | None  # behind all layers; None = there is none
    head: Tensor  # [Vd, D]
    mix: Tensor | None = None  # [D, 2D] EAGLE-1: makes the input, in place of the two norms
    mix_bias: Tensor | None = None
    entry: Tensor | None = None  # [D, 2D] MTP: makes the input of an ordinary layer, behind the two norms


class HeadModel(Model):
    """A head as a model whose first layer has another input."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: HeadWeights,
        dtype: torch.dtype,
        device: torch.device,
        kind: WeightKind,
        normed_residual: bool,
        kernels: str,
    ) -> None:
        self.config, self.dtype, self.device, self.kind = config, dtype, device, kind
        self.max_length = min(config.max_length, LONGEST - TREE_MARGIN)
        first = weights.layers[0]
        norm = torch.ones_like(first.mlp_norm) if weights.norm is None else weights.norm
        self.token_norm, self.feature_norm, self.final_norm = (
            norm.to(device, dtype) for norm in (weights.token_norm, weights.feature_norm, norm)
        )
        self.norms_output = weights.norm is not None
        self.starts_from: ResidualStart = "normed" if normed_residual else "features"
        if weights.entry is not None:
            self.starts_from = "nothing"
        self.mix, self.mix_bias = (
            None if part is None else part.to(device, dtype) for part in (weights.mix, weights.mix_bias)
        )
        widest = first.qkv if weights.entry is None else weights.entry
        self.entering = widest.shape[1]  # columns of what goes into the first product
        odd = any(weight.shape[1] % BYTES_STEP for weight in (first.o, first.down, weights.head))
        self.whole = kind == "int8" and weights.mix is None and not odd
        self.compiled = not self.whole and has_compiled(kind, config, device, kernels, dtype, "draft_dtype")
        with torch.no_grad(), torch.inference_mode(False):
            self.embedding = weights.embedding.to(device, dtype)
            self.lift = 1.0  # of what goes into the first product
            self.added = 0.0  # mean square of what all layers together should add to a row's features
            self._head_norm = self.final_norm
            self.head = self._packed(weights.head, "head")
            self.entry = None if weights.entry is None else self._packed(weights.entry)
            rope = self._rope(0)
            self.layers = [self._layer_of(i, part, rope) for i, part in enumerate(weights.layers)]
            if self.whole:
                self._lift(weights)

    def next_norm(self, layer: int) -> Tensor:
        return self._head_norm if layer + 1 == len(self.layers) else self.layers[layer + 1].attention_norm

    def _layer_of(self, index: int, weights: LayerWeights, rope: Tensor) -> Layer:
        norm = torch.ones_like(weights.mlp_norm)  # EAGLE's first layers have none
        return Layer(
            attention_norm=(norm if weights.input_norm is None else weights.input_norm).to(self.device, self.dtype),
            qkv=self._packed(weights.qkv),
            qkv_bias=None,
            qk_norm=None if weights.qk_norm is None else weights.qk_norm.to(self.device, self.dtype),
            o=self._packed(weights.o),
            mlp_norm=weights.mlp_norm.to(self.device, self.dtype),
            gate_up=self._packed(interleaved(weights.gate_up), "gate"),
            down=self._packed(weights.down),
            rope=rope,
            window=self.config.windows[index] or 0,
        )

    def mixed(self, tokens: Tensor, carried: Tensor) -> Tensor:
        """[N, D] EAGLE-1's input of these tokens and features."""
        assert self.mix is not None
        both = torch.cat((F.embedding(tokens.long(), self.embedding), carried.to(self.dtype)), -1)
        found = both @ self.mix.t()
        return found if self.mix_bias is None else found + self.mix_bias

    def _packed(self, weight: Tensor, role: Role = "layer") -> Weight:
        return self._pack(weight.to(self.device, self.dtype).contiguous(), role)

    def _lift(self, weights: HeadWeights) -> None:
        """The same head for rows of whole numbers: they are scaled up where written and down where read."""
        entering, last = torch.cat((self.token_norm, self.feature_norm)), lift_of(self.final_norm)
        self.lift = lift_of(entering)
        self.added = _size(self.feature_norm) ** 2 if self.starts_from == "normed" else 0.0
        if weights.entry is not None:
            self.entry = cast(Packed, self.entry).scaled(1 / self.lift)
            self.added = _size(_outputs(weights.entry, entering)) ** 2
        self.head, self._head_norm = cast(Packed, self.head).scaled(1 / last), self.final_norm * last
        lifted = list[Layer]()
        for i, (layer, plain) in enumerate(zip(self.layers, weights.layers, strict=True)):
            ordinary = i > 0 or self.entry is not None
            norm = layer.attention_norm if ordinary else entering
            lift = lift_of(norm) if ordinary else self.lift
            found, added = self._lifted(layer, plain, norm, lift)
            lifted.append(replace(found, attention_norm=norm * lift) if ordinary else found)
            self.added += added
        self.layers = lifted

    def _lifted(self, layer: Layer, plain: LayerWeights, norm: Tensor, lift: float) -> tuple[Layer, float]:
        """A layer that reads rows behind this norm times `lift`, and the mean square of what it should add to them."""
        qkv, o, gate_up, down = (cast(Packed, w) for w in (layer.qkv, layer.o, layer.gate_up, layer.down))
        first_value = (self.config.heads + self.config.kv_heads) * self.config.head_dim
        gated = lift_of(layer.mlp_norm)
        values = _outputs(plain.qkv[first_value:], norm)
        gate, up = (_outputs(part, layer.mlp_norm) for part in plain.gate_up.chunk(2))
        units = _size(gate) * up
        found, inner = lift_of(values), lift_of(units)
        parts = [_size(values) * _size(_lengths(plain.o)), _size(units) * _size(_lengths(plain.down))]
        into_values = torch.ones_like(qkv.scales)
        into_values[first_value:] = found
        into_inner = torch.ones_like(gate_up.scales)
        into_inner[1::2] = inner
        lifted = replace(
            layer,
            qkv=qkv.scaled(into_values / lift),
            o=o.scaled(1 / found),
            mlp_norm=layer.mlp_norm * gated,
            gate_up=gate_up.scaled(into_inner / gated),
            down=down.scaled(1 / inner),
        )
        return lifted, sum(part * part for part in parts)


def lift_of(sizes: Tensor) -> float:
    """The power of two that brings numbers of these sizes to about LIFTED_TO."""
    return float(2.0 ** round(math.log2(LIFTED_TO / _size(sizes))))


def _size(values: Tensor) -> float:
    return max(1e-6, float(values.float().square().mean().sqrt()))


def _outputs(weight: Tensor, norm: Tensor) -> Tensor:
    """[N] how large the outputs of normed rows are, if their numbers go together by chance."""
    return _lengths(weight.to(norm) * norm)


def _lengths(weight: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(weight.float(), dim=1)
    return lengths


def append_decided(
    into: Tensor, hidden: Sequence[Tensor], sent: Tensor, last: LastRound, form: TreeForm, fused: bool | None = None
) -> None:
    """Add root and path of each tree, as the device has decided them, to the rows of its sequence.

    `sent` is [2, B]: the first place of a tree's sequence, -1 = nobody owns the tree; and the rows that it has. The
    last row of `into` is never read: what nobody owns may go there.
    """
    if into.device.type == "cuda" if fused is None else fused:
        from forerun.drafters.device import kernels

        width = hidden[0].shape[1]
        kernels.append[(form.trees, form.depth + 1)](
            tuple(hidden), into, sent, last.accepted, last.rows, form.trees, STEPS, ROOM=ROOM, WIDTH=width,
            UP=1 << (width - 1).bit_length(), num_warps=4,
        )  # fmt: skip
        return
    first, seen = sent[..., None]
    steps = torch.arange(form.depth + 1, device=first.device)
    kept = (steps <= last.accepted[: form.trees, None]) & (first >= 0)
    places = torch.where(kept, first + (seen + steps) % ROOM, len(into) - 1)
    copy_rows(into, hidden, last.rows[: form.trees, : form.depth + 1].flatten(), places.flatten())


def copy_rows(into: Tensor, hidden: Sequence[Tensor], sources: Tensor, places: Tensor) -> None:
    """Rows of all layers side by side."""
    into.index_copy_(0, places, torch.cat([rows.index_select(0, sources) for rows in hidden], -1))


def pick_plainly(buffers: Iterable[Tensor], rows: Tensor) -> None:
    """Bring some rows of each buffer to its start."""
    for buffer in buffers:
        buffer[: len(rows)] = buffer.index_select(0, rows)


def pick_fused(x: Tensor, queries: Tensor, lifts: Tensor, rows: Tensor) -> None:
    """The same in one kernel, for the buffers that the head reads next."""
    from forerun.drafters.device import kernels

    widths, pdl = (x.shape[1], queries.shape[1]), starts_early(x.device)
    up = 1 << max(2, (len(rows) - 1).bit_length())
    columns = min(512, 8192 // up)
    kernels.pick[(-(-max(widths) // columns),)](
        x, queries, lifts, rows, len(rows), *widths, B_UP=up, COLUMNS=columns, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


class HeadSteps(Steps, Protocol):
    """The steps of a head's pass: a target's, with another input step."""

    def enter(self, run: Run, carried: Tensor, sources: Tensor | None = None) -> None:
        """`sources`: which rows of `carried` to take; None = all, in order."""

    def keys_and_values(self, run: Run, layer: int) -> None:
        """What `qkv` finds, where nobody asks for queries."""

    def pick(self, rows: Tensor) -> None:
        """Go on with these rows only, in this order."""


class PlainHeadSteps(PlainSteps):
    """In plain torch."""

    def __init__(self, model: HeadModel, buffers: Buffers, kv: Tensor) -> None:
        super().__init__(model, buffers, kv)
        self._head_model = model
        self.entered = torch.empty(MAX_ROWS, model.entering, dtype=model.dtype, device=model.device)
        self.lifts = torch.ones(MAX_ROWS, 1, device=model.device)

    def enter(self, run: Run, carried: Tensor, sources: Tensor | None = None) -> None:
        carried = carried if sources is None else carried.index_select(0, sources)
        model, rows, eps = self._head_model, run.size.rows, self.model.config.norm_eps
        if model.mix is not None:
            self.entered[:rows] = model.mixed(run.tokens, carried)
            self.buffers.x[:rows] = self.entered[:rows].float()
            return
        embedded = F.embedding(run.tokens.long(), model.embedding).float()
        normed = F.rms_norm(carried.float(), carried.shape[-1:], model.feature_norm.float(), eps)
        token = F.rms_norm(embedded, embedded.shape[-1:], model.token_norm.float(), eps)
        self.entered[:rows] = torch.cat((token, normed), -1).mul(model.lift).to(model.dtype)
        self._round(self.entered[:rows])
        if model.entry is not None:
            self.buffers.x[:rows] = times(self.entered[:rows], model.entry).float()
        else:
            self.buffers.x[:rows] = normed if model.starts_from == "normed" else carried.float()
        if model.whole:
            handed_on = model.starts_from == "features"
            squares = carried.float().square().mean(-1, keepdim=True) if handed_on else 0.0
            self.lifts[:rows] = torch.as_tensor(squares + model.added, device=model.device).rsqrt()

    def keys_and_values(self, run: Run, layer: int) -> None:
        self.qkv(run, layer)

    def pick(self, rows: Tensor) -> None:
        pick_plainly((self.buffers.x, self.buffers.queries, self.lifts), rows)

    def attend(self, run: Run, layer: int) -> None:
        super().attend(run, layer)
        self._round(self.buffers.found[: run.size.rows])

    def gate(self, run: Run, layer: int) -> None:
        super().gate(run, layer)
        self._round(self.buffers.inner[: run.size.rows])

    def head(self, run: Run) -> None:
        if self._head_model.norms_output:
            rows = self._normed(run, self.model.next_norm(len(self.model.layers) - 1))
        else:
            rows = self.buffers.x[: run.size.rows].to(self.model.dtype)
        self.buffers.logits[: run.size.rows] = times(rows, self.model.head).float()

    def _into_attention(self, run: Run, weights: Layer) -> Tensor:
        entered = weights is self.model.layers[0] and self._head_model.entry is None
        return self.entered[: run.size.rows] if entered else super()._into_attention(run, weights)

    def _normed(self, run: Run, weight: Tensor) -> Tensor:
        if not self._head_model.whole:
            return super()._normed(run, weight)
        x, lifts = self.buffers.x[: run.size.rows], self.lifts[: run.size.rows]
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.model.config.norm_eps)
        return whole(x * weight.float() * lifts) * (inverse / lifts)

    def _round(self, rows: Tensor) -> None:
        """Rows as a head of int8 weights has them."""
        if self._head_model.whole:
            rows.copy_(whole(rows))


class HeadNet:
    """A head with its buffers, and the pages of its sequences."""

    def __init__(self, model: HeadModel, kv_slots: int, kernels: str) -> None:
        config = model.config
        self.model, self.buffers = model, Buffers(model)
        self.attends = len(model.layers) > 1  # do rows attend that are read for keys and values alone?
        self.group_nodes = 64 // (1 << (config.heads // config.kv_heads - 1).bit_length())
        self.pool = PagePool(pages_for(kv_slots))  # nobody shares a head's pages: only hidden rows are shared
        with torch.inference_mode(False):
            shape = len(model.layers), 2, config.kv_heads, PAGE * self.pool.size, config.head_dim
            # slots of rows that no draft depends on are never written, and read as part of a page: zeros are harmless
            self.kv = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.steps: HeadSteps
        if kernels == "triton":
            from forerun.drafters.device.fused_head import CompiledHeadSteps, FusedHeadSteps

            made = CompiledHeadSteps if model.compiled else FusedHeadSteps
            self.steps = made(model, self.buffers, self.kv)
        else:
            self.steps = PlainHeadSteps(model, self.buffers, self.kv)

    @property
    def depends_on(self) -> int | None:
        """Rows, the last one included, that a draft behind the last row depends on; None = all."""
        windows = self.model.config.windows
        return None if None in windows else 1 + sum((window or 1) - 1 for window in windows)

    @property
    def out(self) -> Tensor:
        """[MAX_ROWS, D] fp32: the outputs of the last pass, before the norm."""
        return self.buffers.x

    @property
    def logits(self) -> Tensor:
        """[MAX_ROWS, Vd] fp32 of what follows the rows of the last pass."""
        return self.buffers.logits

    def keep(self, run: Run, carried: Tensor) -> None:
        """Keys and values of rows in all layers, and nothing else; where there are several, rows attend."""
        self._below(run, carried)
        self.steps.keys_and_values(run, len(self.model.layers) - 1)

    def run(self, run: Run, carried: Tensor, sources: Tensor | None = None) -> None:
        """All layers, and the logits; `sources` says which rows of `carried` to take, None = all."""
        self._begin(run, carried, sources)
        self._finish(run)

    def run_some(self, run: Run, carried: Tensor, some: Run, rows: Tensor) -> None:
        """Keys and values of all rows, the rest of the last layer and the logits for some of them only."""
        self._begin(run, carried)
        self.steps.pick(rows)
        self._finish(some)

    def _below(self, run: Run, carried: Tensor, sources: Tensor | None = None) -> None:
        """The input step, and all layers but the last."""
        self.steps.enter(run, carried, sources)
        for layer in range(len(self.model.layers) - 1):
            self.steps.qkv(run, layer)
            self._behind_qkv(run, layer)

    def _begin(self, run: Run, carried: Tensor, sources: Tensor | None = None) -> None:
        """As far as the last layer's queries, keys and values."""
        self._below(run, carried, sources)
        self.steps.qkv(run, len(self.model.layers) - 1)

    def _finish(self, run: Run) -> None:
        self._behind_qkv(run, len(self.model.layers) - 1)
        self.steps.head(run)

    def _behind_qkv(self, run: Run, layer: int) -> None:
        self.steps.attend(run, layer)
        self.steps.leave_attention(run, layer)
        self.steps.gate(run, layer)
        self.steps.leave_mlp(run, layer)


# than the target's: padding has some, and drafts are written behind all sequences
MORE_SLOTS = 3 * TREE_MARGIN
WIDE = 1024  # from this width on reading a head's weights is what a level costs, and one byte each is enough


class FeatureFusion:
    """What a row carries: the target's features of a true row, the head's own output of a drafted one."""

    def __init__(self, config: EagleConfig, weights: Mapping[str, Tensor], model: HeadModel) -> None:
        def get(name: str) -> Tensor:
            return weights[name].detach().to(model.device, model.dtype)

        self.layers, self.feature_width, self._eps = config.layers, config.feature_width, config.norm_eps
        self._fc = get("fc.weight") if config.kind == "eagle3" else None
        self._bias = get("fc.bias") if config.kind == "eagle3" and "fc.bias" in weights else None
        count = len(config.layers) if config.fc_norm else 0
        self._norms = [get(f"fc_norm.{i}.weight") for i in range(count)]
        self._input_norm = get("input_norm.weight") if config.norm_before_fc else None
        self._output_norm = model.final_norm.float() if config.norm_output else None

    def fuse(self, features: Tensor) -> Tensor:
        """[N, F] of the target -> [N, D]; EAGLE-1 and MTP carry the target's own row."""
        if self._fc is None:
            return features
        if self._input_norm is not None:
            features = F.rms_norm(features, features.shape[-1:], self._input_norm, self._eps)
        if self._norms:
            parts = zip(features.chunk(len(self._norms), -1), self._norms, strict=True)
            features = torch.cat([F.rms_norm(part, norm.shape, norm, self._eps) for part, norm in parts], -1)
        fused = features @ self._fc.t()
        return fused if self._bias is None else fused + self._bias

    def carry(self, out: Tensor) -> Tensor:
        """[N, D] fp32 outputs -> what the rows behind them carry."""
        if self._output_norm is None:
            return out
        return F.rms_norm(out, out.shape[-1:], self._output_norm, self._eps)


def why_not(config: EagleConfig, target: object) -> str:
    """Why a head cannot draft on the device; empty where it can."""
    if not isinstance(target, CudaDecoder):
        return "the target is not our decoder on a GPU"
    if config.family is not None:
        return f"its layer is one of {config.family.family}, which runs on the host"
    if config.head_dim not in HEAD_DIMS or config.width % 16 or config.inner % 16:
        return f"head_dim={config.head_dim}, width={config.width} or inner={config.inner} do not fit the kernels"
    return ""


def make_net(
    config: EagleConfig, weights: Mapping[str, Tensor], target: CudaDecoder, kind: WeightKind | None = None
) -> tuple[HeadNet, FeatureFusion, HeadOutput, LastRound]:
    """A head for a target; weights of one byte by default where the head is wide and kernels can read them."""
    if kind is None:
        bytes_pay = config.kind != "eagle" and config.width >= WIDE and target.kernels == "triton"
        kind = "int8" if bytes_pay else "plain"
    rows = len(weights["lm_head.weight"]) if "lm_head.weight" in weights else config.draft_vocab_size
    vocabulary = DraftVocabulary.from_file(weights, rows, config.vocab_size).to(target.device)
    parts = _head_weights(config, weights, target, vocabulary)
    shape = _decoder_config(config, target.max_length, rows, parts.layers[0].qk_norm is not None)
    model = HeadModel(
        shape, parts, target.model.dtype, target.device, kind,
        config.norm_before_residual, target.kernels,
    )  # fmt: skip
    net = HeadNet(model, target.kv.capacity + MORE_SLOTS, target.kernels)
    worth = config.calibration
    head_output = HeadOutput(vocabulary.ids, math.log(worth.scale), worth.power)
    return net, FeatureFusion(config, weights, model), head_output, target.grown.last


def _head_weights(
    config: EagleConfig, weights: Mapping[str, Tensor], target: CudaDecoder, vocabulary: DraftVocabulary
) -> HeadWeights:
    own = weights.get("embed_tokens.weight")
    narrows = weights.get("embed_proj.weight")  # of a head that is narrower than its target
    if narrows is not None:
        table = target.model.embedding
        own = torch.cat([part @ narrows.to(table).t() for part in torch.split(table, 1 << 14)])
    head = weights.get("lm_head.weight")
    mixes, unused = config.kind == "eagle", torch.ones(config.width)
    norms = ("enorm", "hnorm") if config.kind == "mtp" else ("midlayer.input_layernorm", "midlayer.hidden_norm")
    token_norm, feature_norm = (weights.get(f"{name}.weight", unused) for name in norms)
    return HeadWeights(
        embedding=target.model.embedding if own is None else own,
        token_norm=token_norm,
        feature_norm=feature_norm,
        layers=[_layer_weights(config, weights, prefix) for prefix in config.prefixes],
        norm=weights.get("norm.weight"),
        head=target.shared().head_rows(vocabulary.ids) if head is None else head,
        mix=weights["fc.weight"] if mixes else None,
        mix_bias=weights.get("fc.bias") if mixes else None,
        entry=weights["fc.weight"] if config.kind == "mtp" else None,
    )


def _layer_weights(config: EagleConfig, weights: Mapping[str, Tensor], at: str) -> LayerWeights:
    return LayerWeights.read(config, lambda name: weights[at + name], lambda name: weights.get(at + name))


def _decoder_config(config: EagleConfig, longest: int, rows: int, qk_norm: bool) -> DecoderConfig:
    """The head as a model whose vocabulary is the draft's, and which reads texts as long as the target does."""
    reaches = [config.reach(i) for i in range(config.depth)]
    found = DecoderConfig.from_hf(
        {
            "model_type": "qwen3" if qk_norm else "llama",
            "vocab_size": rows,
            "hidden_size": config.width,
            "intermediate_size": config.inner,
            "num_hidden_layers": config.depth,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": longest,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "tie_word_embeddings": False,
        }
    )
    windows = tuple(None if reach >= longest else reach for reach in reaches)
    return replace(found, windows=windows, ropes=(config.rope,))
