"""NativeDecoder: our decoder on the native kernels, a Target whose whole pass is one call into the C library.

Weights keep the checkpoint's own quantisation where it has one. Every row of a pass has the same bits whatever
other rows are in it, so text with and without drafting is bit-equal in every mode. Slots, prompts and trees are
handled by the torch decoder that this one extends; so are the sizes that `reason_against` names.

An adapter's matrix is multiplied by a power of two that brings its largest number close to the largest of 16 bits; what
`down` gives is divided by it again, in float32. So numbers of float16 or bfloat16 are exact, and those of float32 are
rounded to 11 significant bits.
"""

from __future__ import annotations

import ctypes
import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NotRequired, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.types import Greedy, Needs, Prompts, Scores, Seq, TreeBatch
from forerun.models.adapters import Adapter, parts_of
from forerun.models.attention import PassRows, Span
from forerun.models.base import LayerSubset, SharedWeights
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.layers import Rotations, unpair
from forerun.models.load.quants import Blocks
from forerun.models.load.weights import GgufWeights, Weights
from forerun.models.native import library as native
from forerun.models.native.library import AdapterLayer, Change
from forerun.models.native.packing import is_packable, table_of, unpack_rows
from forerun.models.native.pass_rows import (
    HiddenRows,
    PlainRun,
    RotationTables,
    TreePass,
    checked,
    rows_of,
    without_rows,
)
from forerun.models.native.weights import Mode, NativeReader, some_layers
from forerun.models.partial import PartialTarget
from forerun.models.slots import KV_DTYPES, SlotTarget

_LANES, _RANKS, _OUTPUTS = 16, 4, 32  # as forerun.h has them
_ORDER = ("q", "k", "v", "o", "gate", "up", "down")  # as fr_adapter_layer has them


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class NativeAdapter:
    """An adapter in memory; implements forerun.core.types.LoadedAdapter."""

    name: str
    key: int
    nbytes: int
    config: DecoderConfig  # of the target that it was loaded for
    layers: ctypes.Array[AdapterLayer]
    kept: Sequence[Tensor]  # what the structs point to

    @classmethod
    def of(cls, name: str, key: int, adapter: Adapter, config: DecoderConfig) -> NativeAdapter:
        layers, kept = (AdapterLayer * config.layers)(), list[Tensor]()
        rank = -(-adapter.rank // _RANKS) * _RANKS
        for part in parts_of(adapter, config):
            turned = config.rope_pairs == "neighbours" and part.name in ("q", "k")  # as the weights' rows are
            rows = unpair(part.up, config.head_dim, config.ropes[0].dims) if turned else part.up
            (down, first), (up, second) = _halves(part.down), _halves(rows)
            down, up = _in_blocks(down), _in_panels(up, rank)
            kept += [down, up]
            change = Change(rank, down.data_ptr(), up.data_ptr(), adapter.scale * 2.0 ** -(first + second))
            layers[part.layer].changes[_ORDER.index(part.name)] = change
        return cls(name, key, sum(one.nbytes for one in kept), config, layers, kept)

    def at(self, first: int) -> int:
        """Where the changes of a layer, and of those behind it, lie."""
        return ctypes.addressof(self.layers) + first * ctypes.sizeof(AdapterLayer)


def _halves(matrix: Tensor) -> tuple[Tensor, int]:
    """The matrix times a power of two, in 16 bits, and that power."""
    largest = float(matrix.abs().max())
    power = 14 - math.frexp(largest)[1] if 0.0 < largest < math.inf else 0
    return (matrix.double() * 2.0**power).half(), power


def _in_blocks(down: Tensor) -> Tensor:
    """[R, in] -> [R / 4, in / 16, 4, 16], zeros behind the last."""
    rank, inputs = down.shape
    whole = F.pad(down, (0, -inputs % _LANES, 0, -rank % _RANKS))
    return whole.view(-1, _RANKS, whole.shape[1] // _LANES, _LANES).transpose(1, 2).contiguous()


def _in_panels(up: Tensor, rank: int) -> Tensor:
    """[out, R] -> [out / 32, R, 32], zeros behind the last."""
    whole = F.pad(up, (0, rank - up.shape[1], 0, -len(up) % _OUTPUTS))
    return whole.view(-1, _OUTPUTS, rank).transpose(1, 2).contiguous()


def adapters_of(config: DecoderConfig, spans: Sequence[Span], seqs: Sequence[Seq], first: int = 0) -> array[int] | None:
    """For every row of a pass, where the changes of its sequence's adapter lie from layer `first` on; None = nowhere.

    The array must live as long as the pass, and the sequences keep their adapters.
    """
    if not any([seq.adapter is not None for seq in seqs]):  # noqa: C419 - asked in every pass
        return None
    places = array("Q")
    for span, seq in zip(spans, seqs, strict=True):
        places.extend([address_of(config, seq, first)] * span.nodes)
    return places


def address_of(config: DecoderConfig, seq: Seq, first: int = 0) -> int:
    """Of one sequence; 0 = it has none."""
    own = seq.adapter
    if own is None:
        return 0
    if not isinstance(own, NativeAdapter) or own.config is not config:  # C would read what is not there
        raise InvalidInput(f"the adapter {own.name!r} was loaded by another target")
    return own.at(first)


log = logging.getLogger(__name__)

_KV_KINDS = {torch.float32: native.FLOATS, torch.float16: native.HALVES, torch.int8: native.BYTES}


class NativePlacement(TypedDict):
    """How the kernels hold weights, and what the KV cache may take."""

    mode: Mode
    kv_slots: NotRequired[int | None]
    kv_memory: NotRequired[int | None]
    kv_dtype: NotRequired[str]


class NativeDecoder(Decoder):
    """Implements forerun.models.base.Target."""

    reader = NativeReader

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Tensor], **placed: Unpack[NativePlacement]) -> None:
        mode = placed["mode"]
        # Not Decoder's: it would read all weights into torch.
        SlotTarget.__init__(
            self,
            config,
            dtype=torch.float32,
            device="cpu",
            kv_slots=placed.get("kv_slots"),
            kv_memory=placed.get("kv_memory"),
            kv_dtype=KV_DTYPES.get(placed.get("kv_dtype", "auto"), usual_kv_dtype(mode)),
        )
        self.mode = mode
        self._decode = native.library().fr_decode
        self._pass = native.Pass()  # filled anew by every pass, but for what seldom changes
        self._active_experts = (ctypes.c_int32 * config.layers)()
        self._pass.active_experts = ctypes.addressof(self._active_experts)
        self._known_data: Tensor | None = None  # the KV cache that it points to
        self._stored: tuple[list[int], list[Tensor]] = [], []  # layers whose rows lie beside it, and where
        self._stores_at = array("Q")
        self._all = LayerSubset(config.layers)
        self._models: dict[LayerSubset, native.Model] = {}  # of some layers only
        self.early_exits = {}
        with torch.no_grad(), torch.inference_mode(False):
            reader = self.reader(config, weights, mode)
            self._model = reader.model()
            self._embedding_rows, self._head_rows = reader.embedding(), reader.head_table()
            self._final_norm = reader.names.final_norm()
            self._kept, self._inactive_bytes = reader.kept, sum(reader.inactive_bytes)
        self._model.embedding = table_of(self._embedding_rows)
        self._looks_up = bool(self._model.embedding.rows)  # the kernels themselves, token by token
        self._input_rows = reader.input_rows
        self._alone = TreePass(self._model)
        self._alone.one.active_experts = self._pass.active_experts
        self._plain_run = PlainRun(self._alone, config.layers, config.width)
        if isinstance(weights, GgufWeights):
            weights.file.drop_pages()  # what is needed is packed by now
        self._rotations = [Rotations(rope, self.device) for rope in config.ropes]
        self._tables = RotationTables(self._rotations)

    @staticmethod
    def reason_against(config: DecoderConfig) -> str | None:
        """What about this model the kernels cannot run; None = nothing."""
        if (latent := config.latent) is not None and latent.rank % 4:
            return f"kv_lora_rank={latent.rank} is no multiple of 4"
        if config.moe is not None and config.moe.corrected and not config.moe.sigmoid:
            return "it has corrected softmax routers"
        if config.recurrent is not None and config.recurrent.kernel > native.MOST_TAPS:
            return f"its convolutions read {config.recurrent.kernel} rows, more than {native.MOST_TAPS}"
        dims = {config.kv_sizes(layer)[1] for layer in range(config.layers)}
        return next((f"head_dim={dim} is no multiple of 4" for dim in dims if dim % 4), None)

    def _run(self, given: PassRows, layers: LayerSubset | None = None, rows: Tensor | None = None) -> list[int] | None:
        """One pass, which fills the hidden rows and logits given, and says where each row of these is largest."""
        tokens, spans, seqs, hidden, logits, _ = given
        self._plain_run.drop()  # their keys and values may be overwritten
        layers, scored, one = layers or self._all, 0 if logits is None else len(logits), self._pass
        nodes, x = rows_of(spans), hidden.get(layers.end, rows)  # [M, D] what leaves the last layer
        ids, tops = array("q", tokens), None if logits is None else array("i", bytes(4 * scored))
        if not 0 <= min(tokens) <= max(tokens) < self.vocab_size:  # C would read what is not there
            raise IndexError(f"tokens {tokens} in a vocabulary of {self.vocab_size}")
        if rows is not None:
            assert x is rows, "rows that enter a layer are overwritten by those that leave the last"
        elif not self._looks_up:
            embedded = _take(self._embedding_rows, tokens).mul_(self.config.embedding_scale)
            x = embedded if x is None else x.copy_(embedded)
        table = self._tables.of_rows(nodes, spans, [self._regimes_of(seq) for seq in seqs])
        if self.kv.data is not self._known_data:
            self._note_cache(self.kv.data)
        one.nodes, one.scored = len(tokens), scored
        model = self._model_of(layers)
        unread = -1 not in hidden and max(hidden, default=0) < layers.first + model.keyed
        one.keys_only = len(tokens) - scored if unread else 0
        one.tokens = ids.buffer_info()[0] if rows is None else None
        one.x = None if x is None else x.data_ptr()
        one.cosines, one.sines, one.rope_stride = table.cosines, table.sines, table.stride
        one.position, one.write = nodes.position, nodes.write
        nodes.set_reach(one.reach)
        shown = self._show(one, hidden, layers.end)  # lives until the call is over
        adapters = adapters_of(self.config, spans, seqs, layers.first)
        one.adapters = None if adapters is None else adapters.buffer_info()[0]
        one.normed = hidden[-1].data_ptr() if -1 in hidden else None
        one.logits = None if logits is None else logits.data_ptr()
        one.tops = None if tops is None else tops.buffer_info()[0]
        native.match_threads(torch.get_num_threads())
        failed = self._decode(ctypes.byref(model), ctypes.byref(one))
        del shown, adapters
        if failed:
            raise MemoryError(f"no memory for a pass over {len(tokens)} nodes")
        return None if tops is None else checked(tops.tolist())

    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        """As every decoder's; the tree of one sequence has a shorter way to the same call."""
        alone = prompts is None and len(seqs) == 1 and self._looks_up and not self.early_exits
        if alone and needs.last_row and (needs.rests or self._plain_run.has_next(self._extent_for(seqs[0], 1))):
            needs = without_rows(needs)  # nobody drafts behind this pass
        if alone and -1 not in needs.hidden_layers:
            return self._score_alone(seqs[0], trees, needs)
        return super().score(seqs, trees, needs, prompts)

    def _score_alone(self, seq: Seq, trees: TreeBatch, needs: Needs) -> Scores:
        tokens, alone, vocab = trees.to_host()[0], self._alone, self._model.vocab
        if not 0 <= min(tokens) <= max(tokens) < vocab:  # C would read what is not there
            raise IndexError(f"tokens {tokens} in a vocabulary of {vocab}")
        nodes, extent = len(tokens), self._extent_for(seq, len(tokens))
        if extent.layers:
            self._note_layers((seq,), needs)
        if (known := self._plain_run.known(extent, tokens, needs)) is not None:
            return known
        most, last = self._plain_run.passes(seq, extent, trees, needs), self.config.layers
        end = extent.length + nodes
        if most and (reaches := self.reaches((seq,))) is not None:
            most = max(0, min(most, reaches[0] - end))
        table = self._tables.at(self._regimes_of(seq), end + most)
        alone.fill(tokens, trees.topology()[0], extent.length, extent.pages, table)
        alone.set_adapter(address_of(self.config, seq), nodes)
        if self.kv.data is not self._known_data:
            self._note_cache(self.kv.data)
        hidden = self._hidden_rows(needs, nodes) if needs.hidden_layers else {}
        shown = self._show(alone.one, hidden, last) if needs.hidden_layers else ()
        alone.set_x(hidden, last, bool(needs.hidden_layers))
        logits, ahead, own = alone.logits(nodes), 0, 1.0
        native.match_threads(torch.get_num_threads())
        if most:
            ahead, own = self._plain_run.run(seq, extent, tokens, most, needs, tuple(hidden))
        elif self._decode(*alone.at):
            raise MemoryError(f"no memory for a pass over {nodes} nodes")
        del shown
        found = checked(alone.tops())
        if not isinstance(hidden, HiddenRows) and hidden:
            self._keep_rows(hidden, extent.slots(extent.length, end))
        return Scores(logits, hidden, Greedy(found), ahead=ahead, own=own)

    def load_adapter(self, name: str, key: int, adapter: Adapter) -> NativeAdapter:
        return NativeAdapter.of(name, key, adapter, self.config)

    def truncate(self, seq: Seq, length: int) -> None:
        self._plain_run.drop()
        super().truncate(seq, length)

    def release(self, seq: Seq) -> None:
        self._plain_run.drop()
        super().release(seq)

    def _show(self, one: native.Pass, hidden: Mapping[int, Tensor], end: int) -> Sequence[array[int]]:
        """Where rows that enter layers go; what is returned must live as long as the pass."""
        inner = [layer for layer in hidden if 0 <= layer < end]
        one.hidden_count, one.kept = len(inner), None
        if not inner:
            return ()
        if isinstance(hidden, HiddenRows):
            places, one.kept = array("Q", hidden.addresses.values()), self._kept_at(inner)
        else:
            places = array("Q", [hidden[layer].data_ptr() for layer in inner])
        wanted = array("q", inner)
        one.hidden_layers, one.hidden = wanted.buffer_info()[0], places.buffer_info()[0]
        return wanted, places

    def _hidden_rows(self, needs: Needs, rows: int) -> Mapping[int, Tensor]:
        """Where the kernels copy rows that enter a layer; what leaves the last one they compute in place."""
        layers = self._layers(needs)
        if not layers or min(layers) < 0 or max(layers) >= self.config.layers:
            return super()._hidden_rows(needs, rows)
        return HiddenRows(layers, rows, self.config.width)

    def _keep_rows(self, hidden: Mapping[int, Tensor], slots: Sequence[int]) -> None:
        """As every decoder's; where the kernels know the addresses they have kept the rows already."""
        if not isinstance(hidden, HiddenRows):
            super()._keep_rows(hidden, slots)

    def _kept_at(self, layers: list[int]) -> int:
        """Where it says where the rows of these layers are kept, by slot."""
        if layers != self._stored[0]:  # they move when the cache does, and only then
            stores = [self.kv.rows_of(layer, self.config.width, self._dtype) for layer in layers]
            self._stored, self._stores_at = (layers, stores), array("Q", [one.data_ptr() for one in stores])
        return self._stores_at.buffer_info()[0]

    def _model_of(self, layers: LayerSubset) -> native.Model:
        """The model's struct, or one of some of its layers."""
        if layers is self._all:
            return self._model
        if layers not in self._models:
            self._models[layers] = some_layers(self._model, layers)
        return self._models[layers]

    def _head_product(self, rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        logits = rows.new_empty(len(rows), self.vocab_size)
        native.match_threads(torch.get_num_threads())
        head = ctypes.byref(self._model.head)
        if native.library().fr_linear_rows(head, rows.data_ptr(), logits.data_ptr(), len(rows)):
            raise MemoryError(f"no memory for the logits of {len(rows)} rows")
        return logits

    def _note_cache(self, data: Tensor) -> None:
        """Where keys and values lie from now on; huge pages are asked for before anything is written there."""
        at = data.data_ptr()
        native.library().fr_use_huge_pages(at, data.nbytes)
        for one in (self._pass, self._alone.one):
            one.kind = _KV_KINDS[data.dtype]
            one.layer_stride, one.slot_stride = data.stride(0), data.stride(3)
            one.head_stride = data.stride(2) if self.config.varied is None else 0
            one.keys = at  # of latents, values are the same rows
            one.values = at if len(data[0]) == 1 else at + data.stride(1) * data.element_size()
        self._known_data, self._stored = data, ([], [])

    def shared(self) -> SharedWeights:
        """Rows in float32; heads that run on the same kernels read the tables in place."""
        apart = self.config.special is None  # do layers run by themselves?
        return SharedWeights(
            embed=lambda ids: _take(self._embedding_rows, ids),
            head_rows=lambda ids: _take(self._head_rows, ids),
            vocab_size=self.vocab_size,
            width=self.config.width,
            dtype=torch.float32,
            table=self._embedding_rows,
            head_table=self._head_rows,
            layers=[self._model.layer[i] for i in range(self.config.layers)] if apart else (),
            final_norm=self._final_norm,
            rotations=self._rotations,
            config=self.config,
            partial=partial(PartialTarget, self) if apart else None,
        )

    @property
    def weight_bytes(self) -> int:
        """What a pass over one node reads; of experts, those that one node picks."""
        return sum(tensor.nbytes for tensor in self._kept if isinstance(tensor, Tensor)) - self._inactive_bytes

    @property
    def active_experts(self) -> list[int]:
        """By layer, how many experts the last pass read; empty where the model has none."""
        return [] if self.config.moe is None else self._active_experts[:]


def _take(table: Tensor | Blocks, ids: Tensor | Sequence[int]) -> Tensor:
    """Rows of a table in float32: [N] -> [N, D]."""
    if isinstance(table, Tensor):
        return F.embedding(torch.as_tensor(ids), table).float().contiguous()
    return unpack_rows(table, ids)


def native_decoder(
    config: DecoderConfig,
    weights: Mapping[str, Tensor],
    dtype: str,
    kv_slots: int | None,
    kv_memory: int | None,
    kv_dtype: str = "auto",
) -> NativeDecoder | None:
    """The native decoder of a checkpoint; None where it runs in torch, which has no KV cache in 8 bits."""
    mode = choose_mode(config, weights, dtype)
    if mode is None:
        reason = NativeDecoder.reason_against(config)
        if kv_dtype != "auto":
            reason = native.why_not() or reason or f"dtype={dtype!r} runs in torch"
            raise InvalidInput(f"kv_dtype={kv_dtype!r} needs the native kernels: {reason}; or use kv_dtype='auto'")
        if reason is not None:
            log.warning("the C kernels cannot run this model: %s; it runs in torch, several times slower", reason)
        elif native.available():
            log.warning("the C kernels have no dtype=%r: it runs in torch, several times slower; auto is faster", dtype)
        return None
    made = NativeDecoder
    if config.recurrent is not None:
        from forerun.models.hybrid.native import NativeHybrid

        made = NativeHybrid
    return made(config, weights, mode=mode, kv_slots=kv_slots, kv_memory=kv_memory, kv_dtype=kv_dtype)


def usual_kv_dtype(mode: Mode) -> torch.dtype:
    """Of a KV cache that nobody has chosen: halves where rows are rounded to eight bits before every layer anyway.

    A long context is then read in half the time.
    """
    return torch.float16 if mode in ("gguf", "q8") and native.library().fr_prefers_half() else torch.float32


def choose_mode(config: DecoderConfig, weights: Mapping[str, Tensor], dtype: str) -> Mode | None:
    """How a CPU should hold these weights; None = in torch. Raises where `dtype` asks for what cannot be had."""
    required = dtype in ("gguf", "q8")
    reason = native.why_not() if not native.available() else NativeDecoder.reason_against(config)
    if reason is not None:
        if required:
            raise InvalidInput(f"dtype={dtype!r} needs the native kernels: {reason}; or use dtype='float32'")
        return None
    if dtype == "gguf" and not isinstance(weights, GgufWeights):
        raise InvalidInput("dtype='gguf' needs a .gguf file; use q8, float32 or bfloat16 for this checkpoint")
    if dtype == "auto":
        kinds = weights.packed_kinds() if isinstance(weights, Weights) else set()
        return "gguf" if kinds and all(map(is_packable, kinds)) else "float32"
    modes: dict[str, Mode] = {"gguf": "gguf", "q8": "q8", "float32": "float32", "bfloat16": "bfloat16"}
    return modes.get(dtype)
