"""The GPU decoder's weights, the buffers of a pass, and the order of its steps.

The steps themselves come in two kinds with one set of tests: Triton kernels (steps/fused.py) and plain torch
(steps/plain.py). Both read and write the same buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from forerun.core.errors import UnsupportedModel
from forerun.models.base import LayerSubset
from forerun.models.blocks import Block, Checkpoint
from forerun.models.config import DecoderConfig
from forerun.models.cuda.adapters import Adapted, AdapterStacks
from forerun.models.cuda.file_weights import GgufNumbers, StoredBlocks, StoredWeights, pack_gguf, pack_numbers
from forerun.models.cuda.plan import FIELDS, LONGEST, MAX_ROWS, PAGES, Plan, SentInts, Size
from forerun.models.cuda.special import (
    LatentWeights,
    LayerEnd,
    Recurrent,
    end_of,
    inputs_of,
    latent_of,
    opens_of,
    ordinary,
    recurrent_of,
)
from forerun.models.cuda.states import StatePool, Trace
from forerun.models.cuda.weights import (
    ExpertWeights,
    Role,
    Weight,
    WeightKind,
    interleaved,
    pack,
    pack_strips,
    stack_experts,
)
from forerun.models.families import BEFORE
from forerun.models.hybrid.weights import HybridCheckpoint
from forerun.models.layers import Experts
from forerun.models.load.quantized.layouts import Numbers
from forerun.models.load.weights import GgufWeights
from forerun.models.pages import TREE_MARGIN
from forerun.models.rope import frequencies

WIDEST_MEMORY = 256  # numbers of a key or a value of recurrent layers
HEAD_DIMS = (16, 32, 64, 128, 256, 512)
HAS = {
    "GeGLU",
    "soft caps of logits",
    "scaled embeddings",
    "norms with an offset",
    "norms behind attention and feed-forward layers",
    "several ropes",
    "rotations of neighbours",
    "layers without positions",
    "sliding windows",
    "soft caps of attention scores",
}
HAS |= {"experts", "experts with biases", "clamped gates", "attention sinks", "sigmoid routers", "scaled experts"}
HAS |= {"shared experts without a gate", "norms over all heads of queries and keys", "scaled residuals"}
HAS |= {"layers without a norm before attention", "scaled logits", "layers of different sizes"}
HAS |= {"latent attention", "groups of experts", "recurrent states", "gates behind attention"}


def reason_against(config: DecoderConfig) -> str | None:
    """What about this model the GPU decoder cannot run; None = nothing."""
    moe = config.moe
    layers, varied = range(config.layers), config.varied
    widths = [config.width, *((moe.inner, moe.shared_inner or 0) if moe is not None else ())]
    widths += sorted({config.inner_of(layer) for layer in layers})
    dims = sorted({config.kv_sizes(layer)[1] for layer in layers})
    if (recurrent := config.recurrent) is not None and recurrent.mlp_alone:
        return "it has no kernels for feed-forward-only layers"
    if lacking := [name for name in config.features if name not in HAS]:
        return f"it has no kernels for {lacking[0]}"
    if recurrent is not None and max(recurrent.key_dim, recurrent.value_dim) > WIDEST_MEMORY:
        return f"memories of {recurrent.key_dim} by {recurrent.value_dim} numbers"
    norms = [name is None for name in config.norms] == [name is None for name in BEFORE]
    if moe is not None and (config.activation != "silu" or not norms or config.residual_scale != 1.0):
        return "its experts have GeGLU, other norms than one before them, or scaled residuals"
    if (latent := config.latent) is not None:
        powers, sizes = (latent.rank, latent.rope_dim), (latent.key_dim, latent.value_dim, latent.query_rank or 0)
        if any(one < 16 or one & (one - 1) for one in powers) or any(one % 16 for one in sizes):
            return f"latents of {latent.rank} with heads of {latent.key_dim} + {latent.rope_dim}, {latent.value_dim}"
    elif others := [dim for dim in dims if dim not in HEAD_DIMS]:
        return f"head_dim={others[0]} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if varied is not None and (varied.input_width % 16 or any(varied.row % dim for dim in dims)):
        return f"it has inputs of {varied.input_width} numbers, or heads of {dims} in rows of {varied.row}"
    if any(width % 16 for width in widths):
        return f"widths {', '.join(map(str, widths))} must be multiples of 16"
    return None


def has_long_rope(config: DecoderConfig) -> bool:
    """Has a rope other rotations for texts beyond some length (longrope)?"""
    return any(rope.kind == "longrope" for rope in config.ropes)


def check_supported(config: DecoderConfig) -> None:
    """UnsupportedModel says what the GPU decoder cannot run; the plain decoder may."""
    if (reason := reason_against(config)) is not None:
        raise UnsupportedModel(f"the GPU decoder cannot run this model: {reason}; dtype='bfloat16' runs it in torch")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer; rows of `gate_up` are gate and up interleaved, so that a tile holds both of a unit."""

    attention_norm: Tensor  # [D]; ones where rows enter as they are
    qkv: Weight  # [(H + 2 Hkv) Dh, D]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [H + Hkv, Dh]
    o: Weight  # [D, H Dh]
    mlp_norm: Tensor
    gate_up: Weight  # [2I, D], or those of all experts
    down: Weight  # [D, I]
    rope: Tensor | None  # [P, R, 2] fp32 cosine and sine; None = no positions in this layer
    window: int  # positions a node sees, itself included; 0 = all
    experts: ExpertWeights | None = None
    after_attention_norm: Tensor | None = None  # [D] of what attention adds to the residual stream
    after_mlp_norm: Tensor | None = None
    sinks: Tensor | None = None  # [H] fp32: a score of each head that joins the sum of its weights, without a value
    end: LayerEnd | None = None  # what follows the feed-forward layer
    latent: LatentWeights | None = None
    opens: Weight | None = None  # [H Dh, D] the gate of what attention finds
    recurrent: Recurrent | None = None  # a layer with a state: `qkv` makes its inputs, `o` reads what it finds

    @property
    def weights(self) -> list[Weight]:
        """All that a pass reads of a layer without experts."""
        end = () if self.end is None else (self.end.gate, self.end.projection)
        return [one for one in (self.qkv, self.opens, self.o, self.gate_up, self.down, *end) if one is not None]


class Model:
    """A checkpoint on the device."""

    whole = False  # rows are whole numbers of two bytes: heads of int8 weights only
    compiled = False
    entry: Weight | None = None  # [D, K] starts the residual stream from wider rows: heads only

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        kind: WeightKind = "plain",
        compiled: bool = False,
    ) -> None:
        """`compiled`: weights lie as the products that are compiled ahead read them (cubin/)."""
        check_supported(config)
        self.config, self.dtype, self.device, self.kind = config, dtype, device, kind
        self.compiled = compiled
        self.max_length = min(config.max_length, LONGEST - TREE_MARGIN)
        with torch.no_grad(), torch.inference_mode(False):
            checkpoint = (Checkpoint if config.special is None else HybridCheckpoint)(weights, config, dtype, device)
            ropes = [self._rope(i) for i in range(len(config.ropes))]
            self.embedding = checkpoint.embedding()
            stored = _stored(weights, config, device) if kind == "file" else None
            of_head = stored.head() if isinstance(stored, StoredBlocks) else None
            self.head = self._pack(checkpoint.head(self.embedding), "head", of_head)
            self.final_norm = checkpoint.final_norm()
            self.inputs = inputs_of(checkpoint, self._pack_layer) if isinstance(checkpoint, HybridCheckpoint) else None
            self.layers = [
                self._read(
                    checkpoint, i, None if rope is None else ropes[rope], {} if stored is None else stored.block(i)
                )
                for i, rope in enumerate(config.layer_ropes)
            ]

    @property
    def attending(self) -> Layer:
        """The last layer with attention."""
        return next(layer for layer in reversed(self.layers) if layer.recurrent is None)

    def next_norm(self, layer: int) -> Tensor:
        """The norm behind a layer: the next layer's first, or the last of all."""
        return self.final_norm if layer + 1 == len(self.layers) else self.layers[layer + 1].attention_norm

    def part(self, subset: LayerSubset) -> Model:
        """The same weights, some layers only: norms are those of what runs next, which kernels hand on in advance."""
        part, norm, layers = copy.copy(self), self.final_norm, list[Layer]()
        for i in reversed(range(subset.end)):
            layer = self.layers[i]
            behind = norm if i in subset.without_mlp else layer.mlp_norm
            norm = behind if i in subset.without_attention else layer.attention_norm
            layers.append(replace(layer, attention_norm=norm, mlp_norm=behind))
        part.layers = layers[::-1]
        return part

    def _read(
        self,
        checkpoint: Checkpoint,
        index: int,
        rope: Tensor | None,
        stored: Mapping[str, Numbers | GgufNumbers | None],
    ) -> Layer:
        if not isinstance(checkpoint, HybridCheckpoint):
            return self._layer(checkpoint.block(index), index, rope, stored)
        block = checkpoint.hybrid_block(index)
        layer = self._layer(ordinary(block, self.config), index, rope, stored)
        recurrent = recurrent_of(block, self.config.recurrent, index)
        end, latent = end_of(block, self._pack_layer), latent_of(block, self._pack_layer)
        opens = opens_of(block, self.config, self._pack_layer)
        return replace(layer, end=end, latent=latent, recurrent=recurrent, opens=opens)

    def _layer(
        self, block: Block, index: int, rope: Tensor | None, stored: Mapping[str, Numbers | GgufNumbers | None]
    ) -> Layer:
        mlp, moe, experts = block.mlp, self.config.moe, None
        if isinstance(mlp, Experts):
            assert moe is not None
            experts = stack_experts(mlp, moe, self.kind, block.o_bias)
            gate_up, down = experts.gate_up, experts.down
            biases: tuple[Tensor | None, ...] = () if moe.biases else (block.o_bias,)
        else:
            # products compiled ahead close gates of SwiGLU only; others are closed behind them
            apart = self.compiled and self.config.activation != "silu"
            both: tuple[Tensor, Role] = (mlp.gate_up, "layer") if apart else (interleaved(mlp.gate_up), "gate")
            gate_up = self._pack(*both, stored.get("gate_up"))
            down = self._pack(mlp.down, "layer", stored.get("down"))
            biases = block.o_bias, mlp.gate_up_bias, mlp.down_bias
        if any(bias is not None for bias in biases):
            raise UnsupportedModel(
                "the GPU decoder has no biases behind attention and feed-forward layers; use the plain decoder"
            )
        ones = torch.ones(self.config.width, dtype=self.dtype, device=self.device)
        return Layer(
            attention_norm=ones if block.attention_norm is None else block.attention_norm,
            qkv=self._pack(block.qkv, "layer", stored.get("qkv")),
            qkv_bias=block.qkv_bias,
            qk_norm=None if block.qk_norm is None else block.qk_norm.contiguous(),
            o=self._pack(block.o, "layer", stored.get("o")),
            mlp_norm=ones if block.mlp_norm is None else block.mlp_norm,
            gate_up=gate_up,
            down=down,
            rope=rope,
            window=self.config.windows[index] or 0,
            experts=experts,
            after_attention_norm=block.after_attention_norm,
            after_mlp_norm=block.after_mlp_norm,
            sinks=None if block.sinks is None else block.sinks.float(),
        )

    def _pack_layer(self, weight: Tensor) -> Weight:
        return self._pack(weight, "layer")

    def _pack(self, weight: Tensor, role: Role, numbers: Numbers | GgufNumbers | None = None) -> Weight:
        """A weight, or the numbers that a checkpoint has in its place."""
        if isinstance(numbers, GgufNumbers):
            return pack_gguf(numbers, role)
        if numbers is not None:
            return pack_numbers(numbers, role)
        return pack_strips(weight, self.kind, role) if self.compiled else pack(weight, self.kind)

    def _rope(self, index: int) -> Tensor:
        """[P, R, 2] rotations at every position that a sequence may have, and a tree behind it.

        Where a rope has others for long texts, those of each rope lie behind these: [2P, R, 2].
        """
        rope, parts = self.config.ropes[index], list[Tensor]()
        positions = torch.arange(self.max_length + TREE_MARGIN, dtype=torch.float32, device=self.device)
        for length in (0, rope.context + 1) if has_long_rope(self.config) else (0,):
            rates, magnitude = frequencies(rope, rope.regime(length))
            angles = positions[:, None] * rates.to(self.device)
            parts.append(torch.stack((angles.cos(), angles.sin()), -1).mul_(magnitude))
        return torch.cat(parts)


def _stored(weights: Mapping[str, Tensor], config: DecoderConfig, device: torch.device) -> StoredWeights | StoredBlocks:
    if isinstance(weights, GgufWeights):
        return StoredBlocks(weights, config, device)
    return StoredWeights(weights, config, device)


class Buffers:
    """Where a pass works; one set serves every size, so captured graphs share it."""

    def __init__(self, model: Model, queries: torch.dtype | None = None) -> None:
        """`queries`: their type; None = that of the rows."""
        config, device, dtype = model.config, model.device, model.dtype
        size = MAX_ROWS + 3 * MAX_ROWS + FIELDS * 2048 + MAX_ROWS * 257 + PAGES
        self._sent = SentInts(device, size, torch.int32, first=MAX_ROWS)
        self.ints = self._sent.all
        heads = config.heads * max(config.kv_sizes(layer)[1] for layer in range(config.layers))
        found = max(heads, *(layer.o.shape[1] for layer in model.layers))
        inner = max(config.inner_of(layer) for layer in range(config.layers))
        with torch.inference_mode(False):
            self.x = torch.empty(MAX_ROWS, config.width, device=device)  # the residual stream, fp32
            # times a norm's weight
            self.rows = torch.empty(MAX_ROWS, config.width, dtype=dtype, device=device)
            self.queries = torch.empty(MAX_ROWS, heads, dtype=queries or dtype, device=device)
            self.found = torch.empty(MAX_ROWS, found, dtype=dtype, device=device)
            self.inner = torch.empty(MAX_ROWS, inner, dtype=dtype, device=device)
            self.logits = torch.empty(MAX_ROWS, config.vocab_size, device=device)
        self.model, self._hidden = model, dict[int, Tensor]()
        # of longrope: [pages] what positions of rows there are moved by in the tables of rotations; [MAX_ROWS] those
        # of a pass
        self.page_turns: Tensor | None = None
        self.turned = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        self.adapters = AdapterStacks(config, dtype, device)
        self.states = None if config.recurrent is None else StatePool(config, dtype, device)

    def hidden(self, layer: int) -> Tensor:
        if layer not in self._hidden:
            shape = MAX_ROWS, self.model.config.width
            with torch.inference_mode(False):
                self._hidden[layer] = torch.empty(shape, dtype=self.model.dtype, device=self.model.device)
        return self._hidden[layer]

    def send(self, plan: Plan) -> None:
        """One copy from pinned memory, behind the identity: the host goes on, whatever the device still has to do.

        Where rows have adapters, or layers keep states, another one.
        """
        self._sent.send(plan.ints)
        if self.states is not None:
            self.states.send(plan.links)
        if plan.units is not None:
            self.adapters.sent.send(plan.units)


@dataclass(frozen=True, slots=True)
class Run:
    """The integers of a pass of one size, where `Buffers.send` puts them."""

    size: Size
    ints: Tensor  # all of them: ancestors are counted from its start
    tokens: Tensor  # [rows]
    positions: Tensor
    slots: Tensor
    groups: Tensor  # [groups, FIELDS]
    adapted: Adapted | None = None  # None = no row has a LoRA adapter

    @classmethod
    def of(cls, size: Size, ints: Tensor, adapted: Adapted | None = None) -> Run:
        tokens, positions, slots = ints[MAX_ROWS : MAX_ROWS + 3 * size.rows].view(3, size.rows).unbind(0)
        first = MAX_ROWS + 3 * size.rows
        groups = ints[first : first + FIELDS * size.groups].view(size.groups, FIELDS)
        return cls(size, ints, tokens, positions, slots, groups, adapted)

    def first(self, rows: int) -> Run:
        """The same for the first rows only: for steps that work row by row."""
        if rows == self.size.rows:
            return self
        some = {name: getattr(self, name)[:rows] for name in ("tokens", "positions", "slots")}
        return replace(self, size=replace(self.size, rows=rows), **some)


def turned(buffers: Buffers, run: Run) -> Tensor:
    """[rows] the places of a pass's rows in the tables of rotations."""
    return run.positions if buffers.page_turns is None else buffers.turned[: run.size.rows]


class Steps(Protocol):
    """The steps of a pass. Each reads and writes the buffers; bits of a row depend on that row alone."""

    def embed(self, run: Run) -> None: ...
    def qkv(self, run: Run, layer: int) -> None: ...
    def attend(self, run: Run, layer: int) -> None: ...
    def leave_attention(self, run: Run, layer: int) -> None: ...
    def gate(self, run: Run, layer: int) -> None: ...
    def leave_mlp(self, run: Run, layer: int) -> None: ...
    def normalise(self, run: Run, into: Tensor) -> None: ...
    def head(self, run: Run) -> None: ...
    def head_of_normed(self, run: Run) -> None:
        """The LM head's logits of `Buffers.rows` with their norm applied, where another than the last norm did that."""

    def on(self, model: Model) -> Steps:
        """The same steps over a part of their model, in the same buffers."""

    def active_experts(self) -> list[int]:
        """Experts that the last pass read, by layer; [] where there are none. Waits for the device."""


@runtime_checkable
class StateSteps(Protocol):
    """Steps of models with recurrent layers."""

    def keep_states(self, trace: Trace, rows: Tensor, places: Tensor) -> None:
        """Write the states behind some rows of a pass; places below 0 are none."""


def one_of_each_kind(layers: Sequence[Layer]) -> list[int]:
    """Layers that launch what all launch, mostly: the first of each kind, and the last, which has fewer rows."""
    kinds = [
        (
            layer.window,
            layer.rope is None,
            layer.experts is None,
            layer.sinks is None,
            layer.recurrent is None,
            layer.qkv.shape,
            layer.down.shape,
        )
        for layer in layers
    ]
    return sorted({*map(kinds.index, kinds), len(layers) - 1})


def run_pass(
    steps: Steps,
    model: Model,
    buffers: Buffers,
    run: Run,
    hidden: tuple[int, ...],
    scored: int,
    only: Sequence[int] | None = None,
    rotated: Run | None = None,
) -> None:
    """All layers over all rows, from tokens to the logits of the first `scored` rows; or `only` some layers.

    Rows behind these need only keys and values in the last layer that writes some, and nothing of the layers behind
    it, unless what leaves one of them is wanted of all rows. `rotated`: the same rows at the positions that rotations
    count, where attention leaves pages out.
    """
    rows, layers, last = run.size.rows, len(model.layers), last_with_keys(model)
    leaving = run if -1 in hidden or any(layer > last for layer in hidden) else run.first(scored)
    steps.embed(run if rotated is None else rotated)
    for i in range(layers) if only is None else only:
        if i in hidden:
            buffers.hidden(i)[:rows].copy_(buffers.x[:rows])
        behind = leaving if i >= last else run
        entering = run if rotated is None else rotated
        if i > last and leaving is not run:
            entering = entering.first(scored)
        if entering.size.rows:
            steps.qkv(entering, i)
        if behind.size.rows or model.layers[i].recurrent is not None:
            steps.attend(run, i)
        if behind.size.rows:
            steps.leave_attention(behind, i)
            steps.gate(behind, i)
            steps.leave_mlp(behind, i)
    if layers in hidden:
        buffers.hidden(layers)[:rows].copy_(buffers.x[:rows])
    if -1 in hidden:
        steps.normalise(run, buffers.hidden(-1))
    if scored:
        steps.head(run.first(scored))


def last_with_keys(model: Model) -> int:
    """The last layer that writes keys and values: those behind it read earlier ones'."""
    varied, layers = model.config.varied, len(model.layers)
    return layers - 1 if varied is None else max(i for i in range(layers) if varied.owns[i])


def shaped(buffer: Tensor, columns: int) -> Tensor:
    """The start of a buffer as rows of so many columns, for layers that are narrower than the widest."""
    if buffer.shape[-1] == columns:
        return buffer
    return buffer.flatten()[: MAX_ROWS * columns].view(MAX_ROWS, columns)
