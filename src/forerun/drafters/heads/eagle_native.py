"""NativeRunner: runs an EAGLE head on the native CPU kernels, in blocks of four or eight bits.

A draft step on a CPU is memory traffic and the number of operations, so here it is an eighth or a quarter of the bytes
and two calls, and the target's embedding is read in place; a draft of one sequence is one call (`WholeDraft`). Rounding
costs a rejected token now and then, and never correctness: with four bits the packaged head writes 2.09 tokens a round
in chains of three instead of 2.10 with eight, and a level takes half as long.

What each row attends to is given as in the decoder's passes: a run of slots, the sequence's own rows, and then its
ancestors in the draft. Sequences share a pass without padding, and no row depends on its neighbours.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from forerun.core.errors import VocabularyMismatch
from forerun.core.types import Budget, Seq, offsets
from forerun.drafters.heads.base import Calibration, ObservedRows, Piece, checked_shared, vocabulary_of
from forerun.drafters.heads.eagle_head import CHUNK, EagleConfig, HeadCache, frontier_sizes
from forerun.drafters.heads.formats import Matrix, packed_form
from forerun.drafters.heads.growth import Frontier, Ranked, Tree
from forerun.drafters.model.draft_law import KernelDraftLaw, factor_of, has_noise
from forerun.models.base import SharedWeights
from forerun.models.layers import Rotations
from forerun.models.load.quants import Blocks
from forerun.models.native import library as native
from forerun.models.native.head_library import Ranking, draft_tree, run_rows
from forerun.models.native.library import Draft, Head, HeadLayer, HeadPass, Weights
from forerun.models.native.packing import (
    FloatMode,
    as_q4_1,
    is_packable,
    pack_blocks,
    side_by_side,
    table_of,
    take_rows,
    unpack_rows,
)
from forerun.models.native.pass_rows import LayerRows, RotationTables

Bits = Literal[4, 8]
_MANY = 1024  # rows of the LM head that are worth rounding
_ROWS = 4096  # of them that are in floats at once


class NativeHead:
    """Weights of one head, packed, and the struct that points to them."""

    def __init__(
        self, config: EagleConfig, weights: Mapping[str, Tensor], shared: SharedWeights | None, bits: Bits | None = None
    ) -> None:
        """`bits` of a weight; None = four where memory limits the kernels, else eight."""
        self.config, self.device = config, torch.device("cpu")
        if bits is None:
            bits = 4 if native.library().fr_prefers_half() else 8
        self._mode: FloatMode = "q4" if bits == 4 else "q8"
        self._weights, self._kept = weights, list[Tensor]()
        self.vocabulary = vocabulary_of(config, weights)
        self._shared = checked_shared(config, weights, shared)
        narrows = self._weights.get("embed_proj.weight")  # of a head that is narrower than its target
        self._embed_proj = None if narrows is None else Matrix(narrows.detach().float())
        self._table = self._embedding_table()
        with torch.no_grad(), torch.inference_mode(False):
            self.layers = (HeadLayer * config.depth)(*map(self._layer, range(config.depth)))
            self.struct = self._struct()
        self.ids: list[int] = self.vocabulary.ids.tolist()
        # can the kernels look up whatever they draft?
        self.looks_up = self._table is not None and max(self.ids) < self._table.shape[0]
        self.int32_ids = self.vocabulary.ids.to(torch.int32)
        del self._weights  # what is needed is packed by now

    @staticmethod
    def supports(config: EagleConfig, device: torch.device) -> bool:
        fits = config.head_dim % 4 == 0 and config.heads % config.kv_heads == 0
        return fits and device.type == "cpu" and native.available()

    def embedded(self, tokens: list[int]) -> Tensor | None:
        """[N, D] of these tokens; None where the kernels look them up themselves."""
        if self._table is not None:
            if max(tokens) >= self._table.shape[0]:  # C would read what is not there
                raise VocabularyMismatch(
                    f"token {max(tokens)} is beyond the head's {self._table.shape[0]}: use a head of this target"
                )
            return None
        assert self._shared is not None
        rows = self._shared.embed(torch.tensor(tokens)).float().contiguous()
        return rows if self._embed_proj is None else self._embed_proj.times(rows)

    def _struct(self) -> Head:
        config, table = self.config, self._table
        fused = config.kind == "eagle3"
        parts = [self._weights[f"fc_norm.{i}.weight"] for i in range(len(config.layers)) if config.fc_norm]
        return Head(
            width=config.width,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            inner=config.inner,
            features=config.feature_width,
            parts=max(1, len(config.layers)),
            joins_token=not fused,
            norm_before_residual=config.norm_before_residual,
            norm_output=config.norm_output,
            depth=config.depth,
            eps=config.norm_eps,
            attention_scale=config.head_dim**-0.5,
            token_norm=self._vector("midlayer.input_layernorm.weight") if fused else None,
            feature_norm=self._vector("midlayer.hidden_norm.weight") if fused else None,
            out_norm=self._vector("norm.weight"),
            input_norm=self._vector("input_norm.weight") if config.norm_before_fc else None,
            part_norms=self._keep(torch.cat(parts)) if parts else None,
            fc=self._linear(self._weights["fc.weight"], bias=self._weights.get("fc.bias")),
            lm_head=self._lm_head(),
            layers=self.layers,
            embedding=table_of(table),
        )

    def _layer(self, index: int) -> HeadLayer:
        """An ordinary layer, behind the first, has a norm of its own before attention."""
        at = self.config.prefixes[index]
        return HeadLayer(
            window=self.config.reach(index),
            input_norm=self._vector(at + "input_layernorm.weight") if index else None,
            mlp_norm=self._vector(at + "post_attention_layernorm.weight"),
            qkv=self._linear(*(self._weights[f"{at}self_attn.{name}_proj.weight"] for name in "qkv")),
            output=self._linear(self._weights[at + "self_attn.o_proj.weight"]),
            gate_up=self._linear(*(self._weights[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up"))),
            down=self._linear(self._weights[at + "mlp.down_proj.weight"]),
        )

    def _embedding_table(self) -> Tensor | Blocks | None:
        """What tokens are looked up in; None where only the target can do it."""
        own = self._weights.get("embed_tokens.weight")
        if own is not None:
            return own.detach().float().contiguous()
        assert self._shared is not None
        if self._embed_proj is not None:
            return None
        return self._shared.table if table_of(self._shared.table).rows else None

    def _lm_head(self) -> Weights:
        """The head's own, or the target's rows of these words, as the file has them: never all of them in floats."""
        own = self._weights.get("lm_head.weight")
        if own is not None:
            return self._linear(own)
        assert self._shared is not None
        ids, table = self.vocabulary.ids, self._shared.head_table
        if not (isinstance(table, Blocks) and is_packable(table.kind)):
            return self._linear(self._shared.head_rows(ids))
        rows = take_rows(table, ids)
        if self._mode == "q4" and rows.data.numel() > len(ids) * table.shape[1] and len(ids) >= _MANY:
            packed = pack_blocks(_in_four_bits(rows))
        else:
            packed = pack_blocks(rows)
        self._kept.append(packed.data)
        return side_by_side([packed])

    def _linear(self, *weights: Tensor, bias: Tensor | None = None) -> Weights:
        packed = [packed_form(weight, bias, self._mode) for weight in weights]
        self._kept.extend(part.data for part in packed)
        self._kept.extend(part.bias for part in packed if part.bias is not None)
        return side_by_side(packed)

    def _vector(self, name: str) -> int | None:
        return self._keep(self._weights[name]) if name in self._weights else None

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor.detach().to(torch.float32, copy=True).contiguous())
        return self._kept[-1].data_ptr()


def _in_four_bits(blocks: Blocks) -> Blocks:
    """The same rows in a third to a half of the bytes, some at a time."""
    outputs, inputs = blocks.shape
    parts = [as_q4_1(unpack_rows(blocks, range(i, min(i + _ROWS, outputs)))) for i in range(0, outputs, _ROWS)]
    return Blocks(parts[0].kind, (outputs, inputs), torch.cat([part.data for part in parts]))


class Features:
    """The addresses of the features of some rows, layer by layer, for the kernels."""

    def __init__(self, pieces: Sequence[Piece], width: int) -> None:
        self._kept: list[Sequence[Tensor]] = []  # the memory that is pointed to
        self._parts = 0
        self._addresses: list[int] = []
        for layers, rows in pieces:
            if isinstance(layers, LayerRows):
                steps = [(at, layers.hidden.row_bytes) for at in layers.addresses]
                self._kept.append(layers)
            else:
                steps = self._steps(layers, width)
            self._addresses += [at + row * size for row in rows for at, size in steps]
            self._parts = len(steps)

    def _steps(self, layers: Sequence[Tensor], width: int) -> list[tuple[int, int]]:
        """Where each layer starts, and the bytes of its rows; a tensor has one layer, or several side by side."""
        kept = [layer.float().contiguous() for layer in layers]
        self._kept.append(kept)
        firsts = [(t.data_ptr(), 4 * t.shape[1]) for t in kept]
        return [(at + 4 * i, size) for at, size in firsts for i in range(0, size // 4, width)]

    def of(self, first: int, count: int) -> list[int]:
        """[count * layers] of `count` rows."""
        return self._addresses[first * self._parts : (first + count) * self._parts]


class TrueRows:
    """Rows of one pass, and the columns that `NativeRunner.run` takes: a row sees those before it, then itself."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.features: list[int] = []
        self.columns: list[list[int]] = [[], [], [], [], []]

    def add(
        self, cache: HeadCache, seq_id: int, tokens: Sequence[int], features: Features, first: int, end: int
    ) -> None:
        """Rows `first` to `end` of those that are new, behind what the cache has; they count as cached from now on."""
        if end <= first:
            return
        base, length, count = cache.base(seq_id), cache.lengths[seq_id], end - first
        places, own = range(length, length + count), range(base + length, base + length + count)
        new = ([base] * count, places, [1] * count, places, own)
        for column, numbers in zip(self.columns, new, strict=True):
            column += numbers
        self.tokens += tokens[first:end]
        self.features += features.of(first, count)
        cache.lengths[seq_id] = length + count


@dataclass(frozen=True, slots=True)
class WholeDraft:
    tree: Tree
    expected: float  # tokens of it that should be accepted
    levels: int
    first: float  # share of the first level in the seconds of all


@dataclass(slots=True)
class NewRows:
    """Rows that the head has not read: tokens, where their features lie, and room for their outputs [N, D]."""

    tokens: list[int]
    features: list[int]
    out: int
    base: int  # the sequence's first slot
    length: int  # rows that it has there already


class DraftCall:
    """The struct, and what it points to."""

    def __init__(self, head: NativeHead) -> None:
        self.head, self._draft = head, Draft(vocabulary=len(head.ids))
        self._ids = None if head.vocabulary.is_whole else head.int32_ids
        self._draft.ids = None if self._ids is None else self._ids.data_ptr()
        self._logits, self._tree = torch.empty(0), array("q")
        self._price: tuple[float, ...] | None = None
        self._prices = array("d")
        self._calibration: Calibration | None = None

    def run(
        self, like: HeadPass, rows: NewRows, root: int, budget: Budget, calibration: Calibration, scale: float
    ) -> WholeDraft:
        """Run the new rows and grow a tree within the budget, on the slots that `like` points to."""
        draft, width = self._draft, min(budget.width, budget.nodes)
        if width > len(self._logits):
            self._logits = torch.empty(width, len(self.head.ids))
            draft.logits = self._logits.data_ptr()
        if 2 * budget.nodes > len(self._tree):
            self._tree = array("q", [0] * (2 * budget.nodes))
            draft.tree = self._tree.buffer_info()[0]
        if budget.price is not self._price:
            self._price, self._prices = budget.price, array("d", budget.price or ())
            draft.price = None if budget.price is None else self._prices.buffer_info()[0]
            draft.prices = len(self._prices)
        if calibration is not self._calibration:
            self._calibration, draft.power = calibration, calibration.power
            draft.shift = math.log(calibration.scale)
        tokens, features = array("q", rows.tokens), array("Q", rows.features)
        draft.fresh, draft.tokens = len(tokens), tokens.buffer_info()[0]
        draft.features, draft.out = features.buffer_info()[0], rows.out
        draft.base, draft.length, draft.scale = rows.base, rows.length, scale
        draft.nodes, draft.depth, draft.width = budget.nodes, budget.depth, budget.width
        draft.frontier, draft.branch, draft.level = width, min(width, len(self.head.ids)), budget.level
        draft_tree(self.head.struct, like, draft)
        count, first = draft.count, draft.first
        below = self._tree[:count].tolist(), self._tree[budget.nodes : budget.nodes + count].tolist()
        tree = [root, *below[0]], [-1, *below[1]]
        return WholeDraft(tree, draft.expected, draft.levels, first / max(first + draft.further, 1e-9))


Floats: TypeAlias = "array[float]"


class NativeRunner:
    """Keeps the head's KV cache of each sequence, and starts drafts."""

    def __init__(self, head: NativeHead) -> None:
        self.head, config = head, head.config
        self.cache = HeadCache(config, torch.float32, head.device)
        self._last: dict[int, tuple[Floats, int]] = {}  # where the output of each sequence's last row is: [N, D], row
        self._tables = RotationTables([Rotations(config.rope, head.device)])
        self._pass, self._known = HeadPass(), self.cache.data  # the slots that it points to
        self._ranking = Ranking(1, 1, head.int32_ids)
        self._outs = [self._room(1) for _ in range(2)]
        self._call = DraftCall(head)

    def begin(self, seqs: Sequence[Seq], sequences: Sequence[ObservedRows], budgets: Sequence[Budget]) -> NativeSteps:
        """Run the observed rows of these sequences; the result drafts for them."""
        native.match_threads(torch.get_num_threads())
        sizes = frontier_sizes(budgets)
        for seq, observed in zip(seqs, sequences, strict=True):
            self.cache.admit(seq.id, observed.seen + sum(sizes))
            self.cache.lengths[seq.id] = observed.seen - len(observed.tokens)  # some before these may never be read
        one = self._current_pass(max([observed.seen for observed in sequences]) + len(sizes))
        self._catch_up(one, seqs, sequences)
        lasts = [self._last[seq.id] for seq in seqs]
        return NativeSteps(self, one, [seq.id for seq in seqs], lasts[0] if len(lasts) == 1 else self._gather(lasts))

    def draft(self, seq: Seq, observed: ObservedRows, budget: Budget, calibration: Calibration) -> WholeDraft | None:
        """New rows and tree of one sequence in one call; not under noise, or where kernels look no tokens up."""
        tokens, cache = observed.tokens, self.cache
        if not (tokens and self.head.looks_up) or has_noise(seq):
            return None
        self.head.embedded(tokens)  # are they in its table?
        native.match_threads(torch.get_num_threads())
        cache.admit(seq.id, observed.seen + min(budget.width, budget.nodes) * budget.depth)
        one = self._current_pass(observed.seen + budget.depth)
        count, out = len(tokens), self._room(len(tokens))
        features = Features(observed.take(), self.head.config.feature_width // self.head.struct.parts)
        base, length = cache.base(seq.id), observed.seen - count
        rows = NewRows(tokens, features.of(0, count), _address(out), base, length)
        found = self._call.run(one, rows, seq.tokens[-1], budget, calibration, factor_of(seq))
        cache.lengths[seq.id], self._last[seq.id] = length + count, (out, count - 1)
        return found

    def forget(self, seq_id: int) -> None:
        self._last.pop(seq_id, None)
        self.cache.release(seq_id)

    def ranking(self, rows: int, count: int) -> Ranking:
        have = self._ranking
        if rows > have.rows or count > have.count:
            have = Ranking(max(rows, have.rows), max(count, have.count), self.head.int32_ids)
            self._ranking = have
        return have

    def outputs(self, level: int, rows: int) -> Floats:
        """Room for the outputs of a level [N, D]; those of the level before it stay."""
        if rows * self.head.config.width > len(self._outs[0]):
            self._outs = [self._room(rows) for _ in range(2)]
        return self._outs[level % 2]

    def _room(self, rows: int) -> Floats:
        return array("f", bytes(4 * rows * self.head.config.width))

    def _gather(self, places: Sequence[tuple[Floats, int]]) -> tuple[Floats, int]:
        joined, size = self._room(len(places)), 4 * self.head.config.width
        for i, (out, row) in enumerate(places):
            ctypes.memmove(_address(joined) + i * size, _address(out) + row * size, size)
        return joined, 0

    def run(self, one: HeadPass, tokens: list[int], columns: Sequence[list[int]], tails: list[int]) -> None:
        """A pass over these rows; columns are first, context, tail, position, write and, of drafted rows, parent."""
        # arrays, not ctypes: each length of those is a type of its own, which is made anew again and again
        numbers, ids = array("i"), array("q", tokens)
        for column in columns:
            numbers.extend(column)
        numbers.extend(tails)
        at, size = _address(numbers), 4 * len(tokens)
        stride, reach = columns[2][0], one.reach
        one.rows, one.tokens = len(tokens), _address(ids)
        one.position, one.write, one.parents = at + 3 * size, at + 4 * size, at + 5 * size
        reach.first, reach.context, reach.tail = at, at + size, at + 2 * size
        reach.tails, reach.tail_stride = at + len(columns) * size, stride
        reach.most = max(columns[1]) + stride
        embedded = self.head.embedded(tokens)
        if embedded is not None:
            one.embedded = embedded.data_ptr()
        run_rows(self.head.struct, one)

    def _current_pass(self, longest: int) -> HeadPass:
        """The pass over this head's slots, for positions up to `longest`; its rows are filled in later."""
        one, data, table = self._pass, self.cache.data, self._tables.at((0,), longest)
        if self._known is not data:
            one.keys = at = data.data_ptr()
            one.layer_stride, one.head_stride = data[0].numel(), data.shape[4] * data.shape[5]
            one.values = at + data[0].nbytes // 2
            self._known = data
        one.cosines, one.sines = table.cosines, table.sines
        return one

    def _catch_up(self, one: HeadPass, seqs: Sequence[Seq], sequences: Sequence[ObservedRows]) -> None:
        """Run the rows that are new since each sequence's last draft; only the last row's output is drafted from."""
        width = self.head.config.feature_width // self.head.struct.parts
        unread = [
            (seq.id, observed.tokens, Features(observed.take(), width))
            for seq, observed in zip(seqs, sequences, strict=True)
        ]
        longest = max(len(tokens) for _, tokens, _ in unread)
        for low in range(0, longest, CHUNK):
            rows = TrueRows()
            for seq_id, tokens, features in unread:
                rows.add(self.cache, seq_id, tokens, features, low, min(low + CHUNK, len(tokens) - 1))
            before_last, ended = len(rows.tokens), list[int]()
            for seq_id, tokens, features in unread:
                if low < len(tokens) <= low + CHUNK:
                    rows.add(self.cache, seq_id, tokens, features, len(tokens) - 1, len(tokens))
                    ended.append(seq_id)
            out, addresses = self._room(len(rows.tokens)), array("Q", rows.features)
            one.features, one.out, one.keys_only = _address(addresses), _address(out), before_last
            self.run(one, rows.tokens, rows.columns, rows.columns[4])
            self._last |= {seq_id: (out, before_last + i) for i, seq_id in enumerate(ended)}
        one.keys_only = 0  # drafted rows are all drafted from


class NativeSteps:
    """The draft of one batch: rows written behind the true ones, each seen by its descendants only."""

    def __init__(self, runner: NativeRunner, one: HeadPass, ids: Sequence[int], last: tuple[Floats, int]) -> None:
        self.runner, self.levels = runner, 1
        self.size = len(runner.head.ids)
        self._pass, one.features = one, None
        self._bases = [runner.cache.base(i) for i in ids]
        self._lengths = [runner.cache.lengths[i] for i in ids]
        self._free = [base + length for base, length in zip(self._bases, self._lengths, strict=True)]
        self._out, row = last  # [N, D] of the last frontiers, sequences end to end
        self._at = _address(self._out) + 4 * row * runner.head.config.width
        self._rows = len(ids)
        # of each frontier node: its ancestors' slots
        self._paths: list[list[list[int]]] = [[[]] for _ in ids]
        self._draft_law: KernelDraftLaw | None = None

    def ranks(self, seqs: Sequence[Seq]) -> NativeSteps:
        self._draft_law = KernelDraftLaw(seqs)
        return self

    def roots(self, count: int) -> list[Ranked]:
        return self._ranked(count)

    def below(self, frontiers: Sequence[Frontier], count: int) -> list[Ranked]:
        self._step(frontiers)
        return self._ranked(count)

    def first(self) -> Tensor:
        return self._logits()

    def after(self, parents: Tensor, tokens: Tensor) -> Tensor:
        rows = zip(parents.tolist(), tokens.tolist(), strict=True)
        self._step([list(zip(*row, strict=True)) for row in rows])
        return self._logits().view(*tokens.shape, -1)

    def _step(self, frontiers: Sequence[Frontier]) -> None:
        """Put one frontier of each sequence through the layer."""
        columns: list[list[int]] = [[], [], [], [], [], [], [], []]
        tokens, parents, first, context, position, write, tails, depths = columns
        start, level = 0, self.levels
        for b, frontier in enumerate(frontiers):
            wide, length, free, before = len(frontier), self._lengths[b], self._free[b], self._paths[b]
            paths = [[*before[place], free + i] for i, (place, _) in enumerate(frontier)]
            tokens += [token for _, token in frontier]
            parents += [start + place for place, _ in frontier]
            first += [self._bases[b]] * wide
            context += [length] * wide
            depths += [level] * wide
            position += [length + level - 1] * wide
            write += range(free, free + wide)
            for path in paths:
                tails += path
            start += len(before)
            self._paths[b], self._free[b] = paths, free + wide
        out = self.runner.outputs(level, len(tokens))
        self._pass.before, self._pass.out = self._at, _address(out)
        self.runner.run(self._pass, tokens, (first, context, depths, position, write, parents), tails)
        self._out, self._at, self._rows = out, _address(out), len(tokens)
        self.levels += 1

    def _ranked(self, count: int) -> list[Ranked]:
        draft_law, head = self._draft_law, self.runner.head
        assert draft_law is not None
        sizes = [len(paths) for paths in self._paths]
        ranking = self.runner.ranking(self._rows, count)
        noise = draft_law.noise(sizes, self.levels - 1) if draft_law.is_noisy else ((), None)
        ranking.set_noise(*noise)
        values, places = ranking.rank(head.struct, self._at, self._rows, count, draft_law.scales(sizes))
        ids = head.ids
        tokens = places if head.vocabulary.is_whole else [ids[place] for place in places]
        if len(sizes) == 1:
            return [(values, tokens)]
        ends = offsets([size * count for size in sizes])
        return [(values[a:b], tokens[a:b]) for a, b in pairwise(ends)]

    def _logits(self) -> Tensor:
        """[N, Vd] after the last frontiers."""
        ranking = self.runner.ranking(self._rows, 1)
        ranking.set_noise((), None)
        ranking.rank(self.runner.head.struct, self._at, self._rows, 1)
        return ranking.logits[: self._rows].clone()


def _address(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]
