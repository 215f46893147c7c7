"""NativeRunner: runs an EAGLE head on the native CPU kernels; a level is two calls on integers.

What each row attends to is given as in the decoder's passes: a run of slots, the sequence's own rows, and then its
ancestors in the draft. Sequences share a pass without padding, and no row depends on its neighbours.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from forerun.drafters.draft_law import KernelDraftLaw
from forerun.drafters.eagle.head_cache import HeadCache
from forerun.drafters.eagle.native_head import NativeHead
from forerun.drafters.eagle.torch_runner import CHUNK, frontier_sizes
from forerun.drafters.head_drafter import ObservedRows, Piece
from forerun.drafters.tree_growth import Frontier, Ranked
from forerun.models.layers import Rotations
from forerun.models.native import library as native
from forerun.models.native.head_library import HeadPass, Ranking, run_rows
from forerun.models.native.library import Reach
from forerun.models.rope import RopeConfig
from forerun.types import Budget, Seq, offsets

_PIECE = 512  # positions whose rotations are worked out at once
Floats = ctypes.Array[ctypes.c_float]


class NativeRunner:
    """Keeps the head's KV cache of each sequence, and starts drafts."""

    def __init__(self, head: NativeHead) -> None:
        self.head, config = head, head.config
        self.cache = HeadCache(config, torch.float32, head.device)
        self._last: dict[
            int, tuple[Floats, int]
        ] = {}  # where the output of each sequence's last row is: [N, D], row
        self._rotations = Rotations(
            RopeConfig("default", config.rope_theta, config.head_dim, config.max_length), head.device
        )
        self._rotation_table = torch.empty(2, 0, config.head_dim // 2)  # cosines and sines
        self._ranking = Ranking(1, 1, head.int32_ids)
        self._outs = [self._room(1) for _ in range(2)]

    def begin(
        self, seqs: Sequence[Seq], sequences: Sequence[ObservedRows], budgets: Sequence[Budget]
    ) -> NativeSteps:
        """Run the observed rows of these sequences; the result drafts for them."""
        native.match_threads(torch.get_num_threads())
        sizes = frontier_sizes(budgets)
        for seq, observed in zip(seqs, sequences, strict=True):
            self.cache.admit(seq.id, observed.seen + sum(sizes))
        self._rotations_to(max(observed.seen for observed in sequences) + len(sizes))
        one = self._new_pass()
        self._catch_up(one, seqs, sequences)
        lasts = [self._last[seq.id] for seq in seqs]
        return NativeSteps(
            self, one, [seq.id for seq in seqs], lasts[0] if len(lasts) == 1 else self._gather(lasts)
        )

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
        return (ctypes.c_float * (rows * self.head.config.width))()

    def _gather(self, places: Sequence[tuple[Floats, int]]) -> tuple[Floats, int]:
        """Rows from several places side by side."""
        joined, size = self._room(len(places)), 4 * self.head.config.width
        for i, (out, row) in enumerate(places):
            ctypes.memmove(ctypes.addressof(joined) + i * size, ctypes.addressof(out) + row * size, size)
        return joined, 0

    def run(self, one: HeadPass, tokens: list[int], columns: Sequence[list[int]], tails: list[int]) -> None:
        """A pass over these rows; columns are first, context, tail, position, write and, of drafted rows, parent."""
        count = len(tokens)
        flat = [number for column in columns for number in column]
        numbers = (ctypes.c_int32 * (len(flat) + len(tails)))(*flat, *tails)
        ids = (ctypes.c_int64 * count)(*tokens)
        first, context, tail, position, write, *more = range(
            ctypes.addressof(numbers), ctypes.addressof(numbers) + 4 * len(flat) + 1, 4 * count
        )
        stride, most = columns[2][0], max(columns[1]) + columns[2][0]
        one.rows, one.tokens, one.position, one.write = count, ctypes.addressof(ids), position, write
        one.parents = more[0]
        one.reach = Reach(first, context, tail, more[-1], stride, most)
        embedded = self.head.embedded(tokens)
        if embedded is not None:
            one.embedded = embedded.data_ptr()
        run_rows(self.head.struct, one)

    def _new_pass(self) -> HeadPass:
        """A pass over this head's slots; its rows are filled in later."""
        data, rotations = self.cache.data, self._rotation_table
        keys, cosines = data.data_ptr(), rotations.data_ptr()
        return HeadPass(
            cosines=cosines,
            sines=cosines + rotations.nbytes // 2,
            keys=keys,
            values=keys + data.nbytes // 2,
            head_stride=data.shape[3] * data.shape[4],
        )

    def _catch_up(self, one: HeadPass, seqs: Sequence[Seq], sequences: Sequence[ObservedRows]) -> None:
        """Run the rows that are new since each sequence's last draft."""
        width = self.head.config.feature_width // self.head.struct.parts
        unread = [(observed.tokens, _Features(observed.take(), width)) for observed in sequences]
        longest = max(len(tokens) for tokens, _ in unread)
        for low in range(0, longest, CHUNK):
            tokens, given, ends = list[int](), list[int](), dict[int, int]()
            columns: list[list[int]] = [[], [], [], [], []]
            for seq, (all_fresh, features) in zip(seqs, unread, strict=True):
                fresh = all_fresh[low : low + CHUNK]
                if not fresh:
                    continue
                base, length, count = self.cache.base(seq.id), self.cache.lengths[seq.id], len(fresh)
                places = range(length, length + count)  # a row sees those before it, and itself as its tail
                own = range(base + length, base + length + count)
                new = ([base] * count, places, [1] * count, places, own)
                for column, numbers in zip(columns, new, strict=True):
                    column += numbers
                tokens += fresh
                given += features.of(low, count)
                ends[seq.id] = len(tokens)
                self.cache.lengths[seq.id] = length + count
            out, addresses = self._room(len(tokens)), (ctypes.c_void_p * len(given))(*given)
            one.features, one.out = ctypes.addressof(addresses), ctypes.addressof(out)
            self.run(one, tokens, columns, columns[4])
            self._last |= {seq_id: (out, end - 1) for seq_id, end in ends.items()}

    def _rotations_to(self, last: int) -> None:
        """Rotations of positions up to `last` at least."""
        while self._rotation_table.shape[1] <= last:
            start = self._rotation_table.shape[1]
            rotations = self._rotations.at(torch.arange(start, start + _PIECE), 0).squeeze(1)
            self._rotation_table = torch.cat(
                (self._rotation_table, torch.stack((rotations.real, rotations.imag))), dim=1
            )


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
        self._at = ctypes.addressof(self._out) + 4 * row * runner.head.config.width
        self._rows = len(ids)
        self._paths: list[list[list[int]]] = [
            [[]] for _ in ids
        ]  # of each frontier node: its ancestors' slots
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
        tokens, parents, start = list[int](), list[int](), 0
        first, context, position = list[int](), list[int](), list[int]()
        write, tails, level = list[int](), list[int](), self.levels
        for b, frontier in enumerate(frontiers):
            wide, length, free, before = len(frontier), self._lengths[b], self._free[b], self._paths[b]
            paths = [[*before[place], free + i] for i, (place, _) in enumerate(frontier)]
            tokens += [token for _, token in frontier]
            parents += [start + place for place, _ in frontier]
            first += [self._bases[b]] * wide
            context += [length] * wide
            position += [length + level - 1] * wide
            write += range(free, free + wide)
            for path in paths:
                tails += path
            start += len(before)
            self._paths[b], self._free[b] = paths, free + wide
        out = self.runner.outputs(level, len(tokens))
        self._pass.before, self._pass.out = self._at, ctypes.addressof(out)
        columns = (first, context, [level] * len(tokens), position, write, parents)
        self.runner.run(self._pass, tokens, columns, tails)
        self._out, self._at, self._rows = out, ctypes.addressof(out), len(tokens)
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


class _Features:
    """The addresses of the features of some rows, layer by layer, for the kernels."""

    def __init__(self, pieces: Sequence[Piece], width: int) -> None:
        self._kept = [([layer.float().contiguous() for layer in layers], rows) for layers, rows in pieces]
        self._parts = 0
        self._addresses: list[int] = []
        for layers, rows in self._kept:
            # a tensor has one layer, or several side by side
            firsts = [(t.data_ptr(), 4 * t.shape[1]) for t in layers]
            steps = [(at + 4 * i, size) for at, size in firsts for i in range(0, size // 4, width)]
            self._addresses += [at + row * size for row in rows for at, size in steps]
            self._parts = len(steps)

    def of(self, first: int, count: int) -> list[int]:
        """[rows * layers] of so many rows."""
        return self._addresses[first * self._parts : (first + count) * self._parts]
