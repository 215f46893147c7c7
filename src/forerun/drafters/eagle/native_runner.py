"""NativeRunner: runs an EAGLE head on the native CPU kernels; a level is two calls on integers.

What each row attends to is given as in the decoder's passes: a run of slots, the sequence's own rows, and then its
ancestors in the draft. Sequences share a pass without padding, and no row depends on its neighbours.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from forerun.drafters.draft_law import KernelDraftLaw, factor_of, has_noise
from forerun.drafters.eagle.head_cache import HeadCache
from forerun.drafters.eagle.native_head import NativeHead
from forerun.drafters.eagle.native_rows import Features, TrueRows
from forerun.drafters.eagle.torch_runner import CHUNK, frontier_sizes
from forerun.drafters.eagle.whole_draft import DraftCall, NewRows, WholeDraft
from forerun.drafters.head_drafter import Calibration, ObservedRows
from forerun.drafters.tree_growth import Frontier, Ranked
from forerun.models.layers import Rotations
from forerun.models.native import library as native
from forerun.models.native.head_library import HeadPass, Ranking, run_rows
from forerun.models.native.rotation_tables import RotationTables
from forerun.models.rope import RopeConfig
from forerun.types import Budget, Seq, offsets

Floats: TypeAlias = "array[float]"


class NativeRunner:
    """Keeps the head's KV cache of each sequence, and starts drafts."""

    def __init__(self, head: NativeHead) -> None:
        self.head, config = head, head.config
        self.cache = HeadCache(config, torch.float32, head.device)
        self._last: dict[
            int, tuple[Floats, int]
        ] = {}  # where the output of each sequence's last row is: [N, D], row
        rope = RopeConfig("default", config.rope_theta, config.head_dim, config.max_length)
        self._tables = RotationTables(Rotations(rope, head.device))
        self._pass, self._known = HeadPass(), self.cache.data  # the slots that it points to
        self._ranking = Ranking(1, 1, head.int32_ids)
        self._outs = [self._room(1) for _ in range(2)]
        self._call = DraftCall(head)

    def begin(
        self, seqs: Sequence[Seq], sequences: Sequence[ObservedRows], budgets: Sequence[Budget]
    ) -> NativeSteps:
        """Run the observed rows of these sequences; the result drafts for them."""
        native.match_threads(torch.get_num_threads())
        sizes = frontier_sizes(budgets)
        for seq, observed in zip(seqs, sequences, strict=True):
            self.cache.admit(seq.id, observed.seen + sum(sizes))
        one = self._current_pass(max([observed.seen for observed in sequences]) + len(sizes))
        self._catch_up(one, seqs, sequences)
        lasts = [self._last[seq.id] for seq in seqs]
        return NativeSteps(
            self, one, [seq.id for seq in seqs], lasts[0] if len(lasts) == 1 else self._gather(lasts)
        )

    def draft(
        self, seq: Seq, observed: ObservedRows, budget: Budget, calibration: Calibration
    ) -> WholeDraft | None:
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
        base, length = cache.base(seq.id), cache.lengths[seq.id]
        rows = NewRows(tokens, features.of(0, count), _address(out), base, length)
        found = self._call.run(one, rows, seq.tokens[-1], budget, calibration, factor_of(seq))
        cache.lengths[seq.id], self._last[seq.id] = length + count, (out, count - 1)
        return found

    def forget(self, seq_id: int) -> None:
        self._last.pop(seq_id, None)
        self.cache.release(seq_id)

    def ranking(self, rows: int, count: int) -> Ranking:
        """Room for the best of so many rows."""
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
        """Rows from several places side by side."""
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
        one, data, table = self._pass, self.cache.data, self._tables.at(0, longest)
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

    def __init__(
        self, runner: NativeRunner, one: HeadPass, ids: Sequence[int], last: tuple[Floats, int]
    ) -> None:
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
        self._seasoning: KernelDraftLaw | None = None

    def ranks(self, seqs: Sequence[Seq]) -> NativeSteps:
        self._seasoning = KernelDraftLaw(seqs)
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
        draft_law, head = self._seasoning, self.runner.head
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
